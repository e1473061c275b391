"""The cost of a model's parts at one shape of micro-batch, read off the model's own code.

Each kind of layer, and the head, runs once on fake tensors (shapes without data) under a counter of
its operations: FLOPs, bytes touched, and bytes alive. Of parts that run in tiles
(model/token_chunks.py, with its legend of shapes) one tile is measured, and none is run.
"""

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from math import gcd, prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain.compat.torch import FakeTensorMode, current_mode, without_modes
from megatrain.compat.transformers import unpacked
from megatrain.device import Buffer, CpuDevice
from megatrain.engine.batch import Batch
from megatrain.engine.head import Head, Summed
from megatrain.engine.sink import GradAccumulator
from megatrain.forecast.encoders import (
    ENCODER_LAYERS,
    Known,
    MediaWork,
    give_media,
    in_one_call,
    media_work,
)
from megatrain.forecast.inductor_model import Trace, compiled_work, eager_work, traced
from megatrain.forecast.op_counter import (
    LayerWork,
    OneAttention,
    OpCounter,
    Shape,
    Work,
    added,
    cross_entropy,
    foreseeing,
)
from megatrain.forecast.workload import MediaRow
from megatrain.loss import CROSS_ENTROPY, JointLoss, Loss
from megatrain.model.capture import Call, Ref, Rows, last_hidden, stand_in
from megatrain.model.layer_template import LayerTemplate
from megatrain.model.media import as_computed
from megatrain.model.program import Activations, MicroBatch, ModelProgram
from megatrain.model.spec import ModelSpec
from megatrain.model.token_chunks import ChunkedOverTokens, acts_on_tokens_alone, parts
from megatrain.optim import tile_planes
from megatrain.store.store import Tile
from megatrain.tile import TileLayout

_SIZE = 4  # of the greatest common divisor of a part's sizes, in a trial
_MOST = 1 << 24  # parameters of a part that is tried in its own size


Measure = Callable[[nn.Module, dict[str, Tensor], tuple[int, ...], torch.dtype], LayerWork]
"""Of a part, its weights and buffers without data, and the sizes `[1, C, D]` and type of a tile."""


@contextmanager
def tiled(kind: LayerTemplate, tokens: int, measure: Measure) -> Iterator[None]:
    """Within this context a kind's parts stand for tiles of `tokens`."""
    before, kind.module = kind.module, copy.deepcopy(kind.module)
    try:
        with measured_tiles(parts(kind.module), tokens, measure):
            yield
    finally:
        kind.module = before


@contextmanager
def measured_tiles(modules: Sequence[nn.Module], tokens: int, measure: Measure) -> Iterator[None]:
    """Within this context some parts stand for tiles of `tokens`."""
    before = [(part, part.__dict__.pop("forward", None)) for part in modules]
    try:
        for part in modules:
            part.forward = _MeasuredTiles(part, tokens, measure)
        yield
    finally:
        for part, forward in before:
            del part.forward
            if forward is not None:
                part.forward = forward


