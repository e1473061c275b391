"""Weights that a folder stores packed for inference, unpacked as they are read.

Their values are those of transformers' own dequantisation, bit for bit: mxfp4 (gpt-oss), float8
in blocks (DeepSeek-V3, Kimi K2, Qwen3, MiniMax), and float8, int8 and int4 of compressed-tensors.
https://github.com/huggingface/transformers (integrations: mxfp4.py, finegrained_fp8.py),
https://github.com/vllm-project/compressed-tensors (compressors).

Legend: E experts, O outputs, I inputs, G groups of inputs that share a scale.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatrain.base.json_yaml import DAMAGED
from megatrain.errors import InputError
from megatrain.model.safetensors_io import Stored

Settings = Mapping[str, Any]

_FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_FP4 += [-value for value in _FP4]
_COMPRESSED = {"pack-quantized", "int-quantized", "float-quantized"}
_CODES = (torch.float8_e4m3fn, torch.int8, torch.int32)
_UNUSED = (".activation_scale", ".input_scale", ".weight_shape")  # what a packed forward needs


@dataclass(frozen=True, kw_only=True)
class Unpacked(Stored):
    """A weight of several stored parts; its dtype and shape are those of its values."""

    parts: tuple[Stored, ...]
    unpack: Callable[..., Tensor]

    def read(self) -> Tensor:
        """The values, unpacked."""
        return self.unpack(*(part.read() for part in self.parts))

    def kept_open(self, opened: Callable[[Path], BinaryIO]) -> "Unpacked":
        """The same weight, of parts in files that stay open."""
        return replace(self, parts=tuple(part.kept_open(opened) for part in self.parts))


def unpacked_from(settings: Settings) -> str | None:
    """The format of a `quantization_config`, if its weights are unpacked exactly; else None."""
    method, schemes = str(settings.get("quant_method")), _schemes(settings)
    if method in ("mxfp4", "fp8"):
        return method
    formats = sorted({str(scheme["format"]) for scheme in schemes})
    packed = [scheme for scheme in schemes if scheme["format"] == "pack-quantized"]
    turned = settings.get("sparsity_config") or settings.get("transform_config")
    alike = {(scheme.get("num_bits"), str(scheme.get("group_size"))) for scheme in packed}
    if method != "compressed-tensors" or turned or not {*formats} <= _COMPRESSED or not formats:
        return None
    alone = not packed or (len(alike) == 1 and alike.pop()[0] == 4)
    return f"{method} ({', '.join(formats)})" if alone else None


def unpacked(
    stored: Mapping[str, Stored], settings: Settings
) -> tuple[dict[str, Stored], set[str]]:
    """The weights of a folder whose parts are packed, by name, and the names of the parts.

    Raises InputError: parts are missing, or do not belong together.
    """
    find = {"mxfp4": _mxfp4, "fp8": _fp8}.get(settings["quant_method"], _compressed)
    weights = {weight.name: weight for weight in find(stored, settings)}
    parts = {part.name for weight in weights.values() for part in weight.parts}
    return dict(weights), parts | {name for name in stored if name.endswith(_UNUSED)}


def _mxfp4(stored: Mapping[str, Stored], settings: Settings) -> Iterator[Unpacked]:
    """Weights `[E, I, O]` of two 4-bit values a byte `[E, O, G, 16]`, exponents `[E, O, G]`."""
    for name in [name for name in stored if name.endswith("_blocks")]:
        weight, blocks = name.removesuffix("_blocks"), stored[name]
        scales = stored.get(f"{weight}_scales")
        if scales is None or len(scales.shape) != 3 or blocks.shape != (*scales.shape, 16):
            raise _mismatch(blocks)
        experts, outputs, groups = scales.shape
        shape = experts, 32 * groups, outputs
        yield _weight(weight, torch.bfloat16, shape, _from_mxfp4, scales, blocks)


def _from_mxfp4(scales: Tensor, blocks: Tensor) -> Tensor:
    pairs = [[_FP4[byte & 15], _FP4[byte >> 4]] for byte in range(256)]
    table = torch.tensor(pairs, dtype=torch.bfloat16)
    experts, outputs, groups = scales.shape
    out = torch.empty(experts, 32 * groups, outputs, dtype=torch.bfloat16)
    for whole, codes, exponents in zip(out, blocks, scales, strict=True):
        values = table[codes.int()].view(outputs, groups, 32)
        whole.copy_(torch.ldexp(values, exponents.int()[..., None] - 127).view(outputs, -1).T)
    return out


def _fp8(stored: Mapping[str, Stored], settings: Settings) -> Iterator[Unpacked]:
    """Weights `[..., O, I]` of float8 values, with a scale for each block of rows and columns."""
    block = settings.get("weight_block_size", (128, 128))
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        weight, scales = name.removesuffix("_scale_inv"), stored[name]
        codes = stored.get(weight)
        if codes is None or codes.dtype != torch.float8_e4m3fn:
            raise _mismatch(scales)
        unpack = _times(codes, scales, [block] if block else [], torch.bfloat16)
        yield _weight(weight, torch.bfloat16, codes.shape, unpack, scales, codes)


def _compressed(stored: Mapping[str, Stored], settings: Settings) -> Iterator[Unpacked]:
    """Weights `[O, I]` of float8 or integers, with scales for groups, rows or blocks."""
    schemes = _schemes(settings)
    groups = [size for each in schemes if (size := each.get("group_size") or -1) > 0]
    blocks = [(1, group) for group in groups]
    blocks += [each["block_structure"] for each in schemes if each.get("block_structure")]
    for name in [name for name in stored if name.endswith(".weight_scale")]:
        weight, scales = name.removesuffix("_scale"), stored[name]
        packed, zeros = stored.get(f"{weight}_packed"), stored.get(f"{weight}_zero_point")
        codes = packed or stored.get(weight)
        if codes is None or codes.dtype not in _CODES or len(codes.shape) != 2:
            raise _mismatch(scales)
        parts = (scales, codes, *((zeros,) if zeros else ()))
        if packed:
            rows, words = packed.shape
            # Rows are padded to whole words; groups tell where they end.
            many = len(scales.shape) == 2 and scales.shape[1] > 1 and len(groups) > 0
            codes = replace(
                packed, shape=(rows, scales.shape[1] * groups[0] if many else 8 * words)
            )
        unpack = _times(codes, scales, blocks, scales.dtype)
        yield _weight(
            weight,
            scales.dtype,
            codes.shape,
            partial(_of_int4, unpack, codes.shape[1]) if packed else unpack,
            *parts,
        )


def _schemes(settings: Settings) -> list[dict[str, Any]]:
    """How each group of a compressed model has its weights, with the format."""
    groups, usual = settings.get("config_groups"), settings.get("format")
    of_groups = groups.values() if isinstance(groups, dict) else ()
    return [{**(g.get("weights") or {}), "format": g.get("format") or usual} for g in of_groups]


def _of_int4(
    unpack: Callable[..., Tensor], columns: int, scales: Tensor, packed: Tensor, *zeros: Tensor
) -> Tensor:
    """Eight values of 4 bits in each int32 of a row; of zeros, in each of a column."""
    centred = (_nibbles(each.T.contiguous()).T[: len(packed)] for each in zeros)
    return unpack(scales, _nibbles(packed)[:, :columns], *centred)


def _nibbles(packed: Tensor) -> Tensor:
    codes = packed.view(torch.uint8)
    return torch.stack((codes & 15, codes >> 4), -1).view(torch.int8).flatten(-2) - 8


def _times(
    codes: Stored, scales: Stored, blocks: Sequence[Sequence[int]], dtype: torch.dtype
) -> Callable[..., Tensor]:
    """A function of scales, codes, and maybe zeros, that gives the values; see `_scaled`.

    Args: `blocks`: how many rows and columns may share a scale; else a row, or all of a matrix.

    Raises InputError: the scales are not those of such blocks.
    """
    rows, columns = codes.shape[-2:]
    matrices = prod(codes.shape[:-2])
    for down, along in [*blocks, (1, columns), (rows, columns)]:
        grid = ceil(rows / down), ceil(columns / along)
        if prod(scales.shape) == matrices * prod(grid) and (
            scales.shape[-2:] == grid or grid[1] == 1
        ):
            return partial(_scaled, (down, along), dtype)
    raise _mismatch(scales)


def _scaled(
    block: tuple[int, int], dtype: torch.dtype, scales: Tensor, codes: Tensor, *zeros: Tensor
) -> Tensor:
    """The values of codes `[..., O, I]` that share scales in blocks, computed in fp32."""
    rows, columns = codes.shape[-2:]
    grid = ceil(rows / block[0]), ceil(columns / block[1])

    def spread(each: Tensor) -> Tensor:
        along = each.view(grid).repeat_interleave(block[0], 0)[:rows]
        return along.repeat_interleave(block[1], 1)[:, :columns]

    if scales.dtype == torch.uint8:  # exponents
        scales = (scales.float() - 127).exp2()
    out = torch.empty(codes.shape, dtype=dtype)
    each = out.view(-1, rows, columns), codes.view(-1, rows, columns), scales.view(-1, *grid)
    for whole, values, scale in zip(*each, strict=True):
        values = values.float()
        for zero in zeros:
            values -= spread(zero.float())
        whole.copy_(values.mul_(spread(scale.float())))
    return out


def _weight(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    unpack: Callable[..., Tensor],
    *parts: Stored,
) -> Unpacked:
    num_bytes = prod(shape) * dtype.itemsize + sum(part.num_bytes for part in parts)
    return Unpacked(name, parts[1].file, dtype, shape, 0, num_bytes, parts=parts, unpack=unpack)


def _mismatch(part: Stored) -> InputError:
    return InputError(
        f"{part.file}: {part.name!r} and what belongs to it do not make up a weight; {DAMAGED}"
    )
