"""Tokens are drawn as transformers draws them, each row by random numbers of its own."""

import pytest
import torch
from transformers import (
    GenerationConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatrain.generate.sampling import OwnDraws

CPU = torch.device("cpu")
IDS = torch.zeros(1, 1, dtype=torch.int64)


def settings(**given):
    return GenerationConfig(max_new_tokens=4, **{"temperature": 1.0, "top_k": 0} | given)


def drawn(logits_RV, rows, seed=0, **given):
    """Tokens `[4, R]` of rows that always have the same logits."""
    draws = OwnDraws(settings(**given), seed, rows, CPU)
    made = [draws(IDS, logits_RV) for _ in range(4)]
    assert all((each.isfinite().sum(1) == 1).all() for each in made)
    return torch.stack([each.argmax(1) for each in made])


@pytest.mark.parametrize(
    "given", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.8}]
)
def test_tokens_come_as_often_as_they_are_likely(given):
    logits = torch.tensor([[2.0, -torch.inf, 0.0, 1.0, -1.0, 1.5, 0.5, -3.0]])
    wanted = TemperatureLogitsWarper(given.get("temperature", 1.0))(IDS, logits)
    if "top_k" in given:
        wanted = TopKLogitsWarper(given["top_k"])(IDS, wanted)
    if "top_p" in given:
        wanted = TopPLogitsWarper(given["top_p"])(IDS, wanted)
    likely, count = wanted.softmax(-1)[0], 5000
    found = drawn(logits.expand(count, -1), range(count), **given)
    share = torch.bincount(found.flatten(), minlength=8) / (4 * count)
    assert ((likely == 0) == (share == 0)).all()
    spread = (likely * (1 - likely) / (4 * count)).sqrt()
    assert ((share - likely).abs() <= 5 * spread).all()


def test_a_rows_draws_are_its_own():
    """Whatever rows are beside it, and other ones at each token, row and seed."""
    logits = torch.zeros(6, 1 << 16)
    found = drawn(logits, range(6))
    assert found.unique().numel() == 24
    assert drawn(logits[:3], (4, 0, 5)).equal(found[:, [4, 0, 5]])
    assert not drawn(logits, range(6), seed=1).eq(found).any()
