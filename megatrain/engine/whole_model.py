"""The transformers model itself, computing with weights that the engine streams.

Its forward is its own, with caches and masks: whatever transformers does with a model, `generate`
above all, it can do with this one. Before a layer runs, its weights are put in place; rows of
embedding tables are gathered on the host.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from megatrain.errors import InputError, RunFailed
from megatrain.model.capture import stand_in
from megatrain.model.media import replaced
from megatrain.model.spec import ModelSpec
from megatrain.parallel.distributed import Ranks
from megatrain.store.store import Store, Tile
from megatrain.tile import Entry

# cuDNN's attention is planned anew for each length, and each new token makes another one.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_HELD = 0.9  # of the memory that is free; the rest is for the work

_HARMLESS = ("__get__", "dim", "size", "is_floating_point", "requires_grad_")  # of a table


def _held_bytes(parts: Parts, spec: ModelSpec, store: Store) -> int:
    """Bytes of device memory that all weights need besides those already there."""
    units = [unit for unit in (*parts.trunk, parts.head) if not parts.stream.keeps(unit.tile)]
    numel = sum(tile.layout.unpacked.numel for tile in {unit.tile for unit in units})
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
    """Within this context the model of `spec` can be called, in its current mode (train or eval).

    With one rank, all weights are copied to the device once if that leaves `spare` bytes. Several
    `ranks` must call the model equally often, with ids of one shape. All get the logits of rank 0,
    unless each passes its own ids (`apart`).
    """
    with ExitStack() as opened:
        # What was loaded ahead must not be read any more when the next update writes it.
        opened.callback(lambda: device.synchronize(device.record(COPY_IN), "weights read"))
        model = opened.enter_context(spec.capture.with_layers())
        places, dtype = _Places(model), store.tiles[0].weights.data.dtype
        opened.callback(places.restore)
        first, _ = next(model.named_parameters())  # which tells the model's device
        nothing = torch.full((), torch.nan, device=device.torch_device, dtype=dtype)
        for name in {first, *spec.unused, *spec.media}:
            places.put(name, nothing.expand(model.get_parameter(name).shape))
        media = _Encoders(device, places, spec, store, ranks)
        opened.enter_context(replaced(model, media.call, spec.media))
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
    """Replace logits by those of rank 0: ranks that draw from them must not diverge."""
    logits = output.logits.float()
    if ranks.rank:
        logits = torch.zeros_like(logits)  # 0 * -inf is no number
    ranks.all_reduce(logits)
    output.logits = logits.to(output.logits.dtype)


def _hold(device: Device, places: "_Places", parts: Parts, spec: ModelSpec, store: Store) -> None:
    """Put all weights into the model; copies of those that pass through slots."""
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
    """Without gradients, and with attention kernels for lengths that change in each call."""
    with torch.no_grad(), sdpa_kernel(_ATTENTION):
        yield


class _Places:
    """The module attributes that hold each parameter; a tied one has several."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._parameters = dict(model.named_parameters())
        first = {id(parameter): name for name, parameter in self._parameters.items()}
        self._held: defaultdict[str, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in model.modules():
            for attribute, parameter in module.named_parameters(recurse=False):
                self._held[first[id(parameter)]].append((module, attribute))

    def put(self, name: str, values: Tensor) -> nn.Parameter:
        """Let the model compute with these values."""
        # With a weight that needs no gradient, torch's matmul may copy it for each row.
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


class _Encoders:
    """Puts the weights of a model's encoders into it before the first of their calls."""

    def __init__(
        self, device: Device, places: _Places, spec: ModelSpec, store: Store, ranks: Ranks
    ) -> None:
        self._device, self._places, self._ranks = device.torch_device, places, ranks
        self._awaited, self._store = {*spec.media}, store

    def call(self, encoder: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of an encoder. Raises InputError: ranks share the weights."""
        if self._awaited and self._ranks.together:
            raise InputError("ranks that share a model make no texts of images; use one rank")
        for tile, entry in self._store.entries() if self._awaited else ():
            if entry.name in self._awaited:
                self._places.put(entry.name, entry.view(tile.weights.data).to(self._device))
        self._awaited.clear()
        return encoder(*args, **kwargs)


class _Tables(TorchFunctionMode):
    """Looks up rows of embedding tables in their planes instead of in stand-ins."""

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
        """Put stand-ins into the model again: the head has replaced that of a tied table."""
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
        """Rows for this rank's ids, from all ranks' parts of a table."""
        ranks = self._ranks
        all_ids = torch.zeros(ranks.size, *ids.shape, dtype=torch.int64, device=self._device)
        all_ids[ranks.rank] = ids
        ranks.all_reduce(all_ids)
        places = all_ids.to(table.own.device) - table.first
        is_here = (places >= 0) & (places < len(table.own))
        rows = torch.zeros(*places.shape, table.own.shape[1], device=places.device)
        rows[is_here] = table.own[places[is_here]].float()  # a sum with zeros keeps every bit
        rows = rows.to(self._device)
        ranks.reduce_scatter(rows)
        return rows[ranks.rank].to(self._dtype)

    def _rows_of(self, value: Any) -> "_Rows | None":
        return self._tables[id(value)][1] if id(value) in self._tables else None


class _Rows:
    """This rank's rows of a table, and a stand-in for the whole table."""

    def __init__(self, tile: Tile, entry: Entry) -> None:
        planes, part = tile.place(entry)
        self.own = tile.weights.data[planes].view(-1, *entry.shape[1:])
        self.first = part.start // prod(entry.shape[1:])
        self.whole = torch.empty(entry.shape, device="meta")


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


class _Feed:
    """Puts each unit's weights into the model when its forward reaches the unit."""

    def __init__(self, parts: Parts, places: _Places, tables: _Tables) -> None:
        self._parts, self._places, self._tables = parts, places, tables
        self._visits: Iterator[tuple[StreamedModule, Buffer]] = iter(())

    def hooks(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> Iterable[Any]:
        """Register hooks on the model and its layers; the caller removes them."""

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
        """Put in the weights of the next unit, which must have this number."""
        unit, slot = next(self._visits)
        if unit is not [*self._parts.trunk, self._parts.head][number]:
            raise RunFailed("the model's forward calls its layers in another order than it did")
        for name, values in unit.tile.layout.unpacked.views(slot.data).items():
            self._places.put(name, values)
