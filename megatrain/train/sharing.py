"""The parts of a run that several ranks share; all else is rank 0's."""

import os
import secrets
import zlib
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megatrain.api import Engine
from megatrain.checkpoint import files
from megatrain.config import Config
from megatrain.data import PackedDataset, Step
from megatrain.data.dataset import ROWS
from megatrain.errors import InputError
from megatrain.loss import IGNORED
from megatrain.parallel.distributed import Ranks, require_same

T = TypeVar("T")


def check_shared(config: Config, ranks: Ranks) -> None:
    """Raises InputError: a rank has another run file, or a step has too few replies for all."""
    if ranks.size == 1:
        return
    sections = config.model_dump(mode="json").items()
    shared = {f"{name}.{key}": str(value) for name, keys in sections for key, value in keys.items()}
    require_same(ranks.all_gather_object(shared))
    replies = config.training.batch_size * config.loss.lines
    if config.loss.kind == "prompts" and replies < ranks.size:
        raise InputError(
            f"a step has {replies} replies for {ranks.size} ranks; raise training.batch_size"
        )


def group_of(config: Config, ranks: Ranks) -> Any:
    """The group of a run's engine: a mesh where there are several hosts."""
    if ranks.host is None or config.engine.sharding == "full":
        return ranks.host
    first, *others = ranks.all_gather_object(int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size)))
    for rank, size in enumerate(others, 1):
        if size != first:
            raise InputError(
                f"the host of rank {rank} has {size} ranks, that of rank 0 has {first}: start as "
                "many on every host (--nproc-per-node), or set engine.sharding to full"
            )
    if ranks.size in (first, 1):
        return ranks.host
    return DeviceMesh("cpu", torch.arange(ranks.size).view(-1, first))


def check_folder(ranks: Ranks, folder: Path) -> None:
    """Raises InputError: a rank does not see what rank 0 puts into a folder."""
    if ranks.size == 1:
        return
    sign = folder / f".seen-{ranks.from_first(lambda: secrets.token_hex(8))}"
    ranks.from_first(sign.touch)
    try:
        ranks.agree(lambda: files.require_seen(sign))
    finally:
        ranks.from_first(sign.unlink)


def part_of(step: Step, ranks: Ranks, *, counted: bool = False) -> Step:
    """This rank's consecutive micro-batches; all ranks get about as many tokens.

    A rank without any gets a row without labels, which adds nothing.

    Args: `counted`: tokens without a label count, too (the loss of routers), if no mask hides them.
    """
    if ranks.size == 1:
        return step
    ends = list(accumulate(micro["input_ids"].numel() for micro in step))
    part, rank = [], -1  # the rank of the micro-batch before
    for number, (micro, end) in enumerate(zip(step, ends, strict=True)):
        middle = end - micro["input_ids"].numel() / 2
        fair_rank = int(middle * ranks.size / ends[-1])
        if len(step) >= ranks.size:  # each has one: none is passed over, and some are left
            fair_rank = max(min(fair_rank, rank + 1), number + ranks.size - len(step))
        rank = fair_rank
        if rank == ranks.rank:
            part.append(micro)
    if part:
        return part
    row = {name: value[:1] for name, value in step[0].items()}
    row["labels"] = torch.full_like(row["labels"], IGNORED)
    if counted:
        row["attention_mask"] = torch.zeros_like(row["input_ids"])
        row.pop("position_ids", None)  # those of documents, which have no mask
    return [row]


def with_own_images(data: PackedDataset, ranks: Ranks, step: Step) -> Step:
    """A step, split for the ranks; the micro-batches that this rank takes have their images."""
    step = split_for_ranks(step, ranks)
    own_ids = {id(micro) for micro in part_of(step, ranks)}
    for number, micro in enumerate(step):
        if id(micro) in own_ids:
            step[number] = data.with_images(micro)
        else:
            del micro[ROWS]
    return step


def split_for_ranks(step: Step, ranks: Ranks) -> Step:
    """Halve the largest micro-batches until each rank can have one, or each has a single row."""
    micros = list(step)
    while len(micros) < ranks.size:
        rows = [len(micro["input_ids"]) for micro in micros]
        if (most := max(rows)) == 1:
            break
        largest, middle = rows.index(most), most - most // 2
        halves = slice(middle), slice(middle, None)
        micros[largest : largest + 1] = [
            {name: values[half] for name, values in micros[largest].items()} for half in halves
        ]
    return micros


def check_rows(ranks: Ranks, step: Step) -> None:
    """Raises InputError: a rank has other rows than rank 0."""
    if ranks.size == 1:
        return
    checksum = 0
    for tensor in (
        micro[name]  # those of images are the rank's own
        for micro in step
        for name in sorted(micro)
        if micro[name].shape == micro["input_ids"].shape and not name.endswith("token_type_ids")
    ):
        checksum = zlib.crc32(tensor.contiguous().numpy().data, checksum)
    require_same(ranks.all_gather_object({"checksum of the step's rows": str(checksum)}))


def logprobs(
    engine: Engine,
    step: Step,
    data: PackedDataset | None = None,
    *,
    reads: str = "logprobs",
    **options: float,
) -> list[Tensor]:
    """`Engine.logprobs` of all micro-batches, on all ranks of the engine, which share the work.

    Args: `data`: whose rows they are, and may have images; `reads`: the engine's method, with
        `options`.
    """

    def of(part: Step) -> list[Tensor]:
        part = part if data is None else [data.with_images(micro) for micro in part]
        return getattr(engine, reads)(part, **options)

    return by_parts(engine.ranks, step, of)


def by_parts(ranks: Ranks, step: Step, make: Callable[[Step], list[T]]) -> list[T]:
    """Compute a result for each micro-batch, split over the ranks; all ranks get all results."""
    part = part_of(step, ranks)
    results = make(part)
    if not any(part[0] is micro for micro in step):
        results = []  # of the row without a label
    return [result for of_rank in ranks.all_gather_object(results) for result in of_rank]


def in_turn(ranks: Ranks, make: Callable[[], T]) -> T:
    """Call `make` on rank 0, then on the others, which find rank 0's files on the disk."""
    results: list[T] = []
    ranks.agree(lambda: None if ranks.rank else results.append(make()))
    ranks.agree(lambda: results.append(make()) if ranks.rank else None)
    return results[0]