class _MeasuredTiles(ChunkedOverTokens):
    def __init__(self, part: nn.Module, tokens: int, measure: Measure) -> None:
        super().__init__(part, tokens, lambda function, what: function)
        self._measure = measure
        self._works: dict[tuple[int, torch.dtype], LayerWork] = {}

    def _trial(self, bound: dict[str, Tensor], x: Tensor) -> bool:
        return acts_alone(self._alone, bound, x.shape[-1])

    def _over_tiles(self, bound: dict[str, Tensor], x: Tensor) -> Tensor:
        key, count = (x.shape[-1], x.dtype), -(-x.shape[:-1].numel() // self._tokens)
        if key not in self._works:
            sizes = (1, self._tokens, x.shape[-1])
            self._works[key] = self._measure(self._alone, bound, sizes, x.dtype)
        return _AllTiles.apply(self._works[key], count, x, *bound.values())


def acts_alone(part: nn.Module, bound: dict[str, Tensor], width: int) -> bool:
    """True if a part acts on every token alone, tried without its weights.

    First with random ones of smaller sizes in the same proportions; a part that knows its sizes
    otherwise is tried in its own, if that is quick.
    """
    sizes = {width, *(n for value in bound.values() for n in value.shape)}
    least = gcd(*sizes)

    def tried(sizes: dict[int, int]) -> bool:
        generator, weights = torch.Generator().manual_seed(0), {}
        for name, value in bound.items():
            shape = [sizes[n] for n in value.shape]
            scale = max(1, prod(shape[1:])) ** 0.5
            weights[name] = torch.randn(shape, generator=generator) / scale
        return acts_on_tokens_alone(
            lambda x: functional_call(part, weights, (x,)), torch.empty(1, 1, sizes[width])
        )

    if tried({n: n // least * _SIZE if least > _SIZE else n for n in sizes}):
        return True
    quick = sum(value.numel() for value in bound.values()) <= _MOST
    return quick and tried({n: n for n in sizes})


class _AllTiles(torch.autograd.Function):
    """A part over all its tiles; holds what model/token_chunks.py would hold."""

    @staticmethod
    def forward(ctx: Any, work: LayerWork, count: int, x_BTD: Tensor, *values: Tensor) -> Tensor:
        ctx.work, ctx.count, out = work, count, work.outputs[0]
        ctx.save_for_backward(x_BTD, *values)
        out_BTE = x_BTD.new_empty((*x_BTD.shape[:-1], out.sizes[-1]), dtype=out.dtype)
        copied = Work(touched_bytes=2 * out.num_bytes, kernels=1)
        # The result of the tile before is there until this one's is.
        peak = work.forward.peak_bytes + out.num_bytes
        _count(added(work.forward, copied), count, peak)
        return out_BTE

    @staticmethod
    def backward(ctx: Any, gradient_BTE: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, *values = ctx.saved_tensors
        work, out, needs = ctx.work, ctx.work.outputs[0], ctx.needs_input_grad[3:]
        needed = [value for value, need in zip(values, needs, strict=True) if need]
        sums = [torch.zeros_like(value, dtype=torch.float32) for value in needed]
        dx_BTD = torch.empty_like(x_BTD)
        grads = sum(value.nbytes for value in needed)
        tile = dx_BTD.nbytes // ctx.count
        moved = grads + 2 * sum(total.nbytes for total in sums) + 2 * tile
        summed = Work(touched_bytes=moved, kernels=len(needed) + 1)
        # Its gradients and results are there until those of the next tile are.
        peak = work.backward.peak_bytes + grads + tile + out.num_bytes
        _count(added(added(work.again, work.backward), summed), ctx.count, peak)
        rounded = iter([s.to(v.dtype) for s, v in zip(sums, needed, strict=True)])
        return None, None, dx_BTD, *(next(rounded) if need else None for need in needs)


def _count(work: Work, times: int, peak_bytes: int) -> None:
    counter = current_mode()
    assert isinstance(counter, OpCounter), "parts in tiles are measured under a counter"
    counter.add(work.times(times)._replace(attention_bytes=0, calls=0, peak_bytes=peak_bytes))


_CPU = torch.device("cpu")

Value = TypeVar("Value")

_CHUNKS_RUN = 3  # of a head: the logits of so many take more memory than what is of all tokens


class TwoVisits(JointLoss):
    """A loss of all tokens together, which visits the head twice."""

    def joint(self, log_prob_N: Tensor, targets_N: Tensor, *given: Tensor) -> Tensor:
        raise NotImplementedError


TWO_VISITS = TwoVisits()


class _AnyRows(Rows):
    def position(self, token: int) -> int | None:
        return 0

    def positions(self, ids: Tensor) -> Tensor:
        return ids


@dataclass
class Group(MicroBatch):
    """Micro-batches that are followed as one: all pass a layer before the next one, and are alike.

    A few groups show as well what overlaps: forecasts are the same within 1 %.
    """

    count: int = 1


def grouped(micro: MicroBatch) -> int:
    """How many micro-batches this one stands for."""
    return micro.count if isinstance(micro, Group) else 1


def groups(rows: int, micro_batch: int, most: int | None, passes: int = 1) -> list[tuple[int, int]]:
    """Micro-batches that each group stands for, and their rows; a group is of one pass."""
    full, rest = divmod(rows, micro_batch)
    last = [(1, rest)] if rest else []
    passes = min(passes, full + len(last))
    ends = [(full + len(last)) * number // passes for number in range(passes + 1)]
    counts = []
    for start, stop in pairwise(ends):
        whole = min(stop, full) - start
        number = whole if most is None else min(whole, max(1, (most - len(last)) // passes))
        counts += [(whole // number + (i < whole % number), micro_batch) for i in range(number)]
    return [*counts, *last]


class Once:
    """Remembers values by key."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


class Prologue(NamedTuple):
    """What comes before the layers: its results, the layers' arguments, and their bytes."""

    results: dict[Ref, Shape]
    calls: list[Call]
    argument_bytes: int


class Profile(Once):
    """The works of a model's parts, each measured when it is first asked for."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        sequence_length: int,
        *,
        compiled: bool,
        chunk_tokens: int | None = None,
        float8: bool = False,
        media: MediaRow | None = None,
    ) -> None:
        """Args: with `chunk_tokens`, layers are eager but for the parts that run in tiles."""
        super().__init__()
        self._float8, self.media = float8, media
        self.spec, self.dtype, self.tokens = spec, dtype, sequence_length
        self.compiled, self.chunk_tokens = compiled, chunk_tokens
        self.program = ModelProgram(spec, _CPU, dtype)
        self.program.train(True)
        self._outputs: dict[int, tuple[int, dict[int, Shape]]] = {}  # of a kind, for so many rows
        self._traces: dict[int, dict[int, Trace]] = {}  # of a kind, by rows: at most two
        if media is not None:
            self._media = [self._media_work(rows) for rows in (1, 2)]

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.spec.capture.model.named_parameters())

    def distinct(self, rows: int) -> Tensor:
        """The tokens that occur in a step of random ones, `[U]`: as many as on average."""

        def draw() -> Tensor:
            config = self.spec.capture.model.config.get_text_config(decoder=True)
            generator = torch.Generator().manual_seed(0)
            ids_BT = torch.randint(config.vocab_size, (rows, self.tokens), generator=generator)
            known = list(self.spec.constants)
            seen_V = torch.zeros(max(config.vocab_size, *known, 0) + 1, dtype=torch.bool)
            seen_V[ids_BT.flatten()] = seen_V[known] = True  # far quicker than `unique`
            return seen_V.nonzero().flatten()

        return self.once(("distinct", rows), draw)

    def batch(self, rows: int, micro_batch: int, most: int | None = None, passes: int = 1) -> Batch:
        """A step, whose tokens count by their number, of at most `most` groups of micro-batches."""

        def make() -> Batch:
            unique_U, micro = self.distinct(rows), list[MicroBatch]()
            for count, size in groups(rows, micro_batch, most, passes):
                ids_BT = torch.zeros(size, self.tokens, dtype=torch.long)
                table_rows = Rows(ids_BT, ids_BT, {}, unique_U)
                micro.append(Group({"input_ids": ids_BT}, ids_BT, table_rows, count=count))
                micro[-1].media = dict(self.media.tensors) if self.media is not None else {}
            tokens = rows * self.tokens
            batch = Batch(micro, tokens, tokens, unique_U, seed=0)
            batch.most, batch.all_tokens = len(micro), tokens
            batch.loss_inputs = [(micro_batch.rows.ids, []) for micro_batch in micro]
            return batch

        return self.once(("batch", rows, micro_batch, most, passes), make)

    def with_all_rows(self, batch: Batch, rows: int, ranks: int) -> Batch:
        """A rank's batch with the table's rows for the tokens of all ranks, in equal blocks."""
        unique_U = self.distinct(rows)
        block = -(-len(unique_U) // ranks)
        filled = unique_U[-1].expand(block * ranks - len(unique_U))
        return replace(batch, unique_U=torch.cat([unique_U, filled]), own=slice(block))

    @property
    def media_bytes(self) -> int:
        """Bytes on the device of a row's pixels and the like."""
        values = {} if self.media is None else self.media.tensors
        media = [value for name, value in values.items() if self.spec.capture.is_media(name)]
        return sum(as_computed(value[:0], self.dtype).itemsize * value.numel() for value in media)

    def media_work(self, rows: int) -> MediaWork:
        """The work of images and sounds in a micro-batch, by that of one row and of two."""
        one, two = self._media
        return self.once(("media", rows), lambda: one.of_rows(rows, two))

    def _media_work(self, rows: int) -> MediaWork:
        assert self.media is not None
        named = {name: self.parameters[name] for name in self.spec.media}
        with foreseeing("an encoder"), fakes(ENCODER_LAYERS), Known(), in_one_call():
            micro = self.micro_batch(rows)
            give_media(micro, self.media.of(rows, self.tokens), self.program)
            encoders = self._weights(named)
            for name, weight in encoders.items():
                weight.requires_grad_(named[name].requires_grad)
            weights = encoders, self._prologue_weights()
            return media_work(self.program, micro, *weights, trains=rows == 1)

    def _prologue_weights(self) -> dict[str, Tensor]:
        """Weights of what comes before the layers, without data, within `fakes()`."""
        return {
            name: stand_in(self.parameters[name], _CPU, self.program.type_of(name)).requires_grad_()
            for name in self.spec.prologue
        }

    def prologue(self, rows: int) -> Prologue:
        if self.media is not None:
            work = self.media_work(rows)
            return Prologue(work.results, work.calls, work.argument_bytes)

        def measure() -> Prologue:
            with foreseeing("what comes before the layers"), fakes():
                micro = self.micro_batch(rows)
                with torch.enable_grad():
                    values = self.program.prologue(self._prologue_weights(), micro)
                results = {ref: Shape(tuple(v.shape), v.dtype) for ref, v in values.items()}
                arguments = {id(leaf): leaf for call in micro.calls for leaf in call.leaves}
                num_bytes = sum(v.nbytes for v in arguments.values() if isinstance(v, Tensor))
                return Prologue(results, micro.calls, num_bytes)

        return self.once(("prologue", rows), measure)

    def layer(self, visit: int, rows: int) -> LayerWork:
        """The work of a layer, from that of its kind."""
        kind = self.spec.layers[visit].kind

        def measure() -> LayerWork:
            tiles: AbstractContextManager[None] = nullcontext()
            if self.chunk_tokens is not None:
                tiles = tiled(kind, self.chunk_tokens, partial(self._tile, self.compiled))
            with foreseeing(self.spec.layers[visit].name):
                if self.compiled and self.chunk_tokens is None:
                    work = compiled_work(self._trace(visit, rows, kind))
                else:
                    with fakes(), torch.enable_grad(), self.program.eager():
                        run, inputs = self._call(visit, rows)
                        with tiles:
                            work = eager_work(run, inputs)
            work = work.in_float8 if self._float8 else work
            self._outputs[id(kind)] = rows, work.outputs
            return work

        return self.once(("layer", id(kind), rows), measure)

    def shape(self, ref: Ref, rows: int) -> Shape:
        """The shape of an activation, whatever rows its layer was measured with."""
        entering = self.prologue(rows).results
        if ref in entering:
            return entering[ref]
        known = self._outputs.get(id(self.spec.layers[ref.visit].kind))
        measured, outputs = known or (rows, self.layer(ref.visit, rows).outputs)
        return outputs[ref.leaf].of_rows(rows, measured)

    def head(
        self, layout: TileLayout, rows: int, head_tokens: int, loss: Loss = CROSS_ENTROPY
    ) -> Work:
        """The work of epilogue, logits, loss and their gradients.

        That of many chunks follows from a few runs: it is affine in tokens, chunks and their size.
        """
        tokens, run = rows * self.tokens, partial(self._head, layout, loss, Head.loss_and_vjp, rows)
        chunks = -(-tokens // head_tokens)
        if chunks <= 2:
            return run(tokens, head_tokens)
        small, large, largest = min(512, head_tokens), 2048, 8192  # chunks that are run
        wider, grown = large - small, head_tokens - small

        def at(two: int, three: int, wide: int, partly: int) -> int:
            size = (wide - two) / wider / 2  # of one more token in every chunk, for each chunk
            last = (wide + three - two + wider * size - partly) / wider  # of the last one's tokens
            more = (chunks - 2) * (three - two + grown * size)
            return round(two + 2 * grown * size + more - (chunks * head_tokens - tokens) * last)

        two, three, wide = run(2 * small, small), run(3 * small, small), run(2 * large, large)
        works = (two, three, wide, run(2 * large + small, large))
        lower, upper = (small, large) if head_tokens <= large else (large, largest)
        low, high = (run(2 * size, size).peak_bytes for size in (lower, upper))
        peak = low + (head_tokens - lower) * (high - low) // (upper - lower)
        peak += (tokens - 2 * head_tokens) * (three.peak_bytes - two.peak_bytes) // small
        if tokens // head_tokens > _CHUNKS_RUN:  # all tokens may take more than a chunk's logits
            epilogue = self.projected(rows, head_tokens)
            hidden = sum(shape.num_bytes for shape in epilogue.outputs.values())
            peak = max(peak, epilogue.backward.peak_bytes + 2 * hidden)
        return Work(*map(at, *works))._replace(peak_bytes=peak)

    def head_losses(self, layout: TileLayout, rows: int, head_tokens: int) -> Work:
        """The work of the visit that a loss of all tokens together needs first."""

        def visit(head: Head, slot: Buffer, batch: Batch, h: Any, accumulator: Any) -> Any:
            return head.losses(slot, batch, h)

        return self._head(layout, TWO_VISITS, visit, rows, rows * self.tokens, head_tokens)

    def projected(self, rows: int, head_tokens: int) -> LayerWork:
        """The work of what comes before the projection, whose only result is leaf 0."""

        def measure() -> LayerWork:
            with self._measuring_head(head_tokens):
                micro, spec = self.micro_batch(rows), self.spec
                sizes = {ref: self.shape(ref, rows) for ref in spec.epilogue_inputs}
                values = {ref: shape.empty().requires_grad_() for ref, shape in sizes.items()}
                names = [name for name in spec.epilogue if name not in spec.head]
                parameters = self._weights({name: self.parameters[name] for name in names})
                weights = {name: weight.requires_grad_() for name, weight in parameters.items()}

                def run() -> Activations:
                    hidden = last_hidden(self.program.epilogue(weights, micro, values))
                    return {Ref(len(spec.layers), 0): hidden.contiguous()}

                return eager_work(run, [*values.values(), *weights.values()])

        return self.once(("projected", rows, head_tokens), measure)

    def micro_batch(self, rows: int, tokens: int | None = None) -> MicroBatch:
        """One without data, within `fakes()`; of `tokens` a row."""
        ids = torch.zeros(rows, tokens or self.tokens, dtype=torch.long)
        tables = {
            name: torch.empty(1, *self.parameters[name].shape[1:], dtype=self.dtype)
            for name in self.spec.gathered
        }
        tables = {name: table.requires_grad_() for name, table in tables.items()}
        return MicroBatch({"input_ids": ids}, ids, _AnyRows(ids, ids, tables, ids.view(-1)[:1]))

    def _weights(self, parameters: dict[str, nn.Parameter], prefix: str = "") -> dict[str, Tensor]:
        """Weights without data; parameters' names behind `prefix` are those of the model."""
        type_of = self.program.type_of
        return {n: torch.empty(p.shape, dtype=type_of(prefix + n)) for n, p in parameters.items()}

    def _call(self, visit: int, rows: int) -> tuple[Callable[[], Activations], list[Any]]:
        """A function that runs a layer, and all its inputs, within `fakes()`."""
        layer, calls = self.spec.layers[visit], self.prologue(rows).calls
        # Fake tensors belong to the mode they were made in: arguments are made anew, each once.
        known = {id(leaf): leaf for call in calls for leaf in call.leaves}
        made = {i: _anew(leaf) if torch.is_tensor(leaf) else leaf for i, leaf in known.items()}
        calls = [Call([made[id(leaf)] for leaf in call.leaves], call.spec) for call in calls]
        micro = replace(self.micro_batch(rows), calls=calls)
        entering = {*layer.inputs, *calls[visit].entering}  # also what is added of images
        values = {ref: self.shape(ref, rows).empty() for ref in sorted(entering)}
        for value in values.values():
            value.requires_grad_(value.is_floating_point())
        parameters = dict(layer.module.named_parameters())
        weights = self._weights(parameters, f"{layer.name}.")
        for name, weight in weights.items():
            weight.requires_grad_(parameters[name].requires_grad)
        inputs = [*values.values(), *weights.values(), *micro.calls[visit].leaves]
        return partial(self.program.layer, visit, weights, micro, values), inputs

    def _trace(self, visit: int, rows: int, kind: LayerTemplate) -> Trace:
        """The trace of a layer. Two are recorded, others follow: all is affine in the rows.

        A single row is a case of its own: what would be copied of several can be looked at.
        """
        known = self._traces.setdefault(id(kind), {})
        if len(known) == 2 and rows > 1:
            (first, one), (second, two) = known.items()
            if (trace := one.of_rows(rows, first, two, second)) is not None:
                return trace
        with fakes(), torch.enable_grad(), self.program.eager():
            trace = traced(*self._call(visit, rows))
        if len(known) < 2 and rows > 1:
            known[rows] = trace
        return trace

    def _tile(
        self,
        compiled: bool,
        part: nn.Module,
        bound: dict[str, Tensor],
        sizes: tuple[int, ...],
        dtype: torch.dtype,
    ) -> LayerWork:
        trained = {name for name, _ in part.named_parameters()}
        with fakes(), torch.enable_grad():
            x = torch.empty(sizes, dtype=dtype).requires_grad_()
            weights = {n: _anew(v).requires_grad_(n in trained) for n, v in bound.items()}

            def run() -> Activations:
                return {Ref(0, 0): functional_call(part, weights, (x,))}

            inputs = [x, *weights.values()]
            return compiled_work(traced(run, inputs)) if compiled else eager_work(run, inputs)

    @contextmanager
    def _measuring_head(self, tokens: int) -> Iterator[None]:
        """Within this context what follows the layers runs over so many tokens at a time."""
        tiles = measured_tiles(self.program.rest, tokens, partial(self._tile, False))
        with foreseeing("the head"), tiles, fakes(), torch.enable_grad():
            yield

    def _summed(self, loss: Loss) -> Summed:
        """A compiled loss is one operation, whichever it is."""
        if not self.compiled:
            return loss.summed
        return lambda logits_NV, targets_N, *given: cross_entropy(logits_NV, targets_N)

    def _head(
        self,
        layout: TileLayout,
        loss: Loss,
        visit: Callable[[Head, Buffer, Batch, Any, GradAccumulator], Any],
        rows: int,
        tokens: int,
        head_tokens: int,
    ) -> Work:
        """The work of a head for so many tokens, in a single row or several."""
        # A single row is a case of its own: what would be copied of several can be looked at.
        # None is longer than those of a step, for which alone a model need have positions.
        least = max(min(rows, 2), -(-tokens // self.tokens))
        count = next(n for n in range(least, tokens + 1) if tokens % n == 0 or tokens < n + 1)
        sizes = count, tokens // count

        def measure() -> Work:
            with self._measuring_head(head_tokens):
                planes = dict.fromkeys(tile_planes(None, self.dtype), Buffer("", torch.empty(0)))
                tile = Tile(0, layout, planes)
                slot = Buffer("slot", torch.empty(layout.numel, dtype=self.dtype))
                sums = Buffer("sums", torch.empty(layout.trainable_numel))
                beside = [torch.empty(sizes) for _ in loss.inputs]
                micro = replace(self.micro_batch(*sizes), loss=loss, extras=beside)
                refs = dict.fromkeys((*self.spec.epilogue_inputs, *self.spec.routed))
                entering = {ref: self.shape(ref, rows) for ref in refs}
                h = [
                    {
                        ref: Shape(
                            (1, *shape.sizes[1:])  # sums over tokens
                            if ref in self.spec.routed
                            else (*sizes, *shape.sizes[2:]),
                            shape.dtype,
                        ).empty()
                        for ref, shape in entering.items()
                    }
                ]
                batch = Batch([micro], 1, tokens, torch.zeros(1), 0)
                head = Head(CpuDevice(), self.program, tile, head_tokens, self._summed)
                counter = OpCounter()
                counter.ignore((slot.data, sums.data, h, micro.inputs, micro.targets, beside))
                with counter:
                    result = visit(head, slot, batch, h, GradAccumulator(tile, sums))
                del result
                return counter.with_peak

        return self.once(("head", visit.__name__, loss, head_tokens, *sizes), measure)


def _anew(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


@contextmanager
def fakes(layers: int = 1) -> Iterator[None]:
    """Tensors made within this context have no data; operations may be those of `layers`."""
    # A forecast may be in the middle of its own counting.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with without_modes(), unpacked(), mode, OneAttention(layers):
        yield
