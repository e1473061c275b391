"""The memory of replies to prompts, by the model's own forward on fake tensors, as transformers'
`generate` calls it.
"""

from collections.abc import Mapping
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch.func import functional_call

from megatrain.compat.torch import FakeTensorMode
from megatrain.compat.transformers import counts_tokens
from megatrain.forecast.op_counter import OneAttention, OpCounter, foreseeing
from megatrain.model.build import loaded_types
from megatrain.model.media import cache_of
from megatrain.model.spec import ModelSpec

# Of each logit while a token is drawn: in fp32 as it came, after the temperature, sorted, their
# probabilities, and the sums of these; in int64 the order.
_DRAWN_BYTES = 5 * 4 + 8


def generation_bytes(
    spec: ModelSpec, dtype: torch.dtype, rows: int, tokens: int, new_tokens: int
) -> int:
    """Bytes beside the weights, where the model computes, at the peak of continuing `rows` prompts.

    With its reply, of `new_tokens`, one has `tokens`; keys and values are there twice as they grow.
    """
    counter, new = OpCounter(), min(new_tokens, tokens - 1)
    types = loaded_types(spec.capture.model, dtype)
    with (
        foreseeing("generation"),
        spec.capture.with_layers() as model,
        torch.no_grad(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        training = model.training
        model.eval()
        named = model.named_parameters()
        weights = {n: torch.empty(p.shape, dtype=types.get(n, dtype)) for n, p in named}
        try:
            cached, prompts = counts_tokens(model.config.get_text_config(decoder=True)), 0
            if not cached:  # as `generate/texts.py` finds it
                with suppress(ValueError):
                    cached = bool(_forward(model, weights, 1, 1))
            with counter:
                if not cached:
                    last = _forward(model, weights, rows, tokens, cached=False)
                else:
                    _forward(model, weights, rows, tokens - new)
                    prompts = counter.peak_bytes
                    past = cache_of(_forward(model, weights, rows, tokens - 1))
                    counter.restart()
                    last = _forward(model, weights, rows, 1, past, tokens - 1)
        finally:
            model.train(training)
        drawn = rows * last.logits.shape[-1] * _DRAWN_BYTES
        tables = sum(weights[name].nbytes for name in spec.gathered)
        return tables + max(prompts, counter.peak_bytes, counter.total_bytes + drawn)


def _forward(
    model: Any,
    weights: dict[str, torch.Tensor],
    rows: int,
    tokens: int,
    past: Mapping[str, Any] | None = None,
    num_past: int = 0,
    *,
    cached: bool = True,
) -> Any:
    """The output of `rows` rows of new tokens, of which `past` has the cache of those `before`."""
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    mask = torch.ones(rows, num_past + tokens, dtype=torch.int64)
    inputs = {**(past or {}), "attention_mask": mask, "use_cache": cached}
    accepted = signature(model.forward).parameters
    optional = {"logits_to_keep": 1, "position_ids": ids}  # of padded rows, each has its own
    inputs |= {name: value for name, value in optional.items() if name in accepted}
    with OneAttention():
        return functional_call(model, weights, (ids,), inputs)
