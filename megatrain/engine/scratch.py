"""Device memory that one visit after the other works in: gradient sums, embedding rows.

One range, as large as the largest visit needs:

    | fp32 sums of a tile's gradient ...................... | rows, if they are kept |
    | sums of a small prologue | sums of the rows, fp32 | rows |

The first line is a layer or the head, the second the backward of the prologue, or of encoders of
images and sounds. Rows that are not kept
lie where the sums are; they are brought again for the backward.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.base.units import align
from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, Memory, Name

_STEP = 128  # fp32 elements: every piece starts on a boundary that the widest loads like


class ScratchArena:
    """The memory range. Only COMPUTE touches it, except for the rows."""

    def __init__(self, device: Device, numel: int, prologue: int, dtype: torch.dtype) -> None:
        """Args: `numel`: gradient elements of the largest tile; `prologue`: of that one,
        or of the encoders before it, if that is larger."""
        self._device, self._dtype = device, dtype
        self._numel, self._prologue = align(numel, _STEP), align(prologue, _STEP)
        self._memory: Tensor
        self._overlapping: tuple[Buffer, ...] = ()
        self._take(self._numel)

    def _take(self, numel: int) -> None:
        name = Name(Memory.SUMS, "scratch arena")
        self._memory = self._device.empty(name, numel, torch.float32).data

    def sums(self, numel: int) -> Buffer:
        """Room for `numel` fp32 sums, not cleared."""
        return Buffer("gradient sums", self._memory[:numel], self._overlapping)

    def tables(
        self, names: Sequence[str], lengths: Sequence[int], summed: Sequence[int], *, kept: bool
    ) -> list[tuple[Buffer, Buffer]]:
        """Buffers for each table's rows in a step, and for the sums of their gradients.

        They hold until the next call. The range grows if it must.

        Args:
            lengths: elements of each table's rows; `summed`: of their gradients.
            kept: the tiles' `sums` must not overlap the rows.
        """
        self._overlapping = ()
        sums, stop = _in_a_row(summed, self._prologue)
        in_fp32 = [-(-length * self._dtype.itemsize // 4) for length in lengths]
        rows, stop = _in_a_row(in_fp32, max(stop, self._numel) if kept else stop)
        if stop > len(self._memory):
            del self._memory
            self._take(stop)
        rooms = [
            (
                Buffer(f"{name} rows", self._memory[row:].view(self._dtype)[:length]),
                Buffer(f"{name} row gradients", self._memory[start : start + numel]),
            )
            for name, length, numel, start, row in zip(
                names, lengths, summed, sums, rows, strict=True
            )
        ]
        every = [buffer for room in rooms for buffer in room]
        self._overlapping = tuple(sums for _, sums in rooms) if kept else tuple(every)
        # Earlier sums in this memory were used in the order of COMPUTE; earlier rows have left,
        # since a step ends when all its copies out have ended.
        self._device.run(COMPUTE, "lay out rows", lambda: None, writes=every)
        return rooms


def _in_a_row(lengths: Sequence[int], offset: int) -> tuple[list[int], int]:
    """The starts of pieces placed one after the other from `offset`, and the end of the last."""
    starts = []
    for length in lengths:
        starts.append(offset)
        offset = align(offset + length, _STEP)
    return starts, offset
