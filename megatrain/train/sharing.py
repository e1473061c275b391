"""What each of several ranks does of a run; all else is rank 0's."""

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
from megatrain.data import Step
from megatrain.errors import InputError
from megatrain.loss import IGNORED
from megatrain.parallel.distributed import Ranks, require_same

T = TypeVar("T")


def check_shared(config: Config, ranks: Ranks, *, callbacks: str) -> None:
    """Raises InputError: a rank has another run file or other callbacks, or too few replies."""
    if ranks.size == 1:
        return
    keys = config.model_dump(mode="json").items()
    given = {f"{section}.{key}": str(each) for section, own in keys for key, each in own.items()}
    require_same(ranks.all_gather_object(given | {"callbacks": callbacks}))
    replies = config.training.batch_size * config.loss.lines
    if config.loss.kind == "prompts" and replies < ranks.size:
        raise InputError(
            f"a step of {replies} replies has none for some of {ranks.size} ranks; raise "
            "training.batch_size"
        )


def group_of(config: Config, ranks: Ranks) -> Any:
    """What the engine of a run is given as its group: a mesh where there are several hosts.

    Raises:
        InputError: torchrun has started more ranks on one host than on another.
    """
    if ranks.host is None or config.engine.sharding == "full":
        return ranks.host
    first, *others = ranks.all_gather_object(int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size)))
    for rank, each in enumerate(others, 1):
        if each != first:
            raise InputError(
                f"rank {rank} is one of {each} on its host, and rank 0 one of {first}: start as "
                "many on every host (--nproc-per-node), or set engine.sharding to full"
            )
    if ranks.size in (first, 1):
        return ranks.host
    return DeviceMesh("cpu", torch.arange(ranks.size).view(-1, first))


def check_folder(ranks: Ranks, folder: Path) -> None:
    """Raises InputError: a rank does not see what rank 0 puts into a folder."""
    if ranks.size == 1:
        return
    sign = folder / f".seen-{from_first(ranks, lambda: secrets.token_hex(8))}"
    from_first(ranks, sign.touch)
    try:
        ranks.agree(lambda: files.require_seen(sign))
    finally:
        from_first(ranks, sign.unlink)


def part_of(step: Step, ranks: Ranks, *, counted: bool = False) -> Step:
    """The micro-batches of this rank: the next ones, of about as many tokens as each other's.

    Where there are none, a row without a label, which adds nothing.

    Args: `counted`: tokens without a label count, too (the loss of routers), if no mask hides them.
    """
    if ranks.size == 1:
        return step
    ends = list(accumulate(micro["input_ids"].numel() for micro in step))
    own, at = [], -1
    for number, (micro, end) in enumerate(zip(step, ends, strict=True)):
        middle = end - micro["input_ids"].numel() / 2
        fair = int(middle * ranks.size / ends[-1])
        if len(step) >= ranks.size:  # each has one: none is passed over, and some are left
            fair = max(min(fair, at + 1), number + ranks.size - len(step))
        at = fair
        if at == ranks.rank:
            own.append(micro)
    if own:
        return own
    row = {name: value[:1] for name, value in step[0].items()}
    row["labels"] = torch.full_like(row["labels"], IGNORED)
    if counted:
        row["attention_mask"] = torch.zeros_like(row["input_ids"])
        row.pop("position_ids", None)  # those of documents, which have no mask
    return [row]


def enough(step: Step, ranks: Ranks) -> Step:
    """The step's rows in at least one micro-batch for each rank, as far as there are rows."""
    made = list(step)
    while len(made) < ranks.size:
        rows = [len(micro["input_ids"]) for micro in made]
        if (most := max(rows)) == 1:
            break
        at, first = rows.index(most), most - most // 2
        cut = [
            {n: v[part] for n, v in made[at].items()} for part in (slice(first), slice(first, None))
        ]
        made[at : at + 1] = cut
    return made


def by_all(ranks: Ranks, make: Callable[[], T]) -> T:
    """What this rank makes; raises MegatrainError: it, or another rank, cannot."""
    made: list[T] = []
    ranks.agree(lambda: made.append(make()))
    return made[0]


def check_rows(ranks: Ranks, step: Step) -> None:
    """Raises InputError: a rank has read, or made, other rows than rank 0."""
    if ranks.size == 1:
        return
    found = 0
    for each in (micro[name] for micro in step for name in sorted(micro)):
        found = zlib.crc32(each.contiguous().numpy().data, found)
    require_same(ranks.all_gather_object({"checksum of the step's rows": str(found)}))


def logprobs(
    engine: Engine, step: Step, ranks: Ranks, *, scores: bool = False, temperature: float = 1.0
) -> list[Tensor]:
    """As `Engine.logprobs`, of all micro-batches and on all ranks, which share the work.

    Args: `scores`: as `Engine.rewards`.
    """

    def made(own: Step) -> list[Tensor]:
        return engine.rewards(own) if scores else engine.logprobs(own, temperature=temperature)

    return by_parts(ranks, step, made)


def by_parts(ranks: Ranks, step: Step, make: Callable[[Step], list[T]]) -> list[T]:
    """What is made of each micro-batch, on all ranks, each of which makes a part of it."""
    own = part_of(step, ranks)
    found = make(own)
    if not any(own[0] is micro for micro in step):
        found = []  # of the row without a label
    return [each for part in ranks.all_gather_object(found) for each in part]


def in_turn(ranks: Ranks, make: Callable[[], T]) -> T:
    """Let rank 0 make something, and then the others, who find what it has left on the disk."""
    made: list[T] = []
    ranks.agree(lambda: None if ranks.rank else made.append(make()))
    ranks.agree(lambda: made.append(make()) if ranks.rank else None)
    return made[0]


def from_first(ranks: Ranks, make: Callable[[], T]) -> T:
    """What rank 0 makes, on all ranks."""
    return ranks.agree(lambda: None if ranks.rank else make())[0]  # type: ignore[return-value]
