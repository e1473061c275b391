"""Functions of a run on several ranks: they share a step's work; rank 0 does the rest."""

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
    """Raise InputError if ranks have different run files, or a step has too few replies for all."""
    sections = config.model_dump(mode="json").items()
    shared = {f"{name}.{key}": str(value) for name, keys in sections for key, value in keys.items()}
    require_same(ranks.all_gather_object(shared))
    replies = config.training.batch_size * config.loss.lines
    if config.loss.kind == "prompts" and replies < ranks.size:
        raise InputError(
            f"a step has {replies} replies for {ranks.size} ranks; raise training.batch_size"
        )


def group_of(config: Config, ranks: Ranks) -> Any:
    """The group for a run's engine: a DeviceMesh of hosts and their ranks if there are several."""
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
    """Raise InputError if a rank does not see a file that rank 0 puts into a folder."""
    if ranks.size == 1:
        return
    file = folder / f".seen-{ranks.from_first(lambda: secrets.token_hex(8))}"
    ranks.from_first(file.touch)
    try:
        ranks.agree(lambda: files.require_seen(file))
    finally:
        ranks.from_first(file.unlink)


def part_of(step: Step, ranks: Ranks, *, counted: bool = False) -> Step:
    """This rank's micro-batches of a step: consecutive ones, with about equal tokens for each rank.

    A rank without a micro-batch gets a row without labels, which adds nothing.

    Args: `counted`: routers' losses count tokens without labels, too: mask those of that row.
    """
    ends = list(accumulate(micro["input_ids"].numel() for micro in step))
    part, rank = [], -1  # the rank of the micro-batch before
    for number, (micro, end) in enumerate(zip(step, ends, strict=True)):
        middle = end - micro["input_ids"].numel() / 2
        fair_rank = int(middle * ranks.size / ends[-1])
        if len(step) >= ranks.size:  # each rank gets one: skip no rank, and leave enough
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
        row.pop("position_ids", None)  # positions of documents go without a mask
    return [row]


def with_own_images(data: PackedDataset, ranks: Ranks, step: Step) -> Step:
    """Split a step for the ranks, and add images to the micro-batches that this rank takes."""
    step = split_for_ranks(step, ranks)
    own_ids = {id(micro) for micro in part_of(step, ranks)}
    for number, micro in enumerate(step):
        if id(micro) in own_ids:
            step[number] = data.with_images(micro)
        else:
            del micro[ROWS]
    return step


def split_for_ranks(step: Step, ranks: Ranks) -> Step:
    """Halve the largest micro-batches until there is one for each rank, or all are single rows."""
    micros = list(step)
    while len(micros) < ranks.size:
        rows = [len(micro["input_ids"]) for micro in micros]
        if (most_rows := max(rows)) == 1:
            break
        largest, middle = rows.index(most_rows), most_rows - most_rows // 2
        halves = slice(middle), slice(middle, None)
        micros[largest : largest + 1] = [
            {name: values[half] for name, values in micros[largest].items()} for half in halves
        ]
    return micros


def check_rows(ranks: Ranks, step: Step) -> None:
    """Raise InputError if a rank has other rows than rank 0."""
    if ranks.size == 1:
        return
    checksum = 0
    for tensors, name in ((micro, name) for micro in step for name in sorted(micro)):
        is_shared = tensors[name].shape == tensors["input_ids"].shape  # ranks have other images
        if is_shared and not name.endswith("token_type_ids"):
            checksum = zlib.crc32(tensors[name].contiguous().numpy().data, checksum)
    require_same(ranks.all_gather_object({"checksum of the step's rows": str(checksum)}))


def logprobs(
    engine: Engine,
    step: Step,
    data: PackedDataset | None = None,
    *,
    reads: str = "logprobs",
    **options: float,
) -> list[Tensor]:
    """`Engine.logprobs` of all micro-batches; the engine's ranks share the work.

    Args: `data`: the micro-batches' data set, to read images from; `reads`: the engine's method,
        called with `options`.
    """

    def compute(part: Step) -> list[Tensor]:
        part = part if data is None else [data.with_images(micro) for micro in part]
        return getattr(engine, reads)(part, **options)

    return by_parts(engine.ranks, step, compute)


def by_parts(ranks: Ranks, step: Step, make: Callable[[Step], list[T]]) -> list[T]:
    """Compute a result for each micro-batch, each on one rank; all ranks get all results."""
    part = part_of(step, ranks)
    results = make(part)
    if not any(part[0] is micro for micro in step):
        results = []  # the part is a row without labels, not of the step
    return [result for by_rank in ranks.all_gather_object(results) for result in by_rank]


def in_turn(ranks: Ranks, make: Callable[[], T]) -> T:
    """Call `make` on rank 0, then on the other ranks, which find the files that rank 0 wrote."""
    results: list[T] = []
    ranks.agree(lambda: None if ranks.rank else results.append(make()))
    ranks.agree(lambda: results.append(make()) if ranks.rank else None)
    return results[0]
