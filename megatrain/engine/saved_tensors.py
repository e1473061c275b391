"""Tensors that wait from the forward to the backward: layer inputs, graphs, results of attention.

A kept graph refers neither to its layer's weights nor to its inputs, which are restored before the
backward. Other saved tensors stay on the device or wait in pinned host memory.

Results of attention are kept beneath autograd, as in the selective checkpointing of
torch.utils.checkpoint: to compute attention again for a row of 512 k tokens is a fifth of a step.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

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

_ALIGNMENT = 256  # bytes: every tensor starts on a boundary that the widest loads like

_KEEP, _GIVE = Name(Kind.NOTE, "keep"), Name(Kind.NOTE, "give")
_WEIGHTS = "weights"


@dataclass(frozen=True)
class _View:
    """A saved tensor, described as a view of memory that the backward has again."""

    source: Any  # the memory: _WEIGHTS, an input's Ref, or a `_Leaving`
    start: int  # the view's first byte in that memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def of(self, memories: Mapping[Any, Tensor]) -> Tensor:
        """This view of its source, one of `memories`."""
        is_leaving = isinstance(self.source, _Leaving)
        memory = memories[self.source.data if is_leaving else self.source]
        start = memory.storage_offset() * memory.itemsize + self.start
        piece = torch.empty(0, dtype=self.dtype, device=memory.device)
        offset = start // self.dtype.itemsize
        return piece.set_(memory.untyped_storage(), offset, self.size, self.stride)


@dataclass(eq=False)
class _Leaving:
    """An allocation that a graph has saved: its bytes, then its place in `OffloadPlan.memory`."""

    data: Tensor | int


class OffloadPlan:
    """Collects the allocations to send to the host, each once, however many views are saved.

    Until `end` only the views keep an allocation alive: if a forward drops a graph (of DoRA's
    norms), the allocations that this graph saved are freed and do not leave.
    """

    def __init__(self) -> None:
        self.memory: list[Any] = []  # the allocations to send, known at the forward's end
        self._saved: WeakValueDictionary[int, _Leaving] = WeakValueDictionary()

    def view(self, tensor: Tensor) -> _View:
        """The tensor as a view of its allocation, which will leave."""
        leaving = self._saved.get(memory_of(tensor))
        if leaving is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            leaving = _Leaving(flat.set_(tensor.untyped_storage()))
            self._saved[memory_of(tensor)] = leaving
        return _view(tensor, leaving, 0)

    def end(self) -> None:
        """End the forward: move the allocations that still have views to `memory`."""
        for leaving in [*self._saved.values()]:
            self.memory.append(leaving.data)
            leaving.data = len(self.memory) - 1


def _view(tensor: Tensor, source: Any, begin: int) -> _View:
    start = int(tensor.storage_offset()) * tensor.itemsize - begin
    return _View(source, start, tensor.dtype, tensor.size(), tensor.stride())


class SavedTensors:
    """The tensors saved by a graph that is made within `saving()` and waits for its backward."""

    def __init__(
        self, weights: Tensor, inputs: Activations, outside: Iterable, leaving: OffloadPlan | None
    ) -> None:
        """Args:
        outside: other arguments of the layer, which stay on the device.
        leaving: collects the tensors that go to the host; None: all stay on the device.
        """
        self._memory: dict[Any, Tensor] = {_WEIGHTS: weights, **inputs}  # by `_View.source`
        self._leaving = leaving
        self._sources: dict[int, Any] = {
            memory_of(value): ref for ref, value in inputs.items() if value.is_contiguous()
        }
        self._sources[memory_of(weights)] = _WEIGHTS
        self._outside = {memory_of(leaf) for leaf in outside if isinstance(leaf, Tensor)}

    def saving(self) -> saved_tensors_hooks:
        """Within this context autograd hands its saved tensors to this object."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def release(self) -> None:
        """Drop references to weights, inputs and tensors that leave, so that they can be freed."""
        self._memory, self._leaving = {}, None

    def restore(self, weights: Tensor, inputs: Activations, returned: list[Tensor]) -> None:
        """Before the backward, set weights, inputs and the tensors `returned` from the host."""
        self._memory = {_WEIGHTS: weights, **inputs, **dict(enumerate(returned))}

    def _pack(self, tensor: Tensor) -> Any:
        if isinstance(tensor, FakeTensor):  # a compiler at work
            return tensor
        memory = memory_of(tensor)
        if memory in self._sources:
            source = self._sources[memory]
            base = self._memory[source]
            view = _view(tensor, source, int(base.storage_offset()) * base.itemsize)
            last = sum((n - 1) * step for n, step in zip(view.size, view.stride, strict=True))
            stop = view.start + (last + 1) * tensor.itemsize
            if view.start >= 0 and stop <= base.nbytes:
                return view  # else the tensor lies beside the input in a larger allocation
        if self._leaving is None or memory in self._outside:
            return tensor.detach()
        return self._leaving.view(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.of(self._memory)


@dataclass
class _Item:
    """Tensors that have been sent to the host together."""

    host_buffer: Buffer
    num_bytes: int
    tensors: list[tuple[torch.Size, torch.dtype, int]]  # shape, type, bytes
    landed: Any  # event after which they are in `host_buffer`


@dataclass
class _HostRanges:
    """The host memory of one group of items, in as few allocations as possible."""

    buffers: list[Buffer] = field(default_factory=list)
    current: int = 0  # number of the buffer that is being filled
    offset: int = 0  # bytes of that buffer that are in use


class HostOffload:
    """Moves items (a few tensors each) to the host and back, `lanes` of them each way at a time."""

    def __init__(self, device: Device, item: str, lanes: int) -> None:
        """Args: `item`: a word for an item, in names of work and waits."""
        self._device, self._item = device, item
        self._staging = Name(Kind.PACK, f"stage {item}")
        self._out = [_empty_lane(f"leaving {item} {i}") for i in range(lanes)]
        self._in = [_empty_lane(f"returning {item} {i}") for i in range(lanes)]
        self._ranges: dict[Hashable, _HostRanges] = {}
        self._items: dict[Hashable, _Item] = {}
        self._order: list[Hashable] = []
        self._sent = self._fetched = self._num_taken = 0

    @property
    def host_bytes(self) -> int:
        buffers = [buffer for ranges in self._ranges.values() for buffer in ranges.buffers]
        return sum(buffer.data.nbytes for buffer in buffers)

    def begin(self) -> None:
        """Begin a step: forget all items."""
        self._items.clear()
        self._order = []
        self._fetched = self._num_taken = 0
        for ranges in self._ranges.values():
            ranges.current = ranges.offset = 0

    def release(self) -> None:
        """Free all memory, between two steps."""
        self.begin()
        for ranges in self._ranges.values():
            for buffer in ranges.buffers:
                self._device.free(buffer)
        self._ranges.clear()
        for lane in (*self._out, *self._in):
            lane.buffer, lane.free = _empty_lane(lane.buffer.name).buffer, None

    def send(
        self, group: Hashable, key: Hashable, tensors: Sequence[Tensor], later_bytes: int = 0
    ) -> None:
        """Send an item to the host.

        Args:
            group: items of one group share host ranges.
            tensors: contiguous; empty where nothing is computed.
            later_bytes: bytes that the group will send after this item in the step, if known.
        """
        device, lane = self._device, self._out[self._sent % len(self._out)]
        self._sent += 1
        num_bytes = packed_bytes(tensors)
        device.wait(COMPUTE, lane.free, f"leaving {self._item} lane free")
        buffer = self._sized(lane, num_bytes)
        stage = partial(_pack, tensors, buffer.data)
        device.run(COMPUTE, self._staging, stage, writes=[buffer.piece(0, num_bytes)])
        device.wait(COPY_OUT, device.record(COMPUTE), f"{self._item} ready")
        host_buffer = self._room(group, key, num_bytes, later_bytes)
        device.copy(COPY_OUT, host_buffer, buffer, num_bytes)
        lane.free = device.record(COPY_OUT)
        sizes = [(tensor.shape, tensor.dtype, tensor.nbytes) for tensor in tensors]
        self._items[key] = _Item(host_buffer, num_bytes, sizes, lane.free)

    def expect(self, *takes: Sequence[Hashable]) -> None:
        """Announce the keys of `take`s, which come before the takes that were announced earlier."""
        self._order = [key for keys in takes for key in keys] + self._order
        for index in range(len(self._in), max(map(len, takes), default=0)):
            self._in.append(_empty_lane(f"returning {self._item} {index}"))

    def take(self, num: int) -> Iterator[tuple[list[list[Tensor]], list[Buffer]]]:
        """Yield once: the next `num` items and their buffers, valid until the iterator goes on."""
        self.fetch_ahead()
        lanes = [self._in[(self._num_taken + i) % len(self._in)] for i in range(num)]
        keys = self._order[self._num_taken : self._num_taken + num]
        for lane in lanes:
            self._device.wait(COMPUTE, lane.ready, f"{self._item} returned")
        items = [
            _views(self._items[key], lane.buffer) for key, lane in zip(keys, lanes, strict=True)
        ]
        yield items, [lane.buffer for lane in lanes]
        done = self._device.record(COMPUTE)
        for lane in lanes:
            lane.free = done
        self._num_taken += num

    def fetch_ahead(self) -> None:
        """Start to copy back as many items as there are lanes."""
        stop = min(self._num_taken + len(self._in), len(self._order))
        while self._fetched < stop:
            item = self._items[self._order[self._fetched]]
            lane = self._in[self._fetched % len(self._in)]
            buffer = self._sized(lane, item.num_bytes)
            self._device.wait(COPY_IN, item.landed, f"{self._item} landed")
            self._device.wait(COPY_IN, lane.free, f"returning {self._item} lane free")
            self._device.copy(COPY_IN, buffer, item.host_buffer, item.num_bytes)
            lane.ready = self._device.record(COPY_IN)
            self._fetched += 1

    def _sized(self, lane: Lane, num_bytes: int) -> Buffer:
        """The lane's buffer, replaced by a larger one if it is too small."""
        if lane.free is None or lane.buffer.data.nbytes < num_bytes:
            name = Name(Memory.LANES, lane.buffer.name)
            lane.buffer = _empty_lane(name).buffer  # frees the old buffer first
            lane.buffer = self._device.empty(name, num_bytes, torch.uint8)
            # torch's allocator orders by COMPUTE alone: other streams wait until COMPUTE is here.
            lane.free = self._device.record(COMPUTE)
        return lane.buffer

    def _room(self, group: Hashable, key: Hashable, num_bytes: int, later_bytes: int) -> Buffer:
        """A piece of the group's host memory; buffers of earlier steps are reused in order."""
        ranges = self._ranges.setdefault(group, _HostRanges())
        while ranges.current < len(ranges.buffers):
            data = ranges.buffers[ranges.current].data
            if ranges.offset + num_bytes <= data.numel():
                break
            if ranges.offset:
                ranges.current, ranges.offset = ranges.current + 1, 0
            else:  # an empty buffer is too small
                self._device.free(ranges.buffers.pop(ranges.current))
        else:
            name = Name(Memory.LANES, f"{self._item} {group}")
            size = num_bytes + later_bytes
            ranges.buffers.append(self._device.host(name, size, torch.uint8, pinned=True))
        start = ranges.offset
        ranges.offset += num_bytes
        data = ranges.buffers[ranges.current].data[start : ranges.offset]
        return Buffer(f"{self._item} {key}", data)


def _empty_lane(name: str) -> Lane:
    """A lane without memory, which is allocated when the size of its first item is known."""
    return Lane(Buffer(name, torch.empty(0, dtype=torch.uint8)))


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of an item's tensors, each aligned."""
    stop = 0
    for tensor in tensors:
        stop = align(stop, _ALIGNMENT) + tensor.nbytes
    return stop


def _pack(tensors: Sequence[Tensor], flat: Tensor) -> None:
    offset = 0
    for tensor in tensors:
        flat[offset : offset + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
        offset += align(tensor.nbytes, _ALIGNMENT)


def _views(item: _Item, buffer: Buffer) -> list[Tensor]:
    views, offset = [], 0
    for shape, dtype, num_bytes in item.tensors:
        views.append(buffer.data[offset : offset + num_bytes].view(dtype).view(shape))
        offset += align(num_bytes, _ALIGNMENT)
    return views


class DeviceBoundaries:
    """Keeps layer inputs on the device, by work on COMPUTE, whose launches forecasts count."""

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
        """Yield the unit's inputs by micro-batch, each valid until the next is asked for."""

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
        # A device that computes nothing has no values; others may lack what images add.
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
                inputs = {ref: i[0] for ref, i in zip(unit.inputs, items, strict=True) if i}
                yield self._device.run(COMPUTE, _GIVE, partial(dict, inputs), reads=buffers)


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
    """Returns the kept results of attention, in their order, instead of computing them again."""

    def __init__(self, results: list[Any], returned: list[Tensor]) -> None:
        """Args: `returned`: the memory of an `OffloadPlan`, back from the host."""
        super().__init__()
        memories = dict(enumerate(returned))
        kept = pytree.tree_map_only(_View, lambda view: view.of(memories), results)
        self._results = iter(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_attention(func, args, kwargs or {}):
            return pytree.tree_map_only(Tensor, Tensor.detach, next(self._results))
        return func(*args, **(kwargs or {}))
