"""Measures the parts of a model at one shape of micro-batch, by running the model's own code.

Each kind of layer, and the head, runs once on the meta device (shapes without data) under a counter
of its operations: FLOPs, bytes touched, and bytes alive. If a part runs in tiles of tokens
(model/token_chunks.py, with its legend of shapes), one tile is measured. For encoders of images and
sounds, whose work depends on sizes, tensors of integers keep their data.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.func import functional_call
from transformers import AttentionInterface

from megatrain.base.changed import changed
from megatrain.base.units import on_line
from megatrain.compat import torch as compat
from megatrain.compat import transformers as hf
from megatrain.device import Buffer, CpuDevice
from megatrain.engine.head import Head, Summed
from megatrain.engine.sink import GradAccumulator
from megatrain.forecast.inductor_model import Trace, compiled_work, eager_work, traced
from megatrain.forecast.notes import Once
from megatrain.forecast.op_counter import (
    LayerWork,
    MediaWork,
    OneAttention,
    OpCounter,
    Prologue,
    Shape,
    Work,
    added,
    counted,
    cross_entropy,
    foreseeing,
    tensors,
)
from megatrain.forecast.workload import Workload
from megatrain.loss import Loss, Sloped
from megatrain.model.attention import BY_IMAGES, attending, attention_within_images
from megatrain.model.capture import Call, Ref, Rows, last_hidden
from megatrain.model.media import FrozenParts, as_computed
from megatrain.model.micro_batch import Activations, Batch, MicroBatch
from megatrain.model.owned_experts import ExpertOwners
from megatrain.model.program import ModelProgram
from megatrain.model.sequence_share import foretold_attention
from megatrain.model.spec import ModelSpec
from megatrain.model.token_chunks import ChunkedOverTokens, acts_on_tokens_alone, parts
from megatrain.optim import AdamW, tile_planes
from megatrain.parallel.distributed import Ranks
from megatrain.placement import Precision
from megatrain.source.tiles import Model
from megatrain.store.store import Tile
from megatrain.tile import TileKind, TileLayout

ENCODER_LAYERS = 20  # an encoder may have as many operations as so many layers of a trunk
_TRIAL_DIVISOR = 4  # the greatest common divisor of a part's sizes in its first trial
_CHOICES = 64  # tokens that a teacher's label has, by default
_MOST_PARAMETERS = 1 << 24  # of a part that is tried in its own size


class _MeasuredTiles(ChunkedOverTokens):
    """A part that would run in tiles of tokens: one tile is measured, and counted for each."""

    without_data = True

    def __init__(self, part: nn.Module, tokens: int, compiled: bool) -> None:
        super().__init__(part, tokens, lambda function, what: function)  # compiles nothing
        self._compiled = compiled
        self._works: dict[tuple[int, torch.dtype], LayerWork] = {}

    def _trial(self, bound: dict[str, Tensor], x: Tensor) -> bool:
        return acts_alone(self._alone, bound, x.shape[-1])

    def _over_tiles(self, bound: dict[str, Tensor], x: Tensor) -> Tensor:
        key = x.shape[-1], x.dtype
        count = -(-x.shape[:-1].numel() // self._tokens)
        if key in self._works:
            return _AllTiles.apply(self._works[key], count, x, *bound.values())
        trained = {name for name, _ in self._alone.named_parameters()}
        with fakes(), torch.enable_grad():
            tile = torch.empty(1, self._tokens, x.shape[-1], dtype=x.dtype).requires_grad_()
            weights = {n: _anew(v).requires_grad_(n in trained) for n, v in bound.items()}

            def run() -> Activations:
                return {Ref(0, 0): functional_call(self._alone, weights, (tile,))}

            inputs = [tile, *weights.values()]
            work = compiled_work(traced(run, inputs)) if self._compiled else eager_work(run, inputs)
        self._works[key] = work
        return _AllTiles.apply(work, count, x, *bound.values())


def acts_alone(part: nn.Module, bound: dict[str, Tensor], width: int) -> bool:
    """True if a part acts on every token alone, by a trial with random weights.

    The first trial has smaller weights in the same proportions. A part whose code depends on their
    sizes may fail it: a second trial has weights of the real sizes, if that is quick.
    """
    sizes = {width, *(n for value in bound.values() for n in value.shape)}
    divisor = gcd(*sizes)

    def passes_with(new_sizes: dict[int, int]) -> bool:
        generator, weights = torch.Generator().manual_seed(0), {}
        for name, value in bound.items():
            shape = [new_sizes[n] for n in value.shape]
            scale = max(1, prod(shape[1:])) ** 0.5
            weights[name] = torch.randn(shape, generator=generator) / scale
        return acts_on_tokens_alone(
            lambda x: functional_call(part, weights, (x,)), torch.empty(1, 1, new_sizes[width])
        )

    trial_divisor = min(divisor, _TRIAL_DIVISOR)
    if passes_with({n: n // divisor * trial_divisor for n in sizes}):
        return True
    is_quick = sum(value.numel() for value in bound.values()) <= _MOST_PARAMETERS
    return is_quick and passes_with({n: n for n in sizes})


class _AllTiles(torch.autograd.Function):
    """Counts the work of a part over all tiles; saves the same tensors as model/token_chunks.py."""

    @staticmethod
    def forward(ctx: Any, work: LayerWork, count: int, x_BTD: Tensor, *values: Tensor) -> Tensor:
        ctx.work, ctx.count = work, count
        ctx.save_for_backward(x_BTD, *values)
        out = work.outputs[0]
        out_BTE = x_BTD.new_empty((*x_BTD.shape[:-1], out.sizes[-1]), dtype=out.dtype)
        copied = Work(touched_bytes=2 * out.num_bytes, kernels=1)
        # A tile's result is alive until the next tile has computed its own.
        _count(added(work.forward, copied), count, work.forward.peak_bytes + out.num_bytes)
        return out_BTE

    @staticmethod
    def backward(ctx: Any, gradient_BTE: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, *values = ctx.saved_tensors
        work, out = ctx.work, ctx.work.outputs[0]
        needs_grad = ctx.needs_input_grad[3:]  # for each of `values`
        trained = [value for value, needs in zip(values, needs_grad, strict=True) if needs]
        sums = [torch.zeros_like(value, dtype=torch.float32) for value in trained]
        dx_BTD = torch.empty_like(x_BTD)
        grad_bytes = sum(value.nbytes for value in trained)
        tile_bytes = dx_BTD.nbytes // ctx.count
        # Each tile's gradients are added to the sums, and its part of dx is copied to its place.
        moved = grad_bytes + 2 * sum(total.nbytes for total in sums) + 2 * tile_bytes
        summing = Work(touched_bytes=moved, kernels=len(trained) + 1)
        # A tile's gradients and result are alive until the next tile has computed its own.
        peak = work.backward.peak_bytes + grad_bytes + tile_bytes + out.num_bytes
        _count(added(added(work.recompute, work.backward), summing), ctx.count, peak)
        rounded = iter([total.to(v.dtype) for total, v in zip(sums, trained, strict=True)])
        return None, None, dx_BTD, *(next(rounded) if needs else None for needs in needs_grad)


def _count(work: Work, times: int, peak_bytes: int) -> None:
    """Add `times` the work to the counter that is active."""
    counter = compat.current_mode()
    assert isinstance(counter, OpCounter), "parts in tiles are measured under a counter"
    counter.add(work.times(times)._replace(attention_bytes=0, calls=0, peak_bytes=peak_bytes))


class KeepingData(compat.TorchDispatchMode):
    """Computes operations whose arguments all have data; others give shapes without data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = tensors((args, kwargs), real=True)
        floating = (kwargs.get("dtype") or torch.int64).is_floating_point
        if not tensors(read) and (read or not floating):
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
            with compat.without_modes():
                return func(*args, **kwargs)
        if func is torch.ops.aten.index.Tensor:  # the result's shape depends on the masks' values
            args = args[0], [place for index in args[1] for place in _places(index)]
        return func(*args, **kwargs)


