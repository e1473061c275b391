"""The units that sweeps visit, put on the device's compute stream: here prologue and head.

Each takes the weights that the stream has brought and a list of activations, one entry per
micro-batch, and knows how to run forward and backward for all micro-batches in turn.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from megatrain.base.seeds import derived_seed
from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, Kind, Name
from megatrain.device.collectives import Collectives
from megatrain.engine.batch import Batch
from megatrain.engine.embedding import Embedding
from megatrain.engine.head import WholeHead
from megatrain.engine.sink import GradAccumulator
from megatrain.engine.tile_slice import TileSlice
from megatrain.loss import JointLoss
from megatrain.model.capture import PROLOGUE, Ref
from megatrain.model.program import Activations, MicroBatch, ModelProgram
from megatrain.parallel.distributed import ALONE
from megatrain.placement import ActivationPolicy
from megatrain.store.store import Tile

State = list[Activations]

PROLOGUE_NAME, HEAD_NAME = Name(Kind.PROLOGUE, "prologue"), Name(Kind.HEAD, "head")


class StreamedModule:
    """The weights of one tile, or of a slice of one, as a function.

    Attributes:
        tile: where its weights rest.
        prefix: what the tile's parameter names have before the names that the function knows.
        visit: its place among the layers, from 0.
        inputs: the activations that it reads; `new_inputs`: those that no unit before it reads.
        needs_backward: it or a unit before it is trained, so that the backward comes here.
    """

    visit: int
    inputs: list[Ref]
    needs_backward = True

    def __init__(
        self, device: Device, program: ModelProgram, tile: Tile | TileSlice, prefix: str = ""
    ) -> None:
        self.device, self.program, self.tile, self.prefix = device, program, tile, prefix
        self.inputs, self.new_inputs = list[Ref](), list[Ref]()

    def begin(self) -> None:
        """A step begins: drop what one that was broken off has left."""

    @property
    def trained(self) -> bool:
        """True if any weights of the unit are trained."""
        return bool(self.tile.whole.layout.trainable_numel)

    def under(self, policies: Sequence[ActivationPolicy]) -> Self:
        """The unit as it is where layers save what `policies` say; most units save nothing."""
        return self

    def weights(self, slot: Buffer) -> dict[str, Tensor]:
        """The tile's parameters by the function's names."""
        return {
            entry.name.removeprefix(self.prefix): entry.view(slot.data)
            for entry in self.tile.layout.unpacked.entries
        }

    def leaves(self, slot: Buffer) -> tuple[dict[str, Tensor], list[str]]:
        """The parameters as autograd leaves, and the names of the trainable ones."""
        weights = {name: view.detach() for name, view in self.weights(slot).items()}
        names = [entry.name for entry in self.tile.layout.trainable]
        for name in names:
            weights[name.removeprefix(self.prefix)].requires_grad_()
        return weights, names

    def seed(self, batch: Batch, index: int) -> None:
        """Random numbers that depend on the place alone: a recomputed dropout is the same."""
        self.device.seed(derived_seed(batch.seed, self.visit, batch.before + batch.first + index))

    def each(
        self,
        name: str,
        batch: Batch,
        work: Callable[..., Any],
        *states: Iterable[Activations],
        reads: Sequence[Buffer],
        writes: Sequence[Buffer] = (),
    ) -> list[Any]:
        """Put `work(micro, its activations in each state)` on COMPUTE for every micro-batch."""
        results = []
        # All of `states` are asked for their end, which frees what the last one lies in.
        for index, arguments in enumerate(zip(batch.micro, *states, strict=True)):
            self.seed(batch, index)
            results.append(self.device.run(COMPUTE, name, partial(work, *arguments), reads, writes))
        return results


class Prologue(StreamedModule):
    """From token ids to the first layer's arguments; the embedding rows come from `embedding`."""

    visit = PROLOGUE

    def __init__(
        self, device: Device, program: ModelProgram, tile: Tile, embedding: Embedding
    ) -> None:
        super().__init__(device, program, tile)
        self.embedding = embedding

    @property
    def trained(self) -> bool:
        return super().trained or bool(self.embedding.trained)

    def run(self, slot: Buffer, batch: Batch, h: State, *, train: bool) -> State:
        """The first activations of every micro-batch (`h` is not read: there are none)."""
        work = partial(self.forward, slot)
        return self.each(PROLOGUE_NAME, batch, work, reads=[slot, *self.embedding.rows])

    def forward(self, slot: Buffer, micro: MicroBatch) -> Activations:
        """The first activations of one micro-batch."""
        tables = micro.rows.tables
        tables.update({n: table.detach().requires_grad_() for n, table in tables.items()})
        with torch.enable_grad():  # what requires gradients here is an activation there
            values = self.program.prologue(self._all_leaves(slot), micro)
        return {ref: value.detach() for ref, value in values.items()}

    def vjp(
        self, slot: Buffer, batch: Batch, h: Iterable, dh: State, accumulator: GradAccumulator
    ) -> State:
        """Accumulate gradients of the prologue's weights, and of the embedding's rows."""
        if not batch.first:
            self.embedding.prepare_gradients(batch)
        reads, writes = [slot, *self.embedding.rows], [accumulator.sums, *self.embedding.sums]
        name, work = Name(Kind.PROLOGUE, "prologue backward"), partial(self.backward, slot)
        self.each(name, batch, partial(work, accumulator), dh, reads=reads, writes=writes)
        return [{} for _ in batch.micro]

    def backward(
        self, slot: Buffer, accumulator: GradAccumulator, micro: MicroBatch, dh: Activations
    ) -> None:
        """`vjp` of one micro-batch."""
        weights, names = self.leaves(slot)
        with torch.enable_grad():
            values = self.program.prologue({**self._all_leaves(slot), **weights}, micro)
            tables = {name: micro.rows.tables[name] for name in self.embedding.trained}
            pairs = [(values[ref], dh[ref]) for ref in dh if ref in values]
            sources = [*tables.values(), *(weights[name] for name in names)]
            if not pairs or not sources:
                return
            outputs, gradients = zip(*pairs, strict=True)
            grads = torch.autograd.grad(outputs, sources, gradients, allow_unused=True)
        rows = dict(zip(tables, grads, strict=False))
        self.embedding.add({name: g for name, g in rows.items() if g is not None})
        accumulator.add(names, grads[len(tables) :])

    def _all_leaves(self, slot: Buffer) -> dict[str, Tensor]:
        return {n: w.detach().requires_grad_() for n, w in self.weights(slot).items()}


