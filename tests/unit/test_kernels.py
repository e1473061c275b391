"""Rows, norms, memory, threads and the choice between native and reference kernels."""

import mmap
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from megatrain import kernels
from megatrain.kernels import reference
from tests.forks import forked
from tests.unit.kernel_cases import (
    HYPER,
    adamw,
    assert_same_bits,
    flat,
    gradient,
    implementations,
    instruction_set,  # noqa: F401  a fixture
    native,
    needs_native,
    randn,
    split_state,
)

PACKAGE = Path(kernels.__file__).parents[1]


@implementations
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16])
@pytest.mark.parametrize("width", [1, 7, 64, 1001])
def test_rows_are_gathered_and_scattered(kernels, dtype, width):
    table = (randn(50 * width, 0) * 100).view(50, width).to(dtype)
    ids = torch.tensor([3, 49, 0, 3, 17])
    out = torch.empty(5, width, dtype=dtype)
    kernels.gather_rows(table, ids, out, threads=2)
    assert torch.equal(out, table[ids])
    unique, rows = ids[1:], (randn(4 * width, 1) * 100).view(4, width).to(dtype)
    expected = table.clone()
    expected[unique] = rows
    kernels.scatter_rows(table, unique, rows, threads=2)
    assert torch.equal(table, expected)


@implementations
def test_wrong_rows_are_named(kernels):
    table, ids = torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.gather_rows(table, ids, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="row_ids is torch.int32"):
        kernels.gather_rows(table, ids.int(), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="rows is torch.bfloat16"):
        kernels.scatter_rows(table, ids, torch.zeros(2, 3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="2 or 4 bytes"):
        kernels.scatter_rows(table.double(), ids, torch.zeros(2, 3).double())


@implementations
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_first_touch_writes_to_every_page(kernels, threads):
    """Whether the system lets them stay is its own affair."""
    num_bytes = (3 << 20) + 5
    with mmap.mmap(-1, num_bytes) as mapping:
        tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        kernels.first_touch(tensor, threads=threads)
        assert not tensor.any()
        tensor.fill_(7)
        kernels.first_touch(tensor, threads=threads)
        written = (tensor == 0).nonzero().flatten() // mmap.PAGESIZE
        assert written.unique().numel() == -(-num_bytes // mmap.PAGESIZE)
        del tensor, written


@implementations
def test_fill_zero_fills_exactly(kernels):
    tensor = torch.full((3_000_001,), 5, dtype=torch.int16)
    kernels.fill_zero(tensor[1:-1], threads=3)
    assert tensor[0] == tensor[-1] == 5
    assert not tensor[1:-1].any()


@implementations
@pytest.mark.parametrize("size", [0, 5, 3_000_001])
def test_copy_copies_exactly(kernels, size):
    values = torch.randint(256, (size,), dtype=torch.uint8)
    to = torch.full((size + 2,), 7, dtype=torch.uint8)
    kernels.copy(to[1:-1], values, threads=3)
    assert torch.equal(to[1:-1], values)
    assert to[0] == to[-1] == 7
    with pytest.raises(ValueError, match=f"to has {size + 2} elements, expected {size}"):
        kernels.copy(to, values)


@needs_native
def test_calls_from_several_threads_do_not_mix():
    """Four Python threads, each training its own state through the one pool."""
    size, steps = 300_001, 6
    alone = split_state(size)
    for step in range(1, steps + 1):
        adamw(native, **alone, grad=gradient(size, step), **HYPER, step=step, threads=1)
    states = [split_state(size) for _ in range(4)]

    def train(state):
        for step in range(1, steps + 1):
            adamw(native, **state, grad=gradient(size, step), **HYPER, step=step, threads=3)

    threads = [threading.Thread(target=train, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for state in states:
        for plane, values in flat(state).items():
            assert_same_bits(values, flat(alone)[plane], plane)


@needs_native
def test_a_forked_child_has_a_pool_of_its_own():
    values = torch.empty(1 << 20)

    def zeroed():
        values.fill_(1)
        native.fill_zero(values, threads=4)
        assert not values.any()

    def child():
        zeroed()
        if os.path.exists("/proc/self/task"):
            assert len(os.listdir("/proc/self/task")) == 1 + 3

    zeroed()
    assert forked(child) == 0
    zeroed()


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_machine_with_a_compiler_has_the_native_kernels():
    assert native is not None, "run `make native`, or install the package again"


@needs_native
@pytest.mark.parametrize("choice", ["", "native", "reference"])
def test_native_is_chosen_where_it_exists_unless_the_reference_is_asked_for(
    choice, monkeypatch, caplog
):
    monkeypatch.setenv("MEGATRAIN_KERNELS", choice)
    wanted = native, f"native ({native.instruction_set()})"
    if choice == "reference":
        wanted = reference, "reference (asked for)"
    assert kernels._choose() == wanted
    assert caplog.text == ""
