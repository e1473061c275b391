"""The formats in which frozen weights rest; they are unpacked on the device.

A run file chooses `NF4` or `FP8` for the base of an adapter (`BASES`). Weights of published folders
keep their own format, and so their exact values: `MXFP4` (OCP Microscaling, gpt-oss) and `BLOCKS`
(float8 with a scale for each block, DeepSeek-V3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

Expand = Callable[[Tensor, Tensor, Tensor, Tensor], Any]  # takes codes, scales, code values, output

_BLOCK, _GROUP = 64, 256  # nf4: values that share a scale; scales that share a scale of their own
_TINY = 1e-38  # bitsandbytes divides by no smaller scale
_MOST_E4M3 = 448.0
PIECE, _COMPILED_PIECE = 1 << 23, 1 << 28  # values that are expanded at once, eagerly and compiled
_ROWS_PIECE = 1 << 25  # the same for chosen rows, which are expanded into memory of their own
SIDE = 128  # float8: rows and columns of a block with one scale
_SPAN = 32  # mxfp4: values with one exponent
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# https://github.com/bitsandbytes-foundation/bitsandbytes, functional.py, get_4bit_type
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


@dataclass(frozen=True)
class WeightFormat:
    """A format of stored values.

    Attributes:
        sections: from a parameter's shape to numbers of bytes: first of the bytes that all rows (of
            the first dimension) share, then of each array that is stored row after row.
        parts: from a shape and the arrays of its sections to codes and scales; the first dimension
            of the scales cuts the values evenly.
        values: the table of values that codes stand for; empty if codes are numbers.
        takes: True if a parameter of this shape can be packed.
    """

    name: str
    sections: Callable[[Sequence[int]], tuple[int, ...]]
    pack: Callable[[Tensor], Tensor]  # from values to uint8 of the sections' total length
    parts: Callable[..., tuple[Tensor, Tensor]]
    expand: Expand  # writes the values of codes and scales into its last argument
    values: Callable[[torch.device], Tensor] = lambda device: torch.empty(0, device=device)
    computed: torch.dtype = torch.bfloat16  # the type in which layers compute
    takes: Callable[[Sequence[int]], bool] = lambda shape: (
        len(shape) in (2, 3) and prod(shape) % _BLOCK == 0
    )

    def __repr__(self) -> str:
        return self.name  # ranks compare this text, so it must not contain a function's address

    def bytes_of(self, shape: Sequence[int]) -> int:
        """Bytes of a parameter of this shape."""
        return sum(self.sections(shape))

    def codes_and_scales(self, stored: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Codes and scales of a parameter of this shape, at the beginning of flat memory."""
        sections = self.sections(shape)
        return self.parts(shape, *stored.view(torch.uint8)[: sum(sections)].split(sections))

    def unpack(
        self,
        stored: Tensor,
        out: Tensor,
        compiled: Callable[[Expand], Expand] = lambda expand: expand,
        rows: Sequence[int] | None = None,
    ) -> None:
        """Write the values of `stored`, flat memory, to `out`; `compiled` may compile `expand`.

        Args: `rows`: the indices of the rows (of the first dimension) to write; None: all.
        """
        codes, scales = self.codes_and_scales(stored, out.shape)
        flat, expand, values = out.view(-1), compiled(self.expand), self.values(out.device)
        at_once = PIECE if expand is self.expand else _COMPILED_PIECE  # compiled: few launches
        if rows is not None:
            rows_at_once = max(1, min(at_once, _ROWS_PIECE) // out[0].numel())
            for first in range(0, len(rows), rows_at_once):
                chosen = torch.tensor(rows[first : first + rows_at_once], device=out.device)
                row_codes = codes.view(len(out), -1)[chosen].view(-1)
                row_scales = scales.view(len(out), -1, *scales.shape[1:])[chosen].flatten(0, 1)
                unpacked = out.new_empty(len(chosen), *out.shape[1:])
                expand(row_codes, row_scales, values, unpacked.view(-1))
                out[chosen] = unpacked
            return
        num_pieces = -(-flat.numel() // at_once)
        scales_at_once = -(-len(scales) // num_pieces)
        by_scale = (codes.view(len(scales), -1), scales, flat.view(len(scales), -1))
        for piece in zip(*(tensor.split(scales_at_once) for tensor in by_scale), strict=True):
            piece_codes, piece_scales, piece_out = piece
            expand(piece_codes.view(-1), piece_scales, values, piece_out.view(-1))

    def unpacked(self, stored: Tensor, shape: Sequence[int]) -> Tensor:
        """The values that layers compute with, from `stored` on the CPU, as fp32."""
        out = torch.empty(tuple(shape), dtype=self.computed)
        self.unpack(stored, out)
        return out.float()


def _nf4_sections(shape: Sequence[int]) -> tuple[int, ...]:
    """Bytes of the scales' mean and largest values, of the codes, and of the scales' codes."""
    blocks = prod(shape) // _BLOCK
    return 4 * (1 + -(-blocks // _GROUP)), prod(shape) // 2, blocks


def _nf4_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, two a byte, and the scale of each block in fp32."""
    pieces = [_nf4_piece(piece) for piece in values.reshape(-1, _BLOCK).split(PIECE // _BLOCK)]
    return torch.cat([codes for codes, _ in pieces]), torch.cat([scales for _, scales in pieces])


def _nf4_piece(blocks: Tensor) -> tuple[Tensor, Tensor]:
    values, table = blocks.float(), _nf4_values(blocks.device)
    scales = values.abs().amax(1)
    scaled = (values * (1.0 / scales.clamp(min=_TINY))[:, None]).clamp(-1, 1)
    codes = torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)
    pairs = codes.view(-1, 2)
    return (pairs[:, 0] << 4) | pairs[:, 1], scales


def _pack_nf4(values: Tensor) -> Tensor:
    codes, scales = _nf4_codes(values)
    blocks = len(scales)
    mean = scales.expand(2, blocks).mean(1)[0]  # so torch sums a row on one thread: same bits
    groups = nn.functional.pad(scales - mean, (0, -blocks % _GROUP)).view(-1, _GROUP)
    largest = groups.abs().amax(1)
    shares = groups * (1.0 / largest.clamp(min=_TINY))[:, None]
    dynamic = _dynamic_values(values.device)
    bounds = (dynamic[:-1] + dynamic[1:]) / 2
    scale_codes = torch.bucketize(shares.clamp(-1, 1), bounds, out_int32=True).to(torch.uint8)
    floats = torch.cat((mean.view(1), largest)).view(torch.uint8)
    return torch.cat((floats, codes, scale_codes.view(-1)[:blocks]))


def _pack_nf4_wide(values: Tensor) -> Tensor:
    codes, scales = _nf4_codes(values)
    return torch.cat((scales.view(torch.uint8), codes))


def is_nf4(codes: Tensor, scale_codes: Tensor | None) -> bool:
    """True if a folder's tables of codes are this file's; scales in fp32 have no table."""
    if scale_codes is not None and not scale_codes.equal(_dynamic_values(scale_codes.device)):
        return False
    return codes.equal(_nf4_values(codes.device))


def _nf4_parts(_: Any, floats: Tensor, codes: Tensor, scale_codes: Tensor) -> tuple[Tensor, Tensor]:
    mean, largest = floats.view(torch.float32).tensor_split((1,))
    shares = _dynamic_values(codes.device)[scale_codes.int()]
    # Two roundings, as in bitsandbytes; compiled code would round once.
    return codes, shares * largest.repeat_interleave(_GROUP)[: len(shares)] + mean


def _expand_nf4(codes: Tensor, scales: Tensor, values: Tensor, out: Tensor) -> None:
    halves = torch.arange(4, -1, -4, dtype=torch.uint8, device=codes.device)  # high, low
    indices = (codes[:, None] >> halves & 15).view(len(scales), _BLOCK).int()
    out.view(len(scales), _BLOCK).copy_(values[indices] * scales[:, None])


@cache
def _nf4_values(device: torch.device) -> Tensor:
    return torch.tensor(_NF4, device=device)


@cache
def _dynamic_values(device: torch.device) -> Tensor:
    """The 8-bit code of bitsandbytes (create_dynamic_map): a sign, an exponent, a fraction."""
    values = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1)
        means = (10.0 ** (exponent - 6) * ((bounds[:-1] + bounds[1:]) / 2)).tolist()
        values += [*means, *(-mean for mean in means)]
    return torch.tensor(sorted(values), device=device)


def _fp8_sections(shape: Sequence[int]) -> tuple[int, ...]:
    return 0, 4 * prod(shape[:-1]), prod(shape)


def _pack_fp8(values: Tensor) -> Tensor:
    rows = values.reshape(-1, values.shape[-1]).split(max(1, PIECE // values.shape[-1]))
    codes, scales = zip(*map(fp8_rows, rows), strict=True)
    return torch.cat([part.view(-1).view(torch.uint8) for part in (*scales, *codes)])


def fp8_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix to e4m3 codes with fp32 scales `[rows]`: each row's largest becomes 448."""
    scales = (values.abs().amax(1) / _MOST_E4M3).float()
    divisors = scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    scaled = (values.float() / divisors).clamp(-_MOST_E4M3, _MOST_E4M3)
    return scaled.to(torch.float8_e4m3fn), scales


def operands(stored: Tensor, shape: Sequence[int]) -> dict[str, Tensor]:
    """A weight's codes `[O, I]` and scales `[1, O]`, as in `FP8`, and its codes transposed."""
    codes, scales = FP8.codes_and_scales(stored, shape)
    turned = stored.view(torch.uint8)[FP8.bytes_of(shape) :]
    return {
        "codes": codes.view(torch.float8_e4m3fn).view(*shape),
        "scales": scales[None],
        "turned": turned.view(torch.float8_e4m3fn).view(shape[1], shape[0]),
    }


def write_operands(
    weight: Tensor, row_scales: Tensor | None, codes: Tensor, scales: Tensor, turned: Tensor
) -> None:
    """Write a weight to its operands; `weight`: e4m3 codes, or values if `row_scales` is None."""
    if row_scales is None:
        weight, row_scales = fp8_rows(weight)
    codes.copy_(weight)
    scales.copy_(row_scales[None])
    turned.copy_(weight.t())


def _with_fp32(shape: Sequence[int], _: Tensor, scales: Tensor, codes: Tensor) -> Any:
    """The parts of a format whose fp32 scales come before the codes."""
    return codes, scales.view(torch.float32)


def _expand_fp8(codes: Tensor, scales: Tensor, values: Tensor, out: Tensor) -> None:
    wide = codes.view(torch.float8_e4m3fn).view(*scales.shape, -1).float()
    out.view(wide.shape).copy_(wide * scales[..., None])


def _blocks_sections(shape: Sequence[int]) -> tuple[int, ...]:
    *stack, rows, columns = shape
    return 0, 4 * prod(stack) * -(-rows // SIDE) * (columns // SIDE), prod(shape)


def _pack_blocks(values: Tensor) -> Tensor:
    (rows, columns), packed = values.shape[-2:], []
    for matrix in values.reshape(-1, rows, columns):
        padded = nn.functional.pad(matrix, (0, 0, 0, -rows % SIDE))
        blocks = padded.view(-1, SIDE, columns // SIDE, SIDE).transpose(1, 2)
        codes, scales = fp8_rows(blocks.reshape(-1, SIDE * SIDE))
        laid_out = codes.view(torch.uint8).view(blocks.shape).transpose(1, 2)
        packed.append((scales.view(torch.uint8), laid_out.reshape(-1)[: matrix.numel()]))
    return torch.cat([part for pieces in zip(*packed, strict=True) for part in pieces])


def _blocks_parts(shape: Sequence[int], _: Tensor, scales: Tensor, codes: Tensor) -> Any:
    grid = scales.view(torch.float32).view(-1, -(-shape[-2] // SIDE), shape[-1] // SIDE)
    return codes, grid.repeat_interleave(SIDE, 1)[:, : shape[-2]].reshape(-1, grid.shape[-1])


def _pack_mxfp4(values: Tensor) -> Tensor:
    """Pack `[E, I, O]`: an exponent for each span of inputs, and codes, two inputs a byte."""
    spans = values.reshape(-1, _SPAN, values.shape[-1])
    pieces = map(_mxfp4_piece, spans.split(max(1, PIECE // spans[0].numel())))
    return torch.cat([part.view(-1) for kind in zip(*pieces, strict=True) for part in kind])


def _mxfp4_piece(spans: Tensor) -> tuple[Tensor, Tensor]:
    values, table = spans.float(), _fp4_values(spans.device)[:8]
    exponents = (torch.frexp(values.abs().amax(1)).exponent - 3).clamp(-127, 127)
    scaled = torch.ldexp(values, -exponents[:, None])
    codes = torch.bucketize(scaled.abs(), (table[:-1] + table[1:]) / 2) + 8 * scaled.signbit()
    pairs = codes.to(torch.uint8).view(len(spans), _SPAN // 2, 2, -1)
    return (exponents + 127).to(torch.uint8), pairs[:, :, 0] | pairs[:, :, 1] << 4


def _expand_mxfp4(codes: Tensor, exponents: Tensor, values: Tensor, out: Tensor) -> None:
    spans, columns = exponents.shape
    halves = torch.arange(0, 8, 4, dtype=torch.uint8, device=codes.device)[:, None]  # low, high
    indices = (codes.view(spans, _SPAN // 2, 1, columns) >> halves & 15).int()
    bits = (exponents.int() << 23).clamp(min=1 << 22)  # fp32 powers of two, from 2^-127 on
    scales = bits.view(torch.float32)[:, None]
    out.view(spans, _SPAN, columns).copy_(values[indices].view(spans, _SPAN, columns) * scales)


@cache
def _fp4_values(device: torch.device) -> Tensor:
    return torch.tensor([*_FP4, *(-value for value in _FP4)], device=device)


NF4 = WeightFormat("nf4", _nf4_sections, _pack_nf4, _nf4_parts, _expand_nf4, _nf4_values)
NF4_WIDE = replace(
    NF4,
    name="nf4_wide",
    sections=lambda shape: (0, 4 * (prod(shape) // _BLOCK), prod(shape) // 2),
    pack=_pack_nf4_wide,
    parts=_with_fp32,
)
FP8 = WeightFormat("fp8", _fp8_sections, _pack_fp8, _with_fp32, _expand_fp8)
OPERANDS = replace(
    FP8, name="operands", sections=lambda shape: (*_fp8_sections(shape), prod(shape))
)
"""The operands of products in float8: FP8, and its codes transposed for the backward's product."""
BLOCKS = WeightFormat(
    "float8_blocks",
    _blocks_sections,
    _pack_blocks,
    _blocks_parts,
    _expand_fp8,
    takes=lambda shape: len(shape) in (2, 3) and shape[-1] % SIDE == 0,
)
MXFP4 = WeightFormat(
    "mxfp4",
    sections=lambda shape: (0, prod(shape) // _SPAN, prod(shape) // 2),
    pack=_pack_mxfp4,
    parts=lambda shape, _, exponents, codes: (codes, exponents.view(-1, shape[-1])),
    expand=_expand_mxfp4,
    values=_fp4_values,
    takes=lambda shape: len(shape) == 3 and shape[1] % _SPAN == 0,
)
BASES = {base.name: base for base in (NF4, FP8)}
FP32 = WeightFormat(
    "fp32",
    sections=lambda shape: (0, 4 * prod(shape)),
    pack=lambda values: values.float().contiguous().view(-1).view(torch.uint8),
    parts=lambda shape, _, values: (values.view(torch.float32),) * 2,
    expand=lambda codes, scales, values, out: out.copy_(codes),
    computed=torch.float32,
)
# Published folders and models bring the other formats.
PACKINGS = BASES | {packing.name: packing for packing in (NF4_WIDE, BLOCKS, MXFP4, FP32)}
