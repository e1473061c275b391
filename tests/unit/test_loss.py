"""Cross entropy in chunks of tokens against the whole at once."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.engine.head import chunk_results, chunked_loss_gradients
from megatrain.loss import (
    IGNORED,
    cross_entropy_sum,
)

N, D, V = 23, 8, 31


def case(ignored=0.3):
    """Hidden `[N, D]`, targets `[N]`, head weights `[V, D]`."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator)
    targets = torch.randint(V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < ignored] = IGNORED
    return hidden, targets, torch.randn(V, D, generator=generator)


HEADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda hidden, weight: hidden @ weight.T,
    "soft-capped": lambda hidden, weight: 3 * torch.tanh(hidden @ weight.T / 3),
    "scaled": lambda hidden, weight: hidden @ weight.T * 0.125,
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("tokens", [1, 5, 22, 23, 24, 4096])
def test_chunks_give_the_loss_and_gradients_of_the_whole(head, tokens):
    hidden, targets, weight = case()
    count = 1.7 * int((targets != IGNORED).sum())  # labels of other micro-batches count, too
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    summed = F.cross_entropy(head(*leaves), targets, ignore_index=IGNORED, reduction="sum")
    (summed / count).backward()

    parameter = weight.clone().requires_grad_()
    total = torch.zeros_like(weight)
    chunks = []

    def two_dimensional(chunk, table):
        """Whether a product of three dimensions is one of two depends on who needs gradients."""
        return head(chunk[0], table)[None]

    def apply(chunk):
        chunks.append(chunk.shape)
        return two_dimensional(chunk, parameter)

    loss, gradient = chunked_loss_gradients(
        apply,
        hidden,
        targets,
        count,
        tokens,
        cross_entropy_sum,
        [parameter],
        lambda gradients: total.add_(gradients[0]),
    )
    assert all(shape[0] == 1 and shape[1] <= tokens for shape in chunks)
    assert sum(shape[1] for shape in chunks) == N
    torch.testing.assert_close(loss, summed.detach())
    torch.testing.assert_close(gradient, leaves[0].grad)
    torch.testing.assert_close(total, leaves[1].grad)
    parts = chunk_results(
        lambda chunk: two_dimensional(chunk, weight), hidden, targets, tokens, cross_entropy_sum
    )
    assert torch.equal(sum(parts), loss)


def test_bf16_logits_are_summed_in_fp32():
    """And the sum of many chunks, whatever torch's default dtype is."""
    logits = torch.randn(4000, V).bfloat16()
    targets = torch.zeros(4000, dtype=torch.long)
    wanted = F.cross_entropy(logits.double(), targets, reduction="sum")
    loss = cross_entropy_sum(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        in_chunks, _ = chunked_loss_gradients(
            lambda h: h, logits, targets, 1, 1, cross_entropy_sum, [], lambda gradients: None
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert in_chunks.dtype == torch.float32
    torch.testing.assert_close(in_chunks.double(), wanted, rtol=1e-5, atol=0)
