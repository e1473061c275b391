"""How tokens are drawn, as transformers' `generate` is told."""

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

# Logits that differ by a thousandth are as good as equal: below it, sampling takes the likeliest.
_COLD = 1e-3
_USUAL: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 0}


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
        self, own: GenerationConfig, *, room: int, stops: Collection[int], pad: int, cached: bool
    ) -> GenerationConfig:
        """All that `generate` is told.

        Args:
            own: the model's settings.
            room: new tokens at most.
            stops: tokens that end a text.
            cached: keys and values of earlier tokens are kept.
        """
        made = copy.deepcopy(own)
        usual = {} if own.do_sample else _USUAL
        for name in ("temperature", "top_p", "top_k", "repetition_penalty"):
            given = getattr(self, name)
            if given is None:
                given = usual.get(name, getattr(own, name))
            setattr(made, name, given)
        made.do_sample = made.temperature is None or made.temperature >= _COLD
        if not made.do_sample:
            made.temperature = made.top_p = made.top_k = None
        made.max_new_tokens, made.max_length, made.use_cache = room, None, cached
        made.num_beams = made.num_return_sequences = None
        made.eos_token_id, made.pad_token_id = sorted(stops) or None, pad
        made.return_dict_in_generate = True
        return made
