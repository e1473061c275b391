"""Chosen and rejected replies in pairs; losses of such pairs are in `test_trl.py`."""

import pytest

from megatrain import InputError
from megatrain.loss import DPO
from tests.parity.cases import llama, make_engine, replies


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m["chosen"].fill_(1), "pair 0 has no label of a rejected reply in this step"),
        (lambda m: m["chosen"].fill_(0.5), "chosen must be 1 at labels of chosen replies"),
        (lambda m: m["pair"].fill_(1.5), "pair must hold whole numbers"),
    ],
)
def test_pairs_that_are_none_are_refused(spoil, message):
    [*_, micro] = step = replies(DPO())
    spoil(micro)
    with pytest.raises(InputError, match=message):
        make_engine(llama()).step(step, DPO())
    twice = [*replies(DPO()), *replies(DPO())]  # numbers that begin anew
    with pytest.raises(InputError, match="pair 0 has a reply in several rows of this step"):
        make_engine(llama()).step(twice, DPO())
