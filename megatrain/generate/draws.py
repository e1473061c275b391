"""Texts whose random numbers are their own: it does not matter which rank makes them."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatrain.base.seeds import derived_seed
from megatrain.errors import RunFailed
from megatrain.parallel.distributed import Ranks


class OnlyNumbers(LogitsProcessor):
    """Ends where logits are NaN or infinite, of which torch draws nothing, or anything."""

    def __call__(self, input_ids: Tensor, scores_RV: Tensor) -> Tensor:
        """The logits as they are. Raises RunFailed: of some row none is the largest."""
        if not scores_RV.amax(-1).isfinite().all():
            raise RunFailed(
                "the model's logits are NaN or infinite, so no token can be drawn: its weights, or "
                "numbers in its config.json, are damaged; look at both"
            )
        return scores_RV


class OwnDraws(LogitsProcessor):
    """Leaves of each row's logits the token that is drawn: inverse transform sampling.

    A row's random numbers follow from the seed and its own number alone.
    """

    def __init__(
        self, settings: GenerationConfig, seed: int, rows: Sequence[int], device: torch.device
    ) -> None:
        """Args: `settings` say from which tokens, and how many are drawn at most; rows' numbers."""
        self._at, generator = 0, torch.Generator()
        numbers = [
            torch.rand(
                settings.max_new_tokens or 0,
                dtype=torch.float64,
                generator=generator.manual_seed(derived_seed(seed, row)),
            )
            for row in rows
        ]
        self._numbers_TR1 = torch.stack(numbers, 1)[..., None].to(device)
        self._warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(settings.temperature)]
        if settings.top_k:
            self._warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p is not None and settings.top_p < 1:
            self._warpers.append(TopPLogitsWarper(settings.top_p))

    def __call__(self, input_ids: Tensor, scores_RV: Tensor) -> Tensor:
        """Logits that leave each row the drawn token alone: all others are -inf."""
        for warper in self._warpers:
            scores_RV = warper(input_ids, scores_RV)
        sums_RV = scores_RV.softmax(-1, dtype=torch.float64).cumsum(-1)
        wanted_R1 = self._numbers_TR1[self._at] * sums_RV[:, -1:]
        self._at += 1
        tokens_R1 = torch.searchsorted(sums_RV, wanted_R1, right=True)
        return torch.full_like(scores_RV, -torch.inf).scatter_(1, tokens_R1, 0)


class AllEnded(StoppingCriteria):
    """Ends the rows of all ranks together, so that each takes as many forwards as the others."""

    def __init__(self, ranks: Ranks, stops: Collection[int], ended_R: Tensor) -> None:
        """Args: `ended_R`: rows that nobody waits for, bool on the device."""
        self._ranks, self._ended_R = ranks, ended_R
        self._stops = torch.tensor(sorted(stops), dtype=torch.int64, device=ended_R.device)

    def __call__(self, input_ids: Tensor, scores: Any, **rest: Any) -> Tensor:
        """True for each row if all rows of all ranks have had a stop."""
        self._ended_R = self._ended_R | torch.isin(input_ids[:, -1], self._stops)
        open_ones = (~self._ended_R).sum(dtype=torch.float32)[None]
        self._ranks.all_reduce(open_ones)
        return (open_ones == 0).expand(len(input_ids))


def drawn_apart(
    settings: GenerationConfig,
    seed: int,
    rows: Sequence[int],
    num_used: int,
    ranks: Ranks,
    device: torch.device,
) -> dict[str, Any]:
    """Options of `generate` beside `settings`, which lose what these options do.

    Args: `rows`: the numbers of this rank's rows, of which the first `num_used` are waited for.
    """
    options: dict[str, Any] = {}
    if settings.do_sample:
        options["logits_processor"] = [OwnDraws(settings, seed, rows, device)]
        settings.do_sample = False
        settings.temperature = settings.top_p = settings.top_k = None
    if ranks.size > 1:
        unused = torch.arange(len(rows), device=device) >= num_used
        options["stopping_criteria"] = [AllEnded(ranks, settings.eos_token_id or [], unused)]
        settings.eos_token_id = None
    return options
