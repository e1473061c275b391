"""The host's kernels, native and reference: rows, splits, AdamW, other rules, checksums."""

import math
import os
import platform
import re
import shutil
import subprocess
import threading
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch

from megatrain import AdamW, kernels
from megatrain.kernels import reference
from megatrain.kernels.reference import RULES, SUMMED_BYTES
from megatrain.kernels.states import Checksums, Scalars, TileRange, UpdateOptions
from tests.forks import forked
from tests.structure.source_tree import PACKAGE
from tests.unit.kernel_cases import (
    HYPER,
    adamw,
    assert_same_bits,
    flat,
    fuses_like_torch,
    gradient,
    implementations,
    instruction_set,  # noqa: F401  a fixture
    native,
    needs_native,
    randn,
    split_state,
    whole_state,
)


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
@pytest.mark.parametrize("size", [0, 5, 3_000_001])
def test_nothing_is_copied_filled_or_split_beside_the_range(kernels, size):
    values = torch.randint(256, (size,), dtype=torch.uint8)
    to = torch.full((size + 2,), 7, dtype=torch.uint8)
    kernels.copy(to[1:-1], values, threads=3)
    assert torch.equal(to[1:-1], values)
    assert to[0] == to[-1] == 7
    with pytest.raises(ValueError, match=f"to has {size + 2} elements, expected {size}"):
        kernels.copy(to, values)
    planes = [torch.full((size + 2,), 5, dtype=each) for each in (torch.bfloat16, torch.int16)]
    kernels.split(randn(size, 0), *(plane[1:-1] for plane in planes))
    kernels.fill_zero(planes[1][1:-1], threads=3)
    assert all(plane[0] == plane[-1] == 5 for plane in planes) and not planes[1][1:-1].any()


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


# The split master: every fp32 number goes out as bf16 and a remainder, and comes back itself.


def check_patterns(kernels, patterns, threads=1):
    dtypes = torch.bfloat16, torch.int16, torch.float32
    weights, remainder, master = (torch.empty(patterns.size, dtype=each) for each in dtypes)
    floats = torch.from_numpy(patterns.view(np.int32)).view(torch.float32)
    kernels.split(floats, weights, remainder, threads=threads)
    kernels.join(weights, remainder, master, threads=threads)
    high = weights.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    low, back = remainder.numpy(), master.view(torch.int32).numpy().view(np.uint32)
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
def test_tails_threads_and_instruction_sets(instruction_set):  # noqa: F811
    generator = np.random.default_rng(0)
    for size in [*range(71), (1 << 16) + 1, 300_001]:
        patterns = generator.integers(0, 1 << 32, size, dtype=np.uint32)
        for threads in (1, 2, 5):
            check_patterns(native, patterns, threads)


# The AdamW kernels: bit for bit torch's arithmetic, on every instruction set, length and form.

SIZES = [*range(19), 31, 33, 63, 64, 65, 70, 1023, 1025, 140_003]
FORMS = {
    "split": split_state,
    "whole": whole_state,
    "24 bits": partial(split_state, remainder=torch.int8),
}
CASES = list(product(FORMS, ["fp32", "bf16", "int8"], [torch.bfloat16, torch.float32]))


@needs_native
@pytest.mark.parametrize(("form", "kind", "grad_dtype"), CASES)
def test_native_is_the_reference_bit_for_bit(instruction_set, form, kind, grad_dtype):  # noqa: F811
    if not fuses_like_torch(instruction_set):
        pytest.skip("torch fuses multiply-adds here; tested below without")
    for size in SIZES:
        found = after_steps(native, form, kind, grad_dtype, size)
        for plane, values in by_reference(form, kind, grad_dtype, size).items():
            assert_same_bits(found[plane], values, f"{plane} of {size}")


def after_steps(kernels, form, kind, grad_dtype, size):
    state = FORMS[form](size, kind)
    for step in (1, 2, 3):
        grad = gradient(size, step).to(grad_dtype)
        grad[128:200] = 0
        arguments = dict(grad=grad, **HYPER, step=step, grad_scale=0.37, at=(9 << 32) - 640)
        adamw(kernels, **state, **arguments, threads=step)
    return flat(state)


by_reference = cache(partial(after_steps, reference))  # the same for all instruction sets
BY = Scalars(-3e-3, 0.97, 0.9, 0.3, 0.95, 0.05)


@needs_native
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "adamw"])
def test_native_rules_are_the_reference_s_bit_for_bit(instruction_set, rule):  # noqa: F811
    if not fuses_like_torch(instruction_set) and rule == "direction":
        pytest.skip("torch fuses multiply-adds here; tested above without")
    cases = product(FORMS.values(), [torch.bfloat16, torch.float32], [0, 1, 1025, (1 << 16) + 65])
    for make, grad_dtype, size in cases:
        found, expected = make(size), make(size)
        for step in (1, 2):
            grad = gradient(size, step).to(grad_dtype)
            grad[::7], grad[1::40] = -0.0, math.inf
            options = UpdateOptions((9 << 32) - 640, step, 0.37, threads=step)
            by = BY._replace(decay=0.97 * (step < 2))
            for implementation, each in ((native, found), (reference, expected)):
                states = [] if rule in ("sgd", "direction") else [each["exp_avg"]]
                tile = TileRange(each["weights"], each["remainder"], states, grad)
                implementation.update(rule, tile, by, options)
        for plane, values in flat(found).items():
            others = flat(expected)[plane]
            if values.is_floating_point():  # of NaNs only that they are
                values, others = values.nan_to_num(7), others.nan_to_num(7)
            assert_same_bits(values, others, f"{plane} of {size}")


