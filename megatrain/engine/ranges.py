"""A head too large for the device, visited in stages: up to its projection, and ranges of rows.

In the forward sweep each range of the table's rows adds to every token's log-sum-exp, and finds the
targets' logits among its own. With the last range the loss is known, and it goes on to its
gradients; the others come again in the backward, each computing its logits once more. Each stage
passes all micro-batches before the next one's weights are used, as layers do; what it gives to the
next is an activation.

Legend: N tokens of a micro-batch, C tokens of a chunk, D width, R rows of a range.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE
from megatrain.engine.batch import Batch
from megatrain.engine.layer import Layer, Stage
from megatrain.engine.portion import Portion, Ranges
from megatrain.engine.sink import Room
from megatrain.engine.units import Head, State
from megatrain.loss import IGNORED, range_gradient, range_statistics
from megatrain.model.kind import Holds
from megatrain.model.program import Activations, MicroBatch, ModelProgram, Program
from megatrain.model.skeleton import Ref

# Leaves of the head: what is projected `[B, T, D]`, the log-sum-exp and the targets' logits so far
# `[N]`; where logits are asked for, those of a range have the number of its first row after these.
HIDDEN, LSE, PICKED, LOGITS = range(4)

Statistics = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def in_ranges(
    device: Device, program: Program, ranges: Ranges, rows: "Rows"
) -> tuple[list[Layer], Head]:
    """The stages of a head, in their order; the last one is apart."""
    *stages, last = zip(ranges.rows, ranges.bounds, strict=False)
    firsts = [Range(device, program, *stage, rows) for stage in stages]
    for stage in firsts[:1]:
        stage.fresh = stage.inputs
    epilogue = Epilogue(device, program, ranges.rest)
    portion, start = last
    return [epilogue, *firsts], Head(device, program, portion, LastRows(rows, start))


class Rows:
    """What is computed with some rows of the head's table, in chunks of `tokens`."""

    def __init__(
        self,
        program: ModelProgram,
        tokens: int,
        statistics: Statistics = range_statistics,
        gradient: Gradient = range_gradient,
    ) -> None:
        """Args: `statistics`, `gradient` of a chunk's logits; compiled, or as they are."""
        self._program, self._tokens = program, tokens
        self._statistics_of, self._gradient_of = statistics, gradient
        visit = len(program.outline.layers)
        self.hidden, self.lse, self.picked, self.first = (Ref(visit, leaf) for leaf in range(4))

    def see(
        self, weights: dict[str, Tensor], start: int, micro: MicroBatch, values: Activations
    ) -> Activations:
        """`values`, and what is known of the logits after the rows from `start` on."""
        with torch.no_grad():
            if micro.targets is None:
                logits = self._program.projection(weights, micro, values[self.hidden])
                return {**values, Ref(self.first.visit, LOGITS + start): logits.float().cpu()}
            lse_N, picked_N = self._statistics(weights, start, micro, values[self.hidden])
        if self.lse in values:
            lse_N = torch.logaddexp(values[self.lse], lse_N)
            picked_N = values[self.picked] + picked_N
        return {**values, self.lse: lse_N, self.picked: picked_N}

    def _statistics(
        self, weights: dict[str, Tensor], start: int, micro: MicroBatch, hidden_BTD: Tensor
    ) -> tuple[Tensor, Tensor]:
        hidden_ND, places_N = _flat(hidden_BTD), _targets(micro) - start
        found = [
            self._statistics_of(
                self._program.projection(weights, micro, hidden_ND[None, chunk])[0], places_N[chunk]
            )
            for chunk in self._chunks(len(hidden_ND))
        ]
        lse, picked = zip(*found, strict=True)
        return torch.cat(lse), torch.cat(picked)

    def logits(self, values: Activations) -> Tensor:
        """All of them `[B, T, V]`, after the last range."""
        return torch.cat([values[ref] for ref in sorted(values) if ref >= self.first], -1)

    def losses(self, micro: MicroBatch, values: Activations) -> Tensor:
        """Each token's cross entropy `[N]`, after the last range; 0 where nothing is predicted."""
        entropy_N = values[self.lse] - values[self.picked]
        return torch.where(_targets(micro) != IGNORED, entropy_N, 0.0)

    def loss(self, micro: MicroBatch, values: Activations) -> Tensor:
        """Cross entropy summed over the labelled tokens, after the last range."""
        return self.losses(micro, values).sum()

    def gradients(self, values: Activations) -> Activations:
        """What `pull` adds to: the gradient of what is projected, fp32; and the log-sum-exp."""
        total_BTD = torch.zeros_like(values[self.hidden], dtype=torch.float32)
        return {self.hidden: total_BTD, self.lse: values[self.lse]}

    def pull(
        self,
        weights: dict[str, Tensor],
        start: int,
        micro: MicroBatch,
        values: Activations,
        gradients: Activations,
        count: int,
        names: list[str],
        room: Room,
    ) -> None:
        """Add the gradients of the rows from `start` on to `room`, that of the rest to `gradients`.

        Args:
            values: what is projected, among others.
            count: labelled tokens of the step.
            names: of the weights that have gradients.
        """
        hidden_ND, total_ND = _flat(values[self.hidden]), _flat(gradients[self.hidden])
        targets_N, lse_N = _targets(micro), gradients[self.lse]
        weights_N = (targets_N != IGNORED).float() / count
        for chunk in self._chunks(len(hidden_ND)):
            with torch.enable_grad():
                hidden_CD = hidden_ND[None, chunk].detach().requires_grad_()
                logits = self._program.projection(weights, micro, hidden_CD)[0]
            given = logits.detach(), targets_N[chunk] - start, lse_N[chunk], weights_N[chunk]
            sources = [hidden_CD, *(weights[name] for name in names)]
            grads = torch.autograd.grad(
                logits, sources, self._gradient_of(*given), allow_unused=True
            )
            total_ND[chunk] += grads[0][0]
            room.add(names, grads[1:])

    def _chunks(self, total: int) -> Iterator[slice]:
        return (slice(at, at + self._tokens) for at in range(0, total, self._tokens))


