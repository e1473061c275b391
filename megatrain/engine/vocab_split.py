"""A head too large for the device, visited in stages: up to its projection, and ranges of rows.

In the forward sweep each range of the table's rows adds to every token's log-sum-exp, and finds the
targets' logits among its own. With the last range these statistics are known, and so the loss and
its slopes by them; it goes on to its gradients; the others come again in the backward, each
computing its logits once more. Each stage passes all micro-batches before the next one's weights
are used, as layers do; what it gives to the next is an activation.

Legend: N tokens of a micro-batch, C tokens of a chunk, D width, R rows of a range.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from megatrain.device import Buffer, Device
from megatrain.device.base import Kind, Name
from megatrain.engine.batch import Batch
from megatrain.engine.head import WholeHead, flat
from megatrain.engine.layer import Layer
from megatrain.engine.modules import HEAD_NAME, State, StreamedModule
from megatrain.engine.sink import GradAccumulator
from megatrain.engine.tile_slice import TileSlice
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
from megatrain.placement import ActivationPolicy, Saves

# Leaves of the head. Forward: what is projected `[B, T, D]`; the log-sum-exp, the targets' logits,
# the logits' sum and the largest logit so far `[N]`; logits that the loss chooses `[N, K]`, and the
# largest so far with their rows `[N, 2, K]`.
# Backward: the gradient of what is projected; the log-sum-exp as it was, the weight of each token's
# cross entropy, and the loss's slopes by the mean, by the log-sum-exp besides, and by the chosen
# logits. Where logits are asked for, those of a range of rows are the leaf LOGITS + the number of
# its first row.
HIDDEN, LOGITS = 0, 7


class VocabRows(WholeHead):
    """Computes with rows `start` to its tile's last of the head's table, in chunks of `tokens`.

    The instance with the last rows is a head: its loss, logits and gradients are those of all rows.
    """

    def __init__(
        self,
        program: ModelProgram,
        tokens: int,
        start: int,
        statistics: Callable[..., tuple[Tensor, Tensor]] = range_statistics,
        gradient: Callable[..., Tensor] = range_gradient,
    ) -> None:
        """Args: `statistics`, `gradient`: functions of a chunk's logits, compiled or not."""
        super().__init__(program, tokens, lambda loss: loss.summed)
        self._start = start
        self._statistics_of, self._gradient_of = statistics, gradient
        visit = len(program.spec.layers)
        refs = (Ref(visit, leaf) for leaf in range(LOGITS + 1))
        self.hidden, self.lse, self.picked, self.sum, *others = refs
        self.largest, self.chosen, self.top, self.first = others
        self.lse_slope = self.largest  # nobody asks for the largest logit in a backward
        self._num = program.spec.num_logits

    def add_statistics(
        self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations
    ) -> Activations:
        """`values` with statistics of the logits of the table's rows up to these."""
        with torch.no_grad():
            if micro.targets is None:
                logits = self._program.projection(weights, micro, values[self.hidden])
                return {**values, Ref(self.first.visit, LOGITS + self._start): logits.float().cpu()}
            statistics = self._statistics(weights, micro, values[self.hidden])
        if self.lse in values:
            joined: dict[Ref, Any] = {
                self.lse: torch.logaddexp,
                self.largest: torch.maximum,
                self.top: partial(larger_logits, most=micro.loss.top_k),
            }  # others are added
            for ref, number in statistics.items():
                statistics[ref] = joined.get(ref, torch.add)(values[ref], number)
        return {**values, **statistics}

    def _statistics(
        self, weights: dict[str, Tensor], micro: MicroBatch, hidden_BTD: Tensor
    ) -> Activations:
        hidden_ND, places_N = hidden_BTD.flatten(0, 1), _targets(micro) - self._start
        loss, chunks = micro.loss, list[Activations]()
        ids_NK = loss.chosen(flat(micro.extras))
        for chunk in self._chunk_slices(len(hidden_ND)):
            logits = self._logits(weights, micro, hidden_ND[None, chunk])
            lse_C, picked_C = self._statistics_of(logits, places_N[chunk])
            statistics = {self.lse: lse_C, self.picked: picked_C}
            if loss.uses_mean:
                statistics[self.sum] = logits.float().sum(1)
            if loss.uses_margin:
                statistics[self.largest] = logits.float().amax(1)
            if ids_NK is not None:
                statistics[self.chosen] = range_logits(logits, ids_NK[chunk] - self._start)
            if loss.top_k:
                statistics[self.top] = largest_logits(logits, loss.top_k, self._start)
            chunks.append(statistics)
        return {ref: torch.cat([statistics[ref] for statistics in chunks]) for ref in chunks[0]}

    def _logits(self, weights: dict[str, Tensor], micro: MicroBatch, hidden_1CD: Tensor) -> Tensor:
        """A chunk's logits `[C, R]` for these rows, divided by the loss's temperature."""
        return micro.loss.tempered(self._program.projection(weights, micro, hidden_1CD)[0])

    def logits(self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations) -> Tensor:
        """All logits `[B, T, V]`; only for the instance with the last rows."""
        values = self.add_statistics(weights, micro, values)
        return torch.cat([values[ref] for ref in sorted(values) if ref >= self.first], -1)

    def losses(self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations) -> Tensor:
        """Each token's loss `[N]`, 0 without a target; only for the instance with the last rows."""
        return self._losses(micro, self.add_statistics(weights, micro, values))

    def loss(self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations) -> Tensor:
        """The sum of `losses`."""
        return self.losses(weights, micro, values).sum(0)

    def _losses(self, micro: MicroBatch, values: Activations) -> Tensor:
        return micro.loss.each(self._all_rows(values), _targets(micro), *flat(micro.extras))

    def _all_rows(self, values: Activations) -> Statistics:
        mean_N = values[self.sum] / self._num if self.sum in values else None
        picked_N, lse_N = values[self.picked], values[self.lse]
        margin_N = picked_N - values[self.largest] if self.largest in values else None
        chosen, top = values.get(self.chosen), values.get(self.top)
        return Statistics(picked_N - lse_N, lse_N, mean_N, margin_N, chosen, top)

    def gradients_of(
        self,
        weights: dict[str, Tensor],
        names: list[str],
        micro: MicroBatch,
        values: Activations,
        count: float,
        accumulator: GradAccumulator,
    ) -> tuple[Tensor, Activations]:
        """See `WholeHead`; for the instance with the last rows. Others continue the gradients."""
        values = self.add_statistics(weights, micro, values)
        gradients = self.gradients(micro, values, count)
        self.backward(weights, micro, values, gradients, names, accumulator)
        return self._losses(micro, values).sum(0) / count, gradients

    def gradients(self, micro: MicroBatch, values: Activations, count: float) -> Activations:
        """The projected states' fp32 gradient, zeros that `backward` adds to, and its other inputs.

        Args:
            count: divisor of the step's loss.
        """
        slopes = micro.loss.slopes(
            self._all_rows(values), _targets(micro), flat(micro.extras), count
        )
        weights_N = torch.zeros_like(values[self.lse])
        if slopes.log_prob is not None:
            weights_N = -slopes.log_prob
        gradients = {
            self.hidden: torch.zeros_like(values[self.hidden], dtype=torch.float32),
            self.lse: values[self.lse],
            self.picked: weights_N,
            self.sum: None if slopes.mean is None else slopes.mean / self._num,
            self.lse_slope: slopes.lse,
            self.chosen: slopes.chosen,
        }
        return {ref: value for ref, value in gradients.items() if value is not None}

    def backward(
        self,
        weights: dict[str, Tensor],
        micro: MicroBatch,
        values: Activations,
        gradients: Activations,
        names: list[str],
        accumulator: GradAccumulator,
    ) -> None:
        """Accumulate gradients of these rows; add their part to the projected states' gradient.

        Args:
            values: contains the projected states.
            gradients: from `gradients`.
            names: the weights that have gradients.
        """
        hidden_ND = values[self.hidden].flatten(0, 1)
        total_ND = gradients[self.hidden].view(hidden_ND.shape)
        places_N, ids_NK = _targets(micro) - self._start, micro.loss.chosen(flat(micro.extras))
        per_token = [
            *(places_N, gradients[self.lse], gradients[self.picked]),
            *(gradients.get(self.lse_slope), gradients.get(self.sum)),
            None if ids_NK is None else ids_NK - self._start,
            gradients.get(self.chosen),
        ]
        sources = [weights[name] for name in names]
        for chunk in self._chunk_slices(len(hidden_ND)):
            with torch.enable_grad():
                hidden_CD = hidden_ND[None, chunk].detach().requires_grad_()
                logits = self._logits(weights, micro, hidden_CD)
            per_chunk = (values if values is None else values[chunk] for values in per_token)
            gradient = self._gradient_of(logits.detach(), *per_chunk)
            inputs = [hidden_CD, *sources]
            grads = torch.autograd.grad(logits, inputs, gradient, allow_unused=True)
            total_ND[chunk] += grads[0][0]
            accumulator.add(names, grads[1:])

    def _chunk_slices(self, total: int) -> Iterator[slice]:
        return (slice(at, at + self._tokens) for at in range(0, total, self._tokens))


