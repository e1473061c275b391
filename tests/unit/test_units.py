"""Sizes as people write and read them."""

import random

import pytest

from megatrain.base.units import GIB, MIB, gib, parse_bytes, size


def test_what_is_said_to_be_enough_is_enough():
    numbers = random.Random(0)
    for _ in range(1000):
        needed = numbers.randrange(1, 600 * GIB)
        given = parse_bytes(size(needed))
        assert needed <= given < needed + GIB // 10 + MIB


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1000, "1,000 bytes"), (3 * MIB, "3.0 MiB"), (GIB / 25, "41.0 MiB"),
     (GIB / 20, "0.1 GiB"), (81.26 * GIB, "81.3 GiB")],
)  # fmt: skip
def test_what_is_small_is_not_said_to_be_nothing(num_bytes, text):
    assert gib(num_bytes) == text


@pytest.mark.parametrize("text", ["9" * 400, "99999999TiB", 10**400, "1e3", "-5", "", "10 gigs"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="^not a size"):
        parse_bytes(text)
