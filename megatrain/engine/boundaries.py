"""Activations between the sweeps: layer inputs wait for the backward that recomputes from them."""

from collections.abc import Iterator
from functools import partial

from megatrain.device import Device
from megatrain.device.base import COMPUTE, Kind, Name
from megatrain.engine.host_offload import HostOffload, packed_bytes
from megatrain.engine.modules import StreamedModule
from megatrain.model.program import Activations

_KEEP, _GIVE = Name(Kind.NOTE, "keep"), Name(Kind.NOTE, "give")


class DeviceBoundaries:
    """Keeps layer inputs on the device."""

    host_bytes = 0

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: list[Activations] = []

    def begin(self, num_micro: int) -> None:
        """Forget everything; a step of `num_micro` micro-batches begins."""
        self._kept = [{} for _ in range(num_micro)]

    def put(self, unit: StreamedModule, h: list[Activations]) -> None:
        """Keep those inputs of `unit` that no unit before it reads."""

        def keep(kept: Activations, values: Activations) -> None:
            kept.update({ref: values[ref] for ref in unit.new_inputs if ref in values})

        for pair in zip(self._kept, h, strict=True):
            self._device.run(COMPUTE, _KEEP, partial(keep, *pair))

    def take(self, unit: StreamedModule) -> Iterator[Activations]:
        """The unit's inputs, one micro-batch after the other; each holds until the next."""

        def give(kept: Activations) -> Activations:
            inputs = {ref: kept[ref] for ref in unit.inputs if ref in kept}
            for ref in unit.new_inputs:
                kept.pop(ref, None)
            return inputs

        for kept in self._kept:
            yield self._device.run(COMPUTE, _GIVE, partial(give, kept))


class HostBoundaries:
    """Keeps layer inputs in pinned host memory, fetched again ahead of their backward."""

    def __init__(self, device: Device, lanes: int) -> None:
        self._device = device
        self._offload = HostOffload(device, "boundary", lanes, lanes)
        self._num_micro = 0

    @property
    def host_bytes(self) -> int:
        """Pinned host memory held."""
        return self._offload.host_bytes

    def begin(self, num_micro: int) -> None:
        """Forget everything; a step of `num_micro` micro-batches begins."""
        self._num_micro = num_micro
        self._offload.begin()

    def put(self, unit: StreamedModule, h: list[Activations]) -> None:
        """Send those inputs of `unit` to the host that no unit before it reads."""
        keys = [(index, ref) for index in range(self._num_micro) for ref in unit.new_inputs]
        # Where nothing is computed there are no values, nor does a forward always add some.
        values = [[h[index][ref].contiguous()] if ref in h[index] else [] for index, ref in keys]
        later_bytes = sum(map(packed_bytes, values))
        for key, tensors in zip(keys, values, strict=True):
            later_bytes -= packed_bytes(tensors)
            self._offload.send(unit.visit, key, tensors, later_bytes)
        self._offload.expect(
            *([(index, ref) for ref in unit.inputs] for index in range(self._num_micro))
        )

    def take(self, unit: StreamedModule) -> Iterator[Activations]:
        """The unit's inputs, one micro-batch after the other; each holds until the next."""
        for _ in range(self._num_micro):
            for items, buffers in self._offload.take(len(unit.inputs)):
                pairs = zip(unit.inputs, items, strict=True)
                give: partial[Activations] = partial(
                    dict, [(ref, item[0]) for ref, item in pairs if item]
                )
                yield self._device.run(COMPUTE, _GIVE, give, reads=buffers)
