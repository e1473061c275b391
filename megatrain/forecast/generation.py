"""What replies to prompts take, before any is made: keys and values, and work on them.

The model's own forward runs on fake tensors (shapes without data) as transformers' `generate` calls
it: over the prompts, and for the last new token with the cache of all before it.
"""

from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch.func import functional_call
from transformers import PreTrainedModel

from megatrain.compat.torch import FakeTensorMode
from megatrain.compat.transformers import counts_tokens
from megatrain.forecast.ledger import (
    ACTIVATIONS,
    KEPT_ATTENTION,
    KEPT_GRAPHS,
    WORKING_SET,
)
from megatrain.forecast.op_counter import OneAttention, OpCounter, foreseeing
from megatrain.forecast.simulate import Forecast, left_lying
from megatrain.model.spec import ModelSpec

# Of each logit while a token is drawn: in fp32 as it came, after the temperature, sorted, their
# probabilities, and the sums of these; in int64 the order.
_DRAWN_BYTES = 5 * 4 + 8


_DONE = (ACTIVATIONS, KEPT_GRAPHS, KEPT_ATTENTION, WORKING_SET, "layer arguments")


def with_generation(found: Forecast, generated_bytes: int) -> Forecast:
    """The forecast of a run that also generates, between steps: at the peak of either.

    Args: `generated_bytes`: as `generation_bytes` says.
    """
    unified = found.machine.unified
    there = found.host_parts if unified else found.device_bytes
    own = generated_bytes + (left_lying(generated_bytes) if unified else 0)
    done = (*_DONE, "allocator") if unified else _DONE
    more = max(0, own - sum(there.get(place, 0) for place in done))
    if unified:
        return replace(found, host_bytes=found.host_bytes | {"host_generation_bytes": more})
    return replace(found, device_bytes=found.device_bytes | {"generation": more})


def generation_bytes(
    spec: ModelSpec, dtype: torch.dtype, rows: int, tokens: int, new_tokens: int
) -> int:
    """Bytes beside the weights, where the model computes, at the peak.

    Args:
        rows: prompts continued together, each with its reply of `tokens`, of which `new_tokens`
            are the reply's. A layer's keys and values are there twice while they grow.

    Raises:
        NotForeseeable: what the model computes depends on its values.
    """
    counter, new = OpCounter(), min(new_tokens, tokens - 1)
    with (
        foreseeing("generation"),
        spec.capture.with_layers() as model,
        torch.no_grad(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        training = model.training
        model.eval()
        weights = {n: torch.empty(p.shape, dtype=dtype) for n, p in model.named_parameters()}
        try:
            cached, prompts = _takes_cache(model, weights), 0
            with counter:
                if not cached:
                    last = _forward(model, weights, rows, tokens, cached=False)
                else:
                    _forward(model, weights, rows, tokens - new)
                    prompts = counter.peak_bytes
                    past = _cache(_forward(model, weights, rows, tokens - 1))
                    counter.restart()
                    last = _forward(model, weights, rows, 1, past, tokens - 1)
        finally:
            model.train(training)
        drawn = rows * last.logits.shape[-1] * _DRAWN_BYTES
        return max(prompts, counter.peak_bytes, counter.total_bytes + drawn)


def _takes_cache(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> bool:
    """Whether the model computes with a cache (as `generate/texts.py` finds it)."""
    if counts_tokens(model.config.get_text_config(decoder=True)):
        return True
    try:
        _forward(model, weights, 1, 1)
    except ValueError:
        return False
    return True


def _cache(output: Any) -> dict[str, Any]:
    """The cache of an output, under the name by which the next forward takes it."""
    return {name: output[name] for name in ("past_key_values", "cache_params") if name in output}


def _forward(
    model: PreTrainedModel,
    weights: dict[str, torch.Tensor],
    rows: int,
    tokens: int,
    past: Mapping[str, Any] | None = None,
    before: int = 0,
    *,
    cached: bool = True,
) -> Any:
    """The output of `rows` rows of new tokens, of which `past` has the cache of those `before`."""
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    given: dict[str, Any] = dict(past or {})
    given["attention_mask"] = torch.ones(rows, before + tokens, dtype=torch.int64)
    taken = signature(model.forward).parameters
    more = {"logits_to_keep": 1, "position_ids": ids}  # of padded rows, each has its own
    given |= {name: value for name, value in more.items() if name in taken}
    with OneAttention():
        return functional_call(model, weights, (ids,), given | {"use_cache": cached})
