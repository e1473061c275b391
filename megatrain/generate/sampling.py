"""Sampling of tokens: settings of transformers' `generate`, and random numbers for each row."""

import copy
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

from megatrain.base.seeds import derived_seed
from megatrain.errors import InputError, RunFailed
from megatrain.parallel.distributed import Ranks

_LEAST_TEMPERATURE = 1e-3  # below it the likeliest token is taken
_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 0}
# Settings of a model's folder for searches and decoders that are not supported here.
_NOT_FOLLOWED = (
    "constraints", "diversity_penalty", "dola_layers", "force_words_ids", "guidance_scale",
    "low_memory", "num_beam_groups", "num_beams", "num_return_sequences", "penalty_alpha",
    "prefill_chunk_size", "prompt_lookup_num_tokens", "token_healing", "use_mtp",
)  # fmt: skip
_LIMITS = {"temperature": 1e9, "top_p": 1, "top_k": 1 << 31, "repetition_penalty": 1e9}
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, [], {})

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling; None: the model's setting, or temperature 0.8 and top_p 0.95."""

    max_new_tokens: int = 128
    temperature: float | None = None  # 0: always the likeliest token
    top_p: float | None = None  # sample from the likeliest tokens up to this probability
    # sample from no more than so many of the likeliest tokens; 0: from any number
    top_k: int | None = None
    repetition_penalty: float | None = None  # above 1: tokens that have occurred become less likely
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises InputError: a setting is out of range, or not a number (NaN)."""
        for name, limit in _LIMITS.items():
            if (value := getattr(self, name)) is not None and not 0 <= value <= limit:
                raise InputError(f"{name} is {value!r}; it must be from 0 to {limit:g}")

    def settings(
        self, of_model: GenerationConfig, *, room: int, stops: set[int], pad: int, cached: bool
    ) -> GenerationConfig:
        """The settings for transformers' `generate`: these, completed by the model's own.

        Args:
            room: new tokens, at most.
            stops: tokens that end a text.
            cached: True if the model keeps keys and values of earlier tokens.
        """
        settings = copy.deepcopy(of_model)
        ignored = [n for n in _NOT_FOLLOWED if getattr(of_model, n, None) not in _NEUTRAL]
        if ignored:
            _warn_of_ignored(", ".join(ignored))
        for name in ignored:
            setattr(settings, name, None)
        defaults = {} if of_model.do_sample else _DEFAULTS
        for name in _LIMITS:
            value = getattr(self, name)
            if value is None:
                value = defaults.get(name, getattr(of_model, name))
            setattr(settings, name, value)
        temperature = settings.temperature
        settings.do_sample = temperature is None or temperature >= _LEAST_TEMPERATURE
        if not settings.do_sample:
            settings.temperature = settings.top_p = settings.top_k = None
        settings.max_new_tokens, settings.max_length, settings.use_cache = room, None, cached
        settings.eos_token_id, settings.pad_token_id = sorted(stops) or None, pad
        settings.return_dict_in_generate = True
        return settings


@cache
def _warn_of_ignored(names: str) -> None:
    log.warning("settings of the model's generation_config.json that are not followed: %s", names)


class OnlyNumbers(transformers.LogitsProcessor):
    """Raises RunFailed: logits are NaN or infinite, from which torch would sample any token."""

    def __call__(self, input_ids: Tensor, scores_RV: Tensor) -> Tensor:
        if not scores_RV.amax(-1).isfinite().all():
            raise RunFailed(
                "the model's logits are NaN or infinite, so no token can be drawn: its weights, or "
                "numbers in its config.json, are damaged; check both"
            )
        return scores_RV


class OwnDraws(transformers.LogitsProcessor):
    """Samples each row's token by inverse transform sampling, and masks all other tokens.

    A row's random numbers depend on the seed and on the row's own number alone.
    """

    def __init__(
        self, settings: GenerationConfig, seed: int, rows: Sequence[int], device: torch.device
    ) -> None:
        self._num_sampled, generator = 0, torch.Generator()
        numbers = [
            torch.rand(
                settings.max_new_tokens or 0,
                dtype=torch.float64,
                generator=generator.manual_seed(derived_seed(seed, row)),
            )
            for row in rows
        ]
        self._numbers_TR1 = torch.stack(numbers, 1)[..., None].to(device)
        self._warpers: list[transformers.LogitsProcessor] = [
            transformers.TemperatureLogitsWarper(settings.temperature)
        ]
        if settings.top_k:
            self._warpers.append(transformers.TopKLogitsWarper(settings.top_k))
        if settings.top_p is not None and settings.top_p < 1:
            self._warpers.append(transformers.TopPLogitsWarper(settings.top_p))

    def __call__(self, input_ids: Tensor, scores_RV: Tensor) -> Tensor:
        for warper in self._warpers:
            scores_RV = warper(input_ids, scores_RV)
        sums_RV = scores_RV.softmax(-1, dtype=torch.float64).cumsum(-1)
        quantiles_R1 = self._numbers_TR1[self._num_sampled] * sums_RV[:, -1:]
        self._num_sampled += 1
        tokens_R1 = torch.searchsorted(sums_RV, quantiles_R1, right=True)
        return torch.full_like(scores_RV, -torch.inf).scatter_(1, tokens_R1, 0)


class AllEnded(transformers.StoppingCriteria):
    """Stops when the rows of all ranks have ended, so that all ranks run the same forwards."""

    def __init__(self, ranks: Ranks, stops: Collection[int], ended_R: Tensor) -> None:
        """Args: `ended_R`: True for rows that only fill a rank's batch, on the device."""
        self._ranks, self._ended_R = ranks, ended_R
        self._stops = torch.tensor(sorted(stops), dtype=torch.int64, device=ended_R.device)

    def __call__(self, input_ids: Tensor, scores: Any, **rest: Any) -> Tensor:
        self._ended_R = self._ended_R | torch.isin(input_ids[:, -1], self._stops)
        num_open = (~self._ended_R).sum(dtype=torch.float32)[None]
        self._ranks.all_reduce(num_open)
        return (num_open == 0).expand(len(input_ids))
