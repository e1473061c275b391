"""Tensors that wait from the forward to the backward, and where: layer inputs, graphs, attention.

A kept graph holds no weights and no inputs of its own: in the backward its layer's weights are in a
slot again, and its inputs are given again. All else that it saved either stays on the device or
waits in pinned host memory: out through a few lanes, back ahead of its use.

Attention's results are kept as torch.utils.checkpoint's selective checkpointing does it, beneath
autograd: of a row of 512 k tokens, to compute attention again is a fifth of a step. The output and
the logarithms of the softmax's sums are all that its backward needs besides queries, keys, values.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatrain.base.units import align
from megatrain.compat.torch import FakeTensor, TorchDispatchMode, memory_of, pytree, schema_of
from megatrain.device import Buffer, Device
from megatrain.device.base import COMPUTE, COPY_IN, COPY_OUT, Kind, Memory, Name
from megatrain.engine.modules import StreamedModule
from megatrain.model.micro_batch import Activations
from megatrain.store.store import Lane

_STEP = 256  # bytes: every tensor starts on a boundary that the widest loads like

_KEEP, _GIVE = Name(Kind.NOTE, "keep"), Name(Kind.NOTE, "give")
_WEIGHTS = "weights"


@dataclass(frozen=True)
class _View:
    """A tensor described by its place in memory that the backward can find again."""

    source: Any  # _WEIGHTS; a Ref: an input; a number: one of `OffloadPlan.memory`
    start: int  # bytes
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The byte after the view's last one."""
        reach = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.start + (reach + 1) * self.dtype.itemsize

    def on(self, memory: Tensor) -> Tensor:
        """The piece of `memory` at this place."""
        start = memory.storage_offset() * memory.itemsize + self.start
        piece = torch.empty(0, dtype=self.dtype, device=memory.device)
        offset = start // self.dtype.itemsize
        return piece.set_(memory.untyped_storage(), offset, self.size, self.stride)


class OffloadPlan:
    """Collects whole allocations to send to the host, so that all views of them are kept."""

    def __init__(self) -> None:
        self.memory: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def view(self, tensor: Tensor) -> _View:
        """Plan to send the tensor's allocation; the tensor's place in it."""
        memory = memory_of(tensor)
        if memory not in self._numbers:
            self._numbers[memory] = len(self.memory)
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self.memory.append(flat.set_(tensor.untyped_storage()))
        return _view(tensor, self._numbers[memory], 0)


def _view(tensor: Tensor, source: Any, begin: int) -> _View:
    start = int(tensor.storage_offset()) * tensor.itemsize - begin
    return _View(source, start, tensor.dtype, tensor.size(), tensor.stride())


