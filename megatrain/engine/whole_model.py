"""The transformers model itself, computing with weights that the engine streams.

Its forward is its own, with caches and masks: whatever transformers does with a model, `generate`
above all, it can do with this one. Before a layer runs, its weights are put in place; rows of
embedding tables are gathered on the host.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from megatrain.device import Buffer, Device, free_bytes
from megatrain.device.base import COPY_IN
from megatrain.engine.modules import StreamedModule
from megatrain.engine.step import Parts
from megatrain.engine.tile_slice import TileSlice
from megatrain.errors import InputError, RunFailed
from megatrain.model.capture import stand_in
from megatrain.model.spec import ModelSpec
from megatrain.parallel.distributed import Ranks
from megatrain.store.store import Store, Tile
from megatrain.tile import Entry

# cuDNN's attention is planned anew for each length, and each new token makes another one.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_HELD = 0.9  # of the memory that is free; the rest is for the work

_HARMLESS = ("__get__", "dim", "size", "is_floating_point", "requires_grad_")  # of a table


def is_whole(parts: Parts, spec: ModelSpec) -> bool:
    """True if layers and head are each streamed as a whole."""
    units = [*parts.trunk, parts.head]
    return len(units) == len(spec.layers) + 2 and isinstance(parts.head.tile, Tile)


def _held_bytes(parts: Parts, spec: ModelSpec, store: Store) -> int:
    """Device memory that all weights take, beside those that are there."""
    units = [unit for unit in (*parts.trunk, parts.head) if not parts.stream.keeps(unit.tile)]
    numel = sum(tile.layout.unpacked.numel for tile in {unit.tile.whole for unit in units})
    tables = sum(entry.numel for _, entry in store.entries() if entry.name in spec.gathered)
    return (numel + tables) * store.tiles[0].weights.data.dtype.itemsize


@contextmanager
def whole_model(
    device: Device,
    parts: Parts,
    spec: ModelSpec,
    store: Store,
    ranks: Ranks,
    host_limit: int | None,
    spare: int | None,
    *,
    apart: bool,
) -> Iterator[PreTrainedModel]:
    """The model of `spec`, in the mode that it is in; within this context it can be called.

    All its weights are on the device meanwhile, brought there once, if that leaves `spare` bytes
    and there is one rank. Several `ranks` call it equally often, with ids of one shape. All have
    the logits of the first one, unless each calls it with ids of its own (`apart`).

    Raises:
        InputError: layers or head are streamed in slices.
    """
    if not is_whole(parts, spec):
        raise InputError(
            "layers or the head are streamed in slices, so the model cannot run as a whole: "
            "leave placement.max_stream_bytes out"
        )
    with ExitStack() as opened:
        # What was loaded ahead must not be read any more when the next update writes it.
        opened.callback(lambda: device.synchronize(device.record(COPY_IN), "weights read"))
        model = opened.enter_context(spec.capture.with_layers())
        places, dtype = _Places(model), store.tiles[0].weights.data.dtype
        opened.callback(places.restore)
        first, _ = next(model.named_parameters())  # which tells the model's device
        nothing = torch.full((), torch.nan, device=device.torch_device, dtype=dtype)
        for name in {first, *spec.unused}:
            places.put(name, nothing.expand(model.get_parameter(name).shape))
        held = False
        if spare is not None and not ranks.together:
            needed = spare + _held_bytes(parts, spec, store)
            held = needed <= _HELD * free_bytes(device, host_limit)
        if held:
            _hold(device, places, parts, spec, store)
            opened.enter_context(to_generate())
            yield model
            return
        tables = _Tables(device, places, spec, store, ranks.shards)
        opened.enter_context(tables)
        feed = _Feed(parts, places, tables)
        for hook in feed.hooks(model, [layer.module for layer in spec.layers]):
            opened.callback(hook.remove)
        if ranks.together and not apart:
            opened.callback(model.register_forward_hook(partial(_from_first, ranks)).remove)
        opened.enter_context(to_generate())
        yield model


def _from_first(ranks: Ranks, module: nn.Module, args: Any, output: Any) -> None:
    """Logits that ranks draw from must be the same to the bit, or they would part."""
    logits = output.logits.float()
    if ranks.rank:
        logits = torch.zeros_like(logits)  # 0 * -inf is no number
    ranks.all_reduce(logits)
    output.logits = logits.to(output.logits.dtype)


def _hold(device: Device, places: "_Places", parts: Parts, spec: ModelSpec, store: Store) -> None:
    """Put all weights in their places; of those that move through slots, copies."""
    for tile, entry in store.entries():
        if entry.name in spec.gathered:
            rows = entry.view(tile.weights.data)
            places.put(entry.name, rows.to(device.torch_device, copy=True))
    units = [*parts.trunk, parts.head]
    parts.stream.begin(units)
    for unit, slot in parts.stream.visit(units):
        data = slot.data if parts.stream.keeps(unit.tile) else slot.data.clone()
        for name, values in unit.tile.layout.unpacked.views(data).items():
            places.put(name, values)


@contextmanager
def to_generate() -> Iterator[None]:
    """No gradients, and attention whose lengths change from call to call."""
    with torch.no_grad(), sdpa_kernel(_ATTENTION):
        yield


class _Places:
    """The places in which modules hold each parameter, tied ones more than once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._parameters = dict(model.named_parameters())
        first = {id(parameter): name for name, parameter in self._parameters.items()}
        self._held: defaultdict[str, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in model.modules():
            for attribute, parameter in module.named_parameters(recurse=False):
                self._held[first[id(parameter)]].append((module, attribute))

    def put(self, name: str, values: Tensor) -> nn.Parameter:
        """Let the model compute with these values."""
        # Of a weight without gradients, torch's matmul may make a copy for each row.
        parameter = nn.Parameter(values, requires_grad=values.is_floating_point())
        self._set(name, parameter)
        return parameter

    def restore(self) -> None:
        """Give all modules their own parameters back."""
        for name, parameter in self._parameters.items():
            self._set(name, parameter)

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        for module, attribute in self._held[name]:
            setattr(module, attribute, parameter)


class _Tables(TorchFunctionMode):
    """Looks rows of embedding tables up where these rest, instead of in their stand-ins."""

    def __init__(
        self,
        device: Device,
        places: _Places,
        spec: ModelSpec,
        store: Store,
        ranks: Ranks,
    ) -> None:
        super().__init__()
        self._device, self._places, self._ranks = device.torch_device, places, ranks
        entries = {entry.name: (tile, entry) for tile, entry in store.entries()}
        self._rows = {name: _Rows(*entries[name]) for name in spec.gathered}
        self._dtype = store.tiles[0].weights.data.dtype
        self._tables: dict[int, tuple[nn.Parameter, _Rows]] = {}

    def put(self) -> None:
        """Stand-ins in their places: of a tied table the head has taken it."""
        self._tables = {}
        for name, table in self._rows.items():
            stand = self._places.put(name, stand_in(table.whole, self._device, self._dtype))
            self._tables[id(stand)] = stand, table

    def __enter__(self) -> Any:
        self.put()
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and (table := self._rows_of(args[1])) is not None:
            if not self._ranks.together:
                ids, own = args[0].to(table.own.device), table.own
                return F.embedding(ids, own, *args[2:], **kwargs).to(self._device)
            return self._summed(table, args[0])
        if func is Tensor.__getitem__ and (table := self._rows_of(args[0])) is not None:
            if not self._ranks.together:
                return table.own[args[1]].to(self._device)
            return self._summed(table, args[1])
        if any(self._rows_of(each) is not None for each in args) and _name(func) not in _HARMLESS:
            raise RunFailed(f"the model's forward uses an embedding table for {_name(func)}")
        return func(*args, **kwargs)

    def _summed(self, table: "_Rows", ids: Tensor) -> Tensor:
        """Rows of all ranks' parts of a table, for this rank's ids."""
        ranks = self._ranks
        every = torch.zeros(ranks.size, *ids.shape, dtype=torch.int64, device=self._device)
        every[ranks.rank] = ids
        ranks.all_reduce(every)
        every = every.to(table.own.device) - table.first
        here = (every >= 0) & (every < len(table.own))
        rows = torch.zeros(*every.shape, table.own.shape[1], device=every.device)
        rows[here] = table.own[every[here]].float()  # a sum with zeros keeps every bit
        rows = rows.to(self._device)
        ranks.reduce_scatter(rows)
        return rows[ranks.rank].to(self._dtype)

    def _rows_of(self, value: Any) -> "_Rows | None":
        return self._tables[id(value)][1] if id(value) in self._tables else None


class _Rows:
    """The rows of a table that are here, and a stand-in of all of it."""

    def __init__(self, tile: Tile, entry: Entry) -> None:
        planes, part = tile.place(entry)
        self.own = tile.weights.data[planes].view(-1, *entry.shape[1:])
        self.first = part.start // prod(entry.shape[1:])
        self.whole = torch.empty(entry.shape, device="meta")


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


class _Feed:
    """Puts each unit's weights in place when the model's forward comes to it."""

    def __init__(self, parts: Parts, places: _Places, tables: _Tables) -> None:
        self._parts, self._places, self._tables = parts, places, tables
        self._visits: Iterator[tuple[StreamedModule, Buffer]] = iter(())

    def hooks(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> Iterable[Any]:
        """Hooks on the model and its layers; whoever holds them removes them."""

        def begin(module: nn.Module, args: Any) -> None:
            units: list[StreamedModule] = [*self._parts.trunk, self._parts.head]
            self._tables.put()
            self._parts.stream.begin(units)
            self._visits = self._parts.stream.visit(units)
            self._next(0)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if next(self._visits, None) is not None:
                raise RunFailed("the model's forward has left out a layer")

        yield model.register_forward_pre_hook(begin)
        for number, layer in enumerate(layers, 1):
            yield layer.register_forward_pre_hook(
                lambda module, args, number=number: self._next(number), prepend=True
            )
        yield layers[-1].register_forward_hook(
            lambda module, args, output: self._next(len(layers) + 1)
        )
        yield model.register_forward_hook(end)

    def _next(self, number: int) -> None:
        """The weights of the unit of this number, which is the next one."""
        unit, slot = next(self._visits)
        if unit is not [*self._parts.trunk, self._parts.head][number]:
            raise RunFailed("the model's forward calls its layers in another order than it did")
        assert not isinstance(unit.tile, TileSlice)
        for name, values in unit.tile.layout.unpacked.views(slot.data).items():
            self._places.put(name, values)
