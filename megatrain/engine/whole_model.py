"""The transformers model itself, computing with weights that the engine streams.

The model's forward is unchanged, so transformers' `generate` and other code can use the model with
caches and masks. Before a layer runs, its streamed weights are put into its modules; the embedding
tables are on the device. If the tokens are too few to choose all experts of a layer, only the
experts that its router has chosen are read from host memory.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from megatrain.compat.peft import base_path
from megatrain.compat.transformers import takes_grouped_products
from megatrain.device import Buffer, free_bytes
from megatrain.device.base import COPY_IN
from megatrain.engine.modules import StreamedModule
from megatrain.engine.step import Parts
from megatrain.errors import InputError, RunFailed
from megatrain.model.media import calls_of, replaced
from megatrain.model.sizes import experts_of_a_token
from megatrain.parallel.distributed import Ranks
from megatrain.source.source import EngineSetup
from megatrain.store.store import Store, Tier, Tile
from megatrain.tile import Entry, TileKind

# Without cuDNN, which plans attention anew for each length, so for each new token.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_USABLE = 0.9  # part of the free device memory that weights may take; the rest is for the work
_FEW = 1.0  # choices (tokens * experts of a token) per expert, below which only chosen are copied


@contextmanager
def whole_model(
    opened: EngineSetup, parts: Parts, store: Store, spare: int | None, *, apart: bool
) -> Iterator[PreTrainedModel]:
    """Yield the model, ready to be called in its current mode (train or eval).

    With one rank, all weights are copied to the device once if that leaves `spare` bytes (None:
    they are not). Several ranks must call the model equally often, with ids of one shape. All get
    the logits of rank 0, unless each passes its own ids (`apart`).
    """
    device, ranks, spec = opened.device, opened.ranks, opened.model.spec
    with ExitStack() as stack:
        # Wait at the end for loads that ran ahead: the next update overwrites what they read.
        stack.callback(lambda: device.synchronize(device.record(COPY_IN), "weights read"))
        model = stack.enter_context(spec.capture.with_layers())
        places = _Places(model)
        stack.callback(places.restore)
        first_name, _ = next(model.named_parameters())  # its device is `model.device`
        # Parameters without weights, for now or for good, are NaN and take no memory.
        dtype = store.tiles[0].weights.data.dtype
        nan = torch.full((), torch.nan, device=device.torch_device, dtype=dtype)
        for name in {first_name, *spec.unused, *spec.media}:
            places.put(name, nan.expand(model.get_parameter(name).shape))
        encode = _encoding(opened, store, places)
        stack.enter_context(replaced(calls_of(model, spec.media), encode))
        gathered = [(tile, e) for tile, e in store.entries() if e.name in spec.gathered]
        fits, units = False, [*parts.trunk, parts.head]
        if spare is not None and ranks.size == 1:
            to_copy = {unit.tile for unit in units if not parts.stream.keeps(unit.tile)}
            numel = sum(tile.layout.unpacked.numel for tile in to_copy)
            numel += sum(entry.numel for _, entry in gathered)
            fits = spare + numel * dtype.itemsize <= _USABLE * free_bytes(device, opened.host_limit)
        tables = {entry.name: _table(opened, tile, entry) for tile, entry in gathered}
        if fits:  # copies of all weights come through the slots
            for name, table in tables.items():
                places.put(name, table)
            parts.stream.begin(units)
            for unit, slot in parts.stream.visit(units):
                data = slot.data if parts.stream.keeps(unit.tile) else slot.data.clone()
                for name, values in unit.tile.layout.values(data).items():
                    places.put(name, values)
        else:  # stream the weights in each forward
            feed = _Feed(parts, places, tables)
            for hook in feed.hooks(model, [layer.module for layer in spec.layers]):
                stack.callback(hook.remove)
            if ranks.size > 1 and not apart:
                hook = model.register_forward_hook(partial(_take_logits_of_first, ranks))
                stack.callback(hook.remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(sdpa_kernel(_ATTENTION))
        yield model


def _encoding(opened: EngineSetup, store: Store, places: "_Places") -> Callable[..., Any]:
    """A function that calls an encoder; its first call puts the encoders' weights in place."""

    @cache
    def put_weights() -> None:
        if opened.ranks.size > 1:
            raise InputError("ranks that share a model make no texts of images; use one rank")
        for tile in store.of(TileKind.MEDIA):
            for name, values in tile.layout.views(tile.weights.data).items():
                places.put(name, values.to(opened.device.torch_device))

    def encode(encoder: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        put_weights()
        return encoder(*args, **kwargs)

    return encode


def _take_logits_of_first(ranks: Ranks, module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook: replace the logits of each rank by those of rank 0."""
    logits = output.logits.float()
    if ranks.rank:
        logits = torch.zeros_like(logits)  # not logits * 0, which is NaN for -inf
    ranks.all_reduce(logits)
    output.logits = logits.to(output.logits.dtype)


class _Places:
    """The module attributes that hold each parameter; a tied one has several."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._parameters = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._places: defaultdict[str, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in model.modules():
            for attribute, parameter in module.named_parameters(recurse=False):
                self._places[names[id(parameter)]].append((module, attribute))

    def put(self, name: str, values: Tensor) -> None:
        """Let the model compute with `values` for the parameter `name`."""
        # With a weight that needs no gradient, torch's matmul may copy it for each row.
        self._set(name, nn.Parameter(values, requires_grad=values.is_floating_point()))

    def restore(self) -> None:
        """Give all modules their own parameters back."""
        for name, parameter in self._parameters.items():
            self._set(name, parameter)

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        for module, attribute in self._places[name]:
            setattr(module, attribute, parameter)


def _table(opened: EngineSetup, tile: Tile, entry: Entry) -> Tensor:
    """A whole embedding table on the device, gathered from the blocks that ranks keep."""
    device, ranks = opened.device.torch_device, opened.ranks.shards
    flat = tile.weights.data
    if ranks.size == 1:
        return entry.view(flat).to(device)
    [(start, stop)] = [part for part in tile.layout.parts if part[0] <= entry.offset < part[1]]
    table = torch.empty(stop - start, dtype=flat.dtype, device=device)
    [block] = [span for span in tile.spans if start <= span.at < stop]
    table[block.at - start :][: block.numel] = flat[block.start : block.stop]
    ranks.all_gather(table)
    return table[entry.offset - start :][: entry.numel].view(entry.shape)


class _Experts(NamedTuple):
    """A layer's experts."""

    module: nn.Module  # called with the numbers of the chosen experts
    tile: Tile
    stack: list[Entry]  # the module's weights `[experts, ...]`


def _experts(model: PreTrainedModel, units: Iterable[StreamedModule]) -> Iterator[_Experts]:
    """Yield the layers' experts whose matrices can be copied to the device one by one."""
    by_name: dict[str, tuple[Tile, Entry]] = {}
    for tile in (unit.tile for unit in units):
        on_host = tile.rests.streamed and tile.rests.weights is Tier.HOST
        if on_host and tile.layout.ranks == 1:
            by_name |= {entry.name: (tile, entry) for entry in tile.layout.entries}
    for path, module in model.named_modules():
        if not takes_grouped_products(module):
            continue
        names = (f"{path}.{name}" for name, _ in module.named_parameters(recurse=False))
        places = [by_name[name] for name in names if name in by_name]
        stacks = [(tile, entry) for tile, entry in places if len(entry.shape) == 3]
        stack = [e for tile, e in stacks if e.cut_in_rows() and e.name not in tile.layout.copies]
        if stack:
            yield _Experts(model.get_submodule(base_path(path)), stacks[0][0], stack)


class _Feed:
    """Puts each unit's weights into the model when its forward reaches the unit."""

    def __init__(self, parts: Parts, places: _Places, tables: Mapping[str, Tensor]) -> None:
        self._parts, self._places, self._tables = parts, places, tables
        self._visits: Iterator[tuple[StreamedModule, Buffer]] = iter(())
        self._copies_chosen = False  # True if a forward copies the chosen experts alone

    def hooks(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> Iterable[Any]:
        """Register hooks on the model and its layers; the caller removes them."""
        units: list[StreamedModule] = [*self._parts.trunk, self._parts.head]
        experts = [*_experts(model, units)]
        stacks: defaultdict[int, list[Entry]] = defaultdict(list)  # by the tile's index
        for owner in experts:
            stacks[owner.tile.index] += owner.stack
        num_chosen, num_experts = experts_of_a_token(model.config)

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            for name, table in self._tables.items():  # again: the head has replaced a tied table
                self._places.put(name, table)
            ids = kwargs.get("input_ids", args[0] if args else None)
            choices = ids.numel() * num_chosen if isinstance(ids, Tensor) else 0
            self._copies_chosen = 0 < choices < _FEW * num_experts
            self._parts.stream.begin(units, stacks if self._copies_chosen else {})
            self._visits = self._parts.stream.visit(units)
            self._next(0)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if next(self._visits, None) is not None:
                raise RunFailed("the model's forward has left out a layer")

        yield model.register_forward_pre_hook(begin, with_kwargs=True)
        for owner in experts:
            copy_chosen = partial(self._copy_chosen, owner)
            yield owner.module.register_forward_pre_hook(copy_chosen, with_kwargs=True)
        for number, layer in enumerate(layers, 1):
            yield layer.register_forward_pre_hook(partial(self._next, number), prepend=True)
        yield layers[-1].register_forward_hook(partial(self._next, len(layers) + 1))
        yield model.register_forward_hook(end)

    def _copy_chosen(self, experts: _Experts, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._copies_chosen:
            chosen = args[1] if len(args) > 1 else kwargs["top_k_index"]
            self._parts.stream.bring(experts.tile, experts.stack, chosen)

    def _next(self, number: int, *_: Any) -> None:
        """A hook: put the weights of unit `number`, which must be the next one, into the model."""
        unit, slot = next(self._visits)
        if unit is not [*self._parts.trunk, self._parts.head][number]:
            raise RunFailed("the model's forward calls its layers in another order than before")
        for name, values in unit.tile.layout.local.values(slot.data).items():
            self._places.put(name, values)
