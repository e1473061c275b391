"""Loads a model's weights and buffers from its source into a store."""

import logging
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatrain.checkpoint.manifest import Checkpoint
from megatrain.checkpoint.read import masters, read_tiles
from megatrain.compat import peft
from megatrain.compat.transformers import task_of
from megatrain.errors import InputError
from megatrain.model.adapters import Adapted, adapted, draw_adapters, plain
from megatrain.model.build import loaded_types
from megatrain.model.init import initialise
from megatrain.model.safetensors_io import read_header
from megatrain.model.unsupported import refuse_rounding
from megatrain.model.weights import Write, read_weights
from megatrain.source import state_io
from megatrain.source.source import EngineSetup, Source
from megatrain.store.store import Store
from megatrain.telemetry.console import PASSING, Share, end_passing
from megatrain.telemetry.host import update_threads
from megatrain.tile.formats import FP32

_log = logging.getLogger(__name__)


def load_weights(opened: EngineSetup, store: Store) -> None:
    """Fill a store with weights and persistent buffers: read, copied or randomly initialised.

    With a checkpoint that is resumed, all planes of tiles are read. All ranks call this.
    """
    source, ranks, loading = opened.source, opened.ranks, _Loading(opened, store)
    ranks.agree(loading.run)
    from_nothing = source.stored is None and source.copied_model is None
    has_new_adapter = adapted(source.model) is not None and (source.grows or from_nothing)
    if has_new_adapter and not source.adapter_folder:
        # Adapters come last, as their first values may depend on the base.
        values = source.untrained.values
        values |= {e.name: partial(t.whole_master, e, ranks) for t, e in store.entries()}
        ranks.agree(lambda: draw_adapters(source.model, values, loading.write, opened.seed))
    for tile in store.tiles:
        tile.copy_masters(update_threads())
    end_passing()


class _Loading:
    """Fills a store with the weights of a source."""

    def __init__(self, opened: EngineSetup, store: Store) -> None:
        self._source, self._spec, self._store = opened.source, opened.model.spec, store
        self._seed, source = opened.seed, opened.source
        self._places = {entry.name: (tile, entry) for tile, entry in store.entries()}
        self._share = Share(_log, "weights", sum(e.numel for _, e in self._places.values()))
        self._origin = None if adapted(source.model) is None else source.origin
        self._buffers = dict(source.model.named_buffers())

    def run(self) -> None:
        """Load everything except new adapters."""
        source, spec, write = self._source, self._spec, self.write
        source.require_base()
        dtype = self._store.tiles[0].weights.data.dtype
        refuse_rounding(loaded_types(source.model, dtype), spec.gathered, dtype)
        adapters = adapted(source.model)
        to_draw: Collection[str] = ()  # names of weights that have no values
        if source.saved is not None:
            to_draw = self._read_saved(source.saved)
        elif source.folder is not None:
            to_draw = self._read_folder(source.folder, adapters)
        elif source.copied_model is not None:
            for name, parameter in source.copied_model.named_parameters():
                write(name, parameter.detach().cpu())
            for name, buffer in state_io.persistent_buffers(source.copied_model).items():
                if not buffer.is_meta:
                    write(name, buffer.detach().cpu().clone())
        else:
            to_draw = self._places if adapters is None else adapters.base_names
        if to_draw:
            self._draw(to_draw)
        if source.stored is not None:
            source.untrained.carried = state_io.carried(source.stored, source.model)
        read_adapter(source, write)
        source.untrained.computed = state_io.computed_buffers(source.model)

    def _read_folder(self, folder: Path, adapters: Adapted | None) -> set[str]:
        """Read a folder's weights; returns the names of those that it lacks."""
        source, model = self._source, plain(self._source.model)
        stored_names = {name: stored for stored, name in source.names.items()}
        packed = {stored_names.get(name, name): form for name, form in self._spec.packed.items()}
        missing = read_weights(folder, model, self.write, threads=update_threads(), packed=packed)
        if missing and (adapters is None or not {*missing} <= adapters.replaced):
            source.origin = None  # no file has all weights
            adapter = source.adapter_folder
            if adapter is not None and task_of(model) != "CAUSAL_LM":
                raise InputError(
                    f"{adapter}: has no sequence head, and nor has its base; merge it first "
                    f"(megatrain export {adapter} OUT --merged), and begin with OUT"
                )
        return {source.names.get(name, name) for name in missing}

    def _draw(self, names: Collection[str]) -> None:
        """Initialise the named weights randomly."""
        source, threads = self._source, update_threads()
        frozen = {name: entry for name, (_, entry) in self._places.items() if entry.group is None}

        def as_kept(name: str, values: Tensor) -> Tensor:
            """Frozen weights in the dtype or format in which tiles keep them."""
            if (entry := frozen.get(name)) is None:
                return values
            if entry.packed is not FP32:
                values = values.to(source.dtype)
            if entry.packed and entry.needs_unpacking:
                return entry.packed.pack(values)
            return values

        write = partial(self.write, threads=threads, checksum=False)
        alike = source.alike
        initialise(
            self._spec, self._seed, write, names, threads=threads, convert=as_kept, alike=alike
        )

    def _read_saved(self, saved: Checkpoint) -> set[str]:
        """Read a checkpoint; returns the names of unused parameters that no file has."""
        source, threads = self._source, update_threads()
        untrained = state_io.read_untrained(saved, source.model)
        if source.resumes:
            _log.log(PASSING, "reading weights and states of %s...", saved.folder)
            read_tiles(saved, self._store.tiles, threads)
        else:
            values = masters(saved)  # exact fp32, also if the optimizers differ
            with ThreadPoolExecutor(threads, thread_name_prefix="read-masters") as pool:
                list(pool.map(lambda name: self.write(name, values[name]()), values))
        as_computed = not source.resumes
        unused = state_io.read_left_out(saved, source.model, self.write, as_computed=as_computed)
        untrained.rounded = source.untrained.rounded
        source.untrained = untrained
        return unused

    def write(self, name: str, values: Tensor, *, threads: int = 1, checksum: bool = True) -> None:
        """Write values into their place; `checksum`: an adapter's base counts them in its sums."""
        source, untrained = self._source, self._source.untrained
        name = source.names.get(name, name)
        if name not in self._places:
            untrained.buffers[name] = values
            self._buffers[name].copy_(values)
            return
        tile, entry = self._places[name]
        if entry.group is None:
            dtype = values.dtype if values.is_floating_point() else source.dtype
            untrained.dtypes[name] = dtype
            if checksum and self._origin is not None:
                self._origin.add(name, values)
            in_bf16 = tile.remainder_of(entry) is None and tile.weights.data.dtype == torch.bfloat16
            untrained.rounded |= in_bf16 and not entry.packed and dtype != torch.bfloat16
        tile.write_master(entry, values, threads)
        self._share.add(entry.numel)


