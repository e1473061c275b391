"""The functions of `reference` as calls of the C++ library in csrc/ through ctypes.

The library takes pointers, sizes and scalars alone, so one build serves every torch version. Calls
release the interpreter lock and may come from several threads at once.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from ctypes import CDLL, c_char_p, c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.kernels import states
from megatrain.kernels.reference import RULES
from megatrain.kernels.states import Checksums, Scalars, TileRange, UpdateOptions

_ABI = 9
"""The number that megatrain_abi() in csrc/api.cpp must return."""

# The numbers of csrc/kernels.h.
_ADAMW = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_RULES = {name: number for number, name in enumerate(RULES, len(_ADAMW) - 1)}  # AdamW is first
_REMAINDERS = {torch.int16: 1, torch.int8: 2}

_P, _N, _T = c_void_p, c_int64, c_int  # pointer, number of elements or bytes, threads
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "abi": (c_int, []),
    "instruction_set": (c_char_p, []),
    "use_instruction_set": (c_int, [c_char_p]),
    "update": (
        None,
        [*[_P] * 7, c_int, c_int, c_int, _N, *[c_float] * 9, c_uint64, c_uint32, _T, *[_P] * 4],
    ),
    "checksum": (None, [_P, _N, _P, _N, _T]),
    "split": (None, [_P, _P, _P, c_int, _N, _T]),
    "join": (None, [_P, _P, _P, c_int, _N, _T]),
    "gather_rows": (None, [_P, _P, _P, _N, _N, _T]),
    "scatter_rows": (None, [_P, _P, _P, _N, _N, _T]),
    "first_touch": (None, [_P, _N, _T]),
    "fill_zero": (None, [_P, _N, _T]),
    "copy": (None, [_P, _P, _N, _T]),
    "move_file": (c_int, [c_int, c_int, _N, _P, _N, _N, _T]),
}


def _load() -> dict[str, Callable[..., Any]]:
    path = Path(__file__).with_name("_native.so")  # in the source tree, by `make native`
    if not path.exists():
        spec = importlib.util.find_spec("megatrain.kernels._native")
        if spec is None or spec.origin is None:
            raise ImportError("it was not built; `make native` builds it where there is a compiler")
        path = Path(spec.origin)
    functions: dict[str, Callable[..., Any]] = {}
    try:
        library = CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = library[f"megatrain_{name}"]
            function.restype, function.argtypes = result, arguments
            functions[name] = function
    except (OSError, AttributeError) as error:
        raise ImportError(f"{path} does not load: {error}") from error
    if (abi := functions["abi"]()) != _ABI:
        raise ImportError(f"{path} has interface {abi}, not {_ABI}: build it again")
    return functions


_call = _load()


def instruction_set() -> str:
    """The instruction set that the kernels use: `avx512vbmi`, `avx512`, `avx2` or `baseline`."""
    return _call["instruction_set"]().decode()


def use_instruction_set(name: str) -> bool:
    """Switch to another instruction set, for tests and benchmarks.

    Returns True if this machine and this build have it; else nothing changes.
    """
    return bool(_call["use_instruction_set"](name.encode()))


def _sums_arguments(planes: Sequence[Tensor | None], sums: Checksums) -> list[Any]:
    """The library's tables of checksums before and after, first bytes, and element sizes."""
    # None for moments that the rule lacks, before the gradient's values, which are last.
    read, written, first = (
        [*values[:-1], *[None] * (len(planes) - len(values)), values[-1]] for values in sums
    )
    for blocks in (*read, *written):
        if blocks is not None:
            states.check_tensor("blocks", blocks, (torch.int64,))
    sizes = [0 if plane is None else plane.element_size() for plane in planes]
    if sums.first[0] % (2 * states.GROUP * sizes[0]):
        raise ValueError(f"sums begin at byte {sums.first[0]} of the weights")
    pointers, numbers = c_void_p * len(planes), c_int64 * len(planes)
    return [
        pointers(*map(_address, read)),
        pointers(*map(_address, written)),
        numbers(*(byte or 0 for byte in first)),
        numbers(*sizes),
    ]


