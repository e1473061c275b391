"""The parts of a model as black boxes: the engine runs its own step on them, and nothing is
computed. A call says what it takes, holds as much memory as the real one, and returns tensors
without data that gradients flow through.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatrain.engine.expert_split import GIVEN, RESULT
from megatrain.engine.head import WholeHead
from megatrain.engine.sink import GradAccumulator
from megatrain.engine.vocab_split import HIDDEN, VocabSplit
from megatrain.forecast.groups import grouped
from megatrain.forecast.layer_work import LayerWork, Shape
from megatrain.forecast.op_counter import OpCounter, Work
from megatrain.forecast.profile import Profile
from megatrain.forecast.profile_experts import around_experts, some_experts
from megatrain.forecast.profile_head import projected, some_rows
from megatrain.model.capture import Call, Ref
from megatrain.model.experts import Chosen, ExpertRows
from megatrain.model.program import Activations, MicroBatch, Program, Weights
from megatrain.placement import Saves
from megatrain.tile import TileLayout

ACTIVATIONS, WORKING_SET, KEPT_GRAPHS = "activations", "working set", "kept graphs"
KEPT_ATTENTION = "kept attention"


class MetaProgram(Program):
    """A program of which only works and shapes are known."""

    def __init__(self, measured: Profile, counter: OpCounter, head_tokens: int) -> None:
        self.spec = measured.spec
        self._measured, self._counter, self._head_tokens = measured, counter, head_tokens

    def compile(self) -> None:
        """Nothing runs."""

    def tile(self, tokens: int, *, compiled: bool) -> None:
        """Nothing runs."""

    def prologue(self, weights: Weights, batch: MicroBatch) -> Activations:
        rows, count = len(batch.inputs["input_ids"]), grouped(batch)
        shapes = {ref: s.times(count) for ref, s in self._measured.entering(rows).items()}
        num_bytes = count * self._measured.argument_bytes(rows)
        with self._counter.placing("layer arguments"):
            held = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        batch.calls = [Call([held], None)] * len(self.spec.layers)
        sources = [*batch.rows.tables.values(), *weights.values()]
        moved = sum(shape.num_bytes for shape in shapes.values())
        work = Work(touched_bytes=2 * moved, kernels=count, calls=count)
        return _call(self._counter, work, work, KEPT_GRAPHS, sources, shapes)

    def layer(
        self,
        visit: int,
        weights: Weights,
        batch: MicroBatch,
        values: Activations,
        saves: Saves | None = None,
    ) -> Activations:
        """Compute as the model; whole layers of forecasts count themselves (opaque_layer.py)."""
        return self._measured.program.layer(visit, weights, batch, values, saves)

    def repeats(self, visit: int, weights: Callable[[], Weights], batch: MicroBatch) -> bool:
        """Whether the work of such a graph is known: of layers that would be compiled."""
        return self._measured.layer(visit, len(batch.inputs["input_ids"])).repeating is not None

    def projected(self, weights: Weights, batch: MicroBatch, values: Activations) -> Tensor:
        work = projected(self._measured, len(batch.inputs["input_ids"]), self._head_tokens)
        ref, count = Ref(len(self.spec.layers), HIDDEN), grouped(batch)
        sources = [*(values[ref] for ref in self.spec.epilogue_inputs), *weights.values()]
        return self._stage(work, sources, {ref: work.outputs[HIDDEN].times(count)}, count)[ref]

    def _stage(
        self,
        work: LayerWork,
        sources: Sequence[Tensor],
        shapes: Mapping[Ref, Shape],
        count: int = 1,
    ) -> Activations:
        """The results of a part of which nothing is kept; of `count` micro-batches."""
        if torch.is_grad_enabled():
            first, second = work.again.times(count), work.backward.times(count)
            return _call(self._counter, first, second, WORKING_SET, sources, shapes)
        self._counter.add(work.forward.times(count))
        return _results(self._counter, shapes)

    def around_experts(
        self,
        visit: int,
        weights: Weights,
        batch: MicroBatch,
        values: Activations,
        result: Tensor | None,
    ) -> tuple[Activations, tuple[Tensor, ...]]:
        work = around_experts(self._measured, visit, len(batch.inputs["input_ids"]))
        made, given = self.spec.outputs[visit], [Ref(visit, leaf) for leaf in GIVEN]
        shapes = {ref: work.outputs[ref.leaf] for ref in [*made, *given]}
        inputs = [values[ref] for ref in self.spec.layers[visit].inputs]
        sources = [*inputs, *weights.values(), *([] if result is None else [result])]
        out = self._stage(work, sources, shapes)
        return {ref: out[ref] for ref in made}, tuple(out[ref] for ref in given)

    def chosen(self, visit: int, index_NK: Tensor, start: int, stop: int) -> Chosen:
        """The tokens of these experts if all experts are chosen equally often."""
        experts = self.spec.layers[visit].kind.experts
        assert experts is not None
        count = index_NK.numel() * (stop - start) // experts.num
        where_S = torch.empty(count, dtype=torch.long, device="meta")
        return Chosen(where_S, where_S, [count])

    def experts(self, visit: int, weights: Weights, rows: ExpertRows) -> Tensor:
        work, ref = some_experts(self._measured, visit, len(rows[0]), weights), Ref(visit, RESULT)
        return self._stage(work, [*rows, *weights.values()], {ref: work.outputs[RESULT]})[ref]


class MetaVocabSplit(VocabSplit):
    """Rows of the head's table of which only works and shapes are known."""

    def __init__(self, tokens: int, measured: Profile, counter: OpCounter) -> None:
        super().__init__(measured.program, tokens)
        self._measured, self._counter = measured, counter

    def see(
        self, weights: dict[str, Tensor], start: int, micro: MicroBatch, values: Activations
    ) -> Activations:
        tokens = micro.inputs["input_ids"].numel() * grouped(micro)
        self._counter.add(self._work(weights, micro)[0])
        with self._counter.placing(ACTIVATIONS):
            found = {ref: torch.empty(tokens, device="meta") for ref in (self.lse, self.picked)}
        return {**values, **found}

    def loss(self, micro: MicroBatch, values: Activations) -> Tensor:
        return torch.empty((), device="meta")

    def losses(self, micro: MicroBatch, values: Activations) -> Tensor:
        return _of_each_token(micro)

    def gradients(self, micro: MicroBatch, values: Activations, count: float) -> Activations:
        with self._counter.placing(ACTIVATIONS):
            total = torch.empty_like(values[self.hidden], dtype=torch.float32)
            weights_N = torch.empty_like(values[self.picked])
        return {self.hidden: total, self.lse: values[self.lse], self.picked: weights_N}

    def pull(
        self,
        weights: dict[str, Tensor],
        start: int,
        micro: MicroBatch,
        values: Activations,
        gradients: Activations,
        names: list[str],
        room: GradAccumulator,
    ) -> None:
        self._counter.add(self._work(weights, micro)[1])

    def _work(self, weights: Weights, micro: MicroBatch) -> tuple[Work, Work]:
        rows, count = len(micro.inputs["input_ids"]), grouped(micro)
        see, pull = some_rows(self._measured, weights, rows, self._tokens)
        return see.times(count), pull.times(count)