def _targets(micro: MicroBatch) -> Tensor:
    assert micro.targets is not None
    return micro.targets.view(-1)


class Epilogue(Layer):
    """The stage from the last layer's activations to the projected states; it saves nothing."""

    kinds = (Kind.PART, Kind.PART_BACKWARD)

    def __init__(self, device: Device, program: ModelProgram, tile_slice: TileSlice) -> None:
        spec = program.spec
        super().__init__(device, program, tile_slice, len(spec.layers) - 1)
        self.visit += 1
        self.name, self.prefix = HEAD_NAME, ""
        self.backward_name = Name(Kind.HEAD, "head backward")
        self.inputs = self.grad_inputs = spec.epilogue_inputs
        self.new_inputs = [ref for ref in self.inputs if ref not in spec.read]
        self.outputs = [Ref(self.visit, leaf) for leaf in range(LOGITS)]
        self.live_out = frozenset(spec.routed)

    def under(self, policies: Sequence[ActivationPolicy]) -> Self:
        """The stage itself."""
        return self

    def saves(self, *_: Any) -> Saves | None:
        return None

    def _call(
        self,
        weights: dict[str, Tensor],
        micro: MicroBatch,
        values: Activations,
        saves: Saves | None = None,
    ) -> Activations:
        return {self.outputs[0]: self.program.projected(weights, micro, values)}


