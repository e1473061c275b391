"""The head: from the last layer's outputs to loss, gradients or logits, some tokens at a time.

Legend: N tokens of a micro-batch, C tokens of a chunk, D width, V vocabulary, L layers with a
router, S sums of a router (its choices, probabilities, ...).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, Kind, Name
from megatrain.device.collectives import Collectives
from megatrain.engine.modules import State, StreamedModule, differentiable
from megatrain.engine.sink import GradAccumulator
from megatrain.loss import JointLoss, Loss, Sloped
from megatrain.model.capture import Ref, last_hidden, with_hidden
from megatrain.model.micro_batch import Activations, Batch, MicroBatch
from megatrain.parallel.distributed import ALONE
from megatrain.store.store import Tile

if TYPE_CHECKING:
    from megatrain.model.program import ModelProgram

_NAME = Name(Kind.HEAD, "head")

# From logits `[C, V]`, targets `[C]` and the loss's inputs `[C]` to the sum of C tokens' losses.
Summed = Callable[..., Tensor]


class Head(StreamedModule):
    """Epilogue and language-model head; logits exist for at most `tokens` positions at once."""

    def __init__(
        self,
        device: Device,
        program: "ModelProgram",
        tile: Tile,
        tokens: int,
        summed: Callable[[Loss], Summed],
        collectives: Collectives | None = None,
    ) -> None:
        """Args:
        tokens: the most tokens whose logits exist at once.
        summed: returns the function that adds up a loss over tokens, compiled or not.
        collectives: None with a single rank.
        """
        super().__init__(device, program, tile)
        self.visit, self._tokens, self._summed = len(program.spec.layers), tokens, summed
        self.collectives = collectives or Collectives(device, ALONE)

    def loss_and_vjp(
        self, slot: Buffer, batch: Batch, h: State, accumulator: GradAccumulator
    ) -> tuple[list[Tensor], State]:
        """Each micro-batch's share of the step's loss, and the gradients of its activations.

        Empties `h`.
        """
        batch, joint = self._with_slopes(slot, batch, h)
        routers, router_gradients = self.router_loss(batch, h)
        losses: list[Any] = []
        dh: list[Any] = []
        for index, micro in enumerate(batch.micro):
            self.seed(batch, index)
            work = partial(self.gradients, slot, batch.normaliser, accumulator, micro, h[index])
            result = self.device.run(COMPUTE, _NAME, work, [slot], [accumulator.sums])
            loss, gradients = result if result is not None else (None, {})
            losses.append(loss)
            dh.append(gradients | router_gradients[index])
            h[index] = {}  # frees activations that would otherwise stay until the backward's end
        return [*(joint or losses), *routers], dh

    def gradients(
        self,
        slot: Buffer,
        normaliser: float,
        accumulator: GradAccumulator,
        micro: MicroBatch,
        values: Activations,
    ) -> tuple[Tensor, Activations]:
        """One micro-batch's share of the step's loss, and the gradients of its activations."""
        weights = self.leaves(slot)
        inputs = differentiable(values)
        with torch.enable_grad():
            logits_of, hidden_ND, targets_N = self._chunks(weights, micro, inputs)
        hidden = Ref(self.visit, 0)
        graph = self.graph(weights, inputs, {hidden: hidden_ND})
        parameters = graph.parameters.values()
        summed = self._summed(micro.loss)
        extras = [extra.flatten(0, 1) for extra in micro.extras]
        loss = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        gradient_ND = torch.empty_like(hidden_ND)
        for start in range(0, len(hidden_ND), self._tokens):
            rows = slice(start, start + self._tokens)
            with torch.enable_grad():
                chunk_CD = hidden_ND[None, rows].detach().requires_grad_()
                chunk_extras = [extra[rows] for extra in extras]
                part = summed(logits_of(chunk_CD)[0], targets_N[rows], *chunk_extras)
                share = part / normaliser
            grads = torch.autograd.grad(share, [chunk_CD, *parameters], allow_unused=True)
            gradient_ND[rows] = grads[0][0]
            accumulator.add(graph.parameters, grads[1:])
            loss += part.detach()
        return loss / normaliser, graph.backward({hidden: gradient_ND}, accumulator)

    def router_loss(self, batch: Batch, h: State) -> tuple[list[Tensor], list[Activations]]:
        """The routers' loss over all layers, if the model has one; its gradients by micro-batch.

        Takes the routers' activations out of `h`, and adds the loads of experts to `batch`. With
        `router_shares` each micro-batch has a loss of its own. Otherwise a single loss is over the
        tokens of all ranks, and rank 0 alone returns the loss.
        """
        spec, ranks = self.program.spec, self.collectives.ranks
        loss, routed = spec.router_loss, spec.routed
        if loss is None or not routed:
            return [], [{} for _ in h]
        # The micro-batches of each loss.
        parts = [h] if batch.router_shares is None else [[values] for values in h]
        shapes = [spec.routed_shape] * ranks.size
        results = []
        for states in parts:
            total = self.device.run(COMPUTE, _NAME, partial(self.routed_total, states))
            totals = self.collectives.gather_by_sum([total], shapes, ranks.rank)
            results.append(self.device.run(COMPUTE, _NAME, partial(loss.balance, totals)))
        if None in results:  # nothing is computed
            return [], [{} for _ in h]
        loads, losses, gradients = zip(*results, strict=True)
        batch.loads.extend(loads)
        if not loss.is_loss:
            return [], [{} for _ in h]
        weights = {"aux_loss": loss.weight, "router_z_loss": loss.z_weight}  # as in transformers
        means = zip(weights.items(), torch.stack(losses).mean(0), strict=True)
        batch.measured |= {name: mean for (name, weight), mean in means if weight}
        shares = batch.router_shares or [1.0]
        weighted = [share * gradient for share, gradient in zip(shares, gradients, strict=True)]
        dh = [dict.fromkeys(routed, weighted[i % len(weighted)]) for i in range(len(h))]
        if ranks.rank:
            return [], dh
        total = sum(share * part for share, part in zip(shares, losses, strict=True))
        return [loss.weight * total[0] + loss.z_weight * total[1]], dh

    def routed_total(self, h: State) -> Tensor:
        """The sums `[L, S]` over all micro-batches; takes the routers' activations out of `h`."""
        routed = self.program.spec.routed
        sums = [torch.cat([values.pop(ref) for ref in routed]).double() for values in h]
        shape = self.program.spec.routed_shape
        return sum(sums, torch.zeros(shape, dtype=torch.float64, device=self.program.device))

    def _with_slopes(self, slot: Buffer, batch: Batch, h: State) -> tuple[Batch, list[Any]]:
        """Compute a joint loss from the log-probabilities of all micro-batches.

        Returns the batch with the loss `Sloped` in place of the joint loss, whose gradients it has,
        and each micro-batch's share of the joint loss; with any other loss `batch` and no shares.
        """
        loss = batch.micro[0].loss if batch.micro else None
        if not isinstance(loss, JointLoss):
            return batch, []
        num = len(batch.micro) - batch.idle
        of_this_rank = slice(batch.before, batch.before + num)
        targets, extras = zip(*batch.loss_inputs, strict=True)
        width = self.program.spec.num_logits if loss.embeds else None
        shapes = [(len(target), width or target.shape[1]) for target in targets]
        own_log_probs = self.losses(slot, batch, h)
        log_probs = self.collectives.gather_by_sum(own_log_probs[:num], shapes, of_this_rank.start)
        work = partial(loss.weigh, log_probs, targets, extras, batch.normaliser)
        nothing = [None] * len(log_probs)  # on a device that computes nothing
        losses, slopes, measured = self.device.run(COMPUTE, _NAME, work) or (nothing, nothing, {})
        batch.measured |= measured
        own_slopes = [*slopes[of_this_rank], *map(torch.zeros_like, own_log_probs[num:])]
        micro_batches = [
            replace(micro, loss=Sloped(loss), extras=[slope])
            for micro, slope in zip(batch.micro, own_slopes, strict=True)
        ]
        return replace(batch, micro=micro_batches, normaliser=1.0), losses[of_this_rank]

    def loss(self, slot: Buffer, batch: Batch, h: State) -> list[Tensor]:
        """Each micro-batch's share of the step's loss, without gradients."""

        @torch.no_grad()
        def share(micro: MicroBatch, values: Activations) -> Tensor:
            parts = self._of_chunks(slot, micro, values, self._tokens, self._summed(micro.loss))
            zero = torch.zeros((), dtype=torch.float32, device=self.program.device)
            return sum(parts, zero) / batch.normaliser

        _, joint = self._with_slopes(slot, batch, h)
        return joint or self.run_each(_NAME, batch, share, h, reads=[slot])

    def losses(self, slot: Buffer, batch: Batch, h: State) -> list[Tensor]:
        """Each token's loss `[B, T]` (some losses: numbers `[B, T, ...]`), fp32; 0: no target."""
        return self.run_each(_NAME, batch, partial(self.token_losses, slot), h, reads=[slot])

    @torch.no_grad()
    def token_losses(self, slot: Buffer, micro: MicroBatch, values: Activations) -> Tensor:
        tokens = -(-self._tokens // 4)  # eager code needs more memory for each token
        losses = torch.cat([*self._of_chunks(slot, micro, values, tokens, micro.loss.each_of)])
        losses = losses.view(*micro.rows.ids.shape, *losses.shape[1:])
        assert micro.targets is not None
        return micro.loss.pooled(losses, micro.targets)

    def logits(self, slot: Buffer, batch: Batch, h: State) -> list[Tensor]:
        """Each micro-batch's logits `[B, T, V]`, fp32, on the CPU."""

        @torch.no_grad()
        def logits(micro: MicroBatch, values: Activations) -> Tensor:
            weights = self.weights(slot)
            output = self.program.epilogue(weights, micro, values)
            return self.program.logits(weights, micro, output).float().cpu()

        return self.run_each(_NAME, batch, logits, h, reads=[slot])

    def _of_chunks(
        self, slot: Buffer, micro: MicroBatch, values: Activations, tokens: int, function: Summed
    ) -> Iterator[Tensor]:
        """Yield `function(logits, targets, *the loss's inputs)` of each chunk of `tokens`."""
        logits_of, hidden_ND, targets_N = self._chunks(self.weights(slot), micro, values)
        extras = [extra.flatten(0, 1) for extra in micro.extras]
        for start in range(0, len(hidden_ND), tokens):
            rows = slice(start, start + tokens)
            logits = logits_of(hidden_ND[None, rows])
            yield function(logits[0], targets_N[rows], *(extra[rows] for extra in extras))

    def _chunks(
        self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations
    ) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
        """A function from hidden states of a chunk to its logits; all hidden states and targets."""
        output = self.program.epilogue(weights, micro, values)
        hidden = last_hidden(output)
        assert micro.targets is not None
        return (
            lambda chunk: self.program.logits(weights, micro, with_hidden(output, chunk)),
            hidden.reshape(-1, hidden.shape[-1]),
            micro.targets.reshape(-1),
        )