class MetaHead(WholeHead):
    """A head of which only works and shapes are known."""

    def __init__(
        self, tokens: int, measured: Profile, layout: TileLayout, counter: OpCounter
    ) -> None:
        super().__init__(measured.program, tokens, lambda loss: loss.summed)
        self._work = partial(measured.head, layout, head_tokens=tokens)
        self._losses = partial(measured.head_losses, layout, head_tokens=tokens)
        self._counter = counter

    def gradients_of(
        self,
        weights: dict[str, Tensor],
        names: list[str],
        micro: MicroBatch,
        values: Activations,
        count: float,
        room: GradAccumulator,
    ) -> tuple[Tensor, Activations]:
        number = grouped(micro)
        work = self._work(len(micro.inputs["input_ids"]), loss=micro.loss)
        self._counter.add(work.times(number))
        pulled = {ref: value for ref, value in values.items() if value.is_floating_point()}
        # Of a group, each one's activations are gone when the next one's gradients are made.
        gone = sum(value.nbytes for value in pulled.values()) * (number - 1) // number
        with self._counter.placing(ACTIVATIONS), self._counter.more(ACTIVATIONS, -gone):
            return torch.empty((), device="meta"), {ref: _like(v) for ref, v in pulled.items()}

    def losses(self, weights: dict[str, Tensor], micro: MicroBatch, values: Activations) -> Tensor:
        self._counter.add(self._losses(len(micro.inputs["input_ids"])).times(grouped(micro)))
        return _of_each_token(micro)


def _of_each_token(micro: MicroBatch) -> Tensor:
    """A number for each token of one micro-batch, in the room of those of a group."""
    return torch.empty(grouped(micro), micro.inputs["input_ids"].numel(), device="meta")[0]


def _results(counter: OpCounter, shapes: Mapping[Ref, Shape]) -> Activations:
    with counter.placing(ACTIVATIONS):
        return {ref: shape.empty("meta") for ref, shape in shapes.items()}


def _call(
    counter: OpCounter,
    first: Work,
    second: Work,
    place: str,
    sources: Sequence[Tensor],
    shapes: Mapping[Ref, Shape],
) -> Activations:
    """The results of a black box in whose graph the `first` work's kept bytes wait for `second`."""
    made = _BlackBox.apply(counter, first, second, place, shapes, *sources)
    return dict(zip(shapes, made, strict=True))


class _BlackBox(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        counter: OpCounter,
        first: Work,
        second: Work,
        place: str,
        shapes: Mapping[Ref, Shape],
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        counter.add(first)
        with counter.placing(place):
            held = torch.empty(first.kept_bytes, dtype=torch.uint8, device="meta")
        # What is held already counts in the backward's peak.
        peak = max(0, second.peak_bytes - first.kept_bytes)
        ctx.counter, ctx.second = counter, second._replace(peak_bytes=peak)
        ctx.save_for_backward(held)
        ctx.sources = [Shape(tuple(source.shape), source.dtype) for source in sources]
        return tuple(_results(counter, shapes).values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # what was held has its end with this backward
        ctx.counter.add(ctx.second)
        wanted = zip(ctx.sources, ctx.needs_input_grad[5:], strict=True)
        with ctx.counter.placing(WORKING_SET):
            pulled = [source.empty("meta") if needed else None for source, needed in wanted]
        return (None, None, None, None, None, *pulled)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