def update(rule: str, tile: TileRange, scalars: Scalars, options: UpdateOptions) -> None:
    """Compute the bits of `reference.update`, and `options.sums`, in one pass over memory.

    Raises ValueError: a tensor has the wrong dtype, size or layout, or is not on the CPU; or the
    range for sums does not begin at a multiple of two groups.
    """
    states.check_update(rule, tile, options)
    weights, remainder, moments, grad = tile
    planes = (weights, remainder, *moments, *[None] * (4 - len(moments)), grad)
    sums = [None] * 4 if options.sums is None else _sums_arguments(planes, options.sums)
    _call["update"](
        *map(_address, planes),
        _ADAMW[moments[0].dtype] if rule == "adamw" else _RULES[rule],
        0 if remainder is None else _REMAINDERS[remainder.dtype],
        grad.dtype == torch.bfloat16,
        weights.numel(),
        *scalars,
        options.grad_scale,
        options.at,
        options.step % 2**32,
        options.threads,
        *sums,
    )


def _address(plane: Tensor | None) -> int | None:
    return None if plane is None else plane.data_ptr()


def checksum(bytes_uint8: Tensor, blocks: Tensor, at: int, *, threads: int = 1) -> None:
    """See `reference.checksum`; `at` is a multiple of 8."""
    states.check_tensor("bytes", bytes_uint8, (torch.uint8,))
    states.check_tensor("blocks", blocks, (torch.int64,))
    data, size = bytes_uint8.data_ptr(), bytes_uint8.numel()
    _call["checksum"](data, size, blocks.data_ptr(), at, threads)


def split(master_fp32: Tensor, weights: Tensor, remainder: Tensor, *, threads: int = 1) -> None:
    """See `reference.split`."""
    states.check_planes(master=master_fp32, weights=weights, remainder=remainder)
    planes, size = (master_fp32, weights, remainder), remainder.element_size()
    _call["split"](*map(_address, planes), size, remainder.numel(), threads)


def join(weights: Tensor, remainder: Tensor, master_fp32: Tensor, *, threads: int = 1) -> None:
    """See `reference.join`."""
    states.check_planes(master=master_fp32, weights=weights, remainder=remainder)
    planes, size = (weights, remainder, master_fp32), remainder.element_size()
    _call["join"](*map(_address, planes), size, remainder.numel(), threads)


def _rows(name: str, table: Tensor, row_ids: Tensor, rows: Tensor, *, threads: int = 1) -> None:
    states.check_rows(table, row_ids, rows)
    row_bytes = table.shape[1] * table.element_size()
    _call[name](*map(_address, (table, row_ids, rows)), row_ids.numel(), row_bytes, threads)


gather_rows, scatter_rows = partial(_rows, "gather_rows"), partial(_rows, "scatter_rows")
"""See `reference.gather_rows` and `reference.scatter_rows`."""


def _whole(name: str, tensor: Tensor, *, threads: int = 1) -> None:
    states.check_tensor("tensor", tensor, None)
    _call[name](tensor.data_ptr(), tensor.nbytes, threads)


first_touch, fill_zero = partial(_whole, "first_touch"), partial(_whole, "fill_zero")
"""See `reference.first_touch` and `reference.fill_zero`."""


def move_file(
    file: int, offset: int, bytes_uint8: Tensor, *, writes: bool, piece: int, threads: int
) -> None:
    """See `reference.move_file`; `threads` requests of `piece` bytes run at once."""
    states.check_tensor("bytes", bytes_uint8, (torch.uint8,))
    data, size = bytes_uint8.data_ptr(), bytes_uint8.numel()
    if code := _call["move_file"](file, writes, offset, data, size, piece, threads):
        raise OSError(code, os.strerror(code))


def copy(to_uint8: Tensor, from_uint8: Tensor, *, threads: int = 1) -> None:
    """See `reference.copy`."""
    states.check_copy(to_uint8, from_uint8)
    _call["copy"](to_uint8.data_ptr(), from_uint8.data_ptr(), from_uint8.numel(), threads)
