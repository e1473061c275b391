"""How tokens are drawn from logits."""

import torch

from megatrain.cli.generate import Sampling, draw

LOGITS = torch.tensor([0.0, 3.0, 2.0, -1.0, 1.0])


def drawn(sampling: Sampling, count: int = 2000) -> torch.Tensor:
    """Share of each token in `count` draws."""
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = [draw(LOGITS, sampling, generator) for _ in range(count)]
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / count


def test_a_temperature_of_zero_takes_the_likeliest():
    assert drawn(Sampling(temperature=0), 5).tolist() == [0, 1, 0, 0, 0]


def test_without_a_nucleus_the_shares_are_the_softmax():
    shares = drawn(Sampling(temperature=0.7, top_p=1.0), 20000)
    assert torch.allclose(shares, torch.softmax(LOGITS / 0.7, 0), atol=0.015)


def test_the_nucleus_is_the_fewest_tokens_that_reach_top_p():
    # softmax: 0.64, 0.24, 0.09, ... so 0.7 needs the first two, and 0.1 the first one only.
    probabilities = torch.softmax(LOGITS, 0)
    two = probabilities * torch.tensor([0, 1, 1, 0, 0])
    shares = drawn(Sampling(temperature=1.0, top_p=0.7), 20000)
    assert torch.allclose(shares, two / two.sum(), atol=0.015)
    assert drawn(Sampling(temperature=1.0, top_p=0.1), 50).tolist() == [0, 1, 0, 0, 0]
    assert drawn(Sampling(temperature=1.0, top_p=0.0), 50).tolist() == [0, 1, 0, 0, 0]


def test_the_seed_decides_the_draws():
    first, again, other = (drawn(Sampling(seed=seed), 50) for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)


def test_a_temperature_next_to_nothing_takes_the_likeliest():
    assert drawn(Sampling(temperature=1e-300), 5).tolist() == [0, 1, 0, 0, 0]
