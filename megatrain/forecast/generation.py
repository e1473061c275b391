"""The memory that generating replies takes: the model's own forward is run on fake tensors, as
transformers' `generate` calls it.
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

# Of each logit while a token is sampled: five fp32 values (as it came, after the temperature,
# sorted, as a probability, as a cumulative sum) and its int64 place in the order.
_SAMPLING_BYTES = 5 * 4 + 8


def generation_bytes(
    spec: ModelSpec, dtype: torch.dtype, rows: int, tokens: int, new_tokens: int
) -> int:
    """Bytes beside the weights, on the model's device, at the peak of continuing `rows` prompts.

    A reply has `new_tokens`, a prompt with its reply `tokens`; a cache that grows is there twice.
    """
    counter, reply_tokens = OpCounter(), min(new_tokens, tokens - 1)
    types = loaded_types(spec.capture.model, dtype)
    with (
        foreseeing("generation"),
        spec.capture.with_layers() as model,
        torch.no_grad(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        training = model.training
        model.eval()
        parameters = model.named_parameters()
        weights = {n: torch.empty(p.shape, dtype=types.get(n, dtype)) for n, p in parameters}
        try:
            prompts_bytes = 0
            has_cache = counts_tokens(model.config.get_text_config(decoder=True))
            if not has_cache:  # generate/texts.py finds out in the same way if there is a cache
                with suppress(ValueError):
                    has_cache = bool(_forward(model, weights, 1, 1))
            with counter:
                if not has_cache:
                    output = _forward(model, weights, rows, tokens, use_cache=False)
                else:
                    _forward(model, weights, rows, tokens - reply_tokens)
                    prompts_bytes = counter.peak_bytes
                    past = cache_of(_forward(model, weights, rows, tokens - 1))
                    counter.restart()
                    output = _forward(model, weights, rows, 1, past, tokens - 1)
        finally:
            model.train(training)
        sampling_bytes = counter.total_bytes + rows * output.logits.shape[-1] * _SAMPLING_BYTES
        tables_bytes = sum(weights[name].nbytes for name in spec.gathered)
        return tables_bytes + max(prompts_bytes, counter.peak_bytes, sampling_bytes)


def _forward(
    model: Any,
    weights: dict[str, torch.Tensor],
    rows: int,
    tokens: int,
    past: Mapping[str, Any] | None = None,
    num_past: int = 0,
    *,
    use_cache: bool = True,
) -> Any:
    """The model's output for `rows` rows of `tokens`; `past` caches the `num_past` before them."""
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    mask = torch.ones(rows, num_past + tokens, dtype=torch.int64)
    inputs = {**(past or {}), "attention_mask": mask, "use_cache": use_cache}
    accepted = signature(model.forward).parameters
    optional = {"logits_to_keep": 1, "position_ids": ids}  # padded rows have positions of their own
    inputs |= {name: value for name, value in optional.items() if name in accepted}
    with OneAttention():
        return functional_call(model, weights, (ids,), inputs)
