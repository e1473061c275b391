"""A head too large for the device, visited in stages: up to its projection, and ranges of rows.

In the forward sweep each range of the table's rows adds to every token's log-sum-exp, and finds the
targets' logits among its own. With the last range these statistics are known, and so the loss and
its slopes by them; it goes on to its gradients; the others come again in the backward, each
computing its logits once more. Each stage passes all micro-batches before the next one's weights
are used, as layers do; what it gives to the next is an activation.

Legend: N tokens of a micro-batch, C tokens of a chunk, D width, R rows of a range.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatrain.device import Buffer, Device
from megatrain.device.base import Kind, Name
from megatrain.device.collectives import Collectives
from megatrain.engine.batch import Batch
from megatrain.engine.layer import Layer, Stage
from megatrain.engine.modules import HEAD_NAME, Head, State
from megatrain.engine.sink import GradAccumulator
from megatrain.engine.tile_slice import TileSlice, VocabSlices
from megatrain.loss import (
    Statistics,
    larger_logits,
    largest_logits,
    range_gradient,
    range_logits,
    range_statistics,
)
from megatrain.model.capture import Ref
from megatrain.model.program import Activations, MicroBatch, ModelProgram
from megatrain.placement import Saves

# Leaves of the head. Forward: what is projected `[B, T, D]`; the log-sum-exp, the targets' logits,
# the logits' sum and the largest logit so far `[N]`; logits that the loss chooses `[N, K]`, and the
# largest so far with their rows `[N, 2, K]`.
# Backward: the gradient of what is projected; the log-sum-exp as it was, the weight of each token's
# cross entropy, and the loss's slopes by the mean, by the log-sum-exp besides, and by the chosen
# logits. Where logits are asked for, those of a range of rows are the leaf LOGITS + the number of
# its first row.
HIDDEN, LOGITS = 0, 7


def in_shards(
    device: Device,
    program: ModelProgram,
    vocab_slices: VocabSlices,
    rows: "VocabSplit",
    collectives: Collectives,
) -> tuple[list[Layer], Head]:
    """The stages of a head, in their order; the last one is apart."""
    *middle, last = zip(vocab_slices.rows, vocab_slices.bounds, strict=False)
    firsts = [VocabShard(device, program, *stage, rows) for stage in middle]
    for stage in firsts[:1]:
        stage.new_inputs = stage.inputs
    epilogue = Epilogue(device, program, vocab_slices.rest)
    tile_slice, start = last
    head = Head(device, program, tile_slice, LastRows(rows, start), collectives)
    return [epilogue, *firsts], head


class VocabSplit:
    """What is computed with some rows of the head's table, in chunks of `tokens`."""

    def __init__(
        self,
        program: ModelProgram,
        tokens: int,
        statistics: Callable[..., tuple[Tensor, Tensor]] = range_statistics,
        gradient: Callable[..., Tensor] = range_gradient,
    ) -> None:
        """Args: `statistics`, `gradient` of a chunk's logits; compiled, or as they are."""
        self._program, self._tokens = program, tokens
        self._statistics_of, self._gradient_of = statistics, gradient
        visit = len(program.spec.layers)
        refs = (Ref(visit, leaf) for leaf in range(LOGITS + 1))
        self.hidden, self.lse, self.picked, self.sum, *others = refs
        self.largest, self.chosen, self.top, self.first = others
        self.lse_slope = self.largest  # nobody asks for the largest logit in a backward
        self._num = program.spec.num_logits

    def see(
        self, weights: dict[str, Tensor], start: int, micro: MicroBatch, values: Activations
    ) -> Activations:
        """`values`, and what is known of the logits after the rows from `start` on."""
        with torch.no_grad():
            if micro.targets is None:
                logits = self._program.projection(weights, micro, values[self.hidden])
                return {**values, Ref(self.first.visit, LOGITS + start): logits.float().cpu()}
            found = self._statistics(weights, start, micro, values[self.hidden])
        if self.lse in values:
            larger = partial(larger_logits, most=micro.loss.top_k)
            joined: dict[Ref, Any] = {
                self.lse: torch.logaddexp,
                self.largest: torch.maximum,
                self.top: larger,
            }  # others are added
            found = {ref: joined.get(ref, torch.add)(values[ref], n) for ref, n in found.items()}
        return {**values, **found}

    def _statistics(
        self, weights: dict[str, Tensor], start: int, micro: MicroBatch, hidden_BTD: Tensor
    ) -> Activations:
        hidden_ND, places_N = _flat(hidden_BTD), _targets(micro) - start
        loss, found = micro.loss, list[Activations]()
        ids_NK = loss.chosen(_given(micro))
        for chunk in self._chunks(len(hidden_ND)):
            logits = self._logits(weights, micro, hidden_ND[None, chunk])
            lse_C, picked_C = self._statistics_of(logits, places_N[chunk])
            some = {self.lse: lse_C, self.picked: picked_C}
            if loss.uses_mean:
                some[self.sum] = logits.float().sum(1)
            if loss.uses_margin:
                some[self.largest] = logits.float().amax(1)
            if ids_NK is not None:
                some[self.chosen] = range_logits(logits, ids_NK[chunk] - start)
            if loss.top_k:
                some[self.top] = largest_logits(logits, loss.top_k, start)
            found.append(some)
        return {ref: torch.cat([some[ref] for some in found]) for ref in found[0]}

    def _logits(self, weights: dict[str, Tensor], micro: MicroBatch, hidden_1CD: Tensor) -> Tensor:
        """Logits `[C, R]` of a chunk for the rows that are here, at the loss's temperature."""
        return micro.loss.tempered(self._program.projection(weights, micro, hidden_1CD)[0])

    def logits(self, values: Activations) -> Tensor:
        """All logits `[B, T, V]`, after the last range."""
        return torch.cat([values[ref] for ref in sorted(values) if ref >= self.first], -1)

    def losses(self, micro: MicroBatch, values: Activations) -> Tensor:
        """Each token's loss `[N]`, after the last range; 0 where nothing is predicted."""
        return micro.loss.each(self._found(values), _targets(micro), *_given(micro))

    def loss(self, micro: MicroBatch, values: Activations) -> Tensor:
        """The sum of `losses`."""
        return self.losses(micro, values).sum(0)

    def _found(self, values: Activations) -> Statistics:
        mean_N = values[self.sum] / self._num if self.sum in values else None
        picked_N, lse_N = values[self.picked], values[self.lse]
        margin_N = picked_N - values[self.largest] if self.largest in values else None
        more = values.get(self.chosen), values.get(self.top)
        return Statistics(picked_N - lse_N, lse_N, mean_N, margin_N, *more)

    def gradients(self, micro: MicroBatch, values: Activations, count: float) -> Activations:
        """What `backward` adds to: the gradient of what is projected, fp32; and what it reads.

        Args:
            count: what the step's loss is divided by.
        """
        slopes = micro.loss.slopes(self._found(values), _targets(micro), _given(micro), count)
        total_BTD = torch.zeros_like(values[self.hidden], dtype=torch.float32)
        weights_N = torch.zeros_like(values[self.lse])
        if slopes.log_prob is not None:
            weights_N = -slopes.log_prob
        made = {self.hidden: total_BTD, self.lse: values[self.lse], self.picked: weights_N}
        if slopes.mean is not None:
            made[self.sum] = slopes.mean / self._num
        if slopes.lse is not None:
            made[self.lse_slope] = slopes.lse
        if slopes.chosen is not None:
            made[self.chosen] = slopes.chosen
        return made

    def backward(
        self,
        weights: dict[str, Tensor],
        start: int,
        micro: MicroBatch,
        values: Activations,
        gradients: Activations,
        names: list[str],
        accumulator: GradAccumulator,
    ) -> None:
        """Accumulate gradients of the rows from `start` on; add the others to `gradients`.

        Args:
            values: what is projected, among others.
            gradients: as `gradients` makes them.
            names: of the weights that have gradients.
        """
        hidden_ND, total_ND = _flat(values[self.hidden]), _flat(gradients[self.hidden])
        targets_N, lse_N = _targets(micro), gradients[self.lse]
        weights_N = gradients[self.picked]
        more = [gradients.get(ref) for ref in (self.lse_slope, self.sum, self.chosen)]
        if (ids_NK := micro.loss.chosen(_given(micro))) is not None:
            more.insert(2, ids_NK - start)
        more = [] if all(slope is None for slope in more) else more
        for chunk in self._chunks(len(hidden_ND)):
            with torch.enable_grad():
                hidden_CD = hidden_ND[None, chunk].detach().requires_grad_()
                logits = self._logits(weights, micro, hidden_CD)
            given = logits.detach(), targets_N[chunk] - start, lse_N[chunk], weights_N[chunk]
            sources = [hidden_CD, *(weights[name] for name in names)]
            slopes = [None if each is None else each[chunk] for each in more]
            gradient = self._gradient_of(*given, *slopes)
            grads = torch.autograd.grad(logits, sources, gradient, allow_unused=True)
            total_ND[chunk] += grads[0][0]
            accumulator.add(names, grads[1:])

    def _chunks(self, total: int) -> Iterator[slice]:
        return (slice(at, at + self._tokens) for at in range(0, total, self._tokens))


