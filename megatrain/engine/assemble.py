"""From a model to the parts of a step: tiles, store, weights, units."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.checkpoint import Checkpoint, offering_another, read_tiles
from megatrain.device import Device
from megatrain.engine.boundaries import DeviceBoundaries, HostBoundaries
from megatrain.engine.embedding import Embedding
from megatrain.engine.expert_split import staged
from megatrain.engine.host_offload import HostOffload
from megatrain.engine.layer import Layer
from megatrain.engine.makers import Makers
from megatrain.engine.modules import Head, Prologue
from megatrain.engine.scratch import ScratchArena
from megatrain.engine.sink import Sink
from megatrain.engine.state_io import (
    open_model,
    read_untrained,
    saved_companions,
    saved_dtype,
)
from megatrain.engine.step import Parts, TrainingParts
from megatrain.engine.stream import Stream
from megatrain.engine.tile_slice import (
    ExpertSlices,
    TileSlice,
    VocabSlices,
    expert_slices,
    vocab_slices,
)
from megatrain.engine.untrained import Untrained, computed_buffers, persistent_buffers
from megatrain.engine.update import Update
from megatrain.engine.vocab_split import in_shards
from megatrain.errors import InputError
from megatrain.model.build import emptied, empty_model, load_config, loaded_types
from megatrain.model.companions import Companions, companions, set_generation
from megatrain.model.init import initialise
from megatrain.model.program import Program
from megatrain.model.spec import ModelSpec
from megatrain.model.unsupported import refuse_rounding
from megatrain.model.weights import read_weights, resolve_model, source_dtype
from megatrain.optim import StreamedOptimizer
from megatrain.placement import RECOMPUTE, ActivationPolicy, Placement
from megatrain.store import Store, Tile
from megatrain.telemetry.cores import update_threads
from megatrain.tile import TileLayout

# Of a micro-batch's graph or attention on its way to the host and back, at once. Two leave: a graph
# takes up to twice as long over the bus as its layer's forward.
LEAVING, RETURNING = 2, 2

Write = Callable[[str, Tensor], None]


@dataclass
class Source:
    """A model's structure, and where its weights come from: one of the last three, or drawn.

    Attributes:
        dtype: of the weights, in which exports are written.
        untrained: see there; `fill` puts in what comes from the source.
        companions: files of the folder or checkpoint that exports and checkpoints have as well.
        lost: what neither a checkpoint nor an export would have of the model; None: nothing.
    """

    model: PreTrainedModel
    dtype: torch.dtype
    folder: Path | None = None
    given: PreTrainedModel | None = None
    saved: Checkpoint | None = None
    untrained: Untrained = field(default_factory=Untrained)
    companions: Companions = field(default_factory=dict)
    lost: str | None = None


def open_source(
    model: PreTrainedModel | PreTrainedConfig | Checkpoint | str | Path,
    *,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> Source:
    """Structure of a model given as a module, a configuration, a checkpoint, a folder or a hub id.

    Raises:
        InputError: it cannot be read or is not a causal language model.
    """
    if isinstance(model, Checkpoint):
        empty = open_model(
            model, trust_remote_code=trust_remote_code, attn_implementation=attn_implementation
        )
        beside = saved_companions(model)
        set_generation(empty, beside)
        return Source(empty, saved_dtype(model), saved=model, companions=beside)
    if isinstance(model, PreTrainedModel):
        empty = emptied(model, attn_implementation=attn_implementation)
        dtype = next(model.parameters()).dtype
        return Source(empty, dtype, given=model, untrained=_drawn_buffers(empty, dtype))
    if not isinstance(model, PreTrainedConfig | str | Path):
        raise InputError(
            f"the model is a {type(model).__name__}; give a transformers model or configuration, "
            "a folder, or a hub id"
        )
    folder = None if isinstance(model, PreTrainedConfig) else resolve_model(model)
    config = model if folder is None else load_config(folder, trust_remote_code=trust_remote_code)
    empty = empty_model(
        config, trust_remote_code=trust_remote_code, attn_implementation=attn_implementation
    )
    if folder is None:
        dtype, beside = getattr(model, "dtype", None) or torch.float32, {}
    else:
        dtype, beside = source_dtype(folder), companions(folder)
        set_generation(empty, beside)
    return Source(empty, dtype, folder, untrained=_drawn_buffers(empty, dtype), companions=beside)


def tile_layouts(spec: ModelSpec, groups: dict[str, int]) -> list[TileLayout]:
    """Tiles in the order in which a forward needs them; the head, then what nothing reads, last.

    `groups` gives each trainable parameter's optimizer group; all others are frozen.
    """
    shapes = {name: p.shape for name, p in spec.capture.model.named_parameters()}
    unmoved = {*spec.unused, *spec.fixed}

    def layout(name: str, names: list[str]) -> TileLayout:
        return TileLayout(
            name, [(n, shapes[n], None if n in unmoved else groups.get(n)) for n in names]
        )

    tiles = [
        layout("embedding", [n for n in spec.gathered if n not in spec.epilogue]),
        layout("prologue", spec.prologue),
    ]
    for visit, layer in enumerate(spec.layers):
        own = [f"{layer.name}.{n}" for n, _ in layer.module.named_parameters()]
        tiles.append(layout(f"layer {visit}", own))
    return [*tiles, layout("head", spec.epilogue), layout("unused", spec.unused)]


def fill(source: Source, spec: ModelSpec, store: Store, seed: int) -> None:
    """Bring every weight and persistent buffer to its place: read, copied, or drawn.

    From a checkpoint, also the rest of a tile's state.

    Raises:
        InputError: float64 weights that a float32 master cannot hold, or weights that would be
            computed with in fewer bits than transformers keeps.
    """
    dtype = store.tiles[0].weights.data.dtype
    refuse_rounding(loaded_types(source.model, dtype), spec.computed, dtype)
    write = _writer(store, source, threads=1)  # one of many readers at a time

    def draw(only: Any = None) -> None:
        threads = update_threads()
        wide = _writer(store, source, threads=threads)
        initialise(spec, seed, wide, only, threads=threads)

    if source.saved is not None:
        with offering_another(source.saved.folder):
            read_tiles(source.saved, store.tiles, update_threads())
            source.untrained = read_untrained(source.saved, source.model)
    elif source.folder is not None:
        missing = read_weights(source.folder, source.model, write, threads=update_threads())
        if missing:
            draw(missing)
    elif source.given is None or next(source.given.parameters()).is_meta:
        draw()
    else:
        for name, parameter in source.given.named_parameters():
            write(name, parameter.detach().cpu())
        for name, buffer in persistent_buffers(source.given).items():
            if not buffer.is_meta:
                write(name, buffer.detach().cpu().clone())
    source.untrained.computed = computed_buffers(source.model)


def _writer(store: Store, source: Source, *, threads: int) -> Write:
    places = {entry.name: (tile, entry) for tile, entry in store.entries()}
    buffers, untrained = dict(source.model.named_buffers()), source.untrained

    def write(name: str, values: Tensor) -> None:
        if name not in places:
            untrained.buffers[name] = values
            buffers[name].copy_(values)
            return
        if values.dtype == torch.float64 and not torch.equal(values.float().double(), values):
            raise InputError(
                f"{name!r} has float64 values that a float32 master cannot hold; convert the "
                "weights to float32 first"
            )
        tile, entry = places[name]
        if entry.group is None:
            untrained.dtypes[name] = values.dtype
            narrow = tile.remainder is None and tile.weights.data.dtype == torch.bfloat16
            untrained.rounded |= narrow and values.dtype != torch.bfloat16
        tile.write_master(entry, values, threads)

    return write


def _drawn_buffers(model: PreTrainedModel, dtype: torch.dtype) -> Untrained:
    """As the class makes them in `dtype`; most are replaced by those that are read or given."""
    buffers = persistent_buffers(model)
    types = loaded_types(model, dtype) if buffers else {}
    return Untrained({n: b.to(types.get(n, b.dtype), copy=True) for n, b in buffers.items()})


@dataclass
class Assembly:
    """Everything that `parts` is made of; `piece`: elements of a gradient that leave at once."""

    device: Device
    program: Program
    store: Store
    dtype: torch.dtype
    placement: Placement
    makers: Makers
    piece: int | None = None

    @cached_property
    def expert_slices(self) -> dict[int, ExpertSlices]:
        """By visit, the slices of the layers that are split. Raises InputError."""
        found, most = {}, self.placement.max_stream_bytes
        for visit, layer in enumerate(self.program.spec.layers):
            tile = self.tiles[f"layer {visit}"]
            if most and tile.tier.streamed and tile.layout.numel * self.dtype.itemsize > most:
                found[visit] = expert_slices(tile, layer, most, self.dtype.itemsize)
        return found

    def policies(self, *, graphs: bool = True, host: bool = True) -> list[ActivationPolicy]:
        """What each layer saves for its backward.

        Args:
            graphs: layers may save graphs on the device.
            host: layers may save anything on the host; those that would recompute if not.
        """
        placement = self.placement if graphs else replace(self.placement, save_activations=0)
        policies = placement.policies(len(self.program.spec.layers), self.expert_slices)
        return [p if host or p.where == "device" else RECOMPUTE for p in policies]

    @cached_property
    def vocab_slices(self) -> VocabSlices | None:
        """The slices of the head, if it is split; as small as layers, they need no more slots."""
        tile, most, size = self.tiles["head"], self.placement.max_stream_bytes, self.dtype.itemsize
        if not most or not tile.tier.streamed or tile.layout.numel * size <= most:
            return None
        layers = [t.layout.numel * size for t in self._layers if t.tier.streamed]
        slot = max(layers, default=most)
        return vocab_slices(tile, self.program.spec.projection, most, slot, size)

    @property
    def _layers(self) -> list[Tile | TileSlice]:
        whole = [t for t in self.store.tiles if t.name.startswith("layer")]
        split = [tile_slice for found in self.expert_slices.values() for tile_slice in found.all]
        return [*(t for visit, t in enumerate(whole) if visit not in self.expert_slices), *split]

    @property
    def visited(self) -> list[Tile | TileSlice]:
        """What is computed with as a whole: tiles, and the slices of others."""
        return [self.tiles["prologue"], *self._layers, *self.head]

    @property
    def head(self) -> list[Tile | TileSlice]:
        """The head's tile, or its slices."""
        return [self.tiles["head"]] if self.vocab_slices is None else [*self.vocab_slices.all]

    @property
    def tiles(self) -> dict[str, Tile]:
        return {tile.name: tile for tile in self.store.tiles}

    def __post_init__(self) -> None:
        tokens, compiled = self.placement.chunk_tokens, self.placement.compile
        if tokens is not None:
            self.program.tile(tokens, compiled=compiled)
        elif compiled:
            self.program.compile()

    def threads(self) -> int:
        return self.placement.update_threads or update_threads()

    def stream(self) -> Stream:
        sizes = {t.name: t.layout.numel for t in self.visited if t.tier.streamed}
        largest = max(sizes.values(), default=0)
        layer = max((n for name, n in sizes.items() if name.startswith("layer")), default=largest)
        slots, distance = self.placement.slots, self.placement.prefetch_distance
        return Stream(self.device, slots, distance, layer, largest, self.dtype)

    def work_room(self, *, train: bool) -> ScratchArena:
        numel = max(t.layout.trainable_numel for t in self.visited) if train else 0
        beside = self.tiles["prologue"].layout.trainable_numel if train else 0
        return ScratchArena(self.device, numel, beside, self.dtype)

    def units(self, embedding: Embedding) -> tuple[list[Prologue | Layer], Head]:
        device, program, tiles = self.device, self.program, self.tiles
        policies = self.policies()
        offload = None
        if any(policy.where == "host" for policy in policies):
            offload = HostOffload(device, "kept", LEAVING, RETURNING)
        trunk: list[Prologue | Layer] = [Prologue(device, program, tiles["prologue"], embedding)]
        for visit, policy in enumerate(policies):
            if visit in self.expert_slices:
                trunk += staged(device, program, self.expert_slices[visit], visit)
            else:
                tile = tiles[f"layer {visit}"]
                trunk.append(self.makers.layer(device, tile, visit, policy, offload))
        if self.vocab_slices is not None:
            rows = self.makers.rows(self.placement)
            shards, last = in_shards(device, program, self.vocab_slices, rows)
            return [*trunk, *shards], last
        whole = self.makers.head(self.placement)
        return trunk, Head(device, program, tiles["head"], whole)

    def embedding(self, sink: Sink | None, work: ScratchArena) -> Embedding:
        return Embedding(
            self.device,
            self.program.spec.gathered,
            self.store.tiles,
            self.tiles["head"],
            self.dtype,
            sink,
            work,
            self.threads(),
            keep_rows=self.placement.keep_rows,
        )

    def inference(self) -> Parts:
        """Parts of a forward-only pass."""
        embedding = self.embedding(None, self.work_room(train=False))
        trunk, head = self.units(embedding)
        return Parts(trunk, head, embedding, self.stream())

    def training(self, optimizer: StreamedOptimizer, max_grad_norm: float | None) -> TrainingParts:
        """Parts of a training step."""
        device, placement, tiles = self.device, self.placement, self.store.tiles
        update = Update(device, optimizer, max_grad_norm, self.threads(), len(tiles))
        # What waits, for the norm or for the rows of a tied table, has a host gradient of its own.
        spec = self.program.spec
        tied = any(name in spec.epilogue for name in spec.gathered)
        held = [self.tiles["head"]] if tied else []
        waiting = tiles if update.deferred else [*held, *(t for t in tiles if not t.tier.streamed)]
        waiting = sorted(set(waiting), key=lambda tile: tile.index)
        work = self.work_room(train=True)
        host_grads, lanes, rooms = (
            placement.host_grad_buffers,
            placement.gradient_lanes,
            self.visited,
        )
        given = self.dtype, host_grads, waiting, update.ready, work, lanes, self.piece
        sink = Sink(device, tiles, rooms, *given)
        embedding = self.embedding(sink, work)
        trunk, head = self.units(embedding)
        saved: DeviceBoundaries | HostBoundaries = DeviceBoundaries(device)
        if placement.layer_inputs == "host":
            saved = HostBoundaries(device, placement.layer_input_lanes)
        return TrainingParts(trunk, head, embedding, self.stream(), saved, sink, update)


def host_bytes(store: Store, parts: Parts) -> dict[str, int]:
    """Host memory by what it holds: planes, gradients, rows and boundaries on their way."""
    sizes = {f"host_{k}_bytes": v for k, v in store.bytes_by_plane().items()}
    sizes["host_rows_bytes"] = parts.embedding.host_bytes
    if isinstance(parts, TrainingParts):
        sizes["host_gradients_bytes"] = parts.sink.host_bytes
        saved = parts.saved
        sizes["host_boundaries_bytes"] = (
            saved.host_bytes if isinstance(saved, HostBoundaries) else 0
        )
        offload = kept_offload(parts)
        sizes["host_kept_bytes"] = 0 if offload is None else offload.host_bytes
    return sizes


def kept_offload(parts: Parts) -> HostOffload | None:
    """What takes graphs and attention results to the host; None: nothing waits there."""
    offloads = (unit.offload for unit in parts.trunk if isinstance(unit, Layer))
    return next((offload for offload in offloads if offload is not None), None)