class VocabShard(StreamedModule):
    """The stage of one range of the table's rows, except the last range."""

    def __init__(
        self, device: Device, program: ModelProgram, tile_slice: TileSlice, rows: VocabRows
    ) -> None:
        super().__init__(device, program, tile_slice)
        self.visit, self._rows, self.inputs = len(program.spec.layers), rows, [rows.hidden]

    def run(self, slot: Buffer, batch: Batch, h: State, *, train: bool) -> State:
        """Add statistics of the logits of these rows to every micro-batch's activations."""
        return self.each(HEAD_NAME, batch, partial(self.add_statistics, slot), h, reads=[slot])

    def add_statistics(self, slot: Buffer, micro: MicroBatch, values: Activations) -> Activations:
        """`run` for one micro-batch."""
        return self._rows.add_statistics(self.weights(slot), micro, values)

    def vjp(
        self, slot: Buffer, batch: Batch, h: Iterable, dh: State, accumulator: GradAccumulator
    ) -> State:
        """Accumulate gradients of the rows; add to the projected states' gradient."""
        work, writes = partial(self.add_gradients, slot, accumulator), [accumulator.sums]
        self.each(HEAD_NAME, batch, work, h, dh, reads=[slot], writes=writes)
        return dh

    def add_gradients(
        self,
        slot: Buffer,
        accumulator: GradAccumulator,
        micro: MicroBatch,
        values: Activations,
        gradients: Activations,
    ) -> None:
        """`vjp` of one micro-batch."""
        weights, names = self.leaves(slot)
        self._rows.backward(weights, micro, values, gradients, names, accumulator)
