"""A device as the engine uses it: buffers, streams, events, and work that is put on streams.

The work of one stream runs in order; two streams run at once unless an event orders them. Some
streams are host threads (the optimizer's update, the gathering of embedding rows), with the same
interface. So one schedule runs on a GPU, in program order on the CPU, and on the trace device that
only checks the order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from megatrain.telemetry.host import host_available_bytes

COMPUTE = "compute"  # layers, in order
COPY_IN = "copy in"  # host to device
COPY_OUT = "copy out"  # device to host
GATHER = "gather"  # between devices: all-gathers of weights and rows
REDUCE = "reduce"  # between devices: sums over the ranks
HOSTS = "hosts"  # between devices: sums over hosts that each keep the whole model
DEVICE_STREAMS = (COMPUTE, COPY_IN, COPY_OUT, GATHER, REDUCE, HOSTS)
UPDATE = "update"  # a host thread: optimizer
ROWS = "rows"  # a host thread: embedding rows in and out of the host planes
SAVE = "save"  # a host thread: hands pieces of a save to its writers
DISK_IN = "disk in"  # a host thread: reads planes from the disk, ahead of their updates
DISK_OUT = "disk out"  # a host thread: writes updated planes to the disk
DISK_WEIGHTS = "disk weights"  # a host thread: reads weights from the disk into slots
DISK_STREAMS = (DISK_IN, DISK_OUT, DISK_WEIGHTS)
HOST_STREAMS = (UPDATE, ROWS, SAVE, *DISK_STREAMS)


class Kind(Enum):
    """The kind of a piece of work, which tells forecasts how to price it."""

    LAYER = auto()  # forward
    LAYER_BACKWARD = auto()
    HEAD = auto()
    PROLOGUE = auto()  # the model's own forward around the layers, or its backward
    UPDATE = auto()
    ROUND = auto()  # rounds a gradient to the dtype in which it is sent
    PACK = auto()  # copies tensors one after the other before they are sent
    COLLECTIVE = auto()  # an all-gather or reduce-scatter: each rank keeps one block
    ALL_REDUCE = auto()  # each rank has the whole tensor before and after
    NOTE = auto()  # takes no device time
    OTHER = auto()  # takes the same time whenever it has the same buffers


class Memory(Enum):
    """The use of a buffer, unless it is a plane of tiles (PlaneKind); the value is for people."""

    SLOTS = "slots"
    SUMS = "sums and rows"
    KEPT_SUMS = "gradient sums"
    KEPT_WEIGHTS = "kept weights"
    GRADIENTS = "gradients on their way"
    ROWS = "rows on their way"
    LANES = "lanes of the host"
    DISK = "planes on their way from and to the disk"
    IN_PLACE = "host memory that the device's work uses"  # said only to forecasts
    OTHER = "small buffers"


class Name(str):
    """A name of work or of a buffer, with its kind: a Kind, Memory or PlaneKind."""

    kind: Enum

    def __new__(cls, kind: Enum, text: str) -> "Name":
        name = super().__new__(cls, text)
        name.kind = kind
        return name


def kind_of(name: str, default: Enum = Kind.OTHER) -> Enum:
    """The kind of work or of a buffer, from its name; `default` if the name has no kind."""
    return name.kind if isinstance(name, Name) else default


@dataclass(eq=False, slots=True, weakref_slot=True)
class Buffer:
    """A named range of memory as a flat tensor (on the meta device if the device computes nothing).

    `parts` are buffers that share memory with this one: an access to this one counts as an access
    to them.
    """

    name: str
    data: Tensor
    parts: tuple["Buffer", ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of this buffer and of its parts."""
        return (self.name, *(name for part in self.parts for name in part.names))

    def piece(self, start: int, stop: int) -> "Buffer":
        """Elements `start` to `stop`; access checks take the piece for the whole buffer."""
        whole = start == 0 and stop >= self.data.numel()
        return self if whole else Buffer(self.name, self.data[start:stop], self.parts)

    def as_bytes(self) -> "Buffer":
        """This range of memory as uint8."""
        return replace(self, data=self.data.view(torch.uint8))

    def values(self, place: slice = slice(None)) -> Tensor:
        """The elements as they are now; a copy if they rest on a disk."""
        return self.data[place]

    @contextmanager
    def writing(self, place: slice) -> Iterator[Tensor]:
        """Memory for elements; the caller writes all of them within the `with` block."""
        yield self.data[place]


