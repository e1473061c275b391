"""The split master: every fp32 number goes out as bf16 and a remainder, and comes back itself."""

import numpy as np
import pytest
import torch

from tests.unit.kernel_cases import (
    implementations,
    instruction_set,  # noqa: F401  a fixture
    native,
    needs_native,
    randn,
)


def as_floats(patterns):
    return torch.from_numpy(patterns.view(np.int32)).view(torch.float32)


def take_apart(kernels, patterns, threads=1):
    """Weights, remainder and joined-again bits, as uint32, int16 and uint32 arrays."""
    weights = torch.empty(patterns.size, dtype=torch.bfloat16)
    remainder = torch.empty(patterns.size, dtype=torch.int16)
    master = torch.empty(patterns.size)
    kernels.split(as_floats(patterns), weights, remainder, threads=threads)
    kernels.join(weights, remainder, master, threads=threads)
    high = weights.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return high, remainder.numpy(), master.view(torch.int32).numpy().view(np.uint32)


def check_patterns(kernels, patterns, threads=1):
    high, low, back = take_apart(kernels, patterns, threads)
    is_nan = (patterns & 0x7FFFFFFF) > 0x7F800000
    kept = ~is_nan
    # The join is stated here once more, in 64-bit integers, so that two wrongs cannot cancel.
    summed = ((high.astype(np.int64) << 16) + low).astype(np.uint32)
    assert np.array_equal(summed[kept], patterns[kept])
    assert np.array_equal(back[kept], patterns[kept])
    high_is_nan = (high & 0x7FFF) > 0x7F80
    assert np.array_equal(high_is_nan, is_nan)
    quiet = (patterns | 0x00400000) & 0xFFFF0000
    assert np.array_equal(back[is_nan], quiet[is_nan])
    assert np.array_equal(high[is_nan], quiet[is_nan] >> 16)


@implementations
def test_patterns_come_back(kernels):
    """A sweep of all; and every lower half under extreme upper halves."""
    check_patterns(kernels, np.arange(0, 1 << 32, 4093, dtype=np.uint32))
    low = np.arange(1 << 16, dtype=np.uint32)
    for upper in (0, 0x7F, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0x7FBF, 0x7FFF, 0x8000, 0xFF80, 0xFFFF):
        check_patterns(kernels, np.uint32(upper << 16) | low)


@needs_native
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_all_patterns():
    block = 1 << 24
    for start in range(0, 1 << 32, block):
        patterns = np.arange(start, start + block, dtype=np.int64).astype(np.uint32)
        check_patterns(native, patterns, threads=2)


@needs_native
def test_tails_threads_and_instruction_sets(instruction_set):  # noqa: F811
    generator = np.random.default_rng(0)
    for size in [*range(71), (1 << 16) + 1, 300_001]:
        patterns = generator.integers(0, 1 << 32, size, dtype=np.uint32)
        for threads in (1, 2, 5):
            check_patterns(native, patterns, threads)


@needs_native
def test_nothing_is_written_outside_the_range():
    size, edge = 37, 8
    weights = torch.full((size + 2 * edge,), 7.0, dtype=torch.bfloat16)
    remainder = torch.full((size + 2 * edge,), 7, dtype=torch.int16)
    inside = slice(edge, edge + size)
    native.split(randn(size, 0), weights[inside], remainder[inside])
    for plane in (weights, remainder):
        assert (plane[:edge] == 7).all()
        assert (plane[edge + size :] == 7).all()