def read_adapter(source: Source, write: Write) -> None:
    """Read the adapter of the source's folder, if it has one.

    PEFT saves the base's embeddings and head beside adapters of these: they must be unchanged.
    """
    adapters = adapted(source.model)
    if source.adapter_folder is None or adapters is None:
        return
    path, prefix = source.adapter_folder / peft.WEIGHTS_FILE, peft.FILE_PREFIX
    if not path.is_file():
        raise InputError(f"{path}: no such file; save a .bin again with PEFT, as safetensors")
    names = peft.file_names(source.model, adapters.name)
    shapes = {n: tuple(tensor.shape) for n, tensor in source.model.state_dict().items()}
    stored = {tensor.name: tensor for tensor in read_header(path)}
    base_copies = [n for n in stored if ".base_layer." in n and n not in names]
    if base_copies:
        assert source.stored is not None
        base, values = adapters.base, state_io.stored_values(source.stored, adapters.base)
        first_names = {id(parameter): name for name, parameter in base.named_parameters()}
        for name in base_copies:
            if (base_name := adapters.base_names.get(name.removeprefix(prefix))) is None:
                continue
            untied_name = first_names[id(base.get_parameter(base_name))]
            if not torch.equal(stored.pop(name).read().float(), values[untied_name]().float()):
                raise InputError(
                    f"{path}: {name} is not the base's weight, but an adapter does not change its "
                    "base; merge the adapter with PEFT (merge_and_unload), and train the result"
                )
    expected = {file_name: shapes[name] for file_name, name in names.items()}
    differing = {n: tensor.shape for n, tensor in stored.items()}.items() ^ expected.items()
    if differing:
        raise InputError(
            f"{path}: its tensors are not those that {peft.CONFIG_FILE} makes, for example "
            f"{min(differing)[0]}: write the folder again with PEFT"
        )
    for file_name, name in names.items():
        write(name, stored[file_name].read())