def _flat(hidden_BTD: Tensor) -> Tensor:
    return hidden_BTD.view(-1, hidden_BTD.shape[-1])


def _targets(micro: MicroBatch) -> Tensor:
    assert micro.targets is not None
    return micro.targets.view(-1)


def _given(micro: MicroBatch) -> list[Tensor]:
    return [each.flatten(0, 1) for each in micro.given]


class _AfterLayers(Stage):
    """Visited after the last layer."""

    def __init__(self, device: Device, program: ModelProgram, tile_slice: TileSlice) -> None:
        super().__init__(device, program, tile_slice, len(program.spec.layers) - 1)
        self.visit += 1
        self.name, self.prefix = HEAD_NAME, ""
        self.backward_name = Name(Kind.HEAD, "head backward")


class Epilogue(_AfterLayers):
    """From the last layer's activations to what is projected."""

    def __init__(self, device: Device, program: ModelProgram, tile_slice: TileSlice) -> None:
        super().__init__(device, program, tile_slice)
        spec = program.spec
        self.inputs = self.grad_inputs = spec.epilogue_inputs
        self.new_inputs = [ref for ref in self.inputs if ref not in spec.read]
        self.made = [Ref(self.visit, leaf) for leaf in range(LOGITS)]
        self.live_out = frozenset(spec.routed)

    def _call(
        self,
        weights: dict[str, Tensor],
        micro: MicroBatch,
        values: Activations,
        saves: Saves | None = None,
    ) -> Activations:
        return {self.made[0]: self.program.projected(weights, micro, values)}


