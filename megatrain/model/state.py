"""Finds state that a model keeps from one run of its forward to the next, outside of its layers.

Training in micro-batches, layer by layer, runs the forward around the layers more often than plain
training, and in another order. So it must compute the same whenever it runs.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain.compat.torch import buffers_of, is_saved, memory_of, version_of
from megatrain.errors import Unsupported
from megatrain.model.capture import Capture, stop
from megatrain.model.fingerprint import value_of
from megatrain.model.layer_template import LayerTemplate
from megatrain.model.sizes import most_tokens
from megatrain.model.spec import PROBE_IDS, PROBE_SHAPE
from megatrain.model.token_chunks import draws
from megatrain.model.unsupported import Change, Watch
from megatrain.model.zeros import ZeroProducts, zero_pages


def settle(capture: Capture, stack: nn.ModuleList, shapes: Mapping[str, torch.Size]) -> bool:
    """Let the model make what it makes only once, such as the frequencies for long rows.

    Returns True if its forward calls the layers of the stack.

    Raises Unsupported: it makes other than tensors, or these depend on the first batch.
    """
    in_stack = {id(module) for module in stack.modules()}
    outer = [module for module in capture.model.modules() if id(module) not in in_stack]
    watch = Watch(capture.model, "", [*stack])
    states = [(vars(m).copy(), buffers_of(m).copy()) for m in outer]
    reached, changes = _run_to_the_layers(capture, shapes, 0.0, watch)
    if not changes:
        return reached
    settled = [_value(change) for change in changes]
    for module, (attributes, buffers) in zip(outer, states, strict=True):
        vars(module).clear()
        vars(module).update(attributes)
        buffers_of(module).clear()
        buffers_of(module).update(buffers)
    original = [_value(change) for change in changes]
    # Other weights and tokens must make the same values once more.
    _run_to_the_layers(capture, shapes, torch.nan, watch)
    for change, old, new in zip(changes, original, settled, strict=True):
        is_new = old is None or change.name in buffers_of(change.module)
        if not is_new or new is None or _value(change) != new:
            raise change.refusal()
    return reached


def _value(change: Change) -> Any:
    """A changed tensor's value now, to be compared; None: it is no tensor."""
    value = getattr(change.module, change.name, None)
    return value_of(value) if isinstance(value, Tensor) else None


def _run_to_the_layers(
    capture: Capture, shapes: Mapping[str, torch.Size], weight: float, watch: Watch
) -> tuple[bool, list[Change]]:
    """Run short rows, the model's last positions, and after a change short rows again."""
    weights = {
        name: zero_pages(shape) if weight == 0 else torch.full((), weight).expand(shape)
        for name, shape in shapes.items()
    }
    short = {"input_ids": PROBE_IDS if weight == 0 else PROBE_IDS.remainder(3)}
    longest, tokens = most_tokens(capture.model.config) or 0, PROBE_SHAPE[1]
    with torch.no_grad():
        reached = capture.forward(stop, weights, capture.inputs(short)) is True
        if longer := longest > tokens and capture.takes("position_ids"):
            last = {"position_ids": torch.arange(longest - tokens, longest).expand(PROBE_SHAPE)}
            with suppress(Exception):  # not every model takes positions that begin anywhere
                capture.forward(stop, weights, capture.inputs(short | last))
        changes = watch.changes()
        if changes and longer:
            capture.forward(stop, weights, capture.inputs(short))
            changes = watch.changes()
    return reached, changes


def try_kind(kind: LayerTemplate, path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Run a kind once with weights of zeros, note its outputs (`example`), random numbers, states.

    Refuses one that reads what an earlier run has left: NaN in its place must not show. Weights of
    zeros may make NaN themselves, where one is divided by its norm: then a run with ones decides.
    """
    buffers = dict(module.named_buffers())
    zeros = {name: zero_pages(p.shape) for name, p in module.named_parameters()}
    weights = zeros | buffers
    watch, versions = Watch(kind.module, path), {n: _written(w) for n, w in weights.items()}
    randomness = OtherRandomness()

    def run() -> None:
        kind.example = kind.call(weights, args, kwargs)

    with torch.no_grad(), ZeroProducts(zeros.values()):
        kind.random = draws(run, zeros)
        changes = watch.changes()
        kind.states = [(change.module, change.name) for change in changes]
        if changes and _reads(changes, partial(kind.call, weights, args, kwargs)):
            # Experts, which are three-dimensional and may be large, stay zeros.
            ones = {n: torch.ones(z.shape) if z.dim() <= 2 else z for n, z in zeros.items()}
            if _reads(changes, partial(kind.call, ones | buffers, args, kwargs)):
                raise changes[0].refusal()
    for name, tensor in (zeros | buffers).items():
        if weights[name] is not tensor or _written(tensor) != versions[name]:
            kind_of_tensor = "buffer" if name in buffers else "parameter"
            raise Unsupported(f"the forward of {path} changes its {kind_of_tensor} {name}")
    randomness.refuse()


def _written(tensor: Tensor) -> tuple[int, int]:
    """A key that changes when a tensor is written to, or gets other memory."""
    return memory_of(tensor), version_of(tensor)


def _reads(changes: Iterable[Change], run: Callable[[], Iterable[Any]]) -> bool:
    """True if NaN in place of an earlier run's leftovers shows in the outputs of `run`."""
    for change in changes:
        value = getattr(change.module, change.name, None)
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            raise change.refusal()
        setattr(change.module, change.name, torch.full_like(value, torch.nan))
    with sdpa_kernel(SDPBackend.MATH):  # the output of a fused kernel may hide NaN in its input
        tensors = [value for value in run() if isinstance(value, Tensor)]
    return any(bool(t.isnan().any()) for t in tensors if t.is_floating_point())


def refuse_state(watch: Watch, again: Callable[[], Iterable[Any]]) -> None:
    """Refuse changes since `watch` began, except in buffers that each run writes anew.

    Args: `again`: runs the forward and returns all its outputs.

    Raises Unsupported: names the first.
    """
    changes = watch.changes()
    for change in changes:
        written = change.name in buffers_of(change.module)
        if not written or is_saved(change.module, change.name):
            raise change.refusal()
    if changes and _reads(changes, again):
        raise changes[0].refusal()


class OtherRandomness:
    """Notices random numbers from elsewhere than torch, which a recomputation would not repeat."""

    def __init__(self) -> None:
        self._before = self._state()

    @staticmethod
    def _state() -> tuple:
        _, numbers, *rest = numpy.random.get_state(legacy=True)
        return random.getstate(), list(numbers), rest

    def refuse(self) -> None:
        """Raise Unsupported if any has been drawn since the start."""
        if self._state() != self._before:
            raise Unsupported(
                "its forward draws random numbers from Python's or numpy's generator, which its "
                "recomputation would not draw again; use torch's"
            )