class SavedTensors:
    """The tensors saved by a graph that is made within `saving()` and waits for its backward."""

    def __init__(
        self, weights: Tensor, inputs: Activations, outside: Iterable, leaving: OffloadPlan | None
    ) -> None:
        """Args: `outside`: other arguments, which stay on the device; `leaving` None: all stay."""
        self._memory: dict[Any, Tensor] = {_WEIGHTS: weights, **inputs}  # by `_View.source`
        self._leaving = leaving
        self._known: dict[int, Any] = {
            memory_of(value): ref for ref, value in inputs.items() if value.is_contiguous()
        }
        self._known[memory_of(weights)] = _WEIGHTS
        self._outside = {memory_of(leaf) for leaf in outside if isinstance(leaf, Tensor)}

    def saving(self) -> saved_tensors_hooks:
        """Within this context autograd hands its saved tensors to this object."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def let_go(self) -> None:
        """Drop references to weights, inputs and tensors that leave, so that they can be freed."""
        self._memory, self._leaving = {}, None

    def give_back(self, weights: Tensor, inputs: Activations, returned: list[Tensor]) -> None:
        """Before the backward: set weights, inputs and tensors that are back from the host."""
        self._memory = {_WEIGHTS: weights, **inputs, **dict(enumerate(returned))}

    def _pack(self, tensor: Tensor) -> Any:
        if isinstance(tensor, FakeTensor):  # a compiler at work
            return tensor
        memory = memory_of(tensor)
        if memory in self._known:
            source = self._known[memory]
            base = self._memory[source]
            view = _view(tensor, source, int(base.storage_offset()) * base.itemsize)
            if view.start >= 0 and view.stop <= base.nbytes:
                return view  # else it lies beside an input that is part of something larger
        if self._leaving is None or memory in self._outside:
            return tensor.detach()
        return self._leaving.view(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.on(self._memory[packed.source])


@dataclass
class _Item:
    room: Buffer
    num_bytes: int
    tensors: list[tuple[torch.Size, torch.dtype, int]]  # shape, type, bytes
    landed: Any


@dataclass
class _Rooms:
    """The host ranges of one group of items, as few as possible."""

    buffers: list[Buffer] = field(default_factory=list)
    at: int = 0  # the range in use
    offset: int = 0


class HostOffload:
    """Moves items (a few tensors each) to the host and back, `lanes` of them each way at a time."""

    def __init__(self, device: Device, what: str, lanes: int) -> None:
        self._device, self._what = device, what
        self._staging = Name(Kind.PACK, f"stage {what}")
        self._out = [_lane(f"leaving {what} {i}") for i in range(lanes)]
        self._in = [_lane(f"returning {what} {i}") for i in range(lanes)]
        self._rooms: dict[Hashable, _Rooms] = {}
        self._items: dict[Hashable, _Item] = {}
        self._order: list[Hashable] = []
        self._sent = self._fetched = self._num_taken = 0

    @property
    def host_bytes(self) -> int:
        return sum(r.data.nbytes for group in self._rooms.values() for r in group.buffers)

    def begin(self) -> None:
        """Begin a step: forget all items."""
        self._items.clear()
        self._order = []
        self._fetched = self._num_taken = 0
        for group in self._rooms.values():
            group.at = group.offset = 0

    def release(self) -> None:
        """Free all memory, between two steps."""
        self.begin()
        for group in self._rooms.values():
            for buffer in group.buffers:
                self._device.free(buffer)
        self._rooms.clear()
        for lane in (*self._out, *self._in):
            lane.buffer, lane.free = _lane(lane.buffer.name).buffer, None

    def send(
        self, group: Hashable, key: Hashable, tensors: Sequence[Tensor], later_bytes: int = 0
    ) -> None:
        """Send an item to the host.

        Args:
            group: items of one group share host ranges.
            tensors: contiguous; empty where nothing is computed.
            later_bytes: that the group will send after it in this step, as far as is known.
        """
        device, lane = self._device, self._out[self._sent % len(self._out)]
        self._sent += 1
        num_bytes = packed_bytes(tensors)
        device.wait(COMPUTE, lane.free, f"leaving {self._what} lane free")
        buffer = self._sized(lane, num_bytes)
        stage = partial(_pack, tensors, buffer.data)
        device.run(COMPUTE, self._staging, stage, writes=[buffer.piece(0, num_bytes)])
        device.wait(COPY_OUT, device.record(COMPUTE), f"{self._what} ready")
        host_buffer = self._room(group, key, num_bytes, later_bytes)
        device.copy(COPY_OUT, host_buffer, buffer, num_bytes)
        lane.free = device.record(COPY_OUT)
        sizes = [(tensor.shape, tensor.dtype, tensor.nbytes) for tensor in tensors]
        self._items[key] = _Item(host_buffer, num_bytes, sizes, lane.free)

    def expect(self, *takes: Sequence[Hashable]) -> None:
        """Announce the keys of the next `take`s, in their order; they come before earlier ones."""
        self._order = [key for keys in takes for key in keys] + self._order
        for index in range(len(self._in), max(map(len, takes), default=0)):
            self._in.append(_lane(f"returning {self._what} {index}"))

    def take(self, num: int) -> Iterator[tuple[list[list[Tensor]], list[Buffer]]]:
        """Yield the next `num` items and their buffers, which hold until the iterator goes on."""
        self.fetch_ahead()
        lanes = [self._in[(self._num_taken + i) % len(self._in)] for i in range(num)]
        keys = self._order[self._num_taken : self._num_taken + num]
        for lane in lanes:
            self._device.wait(COMPUTE, lane.ready, f"{self._what} returned")
        items = [
            _views(self._items[key], lane.buffer) for key, lane in zip(keys, lanes, strict=True)
        ]
        yield items, [lane.buffer for lane in lanes]
        done = self._device.record(COMPUTE)
        for lane in lanes:
            lane.free = done
        self._num_taken += num

    def fetch_ahead(self) -> None:
        """Start the return of as many items as there are lanes."""
        stop = min(self._num_taken + len(self._in), len(self._order))
        while self._fetched < stop:
            item = self._items[self._order[self._fetched]]
            lane = self._in[self._fetched % len(self._in)]
            buffer = self._sized(lane, item.num_bytes)
            self._device.wait(COPY_IN, item.landed, f"{self._what} landed")
            self._device.wait(COPY_IN, lane.free, f"returning {self._what} lane free")
            self._device.copy(COPY_IN, buffer, item.room, item.num_bytes)
            lane.ready = self._device.record(COPY_IN)
            self._fetched += 1

    def _sized(self, lane: Lane, num_bytes: int) -> Buffer:
        if lane.free is None or lane.buffer.data.nbytes < num_bytes:
            name = Name(Memory.LANES, lane.buffer.name)
            lane.buffer = _lane(name).buffer  # what it had is given back first
            lane.buffer = self._device.empty(name, num_bytes, torch.uint8)
            # Device memory is free to use only in the order of COMPUTE, where it was given.
            lane.free = self._device.record(COMPUTE)
        return lane.buffer

    def _room(self, group: Hashable, key: Hashable, num_bytes: int, later_bytes: int) -> Buffer:
        """A piece of the group's host ranges; ranges of earlier steps are reused in order."""
        ranges = self._rooms.setdefault(group, _Rooms())
        while ranges.at < len(ranges.buffers):
            data = ranges.buffers[ranges.at].data
            if ranges.offset + num_bytes <= len(data):
                break
            if ranges.offset:
                ranges.at, ranges.offset = ranges.at + 1, 0
            else:  # outgrown
                self._device.free(ranges.buffers.pop(ranges.at))
        else:
            name = Name(Memory.LANES, f"{self._what} {group}")
            size = num_bytes + later_bytes
            ranges.buffers.append(self._device.host(name, size, torch.uint8, pinned=True))
        start = ranges.offset
        ranges.offset += num_bytes
        data = ranges.buffers[ranges.at].data[start : ranges.offset]
        return Buffer(f"{self._what} {key}", data)