class VocabShard(_AfterLayers):
    """A stage for a range of the table's rows that is not the last range."""

    def __init__(
        self,
        device: Device,
        program: ModelProgram,
        tile_slice: TileSlice,
        start: int,
        rows: VocabSplit,
    ) -> None:
        """Args: `start` is the first row."""
        super().__init__(device, program, tile_slice)
        self._rows, self._start = rows, start
        self.inputs, self.new_inputs = [rows.hidden], []

    def run(self, slot: Buffer, batch: Batch, h: State, *, train: bool) -> State:
        """What is known of the logits so far, beside what is projected."""
        return self.each(self.name, batch, partial(self.see, slot), h, reads=[slot])

    def see(self, slot: Buffer, micro: MicroBatch, values: Activations) -> Activations:
        """One micro-batch's activations, with what is known of the logits so far."""
        return self._rows.see(self.weights(slot), self._start, micro, values)

    def vjp(
        self, slot: Buffer, batch: Batch, h: Iterable, dh: State, accumulator: GradAccumulator
    ) -> State:
        """Gradients of the rows into `accumulator`; that of what is projected is added to."""
        backward = partial(self.add_gradients, slot, accumulator)
        self.each(self.name, batch, backward, h, dh, reads=[slot], writes=[accumulator.sums])
        return dh

    def add_gradients(
        self,
        slot: Buffer,
        accumulator: GradAccumulator,
        micro: MicroBatch,
        values: Activations,
        gradients: Activations,
    ) -> None:
        """Accumulate one micro-batch's gradients of the rows; add those of what is projected."""
        weights, names = self.leaves(slot)
        self._rows.backward(weights, self._start, micro, values, gradients, names, accumulator)


class LastRows:
    """What is computed with the last rows of the table, from `start` on: the loss is known."""

    def __init__(self, rows: VocabSplit, start: int) -> None:
        self._rows, self._start = rows, start

    def gradients_of(
        self,
        weights: dict[str, Tensor],
        names: list[str],
        micro: MicroBatch,
        values: Activations,
        count: float,
        accumulator: GradAccumulator,
    ) -> tuple[Tensor, Activations]:
        rows = self._rows
        values = rows.see(weights, self._start, micro, values)
        gradients = rows.gradients(micro, values, count)
        rows.backward(weights, self._start, micro, values, gradients, names, accumulator)
        return rows.loss(micro, values) / count, gradients

    def loss(self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations) -> Tensor:
        return self._rows.loss(micro, self._rows.see(weights, self._start, micro, values))

    def losses(self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations) -> Tensor:
        return self._rows.losses(micro, self._rows.see(weights, self._start, micro, values))

    def logits(self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations) -> Tensor:
        return self._rows.logits(self._rows.see(weights, self._start, micro, values))