class Head(StreamedModule):
    """Epilogue and language-model head: from the last activations to loss or logits."""

    def __init__(
        self,
        device: Device,
        program: ModelProgram,
        tile: Tile | TileSlice,
        computed: WholeHead,
        collectives: Collectives | None = None,
    ) -> None:
        """Args: `collectives` of several ranks; None: there is one."""
        super().__init__(device, program, tile)
        self.computed, self.visit = computed, len(program.spec.layers)
        self.collectives = collectives or Collectives(device, ALONE)

    def loss_and_vjp(
        self, slot: Buffer, batch: Batch, h: State, accumulator: GradAccumulator
    ) -> tuple[list[Tensor], State]:
        """Each micro-batch's share of the step's loss, and the activations' gradients.

        Takes the activations out of `h`.
        """
        batch, joint = self._weighed(slot, batch, h)
        balance, slopes = self.balanced(batch, h)
        losses: list[Any] = []
        dh: list[Any] = []
        for index, micro in enumerate(batch.micro):
            self.seed(batch, index)
            work = partial(self.gradients, slot, batch.normaliser, accumulator, micro, h[index])
            result = self.device.run(COMPUTE, HEAD_NAME, work, [slot], [accumulator.sums])
            loss, gradients = result if result is not None else (None, {})
            losses.append(loss)
            dh.append(gradients | slopes[index])
            h[index] = {}  # nobody reads it any more: it would stay until the backward's end
        return [*(joint or losses), *balance], dh

    def gradients(
        self,
        slot: Buffer,
        count: float,
        accumulator: GradAccumulator,
        micro: MicroBatch,
        values: Activations,
    ) -> tuple[Tensor, Activations]:
        """One micro-batch's share of the step's loss, and the gradients of its activations."""
        weights, names = self.leaves(slot)
        return self.computed.gradients_of(weights, names, micro, values, count, accumulator)

    def balanced(self, batch: Batch, h: State) -> tuple[list[Tensor], list[Activations]]:
        """The loss of the routers of all layers, if the model has one; its slopes, by micro-batch.

        Takes what it is of out of `h`. It is of the tokens of all ranks, of which the first has the
        loss, or of each micro-batch alone where the batch has shares for them.
        """
        spec, ranks = self.program.spec, self.collectives.ranks
        loss, routed = spec.router_loss, spec.routed
        if loss is None:
            return [], [{} for _ in h]
        shares, results = batch.router_shares or [1.0], []
        for part in [h] if batch.router_shares is None else [[values] for values in h]:
            total = self.device.run(COMPUTE, HEAD_NAME, partial(self.routed_total, part))
            shapes = [spec.routed_shape] * ranks.size
            totals = self.collectives.gather_by_sum([total], shapes, ranks.rank)
            results.append(self.device.run(COMPUTE, HEAD_NAME, partial(loss.balance, totals)))
        if None in results:  # nothing is computed
            return [], [{} for _ in h]
        balances, slopes = zip(*results, strict=True)
        batch.measured["aux_loss"] = torch.stack(balances).mean()  # as transformers calls it
        weighed = [share * slope for share, slope in zip(shares, slopes, strict=True)]
        dh = [dict.fromkeys(routed, weighed[i % len(weighed)]) for i in range(len(h))]
        if ranks.rank:
            return [], dh
        total = sum(share * balance for share, balance in zip(shares, balances, strict=True))
        return [loss.weight * total], dh

    def routed_total(self, h: State) -> Tensor:
        """The totals of what the routers of all layers chose, taken out of the activations."""
        loss, routed = self.program.spec.router_loss, self.program.spec.routed
        assert loss is not None
        return loss.total([values.pop(ref) for values in h for ref in routed])

    def _weighed(self, slot: Buffer, batch: Batch, h: State) -> tuple[Batch, list[Any]]:
        """For a joint loss: the batch with its labels weighed by the loss, and the losses.

        That takes a visit of the head. Any other loss: the batch as it is, and no losses.
        """
        loss = batch.micro[0].loss if batch.micro else None
        if not isinstance(loss, JointLoss):
            return batch, []
        here = slice(batch.before, batch.before + len(batch.micro))
        targets, extras = zip(*batch.loss_inputs, strict=True)
        shapes = [target.shape for target in targets]
        log_probs = self.collectives.gather_by_sum(self.losses(slot, batch, h), shapes, here.start)
        work = partial(loss.weigh, log_probs, targets, extras, batch.normaliser)
        nothing: Any = [None] * len(log_probs), [None] * len(log_probs), {}
        losses, weights, measured = self.device.run(COMPUTE, HEAD_NAME, work) or nothing
        batch.measured |= measured
        micro_batches = [
            replace(micro, loss=loss.weighed, extras=[weight])
            for micro, weight in zip(batch.micro, weights[here], strict=True)
        ]
        return replace(batch, micro=micro_batches, normaliser=1.0), losses[here]

    def loss(self, slot: Buffer, batch: Batch, h: State) -> list[Tensor]:
        """Each micro-batch's share of the step's loss, without gradients."""

        def share(micro: MicroBatch, values: Activations) -> Tensor:
            return self.computed.loss(self.weights(slot), micro, values) / batch.normaliser

        joint = self._weighed(slot, batch, h)[1]
        return joint or self.each(HEAD_NAME, batch, share, h, reads=[slot])

    def losses(self, slot: Buffer, batch: Batch, h: State) -> list[Tensor]:
        """Each token's loss `[B, T]`, fp32 (or what else it has); 0 where nothing is predicted."""
        return self.each(HEAD_NAME, batch, partial(self.token_losses, slot), h, reads=[slot])

    def token_losses(self, slot: Buffer, micro: MicroBatch, values: Activations) -> Tensor:
        """`losses` of one micro-batch."""
        losses = self.computed.losses(self.weights(slot), micro, values)
        return losses.view(*micro.rows.ids.shape, *losses.shape[1:])

    def logits(self, slot: Buffer, batch: Batch, h: State) -> list[Tensor]:
        """Each micro-batch's logits `[B, T, V]`, fp32, on the CPU."""

        def logits(micro: MicroBatch, values: Activations) -> Tensor:
            return self.computed.logits(self.weights(slot), micro, values)

        return self.each(HEAD_NAME, batch, logits, h, reads=[slot])