@dataclass(frozen=True)
class Abilities:
    """A device's abilities: code outside this folder asks for these, never for the device's name.

    The exception are kernels, chosen by `Tensor.is_cuda` in the files that docs/devices.md lists.
    """

    shares_host_memory: bool = False  # its memory is the host's, so one limit holds for both
    reads_in_place: bool = False  # its work uses pinned `host` buffers (`Device.in_place`)
    counts_memory: bool = False  # it has memory of its own, and `Device.memory` says how much
    compiles: bool = True
    overlaps: bool = False  # copies and host threads run beside its work, not in program order
    attends_with_sums: bool = False  # its attention also returns the log-sum-exp of the softmax
    slow_dtypes: tuple[torch.dtype, ...] = ()  # dtypes for which it has no instructions
    # devices whose torch generators its work draws from, besides the CPU's
    generators: tuple[torch.device, ...] = ()


Buffers = Sequence[Buffer]
Work = Callable[[], Any]


class Device:
    """A place to compute, with its streams. Sizes are in elements of `dtype`.

    A method that a subclass does not define does nothing.
    """

    kind: str  # its name, for people and in checkpoints
    can: Abilities
    torch_device: torch.device

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        """Device memory, not initialised. Raises DoesNotFit."""
        raise NotImplementedError

    def host(self, name: str, numel: int, dtype: torch.dtype, *, pinned: bool) -> Buffer:
        """An exact-size host range of zeros. Raises DoesNotFit."""
        raise NotImplementedError

    def in_place(self, buffer: Buffer) -> Buffer:
        """A `host` buffer as work on COMPUTE sees it. Raises InputError: the device cannot."""
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Free a `host` buffer before `close`; waits until nothing uses it."""

    def run(
        self, stream: str, name: str, work: Work, reads: Buffers = (), writes: Buffers = ()
    ) -> Any:
        """Put `work` on a stream; return its result, or None if a host stream runs it later."""

    def copy(self, stream: str, to: Buffer, source: Buffer, numel: int | None = None) -> None:
        """Put a copy of the first `numel` elements on a stream."""

    def fetch(self, to: Tensor, source: Tensor) -> None:
        """Copy between device and host from within a host stream's work; done on return."""

    def record(self, stream: str) -> Any:
        """An event that passes when all work put on `stream` so far is done."""

    def mark(self, stream: str) -> Any:
        """Put a mark on a device stream, whose time is taken when the stream reaches it."""
        return 0.0

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks that have been reached."""
        return float(end - start)

    def wait(self, stream: str, event: Any, why: str) -> None:
        """Later work of `stream` starts after `event` (at once if None); `why` names the wait."""

    def synchronize(self, event: Any, why: str) -> None:
        """Block the caller until `event` has passed. Raises RunFailed if a host stream died."""

    def read(self, buffer: Buffer) -> list[float]:
        """The numbers in a host buffer as they are now; zeros if the device computes nothing."""
        return list(buffer.data.tolist())

    def seed(self, seed: int) -> None:
        """Reseed the random numbers of work put on COMPUTE after this."""

    def limit(self, device_bytes: int | None, host_bytes: int | None) -> None:
        """Limit the memory that this process takes from now on; None sets no limit.

        `device_bytes` are all that the driver shows for this process, `host_bytes` all resident
        memory of the process and its children. Raises DoesNotFit, InputError.
        """

    def memory(self) -> dict[str, int]:
        """Bytes of device memory, by use."""
        return {
            "device_bytes": 0,  # reserved by torch's allocator
            "device_peak_bytes": 0,  # the most reserved so far
            "device_used_bytes": 0,  # the part of the reserved bytes that tensors use
            "device_used_peak_bytes": 0,  # the most used so far
            "device_total_bytes": 0,  # of the device, or as `limit` allows
            "device_free_bytes": 0,  # the part of the total that no process has taken
            "device_context_bytes": 0,  # taken by the driver for this process
        }

    def close(self) -> None:
        """Finish all streams and free the memory."""


def available_bytes(device: Device) -> int:
    """Bytes of device memory that this process has or that are free."""
    memory = device.memory()
    return memory["device_free_bytes"] + memory["device_bytes"]


def free_bytes(device: Device, host_limit: int | None = None) -> int:
    """Unused bytes of the memory in which the device computes."""
    if not device.can.counts_memory:
        return host_available_bytes(host_limit)
    return available_bytes(device) - device.memory()["device_used_bytes"]


CALLER = "caller"  # the thread that puts work on streams counts as a stream, too


class MetaDevice(Device):
    """Computes nothing: its buffers have no memory, and its streams no order."""

    kind, can = "trace", Abilities()
    torch_device = torch.device("meta")

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        return Buffer(name, torch.empty(numel, dtype=dtype, device="meta"))

    def host(self, name: str, numel: int, dtype: torch.dtype, *, pinned: bool) -> Buffer:
        return Buffer(name, torch.empty(numel, dtype=dtype, device="meta"))

    def synchronize(self, event: Any, why: str) -> None:
        self.wait(CALLER, event, why)

    def read(self, buffer: Buffer) -> list[float]:
        self.run(CALLER, f"read {buffer.name}", lambda: None, [buffer])
        return [0.0] * buffer.data.numel()
