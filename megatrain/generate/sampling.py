"""How tokens are drawn, as transformers' `generate` is told."""

import copy
import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import GenerationConfig

# Logits that differ by a thousandth are as good as equal: below it, sampling takes the likeliest.
_COLD = 1e-3
_USUAL: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 0}
# Settings of a model's folder that are followed as transformers' `generate` follows them.
_FOLLOWED = {
    "bad_words_ids", "begin_suppress_tokens", "cache_config", "cache_implementation",
    "compile_config", "disable_compile", "do_sample", "eos_token_id", "epsilon_cutoff",
    "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "max_cache_len", "max_time", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size",
    "remove_invalid_values", "renormalize_logits", "repetition_penalty", "sequence_bias",
    "stop_strings", "suppress_tokens", "temperature", "top_h", "top_k", "top_p", "typical_p",
    "watermarking_config",
}  # fmt: skip
# Those that the caller's options stand for, or that mean nothing to a model that goes on with text.
_REPLACED = {
    "assistant_confidence_threshold", "assistant_lookbehind", "bos_token_id",
    "decoder_start_token_id", "max_length", "max_matching_ngram_size", "max_new_tokens",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule", "output_attentions", "output_hidden_states", "output_logits",
    "output_scores", "pad_token_id", "return_dict_in_generate", "target_lookbehind",
    "transformers_version", "use_cache",
}  # fmt: skip
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, [], {})

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Of what is None the model's own settings decide, where it has some; else 0.8 and 0.95.

    Attributes:
        temperature: 0: always the likeliest token.
        top_p: sample from the likeliest tokens up to this probability.
        top_k: and from this many at most; 0: any number.
        repetition_penalty: above 1: tokens that are there already become less likely.
    """

    max_new_tokens: int = 128
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int = 0

    def settings(
        self,
        of_model: GenerationConfig,
        *,
        room: int,
        stops: Collection[int],
        pad: int,
        cached: bool,
    ) -> GenerationConfig:
        """All that `generate` is told.

        Args:
            of_model: the model's settings.
            room: new tokens at most.
            stops: tokens that end a text.
            cached: keys and values of earlier tokens are kept.
        """
        settings = copy.deepcopy(of_model)
        for name in _not_followed(of_model):
            setattr(settings, name, None)
        usual = {} if of_model.do_sample else _USUAL
        for name in ("temperature", "top_p", "top_k", "repetition_penalty"):
            value = getattr(self, name)
            if value is None:
                value = usual.get(name, getattr(of_model, name))
            setattr(settings, name, value)
        settings.do_sample = settings.temperature is None or settings.temperature >= _COLD
        if not settings.do_sample:
            settings.temperature = settings.top_p = settings.top_k = None
        settings.max_new_tokens, settings.max_length, settings.use_cache = room, None, cached
        settings.eos_token_id, settings.pad_token_id = sorted(stops) or None, pad
        settings.return_dict_in_generate = True
        return settings


def _not_followed(config: GenerationConfig) -> list[str]:
    """The settings that generation here does not follow, which is said once."""
    known = _FOLLOWED | _REPLACED
    names = [
        name
        for name, value in sorted(vars(config).items())
        if not (name.startswith("_") or name in known or value in _NEUTRAL)
    ]
    if names:
        _say(", ".join(names))
    return names


@cache
def _say(names: str) -> None:
    log.warning("settings of the model's generation_config.json that are not followed: %s", names)
