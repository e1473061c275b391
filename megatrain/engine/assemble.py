"""From a model to the parts of a step: tiles, store, weights, units."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import takewhile
from typing import ClassVar

import torch

from megatrain.device import Device
from megatrain.device.collectives import Collectives
from megatrain.engine.bit_checks import BitChecks
from megatrain.engine.boundaries import DeviceBoundaries, HostBoundaries
from megatrain.engine.embedding import Embedding
from megatrain.engine.head import HeadMath, WholeHead
from megatrain.engine.host_offload import HostOffload
from megatrain.engine.layer import Layer
from megatrain.engine.modules import Head, Prologue
from megatrain.engine.scratch import ScratchArena
from megatrain.engine.sink import Sink
from megatrain.engine.step import Parts, TrainingParts
from megatrain.engine.stream import Stream, Unpack
from megatrain.engine.tile_slice import TileSlice, VocabSlices, require_streamable, vocab_slices
from megatrain.engine.update import Update
from megatrain.engine.vocab_split import VocabSplit, in_shards
from megatrain.loss import Loss, Summed, range_gradient, range_statistics
from megatrain.model.compiled import compile_and_tell
from megatrain.model.program import ModelProgram
from megatrain.optim import StreamedOptimizer
from megatrain.parallel.distributed import ALONE, Ranks
from megatrain.placement import RECOMPUTE, ActivationPolicy, Placement, Verify
from megatrain.store.disk_staging import DiskReader, DiskStaging
from megatrain.store.store import Store, Tier, Tile
from megatrain.telemetry.cores import update_threads
from megatrain.tile import TileKind
from megatrain.tile.packed import Expand

# Of a micro-batch's graph or attention on its way to the host and back, at once. Two leave: a graph
# takes up to twice as long over the bus as its layer's forward.
LEAVING, RETURNING = 2, 2


@dataclass
class Assembly:
    """Everything that `parts` is made of.

    The forecast moves gradients and planes in fewer pieces (forecast/assembly.py).
    """

    device: Device
    program: ModelProgram
    store: Store
    dtype: torch.dtype
    placement: Placement
    ranks: Ranks = ALONE
    verify: Verify = "off"
    sinks: ClassVar[type[Sink]] = Sink

    def policies(self, *, device: bool = True, host: bool = True) -> list[ActivationPolicy]:
        """What each layer saves for its backward.

        Args: `device`, `host`: layers may save tensors there; False: these recompute instead.
        """
        policies = self.placement.policies(len(self.program.spec.layers))
        allowed = {"device": device, "host": host}
        return [policy if allowed[policy.where] else RECOMPUTE for policy in policies]

    @cached_property
    def vocab_slices(self) -> VocabSlices | None:
        """The slices of the head, if it is split; as small as layers, they need no more slots."""
        tile, most, size = self.head, self.placement.max_stream_bytes, self.dtype.itemsize
        if not most:
            return None
        streamed = [t for t in self.layers if t.rests.streamed]
        for layer in streamed:
            require_streamable(layer.name, layer.layout.numel * size, most)
        if not tile.rests.streamed or tile.layout.numel * size <= most:
            return None
        slot = max((t.layout.numel * size for t in streamed), default=most)
        return vocab_slices(tile, self.program.spec.projection, most, slot, size)

    @property
    def visited(self) -> list[Tile | TileSlice]:
        """All that is computed with as a whole: tiles, and the slices of a head."""
        slices = self.vocab_slices
        head = [self.head] if slices is None else [slices.rest, *slices.rows]
        return [self.prologue, *self.layers, *head]

    def __post_init__(self) -> None:
        self.collectives = Collectives(self.device, self.ranks)
        self.checks = BitChecks(self.device, self.store.tiles, self.verify, self.threads())
        self.layers = self.store.of(TileKind.LAYER)
        [self.prologue], [self.head] = map(self.store.of, (TileKind.PROLOGUE, TileKind.HEAD))
        tokens, compiled = self.placement.chunk_tokens, self.placement.compile
        if tokens is not None:
            self.program.tile(tokens, compiled=compiled)
        elif compiled:
            self.program.compile()

    def threads(self) -> int:
        return self.placement.update_threads or max(1, update_threads() // self.ranks.on_host)

    def stream(self) -> Stream:
        streamed = [tile.layout for tile in self.visited if tile.rests.streamed]
        largest = max((each.numel for each in streamed), default=0)
        layers = (each.numel for each in streamed if each.kind is TileKind.LAYER)
        layer = max(layers, default=largest)
        slots, distance = self.placement.slots, self.placement.prefetch_distance
        staying = [tile for tile in self.store.tiles if tile.rests.stays]
        packed = (tile.layout.unpacked.numel for tile in self.layers if tile.layout.is_packed)
        unpacked = max(packed, default=0)
        disk = DiskReader(self.device, [tile.weights for tile in self.layers])
        return Stream(
            self.device,
            slots,
            distance,
            layer,
            largest,
            self.dtype,
            self.collectives,
            disk,
            staying,
            unpacked,
            self.unpack(),
        )

    def unpack(self) -> Unpack:
        """What unpacks a tile's weights on the device."""

        @cache
        def fast(expand: Expand) -> Expand:
            compiled = self.placement.compile
            return compile_and_tell(expand, "the unpacking of weights") if compiled else expand

        return lambda layout, *memory: layout.unpack(*memory, fast)

    def scratch(self, *, train: bool) -> ScratchArena:
        shared = train and self.placement.passes == 1  # else all sums have rooms of their own
        numel = max(t.layout.trainable_numel for t in self.visited) if shared else 0
        beside = self.prologue.layout.trainable_numel if shared else 0
        return ScratchArena(self.device, numel, beside, self.dtype)

    def units(self, embedding: Embedding) -> tuple[list[Prologue | Layer], Head]:
        device, program = self.device, self.program
        policies = self.policies()
        offload = None
        if any(policy.where == "host" for policy in policies):
            offload = HostOffload(device, "kept", LEAVING, RETURNING)
        trunk: list[Prologue | Layer] = [Prologue(device, program, self.prologue, embedding)]
        for visit, policy in enumerate(policies):
            trunk.append(Layer(device, program, self.layers[visit], visit, policy, offload))
        head = Head(device, program, self.head, self.whole_head(), self.collectives)
        if self.vocab_slices is not None:
            shards, head = in_shards(
                device, program, self.vocab_slices, self.vocab_split(), self.collectives
            )
            trunk += shards
        _end_backward(trunk)
        return trunk, head

    def whole_head(self) -> HeadMath:
        """What is computed with a head that is streamed as a whole."""
        compiled = self.placement.compile

        @cache
        def summed(loss: Loss) -> Summed:
            return compile_and_tell(loss.summed, "the loss") if compiled else loss.summed

        return WholeHead(self.program, self.placement.head_tokens, summed)

    def vocab_split(self) -> VocabSplit:
        """What is computed with a head whose table is streamed in ranges of rows."""
        statistics, gradient = range_statistics, range_gradient
        if self.placement.compile:
            statistics = compile_and_tell(statistics, "the loss of some rows")
            gradient = compile_and_tell(gradient, "the gradient of some rows")
        return VocabSplit(self.program, self.placement.head_tokens, statistics, gradient)

    def embedding(self, sink: Sink | None, work: ScratchArena) -> Embedding:
        return Embedding(
            self.device,
            self.program.spec.gathered,
            self.store.tiles,
            self.head,
            self.dtype,
            sink,
            work,
            self.collectives,
            self.threads(),
            keep_rows=self.placement.keep_rows,
        )

    def inference(self) -> Parts:
        """Parts of a forward-only pass."""
        embedding = self.embedding(None, self.scratch(train=False))
        trunk, head = self.units(embedding)
        return Parts(trunk, head, embedding, self.stream())

    def disk_staging(self) -> DiskStaging:
        """The way of planes from a disk to their updates, and back."""
        return DiskStaging(self.device, self.store.tiles)

    def training(self, optimizer: StreamedOptimizer, max_grad_norm: float | None) -> TrainingParts:
        """Parts of a training step."""
        device, placement, tiles = self.device, self.placement, self.store.tiles
        update = Update(
            device,
            optimizer,
            max_grad_norm,
            self.threads(),
            tiles,
            self.disk_staging(),
            self.collectives,
            self.checks,
        )
        # What waits, for the norm or for the rows of a tied table, has a host gradient of its own.
        spec = self.program.spec
        tied = any(name in spec.epilogue for name in spec.gathered)
        held = [self.head] if tied else []
        there = {tile for tile in tiles if tile.rests.gradient is Tier.DEVICE}
        own = {*there, *(tile for tile in tiles if update.waits(tile))}
        if placement.passes > 1 and not optimizer.rule.needs_matrices:  # sums that stay hold it
            own -= there.intersection(self.visited)
        waiting = sorted({*own, *held}, key=lambda tile: tile.index)
        work = self.scratch(train=True)
        passes = placement.passes
        sink = self.sinks(
            device,
            tiles,
            self.visited,
            self.dtype,
            placement.host_grad_buffers,
            waiting,
            update.ready,
            update,
            work,
            self.collectives,
            placement.gradient_lanes,
            passes=passes > 1,
        )
        embedding = self.embedding(sink, work)
        trunk, head = self.units(embedding)
        saved: DeviceBoundaries | HostBoundaries = DeviceBoundaries(device)
        if placement.layer_inputs == "host":
            saved = HostBoundaries(device, placement.layer_input_lanes)
        stream = self.stream()
        return TrainingParts(trunk, head, embedding, stream, saved, sink, update, passes)


