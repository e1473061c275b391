"""Checksums of planes: the kernels' against their reference, and what a difference says."""

from itertools import pairwise

import pytest
import torch

from megatrain import AdamW
from megatrain.kernels import reference
from megatrain.kernels.reference import SUMMED_BYTES
from megatrain.kernels.states import Checksums, TileRange, UpdateOptions
from tests.unit.kernel_cases import (
    assert_same_bits,
    gradient,
    instruction_set,  # noqa: F401  a fixture
    native,
    randn,
)


def blocks(num_bytes):
    return torch.zeros(num_bytes // SUMMED_BYTES + 2, 2, dtype=torch.int64)


def summed(data, at=0):
    """The reference's checksum of a plane's bytes from `at` on."""
    found = blocks(at + data.nbytes)
    reference.checksum(data.view(torch.uint8), found, at)
    return found


def test_a_checksum_is_the_sum_of_words_and_of_each_times_its_place():
    data = torch.randint(-(2**62), 2**62, (SUMMED_BYTES // 8 + 3,), dtype=torch.int64)
    data[1] = -1
    whole = data.tolist()
    expected = [
        [sum(part), sum(i * word for i, word in enumerate(part))]
        for part in (whole[: SUMMED_BYTES // 8], whole[SUMMED_BYTES // 8 :])
    ]
    found = summed(data).tolist()[:2]
    assert [[n % 2**64 for n in each] for each in found] == [
        [n % 2**64 for n in each] for each in expected
    ]


def test_ranges_in_any_order_add_up_on_every_instruction_set(instruction_set):  # noqa: F811
    size = 2 * SUMMED_BYTES + 1001
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    cuts = [0, 8, 4096, 4104, SUMMED_BYTES - 8, SUMMED_BYTES + 136, 2 * SUMMED_BYTES, size]
    for threads in (1, 3):
        found = blocks(size)
        for start, stop in reversed([*pairwise(cuts)]):
            native.checksum(data[start:stop].clone(), found, start, threads=threads)
        assert torch.equal(found, summed(data)), threads


@pytest.mark.parametrize("size", [1, 127, 512, 1000, 70_016, 140_003])
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_an_update_sums_what_it_reads_and_writes(instruction_set, states, size):  # noqa: F811
    """And writes the same bits as without; also where the range begins within a block."""
    rule, at = AdamW(states=states), 3 * 128
    made = []
    for is_summed in (False, True):
        planes = [randn(size, 0).bfloat16(), torch.arange(size).to(torch.int16)]
        for plane in rule.state_planes:
            planes.append(randn(-(-size // plane.per), 1).abs().mul(9).to(plane.dtype))
        planes.append(gradient(size, 1).bfloat16())
        tile = TileRange(*planes[:2], planes[2:-1], planes[-1])
        pers = [1, 1, *(plane.per for plane in rule.state_planes), 1]
        first = [at // n * p.element_size() for p, n in zip(planes, pers, strict=True)]
        before = [summed(*each) for each in zip(planes, first, strict=True)]
        sums = Checksums([torch.zeros_like(b) for b in before],
                         [*(torch.zeros_like(b) for b in before[:-1]), None], first)  # fmt: skip
        options = UpdateOptions(at, 5, 0.5, 2, sums if is_summed else None)
        rule.update(tile, vars(rule), options)
        made.append(planes)
    for found, wanted in zip(sums.read, before, strict=True):
        assert torch.equal(found, wanted)
    for found, plane, byte in zip(sums.written[:-1], planes[:-1], first, strict=False):
        assert torch.equal(found, summed(plane, byte))
    for own, plain in zip(*made, strict=True):
        assert_same_bits(own, plain)