# Checksums of planes: the kernels' against their reference, and what a difference says.


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
            planes.append(randn(-(-size // plane.group_size), 1).abs().mul(9).to(plane.dtype))
        planes.append(gradient(size, 1).bfloat16())
        tile = TileRange(*planes[:2], planes[2:-1], planes[-1])
        pers = [1, 1, *(plane.group_size for plane in rule.state_planes), 1]
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


# The kernels of ARM machines, on an emulated one: each makes the same bits as AVX2's.

DIGESTS = Path(__file__).with_name("kernel_digests.cpp")
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
LIBRARIES = "/usr/aarch64-linux-gnu"
needed = ("cmake", "c++", COMPILER, EMULATOR)


@pytest.mark.exhaustive
@needs_native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with AVX2")
@pytest.mark.skipif(not all(map(shutil.which, needed)), reason="no cross compiler or emulator")
def test_kernels_of_arm_make_the_same_bits(tmp_path):
    def told(*command):
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        return ran.stdout.splitlines()

    def digests(compiler):
        told(compiler, "-std=c++17", "-O1", DIGESTS, "-o", tmp_path / compiler, "-ldl")
        return tmp_path / compiler

    cross = ("NAME=Linux", "PROCESSOR=aarch64")
    cross = (*(f"-DCMAKE_SYSTEM_{each}" for each in cross), f"-DCMAKE_CXX_COMPILER={COMPILER}")
    told("cmake", "-S", PACKAGE / "kernels" / "csrc", "-B", tmp_path / "arm", *cross)
    told("cmake", "--build", tmp_path / "arm")
    emulated = (EMULATOR, "-L", LIBRARIES, digests(COMPILER), tmp_path / "arm" / "_native.so")
    expected = told(digests("c++"), native._find(), "avx2")
    assert len(expected) == 224
    assert told(*emulated, "baseline") == expected


# The kernels of tiles that rest on GPUs, built where there are none.

ARCHITECTURES = [("cuda", 90, 32), ("hip", "gfx942", 64), ("hip", "gfx1151", 32)]
BUILDS = [("fp32", "*fp32", "*fp32", 2, "*i16"), ("bf16", "*bf16", "*bf16", 0, "*fp32"),
         ("int8", "*i8", "*u8", 1, "*i8")]  # fmt: skip


@pytest.mark.parametrize(("vendor", "architecture", "threads"), ARCHITECTURES)
@pytest.mark.parametrize(("states", "first", "second", "size", "remainder"), BUILDS)
def test_gpus_kernels_can_be_built_and_round_where_the_hosts_do(
    vendor, architecture, threads, states, first, second, size, remainder
):
    """With any number of threads in a warp, two sums of an element are fused with products.

    So they are on the host; others would be too, if they might. Subnormal numbers are kept.
    """
    triton = pytest.importorskip("triton", reason="Triton comes with torch for GPUs alone")
    from megatrain.kernels import gpu

    target = triton.backends.compiler.GPUTarget(vendor, architecture, threads)

    def built(kernel, types, constants, options):
        types |= dict.fromkeys(constants, "constexpr")
        source = triton.compiler.ASTSource(kernel, types, constexprs=constants)
        return triton.compile(source, target=target, options=options).asm

    types = dict.fromkeys(gpu._update.arg_names, "fp32") | {
        "weights": "*bf16" if size else "*fp32", "remainder": remainder,
        "exp_avg": first, "exp_avg_sq": second,
        **dict.fromkeys(("scale1", "scale2"), "*fp32" if states == "int8" else first),
        "grad": "*bf16", "numel": "i64", "number": "i64", "seed": "i64",
    }  # fmt: skip
    constants = {"REMAINDER_BYTES": size, "SMALL": True, "STATES": states, "GROUPS": 32,
                 "GROUP": 64}  # fmt: skip
    code = built(gpu._update, types, constants, gpu.OPTIONS)
    fused = re.findall(r"call .* @llvm\.fma\.(?:v(\d+))?f32\(", code["llir"])
    elements = 32 * 64 // (4 * threads)  # of each thread of four warps
    count = sum(int(width or 1) for width in fused)
    assert count >= 2 * elements  # Triton 3.6 divides by such operations, too, for AMD's
    if vendor == "cuda":
        assert count == 2 * elements
        assert "mul.rn.f32" in code["ptx"] and not re.search(r"\.ftz|mul\.f32", code["ptx"])
    else:
        assert '"denormal-fp-math-f32"="ieee"' in code["llir"]
        every = built(gpu._update, types, constants, {"enable_fp_fusion": True})
        product = re.compile(r"\tv_(?:pk_|dual_)?mul_f32")
        assert len(product.findall(code["amdgcn"])) > len(product.findall(every["amdgcn"])) > 0
    types = {"words": "*i64", "blocks": "*i64", "first": "i64", "count": "i64"}
    assert built(gpu._checksum, types, {"WORDS": SUMMED_BYTES // 8, "PART": 2048}, None)
