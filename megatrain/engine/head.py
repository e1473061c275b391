"""The computation of a head, given its weights: from the last activations to a loss or logits.

One micro-batch at a time. A head in ranges of rows is in engine/vocab_split.py.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatrain.engine.saved_tensors import add
from megatrain.engine.sink import GradAccumulator
from megatrain.loss import Loss, Summed, chunk_results, chunked_loss_gradients, chunked_losses
from megatrain.model.capture import last_hidden, with_hidden
from megatrain.model.program import Activations, MicroBatch, ModelProgram


class WholeHead:
    """Epilogue and projection; logits exist for at most `tokens` positions at once."""

    def __init__(
        self,
        program: ModelProgram,
        tokens: int,
        summed: Callable[[Loss], Summed],
        chunked: Callable[..., tuple[Tensor, Tensor]] = chunked_loss_gradients,
        token_losses: Callable[..., Tensor] = chunked_losses,
    ) -> None:
        """Args: `summed` returns a loss's function of summed losses, compiled or not."""
        self._program, self._tokens, self._summed = program, tokens, summed
        self._chunked, self._token_losses = chunked, token_losses

    def gradients_of(
        self,
        weights: dict[str, Tensor],
        names: list[str],
        micro: MicroBatch,
        values: Activations,
        count: float,
        accumulator: GradAccumulator,
    ) -> tuple[Tensor, Activations]:
        """This micro-batch's share of the step's loss, and the gradients of `values`.

        Adds the weights' gradients to `accumulator`.

        Args:
            weights: as autograd leaves.
            names: the weights that have gradients.
            count: divisor of the step's loss.
        """
        parameters = [weights[name] for name in names]
        inputs = {
            ref: value.detach().requires_grad_(value.is_floating_point())
            for ref, value in values.items()
        }
        differentiable = [ref for ref in inputs if inputs[ref].requires_grad]
        with torch.enable_grad():
            logits_of, hidden_ND, targets_N = self._chunks(weights, micro, inputs)
        loss, gradient_ND = self._chunked(
            logits_of,
            hidden_ND.detach(),
            targets_N,
            count,
            self._tokens,
            self._summed(micro.loss),
            parameters,
            lambda gradients: accumulator.add(names, gradients),
            flat(micro.extras),
        )
        sources = [*(inputs[ref] for ref in differentiable), *parameters]
        grads = torch.autograd.grad(hidden_ND, sources, gradient_ND, allow_unused=True)
        accumulator.add(names, grads[len(differentiable) :])
        return loss / count, add({}, differentiable, grads)

    def loss(self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations) -> Tensor:
        """Summed over the labelled tokens, without gradients."""
        summed = self._summed(micro.loss)
        with torch.no_grad():
            logits_of, hidden_ND, targets_N = self._chunks(weights, micro, values)
            extras = flat(micro.extras)
            parts = chunk_results(logits_of, hidden_ND, targets_N, self._tokens, summed, extras)
            return sum(parts, torch.zeros((), dtype=torch.float32, device=hidden_ND.device))

    def losses(self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations) -> Tensor:
        """Each token's loss `[N]`, fp32; 0 where nothing is predicted."""
        tokens = -(-self._tokens // 4)  # this code is not compiled, so it takes more memory a token
        with torch.no_grad():
            chunks = self._chunks(weights, micro, values)
            return self._token_losses(*chunks, tokens, micro.loss.each_of, flat(micro.extras))

    def logits(self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations) -> Tensor:
        """`[B, T, V]`, fp32, on the CPU."""
        with torch.no_grad():
            output = self._program.epilogue(weights, micro, values)
            return self._program.logits(weights, micro, output).float().cpu()

    def _chunks(
        self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations
    ) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
        """A function from a chunk of hidden states to logits; all hidden states; all targets."""
        output = self._program.epilogue(weights, micro, values)
        hidden = last_hidden(output)
        assert micro.targets is not None
        return (
            lambda chunk: self._program.logits(weights, micro, with_hidden(output, chunk)),
            hidden.reshape(-1, hidden.shape[-1]),
            micro.targets.reshape(-1),
        )


def flat(extras: Sequence[Tensor]) -> list[Tensor]:
    """Tensors `[B, T, ...]` as `[N, ...]`."""
    return [extra.flatten(0, 1) for extra in extras]