def _lane(name: str) -> Lane:
    """A lane whose memory is taken when it is first used, and its size is known."""
    return Lane(Buffer(name, torch.empty(0, dtype=torch.uint8)))


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of an item's tensors, each aligned."""
    stop = 0
    for tensor in tensors:
        stop = align(stop, _STEP) + tensor.nbytes
    return stop


def _pack(tensors: Sequence[Tensor], flat: Tensor) -> None:
    offset = 0
    for tensor in tensors:
        flat[offset : offset + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
        offset += align(tensor.nbytes, _STEP)


def _views(item: _Item, buffer: Buffer) -> list[Tensor]:
    views, offset = [], 0
    for shape, dtype, num_bytes in item.tensors:
        views.append(buffer.data[offset : offset + num_bytes].view(dtype).view(shape))
        offset += align(num_bytes, _STEP)
    return views


class DeviceBoundaries:
    """Keeps layer inputs on the device.

    Keeping and giving are pieces of work, so that the launching thread is no further ahead.
    """

    host_bytes = 0

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: list[Activations] = []

    def begin(self, num_micro: int) -> None:
        """Forget everything; a step of `num_micro` micro-batches begins."""
        self._kept = [{} for _ in range(num_micro)]

    def put(self, unit: StreamedModule, h: list[Activations]) -> None:
        """Keep those inputs of `unit` that no unit before it reads."""

        def keep(stored: Activations, values: Activations) -> None:
            stored.update({ref: values[ref] for ref in unit.new_inputs if ref in values})

        for pair in zip(self._kept, h, strict=True):
            self._device.run(COMPUTE, _KEEP, partial(keep, *pair))

    def take(self, unit: StreamedModule) -> Iterator[Activations]:
        """The unit's inputs, one micro-batch after the other; each holds until the next."""

        def give(stored: Activations) -> Activations:
            inputs = {ref: stored[ref] for ref in unit.inputs if ref in stored}
            for ref in unit.new_inputs:
                stored.pop(ref, None)
            return inputs

        for stored in self._kept:
            yield self._device.run(COMPUTE, _GIVE, partial(give, stored))


class HostBoundaries:
    """`DeviceBoundaries` in pinned host memory, fetched again ahead of their backward."""

    def __init__(self, device: Device, lanes: int) -> None:
        self._device = device
        self._offload = HostOffload(device, "boundary", lanes)
        self._num_micro = 0

    @property
    def host_bytes(self) -> int:
        return self._offload.host_bytes

    def begin(self, num_micro: int) -> None:
        self._num_micro = num_micro
        self._offload.begin()

    def put(self, unit: StreamedModule, h: list[Activations]) -> None:
        """Send those inputs of `unit` to the host that no unit before it reads."""
        keys = [(index, ref) for index in range(self._num_micro) for ref in unit.new_inputs]
        # Where nothing is computed there are no values, nor does a forward always add some.
        values = [[h[i][ref].contiguous()] if h[i] and ref in h[i] else [] for i, ref in keys]
        later_bytes = sum(map(packed_bytes, values))
        for key, tensors in zip(keys, values, strict=True):
            later_bytes -= packed_bytes(tensors)
            self._offload.send(unit.visit, key, tensors, later_bytes)
        self._offload.expect(
            *([(index, ref) for ref in unit.inputs] for index in range(self._num_micro))
        )

    def take(self, unit: StreamedModule) -> Iterator[Activations]:
        for _ in range(self._num_micro):
            for items, buffers in self._offload.take(len(unit.inputs)):
                pairs = zip(unit.inputs, items, strict=True)
                give: partial[Activations] = partial(
                    dict, [(ref, item[0]) for ref, item in pairs if item]
                )
                yield self._device.run(COMPUTE, _GIVE, give, reads=buffers)


_KERNELS = "flash", "efficient", "cudnn"
_OPERATIONS = {
    *(f"aten::_scaled_dot_product_{kernel}_attention" for kernel in _KERNELS),
    *(f"aten::_{kernel}_attention_forward" for kernel in _KERNELS),
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "megatrain::causal_attention",
}


def _is_attention(func: Any, args: tuple, kwargs: dict) -> bool:
    """True for attention without dropout, whose random numbers would have to be drawn again."""
    if schema_of(func).name not in _OPERATIONS:
        return False
    names = [argument.name for argument in schema_of(func).arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    return not arguments.get("dropout_p")


class KeepAttention(TorchDispatchMode):
    """Keeps the results of attention within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_attention(func, args, kwargs or {}):
            self.results.append(pytree.tree_map_only(Tensor, Tensor.detach, result))
        return result


class ReplayAttention(TorchDispatchMode):
    """Gives results kept instead of computing attention, in the same order."""

    def __init__(self, results: list[Any], returned: list[Tensor]) -> None:
        """Args: `returned`: what `OffloadPlan.view` has sent to the host, back from there."""
        super().__init__()
        kept = pytree.tree_map_only(_View, lambda view: view.on(returned[view.source]), results)
        self._results = iter(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_attention(func, args, kwargs or {}):
            return pytree.tree_map_only(Tensor, Tensor.detach, next(self._results))
        return func(*args, **(kwargs or {}))