def _places(index: Tensor | None) -> Sequence[Tensor | None]:
    """The integer indices that stand for a mask with data; any other index as it is."""
    if index is None or index.dtype != torch.bool or index.is_meta:
        return [index]
    with compat.without_modes():
        return index.nonzero(as_tuple=True)


@contextmanager
def in_one_call() -> Iterator[None]:
    """Within this context encoders attend to all images in one call, as they do on a GPU."""
    AttentionInterface.register(BY_IMAGES, _attention_to_mean_keys)
    try:
        yield
    finally:
        AttentionInterface.register(BY_IMAGES, attention_within_images)


def _attention_to_mean_keys(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of each patch to as many keys as patches see on average, which costs the same."""
    if cu_seq_lens_q is not None:
        mean = int(cu_seq_lens_q.diff().square().sum()) // query.shape[2]
        key, value = key[:, :, :mean], value[:, :, :mean]
    lengths = ("cu_seq_lens_k", "max_length_q", "max_length_k")
    options = {name: option for name, option in options.items() if name not in lengths}
    return hf.sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0], None


def calls_of_rows(of_one: Sequence[Call], of_two: Sequence[Call], rows: int) -> list[Call]:
    """The layers' calls for `rows` rows, from those for one and for two; leaves have no data."""
    tensors_of_rows: dict[int, Tensor] = {}
    for call, call_of_two in zip(of_one, of_two, strict=True):
        for leaf, leaf_of_two in zip(call.leaves, call_of_two.leaves, strict=True):
            if isinstance(leaf, Tensor) and id(leaf) not in tensors_of_rows:
                shape = on_line(leaf.shape, leaf_of_two.shape, rows - 1, 1)
                tensors_of_rows[id(leaf)] = torch.empty(shape, dtype=leaf.dtype, device="meta")
    return [
        Call([tensors_of_rows.get(id(leaf), leaf) for leaf in call.leaves], call.spec)
        for call in of_one
    ]


def give_media(micro: MicroBatch, inputs: Mapping[str, Tensor], program: ModelProgram) -> None:
    """Give a micro-batch the tensors of rows with images or sounds."""
    micro.inputs, micro.media = {"input_ids": inputs["input_ids"]}, {}
    for name, value in inputs.items():
        if program.capture.is_media(name):
            micro.media[name] = as_computed(value, program.dtype)
        elif program.capture.accepts(name) and name not in ("attention_mask", "labels"):
            micro.inputs[name] = value
    micro.rows = replace(micro.rows, ids=inputs["input_ids"])


def _forward_and_backward(run: Callable[[], Any], sources: Sequence[Tensor]) -> None:
    with torch.enable_grad():
        results = [leaf for leaf in compat.pytree.tree_leaves(run()) if leaf.is_floating_point()]
    gradients = [torch.empty_like(result) for result in results]
    torch.autograd.grad(results, sources, gradients, allow_unused=True)


_CPU, _META = torch.device("cpu"), torch.device("meta")

Shapes = Mapping[Ref, Shape]


class _AnyRows(Rows):
    """Rows of an embedding table in which any token's row is the first one."""

    def position(self, token: int) -> int | None:
        return 0

    def positions(self, ids: Tensor) -> Tensor:
        return ids


class Measurer:
    """Measures a model's parts, in rows of `tokens`; `Profile` has the same arguments."""

    def __init__(
        self, spec: ModelSpec, workload: Workload, chunk_tokens: int | None, owners: int = 1
    ) -> None:
        self.spec, self.tokens, self._media = spec, workload.sequence_length, workload.media
        self._compiled, self._chunk_tokens = workload.compile, chunk_tokens
        self.program = ModelProgram(spec, _CPU, workload.dtype)
        self.program.train(True)
        self.parameters = dict(spec.capture.model.named_parameters())
        self._calls: dict[int, list[Call]] = {}  # of the layers, by rows
        self._parts = Once()  # `_MeasuredTiles` of parts
        units = nn.ModuleList([spec.capture.model, *(kind.module for kind in self.program.kinds)])
        buffers = [*filter(None, map(compat.buffers_of, units.modules()))]
        self._fakes = partial(fakes, buffers=buffers)
        size = workload.sequence_ranks
        self._shared_attention = foretold_attention(size) if size > 1 else None
        self._num_owners = owners
        self._owners = ExpertOwners(Ranks(0, owners)) if owners > 1 else None

    def media(self, rows: int) -> MediaWork:
        """The work of images and sounds in `rows` rows; for one, with the encoders' backward."""
        assert self._media is not None
        with foreseeing("an encoder"), self._fakes(ENCODER_LAYERS), KeepingData(), in_one_call():
            micro = self.micro_batch(rows)
            give_media(micro, self._media.of(rows, self.tokens), self.program)
            encoders = self._weights(self.spec.media)
            prologue = self._weights(self.spec.prologue, all_trained=True)
            trained = [w for w in encoders.values() if w.requires_grad and rows == 1]
            frozen = {name for name, weight in encoders.items() if not weight.requires_grad}
            kept = FrozenParts(self.program.capture.model, frozen) if trained and frozen else None
            encode = partial(self.program.encode, encoders, micro, kept)
            arguments = encoders, prologue, micro.inputs, micro.media, micro.rows.tables
            if kept is not None:  # a first forward with gradients finds the parts to keep
                with torch.enable_grad():
                    encode()
            with torch.no_grad():
                encoding, features_N = counted(encode, arguments, real=True)
            kept_bytes = sum(row.nbytes for _, row in micro.kept)
            recompute = Work()
            if trained:
                both = partial(_forward_and_backward, encode, trained)
                recompute, _ = counted(both, (*arguments, micro.kept), real=True)
            self.program.follow_media(micro)
            leaf_N = torch.empty_like(features_N).requires_grad_()
            enter = partial(self.program.prologue, prologue, micro, leaf_N)
            with torch.enable_grad():
                entering, values = counted(enter, (arguments, leaf_N), real=True)
            sources = [*micro.rows.tables.values(), *prologue.values(), leaf_N]
            leave = partial(_forward_and_backward, enter, sources)
            leaving, _ = counted(leave, (arguments, leaf_N), real=True)
        self._calls[rows] = micro.calls
        return MediaWork(
            encoding, recompute, entering, leaving, kept_bytes,
            feature_bytes=features_N.nbytes, prologue=Prologue.of(micro.calls, values),
        )  # fmt: skip

    def prologue(self, rows: int) -> Prologue:
        """The results and arguments of what comes before the layers."""
        with foreseeing("what comes before the layers"), self._fakes():
            micro = self.micro_batch(rows)
            with torch.enable_grad():
                weights = self._weights(self.spec.prologue, all_trained=True)
                values = self.program.prologue(weights, micro)
            prologue = Prologue.of(micro.calls, values)
        self._calls[rows] = micro.calls
        return prologue

    def _layer_calls(self, rows: int) -> list[Call]:
        """The layers' calls, as the prologue makes them; with media, from those of 1 and 2 rows."""
        if rows not in self._calls and self._media is None:
            self.prologue(rows)
        elif rows not in self._calls:
            for measured in {1, 2} - self._calls.keys():
                self.media(measured)
            self._calls[rows] = calls_of_rows(self._calls[1], self._calls[2], rows)
        return self._calls[rows]

    def layer(self, visit: int, rows: int, entering: Shapes) -> LayerWork:
        """The work of a layer that is not compiled, or of which only the tiles are."""
        tokens, kind = self._chunk_tokens, self.spec.layers[visit].kind
        in_tiles = [] if tokens is None else parts(kind.module)
        with self._ready_to_run(visit):
            run, inputs = self._call(visit, rows, entering)
            with self._tiles(in_tiles, tokens or 0, compiled=self._compiled):
                return eager_work(run, inputs)

    def trace(self, visit: int, rows: int, entering: Shapes) -> Trace:
        """The operations of a layer that is compiled."""
        with self._ready_to_run(visit):
            return traced(*self._call(visit, rows, entering))

    @contextmanager
    def _ready_to_run(self, visit: int) -> Iterator[None]:
        """Within this context a layer can run without data; its experts have their owners."""
        foreseen = foreseeing(self.spec.layers[visit].name)
        module = self.spec.layers[visit].kind.module
        experts = [part for part in module.modules() if hf.takes_grouped_products(part)]
        for part in experts:
            vars(part)["owners"] = self._owners
        shared_rows = self._shared_attention
        attention = attending([module], shared_rows) if shared_rows else nullcontext()
        try:
            with foreseen, self._fakes(), torch.enable_grad(), self.program.eager(), attention:
                yield
        finally:
            for part in experts:
                del vars(part)["owners"]

    def head(self, losses: bool, loss: Loss, sizes: tuple[int, int], chunk: int, h: Shapes) -> Work:
        """The work of a head for rows and tokens of `sizes`, `chunk` tokens at a time.

        Args:
            losses: True for the visit that computes token losses alone, without gradients.
            h: shapes of the activations that the head reads.
        """
        tokens = prod(sizes)
        layout, dtype = self._head_layout, self.program.dtype
        with self._measuring_head(chunk):
            planes = dict.fromkeys(tile_planes(None, dtype), Buffer("", torch.empty(0)))
            tile = Tile(0, layout, planes)
            slot = Buffer("slot", torch.empty(layout.numel, dtype=dtype))
            sums = Buffer("sums", torch.empty(layout.trainable_numel))
            embeds = isinstance(loss, Sloped) and loss.joint.embeds  # slopes of each logit
            shape = (*sizes, self.spec.num_logits) if embeds else sizes
            loss_inputs = [torch.empty(shape) for _ in loss.inputs]
            for name in loss.choices:  # ids of tokens, then numbers of them
                of_choice = torch.int64 if name == loss.choices[0] else torch.float32
                loss_inputs.append(torch.empty(*sizes, _CHOICES, dtype=of_choice))
            micro = replace(self.micro_batch(*sizes), loss=loss, extras=loss_inputs)
            values = {ref: shape.empty() for ref, shape in h.items()}
            batch = Batch([micro], 1, tokens, torch.zeros(1), 0)
            head = Head(CpuDevice(), self.program, tile, chunk, self._summed)
            run: Callable[[], Any] = partial(head.losses, slot, batch, [values])
            if not losses:
                accumulator = GradAccumulator(tile, sums)
                run = partial(head.loss_and_vjp, slot, batch, [values], accumulator)
            ignored = slot.data, sums.data, values, micro.inputs, micro.targets, loss_inputs
            return counted(run, ignored)[0]

    @cached_property
    def _head_layout(self) -> TileLayout:
        precision: Precision = "fp32" if self.program.dtype == torch.float32 else "bf16"
        layouts = Model(self.spec, AdamW(), precision=precision).layouts
        return next(layout for layout in layouts if layout.kind is TileKind.HEAD)

    def projected(self, rows: int, chunk: int, h: Shapes) -> LayerWork:
        """The work of what comes before the projection to logits; its result is leaf 0."""
        with self._measuring_head(chunk):
            micro, spec = self.micro_batch(rows), self.spec
            values = {ref: shape.empty().requires_grad_() for ref, shape in h.items()}
            names = [name for name in spec.epilogue if name not in spec.head]
            weights = self._weights(names, all_trained=True)

            def run() -> Activations:
                hidden = last_hidden(self.program.epilogue(weights, micro, values))
                return {Ref(len(spec.layers), 0): hidden.contiguous()}

            return eager_work(run, [*values.values(), *weights.values()])

    def micro_batch(self, rows: int, tokens: int | None = None) -> MicroBatch:
        """A micro-batch without data, in rows of `tokens`; call this within `fakes()`."""
        ids = torch.zeros(rows, tokens or self.tokens, dtype=torch.long)
        tables = {
            name: torch.empty(1, *self.parameters[name].shape[1:], dtype=self.program.dtype)
            for name in self.spec.gathered
        }
        tables = {name: table.requires_grad_() for name, table in tables.items()}
        return MicroBatch({"input_ids": ids}, ids, _AnyRows(ids, ids, tables, ids.view(-1)[:1]))

    def _weights(
        self, names: Iterable[str], prefix: str = "", *, all_trained: bool = False
    ) -> dict[str, Tensor]:
        """The parameters `prefix + name` without data, by name; those of a rank's own experts."""
        weights = {}
        for name in names:
            path = prefix + name
            parameter = self.parameters[path]
            shape = [*parameter.shape]
            if path in self.spec.stacks:
                shape[0] //= self._num_owners
            weight = torch.empty(shape, dtype=self.program.type_of(path))
            weights[name] = weight.requires_grad_(all_trained or parameter.requires_grad)
        return weights

    def _call(
        self, visit: int, rows: int, entering: Shapes
    ) -> tuple[Callable[[], Activations], list[Any]]:
        """A function that runs a layer, and all its inputs; call this within `fakes()`."""
        layer, old_calls = self.spec.layers[visit], self._layer_calls(rows)
        # New leaves without data; a leaf of several calls stays one tensor.
        leaves = {id(leaf): leaf for call in old_calls for leaf in call.leaves}
        leaves |= {n: _anew(leaf) for n, leaf in leaves.items() if torch.is_tensor(leaf)}
        calls = [Call([leaves[id(leaf)] for leaf in call.leaves], call.spec) for call in old_calls]
        micro = replace(self.micro_batch(rows), calls=calls)
        refs = sorted({*layer.inputs, *calls[visit].entering})  # with features of images
        values = {ref: entering[ref].empty() for ref in refs}
        for value in values.values():
            value.requires_grad_(value.is_floating_point())
        names = [name for name, _ in layer.module.named_parameters()]
        weights = self._weights(names, f"{layer.name}.")
        inputs = [*values.values(), *weights.values(), *micro.calls[visit].leaves]
        return partial(self.program.layer, visit, weights, micro, values), inputs

    @contextmanager
    def _tiles(self, modules: list[nn.Module], tokens: int, *, compiled: bool) -> Iterator[None]:
        """Within this context these modules are measured as if they ran in tiles of `tokens`."""
        replaced = [(part, part.__dict__.pop("forward", None)) for part in modules]
        try:
            for part in modules:
                make = partial(_MeasuredTiles, part, tokens, compiled)
                part.forward = self._parts.once((id(part), tokens), make)
            yield
        finally:
            for part, forward in replaced:
                del part.forward
                if forward is not None:
                    part.forward = forward

    @contextmanager
    def _measuring_head(self, tokens: int) -> Iterator[None]:
        """Within this context modules after the layers run over `tokens` tokens, without data."""
        tiles = self._tiles(self.program.epilogue_parts, tokens, compiled=False)
        with foreseeing("the head"), tiles, self._fakes(), torch.enable_grad():
            yield

    def _summed(self, loss: Loss) -> Summed:
        """The function to count in a loss's place: if compiled, any loss is one fused operation."""
        if not self._compiled:
            return loss.summed
        return lambda logits_NV, targets_N, *inputs: cross_entropy(logits_NV, targets_N)


def _anew(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


class _WithoutData(compat.TorchDispatchMode):
    """Makes every operation run on the meta device, whatever device its arguments name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: _without_data(value) for name, value in (kwargs or {}).items()}
        if named.get("device") is not None:
            named["device"] = _META
        return func(*map(_without_data, args), **named)


def _without_data(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.is_meta else torch.empty_like(value, device=_META)
    return [*map(_without_data, value)] if isinstance(value, list | tuple) else value


@contextmanager
def fakes(layers: int = 1, buffers: Iterable[dict[str, Tensor | None]] = ()) -> Iterator[None]:
    """Tensors made within this context have no data.

    Args:
        layers: those that run in the context, by which `OneAttention` limits operations.
        buffers: of modules; forwards may replace them, and they are put back.
    """
    old = [(of_module, of_module.copy()) for of_module in buffers]
    unchecked = changed([Distribution], _validate_args=False)  # arguments (Gemma 3n) have no data
    try:  # without modes: the caller may itself be counting operations
        with compat.without_modes(), hf.unpacked(), unchecked, _WithoutData(), OneAttention(layers):
            yield
    finally:
        for of_module, values in old:
            of_module.update(values)
