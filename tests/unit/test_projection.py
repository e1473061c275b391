"""What the head's projection is, and whether it can be taken some rows at a time."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.model.projection import find_projection

TABLE = {"lm_head.weight": torch.Size((50, 8))}
BIASED = TABLE | {"lm_head.bias": torch.Size((50,))}


def head(after):
    """A head that does `after` to what it projects."""

    def project(weights, hidden):
        return after(F.linear(hidden, weights["lm_head.weight"], weights.get("lm_head.bias")))

    return project


@pytest.mark.parametrize("shapes", [TABLE, BIASED])
@pytest.mark.parametrize("after", [lambda z: z, lambda z: 30 * (z / 30).tanh(), lambda z: z * 0.1])
def test_what_acts_on_each_logit_alone_can_be_taken_in_parts(shapes, after):
    found = find_projection(head(after), shapes, 50)
    assert (found.names, found.num, found.obstacle) == (tuple(shapes), 50, "")


CUT = "which has no table with a row for each logit"
DEPENDENT = "whose logits depend on each other"
REFUSED: list[tuple[Callable[[Tensor], Tensor], dict[str, torch.Size], int, str]] = [
    (lambda z: z.log_softmax(-1), TABLE, 50, DEPENDENT),
    (lambda z: z - z.mean(-1, keepdim=True), BIASED, 50, DEPENDENT),
    (lambda z: z[..., :5], TABLE, 50, DEPENDENT),
    (lambda z: z.view(1, -1, 50), TABLE, 50, DEPENDENT),  # it knows its size
    (lambda z: z, TABLE, 48, CUT),  # rows that make the table a rounder size
    (lambda z: z, {"lm_head.weight": torch.Size((8, 50))}, 50, CUT),
    (lambda z: z, {}, 50, CUT),
    (lambda z: z, TABLE | {"dense": torch.Size((8, 8))}, 50, "which computes with dense before"),
]


@pytest.mark.parametrize(("after", "shapes", "num", "obstacle"), REFUSED)
def test_what_cannot_says_why(after, shapes, num, obstacle):
    assert find_projection(head(after), shapes, num).obstacle.startswith(obstacle)
