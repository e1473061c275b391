"""Parts of a layer that run in tiles (model/token_chunks.py), as forecasts see them: of all
their chunks one is measured, and none is run.

Legend: as in model/token_chunks.py.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain.compat.torch import current_mode
from megatrain.forecast.op_counter import OpCounter, Work, added
from megatrain.model.layer_template import LayerTemplate
from megatrain.model.token_chunks import ChunkedOverTokens, acts_on_tokens_alone, parts

_SIZE = 4  # of the greatest common divisor of a part's sizes, in a trial
_MOST = 1 << 24  # parameters of a part that is tried in its own size


@dataclass(frozen=True)
class TileWork:
    """What one tile takes: its forward, the one that its backward begins with, the rest of it.

    Attributes:
        made: sizes of its result `[1, C, E]`.
    """

    forward: Work
    again: Work
    backward: Work
    made: tuple[int, ...]
    dtype: torch.dtype

    @property
    def made_bytes(self) -> int:
        return prod(self.made) * self.dtype.itemsize


Measure = Callable[[nn.Module, dict[str, Tensor], tuple[int, ...], torch.dtype], TileWork]


@contextmanager
def tiled(kind: LayerTemplate, tokens: int, measure: Measure) -> Iterator[None]:
    """Within this context a kind's parts stand for tiles of `tokens`.

    Args:
        measure: of a part, what it is bound to (without data), and a whole tile's sizes
            `[1, C, D]` and type.
    """
    before, kind.module = kind.module, copy.deepcopy(kind.module)
    try:
        with foretold(parts(kind.module), tokens, measure):
            yield
    finally:
        kind.module = before


@contextmanager
def foretold(
    found: Sequence[tuple[str, nn.Module]], tokens: int, measure: Measure
) -> Iterator[None]:
    """Within this context some parts stand for tiles of `tokens`; `measure` as in `tiled`."""
    before = [(part, part.__dict__.pop("forward", None)) for _, part in found]
    try:
        for name, part in found:
            part.forward = _Foretold(part, name, tokens, measure)
        yield
    finally:
        for part, forward in before:
            del part.forward
            if forward is not None:
                part.forward = forward


class _Foretold(ChunkedOverTokens):
    """A part whose tiles are measured instead of run."""

    def __init__(self, part: nn.Module, name: str, tokens: int, measure: Measure) -> None:
        super().__init__(part, name, tokens, lambda function, what: function)
        self._measure = measure
        self._works: dict[tuple[int, torch.dtype], TileWork] = {}

    def _trial(self, bound: dict[str, Tensor], x: Tensor) -> bool:
        return acts_alone(self._alone, bound, x.shape[-1])

    def _over_tiles(self, bound: dict[str, Tensor], x: Tensor) -> Tensor:
        key, count = (x.shape[-1], x.dtype), -(-x.shape[:-1].numel() // self._tokens)
        if key not in self._works:
            sizes = (1, self._tokens, x.shape[-1])
            self._works[key] = self._measure(self._alone, bound, sizes, x.dtype)
        return _Opaque.apply(self._works[key], count, x, *bound.values())


def acts_alone(part: nn.Module, bound: dict[str, Tensor], width: int) -> bool:
    """Whether a part acts on every token alone, tried without its weights.

    First with random ones of smaller sizes in the same proportions, since real ones may be large;
    a part that knows its sizes otherwise is tried in its own, if that is quick.
    """
    sizes = {width, *(n for value in bound.values() for n in value.shape)}
    least = gcd(*sizes)
    small = {n: n // least * _SIZE for n in sizes} if least > _SIZE else {n: n for n in sizes}
    if _tried(part, bound, width, small):
        return True
    quick = sum(value.numel() for value in bound.values()) <= _MOST
    return quick and _tried(part, bound, width, {n: n for n in sizes})


def _tried(part: nn.Module, bound: dict[str, Tensor], width: int, sizes: dict[int, int]) -> bool:
    generator = torch.Generator().manual_seed(0)

    def made(value: Tensor) -> Tensor:
        shape = [sizes[n] for n in value.shape]
        return torch.randn(shape, generator=generator) / max(1, prod(shape[1:])) ** 0.5

    weights = {name: made(value) for name, value in bound.items()}
    return acts_on_tokens_alone(
        lambda x: functional_call(part, weights, (x,)), torch.empty(1, 1, sizes[width])
    )


class _Opaque(torch.autograd.Function):
    """A part over all its tiles; holds what model/token_chunks.py would hold."""

    @staticmethod
    def forward(ctx: Any, work: TileWork, count: int, x_BTD: Tensor, *values: Tensor) -> Tensor:
        ctx.work, ctx.count = work, count
        ctx.save_for_backward(x_BTD, *values)
        out_BTE = x_BTD.new_empty((*x_BTD.shape[:-1], work.made[-1]), dtype=work.dtype)
        copied = Work(touched_bytes=2 * work.made_bytes, kernels=1)
        # The result of the tile before is there until this one's is.
        peak = work.forward.peak_bytes + work.made_bytes
        _add(_times(count, added(work.forward, copied)), peak)
        return out_BTE

    @staticmethod
    def backward(ctx: Any, gradient_BTE: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, *values = ctx.saved_tensors
        work, needs = ctx.work, ctx.needs_input_grad[3:]
        needed = [value for value, need in zip(values, needs, strict=True) if need]
        sums = [torch.zeros_like(value, dtype=torch.float32) for value in needed]
        dx_BTD = torch.empty_like(x_BTD)
        grads = sum(value.nbytes for value in needed)
        tile = dx_BTD.nbytes // ctx.count
        moved = grads + 2 * sum(total.nbytes for total in sums) + 2 * tile
        summed = Work(touched_bytes=moved, kernels=len(needed) + 1)
        once = added(added(work.again, work.backward), summed)
        # Its gradients and results are there until those of the next tile are.
        peak = work.backward.peak_bytes + grads + tile + work.made_bytes
        _add(_times(ctx.count, once), peak)
        rounded = iter([s.to(v.dtype) for s, v in zip(sums, needed, strict=True)])
        return None, None, dx_BTD, *(next(rounded) if need else None for need in needs)


def _add(work: Work, peak_bytes: int) -> None:
    counter = current_mode()
    assert isinstance(counter, OpCounter), "parts in tiles are measured under a counter"
    counter.add(work._replace(peak_bytes=peak_bytes))


def _times(count: int, work: Work) -> Work:
    return Work(
        count * work.product_flops,
        count * work.attention_flops,
        count * work.attention_backward_flops,
        count * work.touched_bytes,
        count * work.kernels,
    )