def host_bytes(store: Store, parts: Parts) -> dict[str, int]:
    """Host memory by what it holds: planes, gradients, rows and boundaries on their way."""
    sizes = {f"host_{k}_bytes": v for k, v in store.bytes_by_plane().items()}
    sizes["host_rows_bytes"] = parts.embedding.host_bytes
    sizes["host_disk_lanes_bytes"] = parts.stream.disk.host_bytes
    if isinstance(parts, TrainingParts):
        sizes["host_gradients_bytes"] = parts.sink.host_bytes
        sizes["host_boundaries_bytes"] = parts.saved.host_bytes
        sizes["host_disk_lanes_bytes"] += parts.update.disk.host_bytes
        sizes["host_disk_lanes_bytes"] += parts.update.directions.host_bytes
        offload = kept_offload(parts)
        sizes["host_kept_bytes"] = 0 if offload is None else offload.host_bytes
    return sizes


def kept_offload(parts: Parts) -> HostOffload | None:
    """What takes graphs and attention results to the host; None: nothing waits there."""
    offloads = (unit.offload for unit in parts.trunk if isinstance(unit, Layer))
    return next((offload for offload in offloads if offload is not None), None)


def _end_backward(trunk: Sequence[Prologue | Layer]) -> None:
    """Let the backward end at the first unit that is trained, which keeps all that it reads."""
    frozen = [*takewhile(lambda unit: not unit.trained, trunk)]
    for unit in frozen:
        unit.needs_backward = False
    differentiable = trunk[len(frozen) :]
    if frozen and differentiable:
        later = {ref for unit in differentiable[1:] for ref in unit.new_inputs}
        differentiable[0].new_inputs = sorted(
            {ref for unit in differentiable for ref in unit.inputs} - later
        )
