"""What the parts of a model take at one shape of micro-batch, read off the model's own code.

Each kind of layer, and the head, runs once on fake tensors (shapes without data) under a counter of
its operations: FLOPs, bytes touched, and bytes alive. That takes tenths of a second, for any size.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain.compat.torch import FakeTensorMode, without_modes
from megatrain.compat.transformers import unpacked
from megatrain.device import Buffer, CpuDevice
from megatrain.engine.batch import Batch
from megatrain.engine.head import Head, Summed
from megatrain.engine.sink import GradAccumulator
from megatrain.forecast.groups import Group, groups
from megatrain.forecast.layer_work import LayerWork, Shape
from megatrain.forecast.meta_loss import TWO_VISITS, cross_entropy
from megatrain.forecast.op_counter import OneAttention, OpCounter, Work, foreseeing
from megatrain.forecast.profile_chunks import TileWork, foretold, tiled
from megatrain.forecast.profile_layer import Trace, compiled_work, eager_work, traced
from megatrain.loss import CROSS_ENTROPY, Loss
from megatrain.model.capture import Call, Ref, Rows, last_hidden, stand_in
from megatrain.model.layer_template import LayerTemplate
from megatrain.model.program import Activations, MicroBatch, ModelProgram
from megatrain.model.spec import ModelSpec
from megatrain.optim import tile_planes
from megatrain.store.store import Tile
from megatrain.tile import TileLayout

_CPU = torch.device("cpu")

Found = TypeVar("Found")

_CHUNKS_RUN = 3  # of a head's; the logits of so many take more memory than what is of all tokens


class _AnyRows(Rows):
    """Rows of which only shapes count."""

    def position(self, token: int) -> int | None:
        return 0

    def positions(self, ids: Tensor) -> Tensor:
        return ids


class Profile:
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
    ) -> None:
        """Args: with `chunk_tokens`, layers are eager but for the parts that run in tiles."""
        self._float8 = float8
        self.spec, self.dtype, self.tokens = spec, dtype, sequence_length
        self.compiled, self.chunk_tokens = compiled, chunk_tokens
        self.program = ModelProgram(spec, _CPU, dtype)
        self.program.train(True)
        self._known: dict[Hashable, Any] = {}
        self._outputs: dict[int, tuple[int, dict[int, Shape]]] = {}  # of a kind, for so many rows
        self._traces: dict[int, dict[int, Trace]] = {}  # of a kind, by rows: at most two
        self._micro: dict[int, tuple[dict[Ref, Shape], list[Call], int]] = {}

    def once(self, key: Hashable, measure: Callable[[], Found]) -> Found:
        """What `measure` has found when it was first asked for `key`: of parts of layers, heads."""
        if key not in self._known:
            self._known[key] = measure()
        return self._known[key]

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's, by name. Found once: with adapters a large one has thousands of modules."""
        return dict(self.spec.capture.model.named_parameters())

    def distinct(self, rows: int) -> Tensor:
        """The tokens that occur in a step of random ones, `[U]`: as many as on average."""

        def made() -> Tensor:
            config = self.spec.capture.model.config.get_text_config(decoder=True)
            generator = torch.Generator().manual_seed(0)
            ids_BT = torch.randint(config.vocab_size, (rows, self.tokens), generator=generator)
            known = list(self.spec.constants)
            seen_V = torch.zeros(max(config.vocab_size, *known, 0) + 1, dtype=torch.bool)
            seen_V[ids_BT.flatten()] = seen_V[known] = True  # far quicker than `unique`
            return seen_V.nonzero().flatten()

        return self.once(("distinct", rows), made)

    def batch(self, rows: int, micro_batch: int, most: int | None = None, passes: int = 1) -> Batch:
        """A step, whose tokens count by their number. Of more than `most` micro-batches several
        are one `Group`.
        """

        def made() -> Batch:
            unique_U, micro = self.distinct(rows), list[MicroBatch]()
            for count, size in groups(rows, micro_batch, most, passes):
                ids_BT = torch.zeros(size, self.tokens, dtype=torch.long)
                found = Rows(ids_BT, ids_BT, {}, unique_U)
                micro.append(Group({"input_ids": ids_BT}, ids_BT, found, count=count))
            tokens = rows * self.tokens
            batch = Batch(micro, tokens, tokens, unique_U, seed=0)
            batch.most, batch.all_tokens = len(micro), tokens
            batch.loss_inputs = [(each.rows.ids, []) for each in micro]
            return batch

        return self.once(("batch", rows, micro_batch, most, passes), made)

    def with_all_rows(self, batch: Batch, rows: int, ranks: int) -> Batch:
        """A rank's batch with the table's rows for `rows` of tokens, those of all ranks and hosts.

        The `ranks` of a host keep them in equal blocks, filled up as the engine does.
        """
        unique_U = self.distinct(rows)
        block = -(-len(unique_U) // ranks)
        filled = unique_U[-1].expand(block * ranks - len(unique_U))
        return replace(batch, unique_U=torch.cat([unique_U, filled]), own=slice(block))

    def entering(self, rows: int) -> dict[Ref, Shape]:
        """What the prologue makes of a micro-batch."""
        return self._prologue(rows)[0]

    def argument_bytes(self, rows: int) -> int:
        """Bytes of what the prologue makes besides for layers: positions, masks."""
        return self._prologue(rows)[2]

    def layer(self, visit: int, rows: int) -> LayerWork:
        """The work of a layer, from that of its kind."""
        kind = self.spec.layers[visit].kind

        def measure() -> LayerWork:
            with foreseeing(self.spec.layers[visit].name):
                found = self._layer(visit, rows, kind)
            found = found.in_float8 if self._float8 else found
            self._outputs[id(kind)] = rows, found.outputs
            return found

        return self.once(("layer", id(kind), rows), measure)

    def head(
        self, layout: TileLayout, rows: int, head_tokens: int, loss: Loss = CROSS_ENTROPY
    ) -> Work:
        """The work of epilogue, logits, loss and their gradients."""
        tokens = rows * self.tokens
        run = partial(self._head, layout, rows, head_tokens, loss, Head.loss_and_vjp)
        work = in_chunks(tokens, head_tokens, run)
        if tokens // head_tokens > _CHUNKS_RUN:  # all tokens may take more than a chunk's logits
            epilogue = self.projected(rows, head_tokens)
            hidden = sum(shape.num_bytes for shape in epilogue.outputs.values())
            work = work._replace(
                peak_bytes=max(work.peak_bytes, epilogue.backward.peak_bytes + 2 * hidden)
            )
        return work

    def head_losses(self, layout: TileLayout, rows: int, head_tokens: int) -> Work:
        """The work of the visit that a loss of all tokens together needs first."""

        def visit(head: Head, slot: Buffer, batch: Batch, h: Any, accumulator: Any) -> Any:
            return head.losses(slot, batch, h)

        return self._head(layout, rows, head_tokens, TWO_VISITS, visit, rows * self.tokens)

    def projected(self, rows: int, head_tokens: int) -> LayerWork:
        """The work of what comes before the projection."""

        def measure() -> LayerWork:
            tiles = self.tiles_of_head(head_tokens)
            with foreseeing("the head"), tiles, fakes(), torch.enable_grad():
                micro, spec = self.micro_batch(rows), self.spec
                shapes = {ref: self.shape(ref, rows) for ref in spec.epilogue_inputs}
                values = {ref: s.empty("cpu").requires_grad_() for ref, s in shapes.items()}
                weights = {
                    name: torch.empty(
                        self.parameters[name].shape, dtype=self.dtype
                    ).requires_grad_()
                    for name in spec.epilogue
                    if name not in spec.head
                }

                def run() -> Activations:
                    hidden = last_hidden(self.program.epilogue(weights, micro, values))
                    return {Ref(len(spec.layers), 0): hidden.contiguous()}

                return eager_work(run, [*values.values(), *weights.values()])

        return self.once(("projected", rows, head_tokens), measure)

    def shape(self, ref: Ref, rows: int) -> Shape:
        """The shape of an activation, whatever rows its layer was measured with."""
        if ref in self.entering(rows):
            return self.entering(rows)[ref]
        known = self._outputs.get(id(self.spec.layers[ref.visit].kind))
        measured, outputs = known or (rows, self.layer(ref.visit, rows).outputs)
        return outputs[ref.leaf].of_rows(rows, measured)

    def _prologue(self, rows: int) -> tuple[dict[Ref, Shape], list[Call], int]:
        if rows not in self._micro:
            with foreseeing("what comes before the layers"), fakes():
                micro = self.micro_batch(rows)
                weights = {
                    name: stand_in(self.parameters[name], _CPU, self.dtype).requires_grad_()
                    for name in self.spec.prologue
                }
                with torch.enable_grad():
                    values = self.program.prologue(weights, micro)
                shapes = {ref: Shape(tuple(v.shape), v.dtype) for ref, v in values.items()}
                leaves = {id(leaf): leaf for call in micro.calls for leaf in call.leaves}
                num_bytes = sum(v.nbytes for v in leaves.values() if isinstance(v, Tensor))
                self._micro[rows] = shapes, micro.calls, num_bytes
        return self._micro[rows]

    def micro_batch(self, rows: int, tokens: int | None = None) -> MicroBatch:
        """One without data, within `fakes()`; of `tokens` a row."""
        ids = torch.zeros(rows, tokens or self.tokens, dtype=torch.long)
        shapes = {name: self.parameters[name].shape for name in self.spec.gathered}
        tables = {
            name: torch.empty(1, *shape[1:], dtype=self.dtype).requires_grad_()
            for name, shape in shapes.items()
        }
        return MicroBatch({"input_ids": ids}, ids, _AnyRows(ids, ids, tables, ids.view(-1)[:1]))

    def called(self, visit: int, rows: int) -> tuple[MicroBatch, dict[str, Tensor], Activations]:
        """A micro-batch, weights and inputs to call a layer with, within `fakes()`."""
        layer, calls = self.spec.layers[visit], self._prologue(rows)[1]
        micro = replace(self.micro_batch(rows), calls=_as_fakes(calls))
        values = {ref: self.shape(ref, rows).empty("cpu") for ref in layer.inputs}
        for value in values.values():
            value.requires_grad_(value.is_floating_point())
        weights = {
            name: torch.empty(p.shape, dtype=self.dtype).requires_grad_(p.requires_grad)
            for name, p in layer.module.named_parameters()
        }
        return micro, weights, values

    def _summed(self, loss: Loss) -> Summed:
        """A compiled loss is one operation, whichever it is."""
        if not self.compiled:
            return loss.summed
        return lambda logits_NV, targets_N, *given: cross_entropy(logits_NV, targets_N)

    def _trace(self, visit: int, rows: int, kind: LayerTemplate) -> Trace:
        """The trace of a layer. Two are recorded, others follow: all is affine in the rows.

        A single row is a case of its own: what would be copied of several can be looked at.
        """
        known = self._traces.setdefault(id(kind), {})
        if len(known) == 2 and rows > 1:
            (first, one), (second, two) = known.items()
            between = one.ops.between(two.ops, rows - first, second - first)
            if between is not None:
                outputs = {leaf: s.of_rows(rows, first) for leaf, s in one.outputs.items()}
                return Trace(between, outputs)
        with fakes(), torch.enable_grad(), self.program.eager():
            trace = traced(*self._call(visit, rows))
        if len(known) < 2 and rows > 1:
            known[rows] = trace
        return trace

    def _call(self, visit: int, rows: int) -> tuple[Callable[[], Activations], list[Any]]:
        """What runs a layer, and all that it is given, within `fakes()`."""
        micro, weights, values = self.called(visit, rows)
        given = [*values.values(), *weights.values(), *micro.calls[visit].leaves]
        return partial(self.program.layer, visit, weights, micro, values), given

    def _layer(self, visit: int, rows: int, kind: LayerTemplate) -> LayerWork:
        if self.compiled and self.chunk_tokens is None:
            return compiled_work(self._trace(visit, rows, kind))
        with fakes(), torch.enable_grad(), self.program.eager():
            run, given = self._call(visit, rows)
            if self.chunk_tokens is None:
                return eager_work(run, given)
            with tiled(kind, self.chunk_tokens, partial(self._tile, self.compiled)):
                return eager_work(run, given)

    def _tile(
        self,
        compiled: bool,
        part: nn.Module,
        bound: dict[str, Tensor],
        sizes: tuple[int, ...],
        dtype: torch.dtype,
    ) -> TileWork:
        """What one tile takes in a part."""
        grown = {name for name, _ in part.named_parameters()}
        with fakes(), torch.enable_grad():
            x = torch.empty(sizes, dtype=dtype).requires_grad_()
            weights = {n: _anew(v).requires_grad_(n in grown) for n, v in bound.items()}

            def run() -> Activations:
                return {Ref(0, 0): functional_call(part, weights, (x,))}

            given = [x, *weights.values()]
            work = compiled_work(traced(run, given)) if compiled else eager_work(run, given)
            made = work.outputs[0]
            return TileWork(work.forward, work.again, work.backward, made.sizes, made.dtype)

    def tiles_of_head(self, tokens: int) -> AbstractContextManager[None]:
        """Within this context what follows the layers runs over so many tokens at a time."""
        return foretold(self.program.rest, tokens, partial(self._tile, False))

    def _head(
        self,
        layout: TileLayout,
        rows: int,
        head_tokens: int,
        loss: Loss,
        visit: Callable[[Head, Buffer, Batch, Any, GradAccumulator], Any],
        tokens: int,
    ) -> Work:
        """The work of a head for the first `tokens` of so many rows."""
        # A single row is a case of its own: what would be copied of several can be looked at.
        several = rows > 1 and not (rows * self.tokens) % 2 and not head_tokens % 2
        sizes = (2, tokens // 2) if several else (1, tokens)

        def measure() -> Work:
            tiles = self.tiles_of_head(head_tokens)
            with foreseeing("the head"), tiles, fakes(), torch.enable_grad():
                planes = dict.fromkeys(tile_planes(None, self.dtype), Buffer("", torch.empty(0)))
                tile = Tile(0, layout, planes)
                slot = Buffer("slot", torch.empty(layout.numel, dtype=self.dtype))
                sums = Buffer("sums", torch.empty(layout.trainable_numel))
                beside = [torch.empty(sizes) for _ in loss.inputs]
                micro = replace(self.micro_batch(*sizes), loss=loss, extras=beside)
                shapes = {
                    ref: self.shape(ref, rows)
                    for ref in (*self.spec.epilogue_inputs, *self.spec.routed)
                }
                h = [{ref: shape.of_tokens(*sizes).empty("cpu") for ref, shape in shapes.items()}]
                batch = Batch([micro], 1, tokens, torch.zeros(1), 0)
                head = Head(CpuDevice(), self.program, tile, head_tokens, self._summed)
                counter = OpCounter()
                counter.ignore((slot.data, sums.data, h, micro.inputs, micro.targets, beside))
                with counter:
                    result = visit(head, slot, batch, h, GradAccumulator(tile, sums))
                del result
                return counter.work._replace(peak_bytes=counter.peak_bytes)

        return self.once(("head", visit.__name__, loss, head_tokens, *sizes), measure)


def in_chunks(tokens: int, chunk: int, run: Callable[[int], Work]) -> Work:
    """The work of all tokens, of which chunks are computed one after the other.

    Of many chunks three are run, and four: each one more takes as much as the fourth.
    """
    left_out = max(0, tokens // chunk - _CHUNKS_RUN)
    few = run(tokens - left_out * chunk)
    if not left_out:
        return few
    return few.between(run(tokens - (left_out - 1) * chunk), left_out, 1)


def _as_fakes(calls: list[Call]) -> list[Call]:
    """The arguments of layers, made anew: fake tensors belong to the mode they were made in."""
    known: dict[int, Tensor] = {}

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = _anew(leaf)
        return known[id(leaf)]

    return [Call([fresh(leaf) for leaf in call.leaves], call.spec) for call in calls]


def _anew(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


@contextmanager
def fakes() -> Iterator[None]:
    """Tensors made within this context have no data."""
    # A forecast may be in the middle of its own counting.
    with (
        without_modes(),
        unpacked(),
        FakeTensorMode(allow_non_fake_inputs=True),
        OneAttention(),
    ):
        yield
