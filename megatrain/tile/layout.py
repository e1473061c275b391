"""The flat layout of a tile: one list of offsets, the same in every plane.

Trainable parameters come first, one contiguous run per optimizer group, frozen ones last; so the
gradient and the moments cover a prefix, and the update is one kernel call per group, as long as the
groups stay as they were. Of the frozen ones those come first whose source has more bits than bf16,
so that the rest of the masters is a prefix, too.

Parameters that layers compute with in fp32, whatever the type of the others, have all their bits in
the plane of weights: frozen ones as a packing, trained ones as copies of their masters, which come
after what is trained.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property
from itertools import groupby
from math import lcm, prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatrain.base.units import align

Expand = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # codes, scales, their values; into

_BLOCK, _GROUP = 64, 256  # values with one scale; scales with one of theirs
_TINY = 1e-38  # bitsandbytes divides by no smaller scale
_MOST_E4M3 = 448.0
_PIECE = 1 << 23  # values that are expanded at once

# https://github.com/bitsandbytes-foundation/bitsandbytes, functional.py, get_4bit_type
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


@dataclass(frozen=True)
class WeightFormat:
    """How values are kept.

    Attributes:
        bytes_of: of a parameter of this shape.
        pack: its values, to uint8 of that length.
        parts: of these, the codes and an fp32 scale for each of equally many values.
        expand: codes and scales to values, in place; of the fourth argument's type and length.
        values: what codes stand for; empty where they say it themselves.
        computed: the type that layers compute with; fp32 is read where it is kept.
    """

    name: str
    bytes_of: Callable[[Sequence[int]], int]
    pack: Callable[[Tensor], Tensor]
    parts: Callable[[Tensor, Sequence[int]], tuple[Tensor, Tensor]]
    expand: Expand
    values: Callable[[torch.device], Tensor]
    computed: torch.dtype = torch.bfloat16

    def __repr__(self) -> str:
        return self.name  # ranks compare it: a function's is its address

    def takes(self, shape: Sequence[int]) -> bool:
        """True if a parameter can be packed: a matrix, or a stack of them, of whole blocks."""
        return len(shape) in (2, 3) and prod(shape) % _BLOCK == 0

    def unpack(
        self, stored: Tensor, out: Tensor, fast: Callable[[Expand], Expand] = lambda each: each
    ) -> None:
        """Write the values of `stored`, flat memory, to `out`; `fast` may compile `expand`."""
        num_bytes = self.bytes_of(out.shape)
        codes, scales = self.parts(stored.view(torch.uint8)[:num_bytes], out.shape)
        flat, expand, values = out.view(-1), fast(self.expand), self.values(out.device)
        of = flat.numel() // len(scales)  # values of a scale
        most = max(1, _PIECE // of)
        pieces = (codes.view(len(scales), -1), scales, flat.view(-1, of))
        for piece in zip(*(whole.split(most) for whole in pieces), strict=True):
            expand(piece[0].view(-1), piece[1], values, piece[2].view(-1))

    def unpacked(self, stored: Tensor, shape: Sequence[int]) -> Tensor:
        """The values of `stored` on the CPU that layers are computed with, in fp32."""
        out = torch.empty(tuple(shape), dtype=self.computed)
        self.unpack(stored, out)
        return out.float()


def _nf4_sizes(shape: Sequence[int]) -> tuple[int, int, int]:
    """The numbers of values, of their blocks, and of groups of the blocks' scales."""
    blocks = prod(shape) // _BLOCK
    return prod(shape), blocks, -(-blocks // _GROUP)


def _nf4_bytes(shape: Sequence[int]) -> int:
    values, blocks, groups = _nf4_sizes(shape)
    return 4 * (1 + groups) + values // 2 + blocks


def _nf4_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    pieces = [_nf4_piece(piece) for piece in values.reshape(-1, _BLOCK).split(_PIECE // _BLOCK)]
    return torch.cat([codes for codes, _ in pieces]), torch.cat([scales for _, scales in pieces])


def _nf4_piece(blocks: Tensor) -> tuple[Tensor, Tensor]:
    blocked, code = blocks.float(), _nf4_values(blocks.device)
    scales = blocked.abs().amax(1)
    scaled = (blocked * (1.0 / scales.clamp(min=_TINY))[:, None]).clamp(-1, 1)
    codes = torch.bucketize(scaled, (code[:-1] + code[1:]) / 2, out_int32=True).to(torch.uint8)
    pairs = codes.view(-1, 2)
    return (pairs[:, 0] << 4) | pairs[:, 1], scales


def _pack_nf4(values: Tensor) -> Tensor:
    _, blocks, groups = _nf4_sizes(values.shape)
    codes, scales = _nf4_codes(values)
    mean = scales.expand(2, blocks).mean(1)[0]  # of one thread, so the same however many there are
    padded = torch.zeros(groups * _GROUP)
    padded[:blocks] = scales - mean
    largest = padded.view(groups, _GROUP).abs().amax(1)
    shares = padded.view(groups, _GROUP) * (1.0 / largest.clamp(min=_TINY))[:, None]
    dynamic = _dynamic_values(values.device)
    bounds = (dynamic[:-1] + dynamic[1:]) / 2
    scale_codes = torch.bucketize(shares.clamp(-1, 1), bounds, out_int32=True).to(torch.uint8)
    floats = torch.cat((mean.view(1), largest)).view(torch.uint8)
    return torch.cat((floats, codes, scale_codes.view(-1)[:blocks]))


def _pack_wide(values: Tensor) -> Tensor:
    codes, scales = _nf4_codes(values)
    return torch.cat((scales.view(torch.uint8), codes))


def _wide_bytes(shape: Sequence[int]) -> int:
    values, blocks, _ = _nf4_sizes(shape)
    return 4 * blocks + values // 2


def _wide_parts(stored: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    scales, codes = stored.split((4 * _nf4_sizes(shape)[1], prod(shape) // 2))
    return codes, scales.view(torch.float32)


def is_nf4(codes: Tensor, scale_codes: Tensor | None) -> bool:
    """True if both tables of codes (scales may have none) are those that this file uses."""
    same = torch.equal(codes, _nf4_values(codes.device))
    return same and (
        scale_codes is None or torch.equal(scale_codes, _dynamic_values(scale_codes.device))
    )


def _nf4_parts(stored: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    values, blocks, groups = _nf4_sizes(shape)
    floats, codes, scale_codes = stored.split((4 * (1 + groups), values // 2, blocks))
    mean, largest = floats.view(torch.float32).split((1, groups))
    shares = _dynamic_values(stored.device)[scale_codes.int()]
    # Two roundings, as the library has it: nothing here is compiled, which would make them one.
    return codes, shares * largest.repeat_interleave(_GROUP)[:blocks] + mean


def _expand_nf4(codes: Tensor, scales: Tensor, values: Tensor, out: Tensor) -> None:
    of = torch.stack((codes >> 4, codes & 15), 1).view(len(scales), _BLOCK).int()
    out.view(len(scales), _BLOCK).copy_(values[of] * scales[:, None])


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


def _fp8_bytes(shape: Sequence[int]) -> int:
    return 4 * prod(shape[:-1]) + prod(shape)


def _pack_fp8(values: Tensor) -> Tensor:
    rows = values.reshape(-1, values.shape[-1]).split(max(1, _PIECE // values.shape[-1]))
    codes, scales = zip(*map(fp8_rows, rows), strict=True)
    return torch.cat([each.view(-1).view(torch.uint8) for each in (*scales, *codes)])


def fp8_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """The e4m3 codes of a matrix, and an fp32 scale `[rows]`: its row's largest value is 448."""
    wide, scales = values.float(), (values.abs().amax(1) / _MOST_E4M3).float()
    scaled = (wide / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).clamp(
        -_MOST_E4M3, _MOST_E4M3
    )
    return scaled.to(torch.float8_e4m3fn), scales


def operands(stored: Tensor, shape: Sequence[int]) -> dict[str, Tensor]:
    """A weight's codes `[O, I]` and scales `[1, O]`, as `FP8` keeps them, then turned codes."""
    kept, turned = stored.view(torch.uint8).split((FP8.bytes_of(shape), prod(shape)))
    codes, scales = FP8.parts(kept, shape)
    return {
        "codes": codes.view(torch.float8_e4m3fn).view(*shape),
        "scales": scales[None],
        "turned": turned.view(torch.float8_e4m3fn).view(shape[1], shape[0]),
    }


def write_operands(
    values: Tensor, of_rows: Tensor | None, codes: Tensor, scales: Tensor, turned: Tensor
) -> None:
    """Write a weight, given as values, or as codes with the scales of rows, to its operands."""
    if of_rows is None:
        values, of_rows = fp8_rows(values)
    codes.copy_(values)
    scales.copy_(of_rows[None])
    turned.copy_(values.t())


def _fp8_parts(stored: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    scales, codes = stored.split((4 * prod(shape[:-1]), prod(shape)))
    return codes, scales.view(torch.float32)


def _expand_fp8(codes: Tensor, scales: Tensor, values: Tensor, out: Tensor) -> None:
    wide = codes.view(torch.float8_e4m3fn).view(len(scales), -1).float()
    out.view(len(scales), -1).copy_(wide * scales[:, None])


def _no_values(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


def _expand_fp32(codes: Tensor, scales: Tensor, values: Tensor, out: Tensor) -> None:
    out.copy_(codes)


NF4 = WeightFormat("nf4", _nf4_bytes, _pack_nf4, _nf4_parts, _expand_nf4, _nf4_values)
NF4_WIDE = WeightFormat("nf4_wide", _wide_bytes, _pack_wide, _wide_parts, _expand_nf4, _nf4_values)
FP8 = WeightFormat("fp8", _fp8_bytes, _pack_fp8, _fp8_parts, _expand_fp8, _no_values)
OPERANDS = replace(FP8, name="operands", bytes_of=lambda shape: _fp8_bytes(shape) + prod(shape))
"""The operands of products in float8: FP8, and the codes turned, since they read along the sum."""
BASES = {each.name: each for each in (NF4, FP8)}
FP32 = WeightFormat(
    "fp32",
    bytes_of=lambda shape: 4 * prod(shape),
    pack=lambda values: values.float().contiguous().view(-1).view(torch.uint8),
    parts=lambda stored, shape: (stored.view(torch.float32),) * 2,
    expand=_expand_fp32,
    values=_no_values,
    computed=torch.float32,
)
PACKINGS = BASES | {each.name: each for each in (NF4_WIDE, FP32)}  # chosen by folders and models


def _factors(
    entry: "Entry", stored: Tensor, fast: Callable[[Any], Any]
) -> tuple[Tensor, Tensor | None]:
    """A parameter's values; or its codes and scales, where it is kept in float8."""
    shape = entry.shape
    if entry.packed is FP8:
        codes, scales = FP8.parts(stored.view(torch.uint8)[: FP8.bytes_of(shape)], shape)
        return codes.view(torch.float8_e4m3fn).view(shape), scales
    if entry.packed is None:
        return stored.view(shape), None
    values = stored.new_empty(shape)
    entry.packed.unpack(stored, values, fast)
    return values, None


Group = TypeVar("Group")

# Elements. 128 bf16 values are 256 bytes: every parameter starts on a boundary that the widest
# device loads and the host's cache lines both like.
ALIGNMENT = 128

# Of a tile: what numbers the elements of all tiles, whatever their sizes.
MOST_ELEMENTS = 1 << 40


class TileKind(Enum):
    """The kinds of a tile's parameters; the value is for people."""

    EMBEDDING = "embedding"
    PROLOGUE = "prologue"
    LAYER = "layer"
    HEAD = "head"
    MEDIA = "media"  # encoders of images and sounds, which steps on text alone leave out
    UNUSED = "unused"  # nothing reads them

    @property
    def in_every_step(self) -> bool:
        """True if each step computes with the parameters."""
        return self not in (TileKind.MEDIA, TileKind.UNUSED)


@dataclass(frozen=True)
class Entry:
    """One parameter inside a tile: its Hugging Face name, shape, offset (elements) and group.

    Attributes:
        group: index of the optimizer's parameter group at first; None: frozen.
        wide: it is frozen, and its source has bits that bf16 does not hold.
        packed: how it is kept in the weights plane; None: as its values.
        multiplied: layers compute with its `OPERANDS`.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int | None
    wide: bool = False
    packed: WeightFormat | None = None
    multiplied: bool = False

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def stored(self) -> int:
        """Elements of a plane that the parameter takes."""
        return self.numel if self.packed is None else -(-self.packed.bytes_of(self.shape) // 2)

    @property
    def is_packed(self) -> bool:
        """True if layers cannot compute with the parameter as it is kept."""
        return self.multiplied or self.packed not in (None, FP32, OPERANDS)

    def memory(self, flat: Tensor) -> Tensor:
        """The elements that it takes of a flat plane of its tile."""
        return flat[self.offset : self.offset + self.stored]

    def view(self, flat: Tensor) -> Tensor:
        """This parameter in a flat plane of its tile."""
        values = self.memory(flat)
        if self.packed is FP32:
            values = values.view(torch.float32)
        return values[: self.numel].view(self.shape)


class TileLayout:
    """The places of a tile's parameters.

    Attributes:
        name: for messages, traces and files (`layer 3`, `embedding`, `head`).
        kind: what the tile, or the tile that this is a slice of, is.
        entries: the parameters in storage order.
        numel: length of the weights plane, in elements.
        trainable_numel: length of the gradient and moment planes; a prefix of `numel`.
        parts: `(start, stop)` of what is trained, of its copies in fp32, and of what is frozen
            with and without bits that bf16 does not hold.
        copies: for each trained parameter that layers compute with in fp32, `(start, stop, at)` of
            its elements in each rank's block, and of the first copy, which is as long as two.
        ranks: into how many equal blocks each of these is cut.
    """

    def __init__(
        self,
        name: str,
        parameters: Iterable[tuple[str, torch.Size, int | None]],
        kind: TileKind = TileKind.LAYER,
        wide: Collection[str] = (),
        packed: Mapping[str, WeightFormat] | None = None,
        fp32: Collection[str] = (),
        multiplied: Collection[str] = (),
        *,
        ranks: int = 1,
        row: int = 1,
    ) -> None:
        """Args:
        parameters: as `(name, shape, group)`; group None means frozen.
        wide: names of those whose source has bits that bf16 does not hold.
        packed: how frozen ones are kept that are not kept as bf16, by name.
        fp32: names of those that layers compute with in fp32, whatever the type of the plane.
        multiplied: names of frozen ones that layers multiply by in float8.
        row: elements that no cut between ranks divides, counted from each part's beginning.
        """
        self.name, self.kind, self.ranks, self._row, self._fp32 = name, kind, ranks, row, fp32
        self.copies: dict[str, list[tuple[int, int, int]]] = {}
        cut = ranks * lcm(ALIGNMENT, row) if ranks > 1 else ALIGNMENT
        entries: list[Entry] = []
        offset = 0
        how = {**(packed or {}), **dict.fromkeys(fp32, FP32)}
        marked = [
            (n, shape, group, group is None and n in wide and n not in how)
            for n, shape, group in parameters
        ]
        later = {name for name, packing in how.items() if packing is not FP32}.union(multiplied)
        order = sorted(marked, key=lambda p: (p[2] is None, not p[3], p[0] in later, p[2] or 0))
        self.parts: list[tuple[int, int]] = []
        for (is_frozen, _), members in groupby(order, key=lambda p: (p[2] is None, p[3])):
            start = offset
            for parameter, shape, group, is_wide in members:
                packing = how.get(parameter) if group is None else None
                traits = is_wide, packing, is_frozen and parameter in multiplied
                entries.append(Entry(parameter, tuple(shape), offset, group, *traits))
                offset = align(offset + entries[-1].stored, ALIGNMENT)
            offset = align(offset, cut)
            self.parts.append((start, offset))
            if not is_frozen:
                offset = self._place_copies(entries, offset, cut)
        self.entries, self.numel = tuple(entries), offset
        self.trainable_numel = self.parts[0][1] if self.trainable else 0
        self.by_name = {entry.name: entry for entry in entries}

    def _place_copies(self, trained: Sequence[Entry], start: int, cut: int) -> int:
        """Lay out each rank's copies of its block, of `start` elements in all; returns their end.

        Blocks are equally long, since ranks gather them.
        """
        block, longest = start // self.ranks, 0
        places: list[tuple[str, int, int, int, int]] = []
        for rank in range(self.ranks):
            at = 0
            for entry in (entry for entry in trained if entry.name in self._fp32):
                first = max(entry.offset, rank * block)
                stop = min(entry.offset + entry.numel, (rank + 1) * block)
                if first < stop:
                    places.append((entry.name, first, stop, rank, at))
                    at = align(at + 2 * (stop - first), ALIGNMENT)
            longest = max(longest, at)
        length = align(longest, cut // self.ranks)
        for name, first, stop, rank, at in places:
            pieces = self.copies.setdefault(name, [])
            pieces.append((first, stop, start + rank * length + at))
        if length:
            self.parts.append((start, start + self.ranks * length))
        return start + self.ranks * length

    def computed(self, flat: Tensor) -> dict[str, Tensor]:
        """The weights that layers compute with, in the memory that `unpack` writes."""
        views = self.unpacked.views(flat)
        for entry in self.multiplied:
            del views[entry.name]
            path = entry.name.removesuffix("weight")
            of_entry = operands(entry.memory(flat), entry.shape).items()
            views |= {f"{path}{name}": values for name, values in of_entry}
        return views

    def values(self, flat: Tensor) -> dict[str, Tensor]:
        """Every parameter's values in the memory that `unpack` writes; copies of operands."""
        views = self.unpacked.views(flat)
        for entry in self.multiplied:
            views[entry.name] = flat.new_empty(entry.shape)
            FP8.unpack(entry.memory(flat), views[entry.name])
        return views

    @cached_property
    def multiplied(self) -> list[Entry]:
        """The parameters that layers multiply by in float8, where `unpack` writes them."""
        return [self.unpacked.by_name[entry.name] for entry in self.entries if entry.multiplied]

    @cached_property
    def is_packed(self) -> bool:
        """True if layers cannot compute with some parameters as they are kept."""
        return any(entry.is_packed for entry in self.entries)

    @cached_property
    def unpacked(self) -> "TileLayout":
        """The places of parameters once they are unpacked; of what is not packed the same."""
        if not self.is_packed:
            return self
        parameters = [(e.name, torch.Size(e.shape), e.group) for e in self.entries]
        wide = [e.name for e in self.entries if e.wide]
        packed = {e.name: OPERANDS for e in self.entries if e.multiplied}
        given = self.name, parameters, self.kind, wide, packed, self._fp32
        return TileLayout(*given, ranks=self.ranks, row=self._row)

    def unpack(self, stored: Tensor, out: Tensor, fast: Callable[[Any], Any]) -> None:
        """Write the parameters of the weights plane `stored` to `out`, laid out as `unpacked`.

        `fast` gives what a packing's `expand`, or `write_operands`, is compiled to.
        """
        plain = next((entry.offset for entry in self.entries if entry.is_packed), self.numel)
        out[:plain].copy_(stored[:plain])
        for entry in (entry for entry in self.entries if entry.offset >= plain):
            memory, to = entry.memory(stored), self.unpacked.by_name[entry.name]
            if entry.multiplied:
                written = operands(to.memory(out), to.shape)
                fast(write_operands)(*_factors(entry, memory, fast), *written.values())
            elif entry.packed is None:
                to.view(out).copy_(entry.view(stored))
            else:
                entry.packed.unpack(memory, to.view(out), fast)

    def blocks(self, rank: int) -> Iterator[tuple[int, int]]:
        """A rank's block of each part: its first element, and how many it has."""
        for start, stop in self.parts:
            size = (stop - start) // self.ranks
            yield start + rank * size, size

    def whole_parts(self, stop: int) -> int:
        """The end of the part that has element `stop - 1`, with several ranks; else `stop`."""
        if self.ranks == 1:
            return stop
        return min((end for _, end in self.parts if end >= stop), default=0) if stop else 0

    def runs(self, group_of: Mapping[str, Group]) -> list[tuple[Group, int, int]]:
        """`(group, start, stop)` of each contiguous run of trainable parameters of one group."""
        runs: list[tuple[Group, int, int]] = []
        for entry in self.trainable:
            group, start = group_of[entry.name], entry.offset
            stop = align(entry.offset + entry.numel, ALIGNMENT)
            if runs and runs[-1][0] == group:
                start = runs.pop()[1]
            runs.append((group, start, stop))
        return runs

    @property
    def num_parameters(self) -> int:
        """Parameters, padding not counted."""
        return sum(entry.numel for entry in self.entries)

    @property
    def num_trained(self) -> int:
        """Parameters that have a gradient."""
        return sum(entry.numel for entry in self.trainable)

    @cached_property
    def trainable(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.group is not None)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Every parameter of the tile, as layers compute with it, in its full-length weights."""
        views = {entry.name: entry.view(flat) for entry in self.entries}
        for name, pieces in self.copies.items():
            parts = [flat[at : at + 2 * (stop - start)] for start, stop, at in pieces]
            copy = parts[0] if len(parts) == 1 else torch.cat(parts)
            views[name] = copy.view(torch.float32).view(self.by_name[name].shape)
        return views
