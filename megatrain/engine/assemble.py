"""Builds the parts of a step for a model and its store."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

from megatrain.engine.embedding import Embedding
from megatrain.engine.head import Head, Summed
from megatrain.engine.layer import Layer
from megatrain.engine.modules import Media, Prologue
from megatrain.engine.saved_tensors import DeviceBoundaries, HostBoundaries, HostOffload
from megatrain.engine.shared import Shared
from megatrain.engine.sink import Sink
from megatrain.engine.step import Parts, TrainingParts, Unit
from megatrain.engine.stream import Stream, Unpack
from megatrain.engine.update import Update
from megatrain.loss import Loss
from megatrain.model.capture import FEATURES
from megatrain.model.layer_template import compile_and_tell
from megatrain.optim import StreamedOptimizer
from megatrain.placement import RECOMPUTE, ActivationPolicy
from megatrain.store.store import DiskStaging, Store, Tier
from megatrain.tile.formats import Expand

# Graphs (or attention results) of a micro-batch on their way to the host at once, and as many on
# their way back: over the bus a graph takes up to twice as long as its layer's forward.
LANES = 2


@dataclass
class Assembly(Shared):
    """Everything that `inference` and `training` build the parts of a step from.

    A forecast (forecast/simulate.py) passes other `sinks` and `staging`, which move gradients and
    planes in fewer pieces, and `unpacking`, a stand-in for the unpacking of weights.
    """

    sinks: type[Sink] = Sink
    staging: type[DiskStaging] = DiskStaging
    unpacking: Unpack | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offload = HostOffload(self.device, "kept", LANES)
        tokens, compiled = self.placement.chunk_tokens, self.placement.compile
        if tokens is not None:
            self.program.tile(tokens, compiled=compiled)
        elif compiled:
            self.program.compile()

    def policies(self, *, device: bool = True, host: bool = True) -> list[ActivationPolicy]:
        """The activation policies of all layers.

        Args: `device`, `host`: if False, layers that would save tensors there recompute instead.
        """
        allowed = {"device": device, "host": host}
        policies = self.placement.policies(len(self.layers))
        return [policy if allowed[policy.where] else RECOMPUTE for policy in policies]

    def _unpack(self) -> Unpack:
        @cache
        def compiled(expand: Expand) -> Expand:
            return self._compiled(expand, "the unpacking of weights")

        return lambda layout, *memory, **chosen: layout.unpack(*memory, compiled, **chosen)

    def inference(self) -> Parts:
        return self._parts(None)

    def training(self, optimizer: StreamedOptimizer, max_grad_norm: float | None) -> TrainingParts:
        device, placement, tiles = self.device, self.placement, self.tiles
        update = Update(self, optimizer, max_grad_norm, self.staging(device, tiles))
        passes, spec = placement.passes, self.program.spec
        on_device = {tile for tile in tiles if tile.rests.gradient is Tier.DEVICE}
        # Tiles with memory of their own for the gradient, which waits there for the update.
        waiting = {*on_device, *(tile for tile in tiles if update.waits(tile))}
        if passes > 1 and not optimizer.rule.needs_matrices:  # updates read the sums of all passes
            waiting -= {t for t in on_device.intersection(self.visited) if not t.layout.owned}
        if any(name in spec.epilogue for name in spec.gathered):
            waiting.add(self.head)  # tied: the embedding adds its rows to the head's gradient
        sink = self.sinks(self, sorted(waiting, key=lambda tile: tile.index), update)
        parts = self._parts(sink)
        saved: DeviceBoundaries | HostBoundaries = DeviceBoundaries(device)
        if placement.layer_inputs == "host":
            saved = HostBoundaries(device, placement.layer_input_lanes)
        return TrainingParts(
            **vars(parts), saved=saved, kept=self._offload, sink=sink, update=update, passes=passes
        )

    def _parts(self, sink: Sink | None) -> Parts:
        embedding = Embedding(self, sink)
        trunk: list[Unit] = [Prologue(self, self.prologue, embedding)]
        for visit, policy in enumerate(self.policies()):
            trunk.append(Layer(self, visit, policy, self._offload))

        @cache
        def compiled_sums(loss: Loss) -> Summed:
            return self._compiled(loss.summed, "the loss")

        tokens = self.placement.head_tokens
        head = Head(self.device, self.program, self.head, tokens, compiled_sums, self.collectives)
        with_media = self._trunk_with_media(trunk, embedding)
        _end_backward(trunk)
        stream = Stream(self, self.unpacking or self._unpack())
        return Parts(trunk, head, embedding, stream, with_media)

    def _trunk_with_media(self, trunk: Sequence[Unit], embedding: Embedding) -> list[Unit]:
        """The trunk of a step with images or sounds; empty if the model has no encoders."""
        prologue, *layers = map(copy, trunk)
        if not self.media or not isinstance(prologue, Prologue):
            return []
        media = Media(self, self.media[0], embedding)
        prologue.inputs = prologue.new_inputs = [FEATURES]
        for unit in layers:
            if isinstance(unit, Layer):
                unit.take_added()
        units = [media, prologue, *layers]
        _end_backward(units)
        return units

    def _compiled(self, function: Any, name: str) -> Any:
        return compile_and_tell(function, name) if self.placement.compile else function


def host_bytes(store: Store, parts: Parts) -> dict[str, int]:
    """Bytes of host memory by use: planes, gradients, rows, layer inputs, graphs, disk lanes."""
    sizes = {f"host_{kind}_bytes": size for kind, size in store.bytes_by_plane().items()}
    sizes["host_rows_bytes"] = parts.embedding.host_bytes
    sizes["host_disk_lanes_bytes"] = parts.stream.disk.host_bytes
    if isinstance(parts, TrainingParts):
        sizes["host_gradients_bytes"] = parts.sink.host_bytes
        sizes["host_boundaries_bytes"] = parts.saved.host_bytes
        sizes["host_disk_lanes_bytes"] += parts.update.disk.host_bytes
        sizes["host_kept_bytes"] = parts.kept.host_bytes
    return sizes


def _end_backward(trunk: Sequence[Unit]) -> None:
    """End the backward at the first trained unit."""
    frozen = [*takewhile(lambda unit: not unit.trained, trunk)]
    for unit in frozen:
        unit.needs_backward = False
    if frozen and (units := trunk[len(frozen) :]):
        # The first trained unit also saves later units' inputs that frozen units would have saved.
        saved_later = {ref for unit in units[1:] for ref in unit.new_inputs}
        units[0].new_inputs = sorted({ref for unit in units for ref in unit.inputs} - saved_later)
