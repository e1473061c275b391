"""One training step. Read this first.

Layer-major: every micro-batch passes a layer before the next layer's weights are used, so weights
cross the bus twice however many micro-batches there are. A step may take its micro-batches in
several passes through both sweeps: then fewer graphs wait at once, so more layers can keep theirs.
The modules `stream`, `saved_tensors`, `sink`, `embedding` and `update` say where tensors are and
which work waits for which event.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from torch import Tensor

from megatrain.device import Buffer
from megatrain.engine.embedding import Embedding
from megatrain.engine.head import Head
from megatrain.engine.layer import Layer
from megatrain.engine.modules import Media, Prologue, State
from megatrain.engine.saved_tensors import DeviceBoundaries, HostBoundaries, HostOffload
from megatrain.engine.sink import Sink
from megatrain.engine.stream import Stream
from megatrain.engine.update import Update
from megatrain.model.micro_batch import Batch
from megatrain.placement import ActivationPolicy

Unit = Media | Prologue | Layer
Result = TypeVar("Result")
Finish = Callable[[Head, Buffer, Batch, State], Result]  # from the last layer's outputs


@dataclass
class Parts:
    """The parts of a forward.

    `trunk` is the prologue and the layers, in order; `trunk_with_media` has encoders before them.
    """

    trunk: list[Unit]
    head: Head
    embedding: Embedding
    stream: Stream
    trunk_with_media: list[Unit]

    def for_batch(self, batch: Batch) -> Self:
        """The parts of a step on this batch: with encoders, if it has images or sounds."""
        return replace(self, trunk=self.trunk_with_media) if batch.has_media else self


@dataclass
class TrainingParts(Parts):
    """The parts of a step that changes the weights.

    `saved` keeps layer inputs; `kept` moves graphs and attention results to the host and back.
    """

    saved: DeviceBoundaries | HostBoundaries
    kept: HostOffload
    sink: Sink
    update: Update
    passes: int = 1

    def with_policies(self, policies: Sequence[ActivationPolicy]) -> Self:
        """These parts with other activation policies, one for each layer."""
        return replace(self, trunk=[unit.with_policies(policies) for unit in self.trunk])


def train_step(parts: TrainingParts, batch: Batch) -> tuple[float, float]:
    """Compute a step's gradients and start all updates; return its loss and gradient norm."""
    stream, saved, sink, update = parts.stream, parts.saved, parts.sink, parts.update
    groups = batch.passes(parts.passes)
    # The units of the backward, which ends at the trunk's first trained unit.
    backward = [unit for unit in reversed(parts.trunk) if unit.needs_backward]
    parts.embedding.fetch(batch)
    stream.begin([*parts.trunk, parts.head, *backward] * len(groups))
    update.begin()

    losses: list[Tensor] = []  # shares of the step's loss, which is their sum
    for group in groups:  # one, unless the placement says more
        saved.begin(len(group.micro))
        sink.begin(first=group is groups[0], last=group is groups[-1])
        for unit in parts.trunk:
            unit.begin()

        h = forward(parts, group, saved.put, train=True)

        for head, weights in stream.visit([parts.head]):
            accumulator = sink.accumulator(head.tile)
            shares, dh = head.loss_and_vjp(weights, group, h, accumulator)
            losses += shares
            if group is groups[-1]:
                update.guard(losses)  # no update begins if the loss is not finite
            sink.put(accumulator)

        for unit, weights in stream.visit(backward):
            accumulator = sink.accumulator(unit.tile)
            dh = unit.vjp(weights, group, saved.take(unit), dh, accumulator)
            sink.put(accumulator)

    parts.embedding.send_gradients(batch)
    return update.finish(sink)


def forward(
    parts: Parts, batch: Batch, keep: Callable[[Unit, State], None], *, train: bool
) -> State:
    """Take all micro-batches through the trunk; `keep(unit, h)` saves the unit's inputs."""
    h: State = [{} for _ in batch.micro]
    for unit, weights in parts.stream.visit(parts.trunk):
        if unit.needs_backward:
            keep(unit, h)
        h = unit.run(weights, batch, h, train=train)
    return h


def forward_only(parts: Parts, batch: Batch, finish: Finish[Result]) -> Result:
    """The forward sweep alone, ended by `finish(head, weights, batch, h)`: loss, logits, ..."""
    parts.embedding.fetch(batch)
    parts.stream.begin([*parts.trunk, parts.head])
    h = forward(parts, batch, lambda unit, h: None, train=False)
    for head, weights in parts.stream.visit([parts.head]):
        result = finish(head, weights, batch, h)
    return result
