"""What each of several ranks does of a run; all else is rank 0's."""

import zlib
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatrain.api import Engine
from megatrain.config import Config
from megatrain.data import Step
from megatrain.distributed import Ranks, require_same
from megatrain.errors import InputError
from megatrain.loss import IGNORED, PolicyLoss

T = TypeVar("T")


def check_shared(config: Config, ranks: Ranks, *, callbacks: bool) -> None:
    """Raises InputError: a rank has another run file, or it has what ranks cannot do yet."""
    if ranks.size == 1:
        return
    keys = config.model_dump(mode="json").items()
    given = {f"{section}.{key}": str(each) for section, own in keys for key, each in own.items()}
    require_same(ranks.exchange(given))
    unable = {
        "engine.disk": config.engine.disk is not None,
        f"loss.name {config.loss.name}": isinstance(config.loss.loss(), PolicyLoss),
        "callbacks": callbacks,
    }
    for name, wanted in unable.items():
        if wanted:
            raise InputError(f"{name} is not for several ranks yet; leave it out, or take one")


def part_of(step: Step, ranks: Ranks, *, counted: bool = False) -> Step:
    """The micro-batches of this rank: the next ones, of about as many tokens as each other's.

    Where there are none, a row without a label, which adds nothing.

    Args: `counted`: tokens without a label count, too (the loss of routers), if no mask hides them.
    """
    if ranks.size == 1:
        return step
    ends = list(accumulate(micro["input_ids"].numel() for micro in step))
    middles = [end - micro["input_ids"].numel() / 2 for end, micro in zip(ends, step, strict=True)]
    own = [
        micro
        for middle, micro in zip(middles, step, strict=True)
        if int(middle * ranks.size / ends[-1]) == ranks.rank
    ]
    if own:
        return own
    row = {name: value[:1] for name, value in step[0].items()}
    row["labels"] = torch.full_like(row["labels"], IGNORED)
    if counted:
        row["attention_mask"] = torch.zeros_like(row["input_ids"])
        row.pop("position_ids", None)  # those of documents, which have no mask
    return [row]


def same_rows(
    ranks: Ranks, make: Callable[[], tuple[Step, Mapping[str, Any]]]
) -> tuple[Step, Mapping[str, Any]]:
    """What `make` gives: the rows of a step, of which each rank then takes its part.

    Raises:
        InputError: a rank has other rows than rank 0.
        MegatrainError: `make` raises it on some rank; then all ranks raise.
    """
    if ranks.size == 1:
        return make()
    made: list[tuple[Step, Mapping[str, Any]]] = []

    def checksum() -> dict[str, str]:
        made.append(make())
        tensors = [micro[name] for micro in made[0][0] for name in sorted(micro)]
        found = 0
        for each in tensors:
            found = zlib.crc32(each.contiguous().numpy().data, found)
        return {"checksum of the step's rows": str(found)}

    require_same(ranks.agree(checksum))
    return made[0]


def logprobs(engine: Engine, step: Step, ranks: Ranks, *, scores: bool = False) -> list[Tensor]:
    """As `Engine.logprobs`, of all micro-batches and on all ranks, which share the work.

    Args: `scores`: as `Engine.rewards`.
    """
    own = part_of(step, ranks)
    found = (engine.rewards if scores else engine.logprobs)(own)
    if not any(own[0] is micro for micro in step):
        found = []  # of the row without a label
    return [each for part in ranks.exchange(found) for each in part]


def in_turn(ranks: Ranks, make: Callable[[], T]) -> T:
    """Let rank 0 make something, and then the others, who find what it has left on the disk."""
    made: list[T] = []
    ranks.agree(lambda: None if ranks.rank else made.append(make()))
    ranks.agree(lambda: made.append(make()) if ranks.rank else None)
    return made[0]


def from_first(ranks: Ranks, make: Callable[[], T]) -> T:
    """What rank 0 makes, on all ranks."""
    return ranks.agree(lambda: None if ranks.rank else make())[0]  # type: ignore[return-value]