def _flat(hidden_BTD: Tensor) -> Tensor:
    return hidden_BTD.view(-1, hidden_BTD.shape[-1])


def _targets(micro: MicroBatch) -> Tensor:
    assert micro.targets is not None
    return micro.targets.view(-1)


class _AfterLayers(Stage):
    """Visited after the last layer."""

    def __init__(self, device: Device, program: Program, portion: Portion) -> None:
        super().__init__(device, program, portion, len(program.outline.layers) - 1)
        self.visit += 1
        self.name, self.prefix = "head", ""


class Epilogue(_AfterLayers):
    """From the last layer's activations to what is projected."""

    def __init__(self, device: Device, program: Program, portion: Portion) -> None:
        super().__init__(device, program, portion)
        outline = program.outline
        read = {ref for layer in outline.layers for ref in layer.inputs}
        self.inputs = self.pulled = outline.epilogue_inputs
        self.fresh = [ref for ref in self.inputs if ref not in read]
        self.made = [Ref(self.visit, leaf) for leaf in (HIDDEN, LSE)]
        self.live = set()

    def _call(
        self,
        weights: dict[str, Tensor],
        micro: MicroBatch,
        values: Activations,
        holds: Holds | None = None,
    ) -> Activations:
        return {self.made[0]: self.program.projected(weights, micro, values)}


class Range(_AfterLayers):
    """Some rows of the table, but not the last ones."""

    def __init__(
        self, device: Device, program: Program, portion: Portion, start: int, rows: Rows
    ) -> None:
        """Args: `start` is the first of them."""
        super().__init__(device, program, portion)
        self._rows, self._start = rows, start
        self.inputs, self.fresh = [rows.hidden], []

    def run(self, slot: Buffer, batch: Batch, h: State, *, train: bool) -> State:
        """What is known of the logits so far, beside what is projected."""
        out = []
        for index, micro in enumerate(batch.micro):

            def work(index: int = index, micro: MicroBatch = micro) -> Activations:
                return self._rows.see(self.weights(slot), self._start, micro, h[index])

            out.append(self.device.run(COMPUTE, self.name, work, [slot]))
        return out

    def vjp(self, slot: Buffer, batch: Batch, h: Iterable, dh: State, room: Room) -> State:
        """Gradients of the rows into `room`; that of what is projected is added to."""
        for index, values in enumerate(h):

            def work(index: int = index, values: Activations = values) -> None:
                weights, names = self.leaves(slot)
                given = batch.micro[index], values, dh[index], batch.num_labelled
                self._rows.pull(weights, self._start, *given, names, room)

            self.device.run(COMPUTE, self.name, work, [slot], [room.sums])
        return dh


class LastRows:
    """What is computed with the last rows of the table, from `start` on: the loss is known."""

    def __init__(self, rows: Rows, start: int) -> None:
        self._rows, self._start = rows, start

    def gradients_of(
        self,
        weights: dict[str, Tensor],
        names: list[str],
        micro: MicroBatch,
        values: Activations,
        count: int,
        room: Room,
    ) -> tuple[Tensor, Activations]:
        rows = self._rows
        values = rows.see(weights, self._start, micro, values)
        gradients = rows.gradients(values)
        rows.pull(weights, self._start, micro, values, gradients, count, names, room)
        return rows.loss(micro, values) / count, gradients

    def loss(self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations) -> Tensor:
        return self._rows.loss(micro, self._rows.see(weights, self._start, micro, values))

    def losses(self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations) -> Tensor:
        return self._rows.losses(micro, self._rows.see(weights, self._start, micro, values))

    def logits(self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations) -> Tensor:
        return self._rows.logits(self._rows.see(weights, self._start, micro, values))
