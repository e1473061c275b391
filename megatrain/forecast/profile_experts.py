"""What stages of a layer take that is streamed some experts at a time (engine/expert_split.py)."""

from collections.abc import Mapping
from functools import partial

import torch

from megatrain.engine.expert_split import GIVEN, RESULT
from megatrain.forecast.layer_work import LayerWork
from megatrain.forecast.op_counter import NotForeseeable, foreseeing
from megatrain.forecast.profile import Profile, fakes
from megatrain.forecast.profile_layer import eager_work
from megatrain.model.capture import Ref
from megatrain.model.program import Activations


def around_experts(measured: Profile, visit: int, rows: int) -> LayerWork:
    """The work of a layer with its experts' result given; outputs and what the experts are given.

    Raises:
        NotForeseeable: it depends on values, or is for tiles of tokens.
    """
    layer = measured.spec.layers[visit]
    if measured.chunk_tokens is not None:
        raise NotForeseeable("what split layers take with chunk_tokens is not foreseen")

    def measure() -> LayerWork:
        with foreseeing(layer.name), fakes(), torch.enable_grad(), measured.program.eager():
            micro, weights, values = measured.called(visit, rows)
            call = partial(measured.program.around_experts, visit, weights, micro, values)
            result = torch.empty_like(call(None)[1][0]).requires_grad_()

            def run() -> Activations:
                made, given = call(result)
                named = zip(GIVEN, given, strict=True)
                return {**made, **{Ref(visit, leaf): value for leaf, value in named}}

            given = [*values.values(), *weights.values(), result, *micro.calls[visit].leaves]
            return eager_work(run, given)

    return measured.once(("around experts", id(layer.kind), rows), measure)


def some_experts(
    measured: Profile, visit: int, count: int, shapes: Mapping[str, torch.Size]
) -> LayerWork:
    """The work of experts whose weights have these shapes, on `count` rows in all.

    Raises:
        NotForeseeable: it depends on values.
    """
    layer = measured.spec.layers[visit]

    def measure() -> LayerWork:
        width = around_experts(measured, visit, 1).outputs[GIVEN[0]].sizes[1]
        with foreseeing(layer.name), fakes(), torch.enable_grad():
            rows_SD = torch.empty(count, width, dtype=measured.dtype, requires_grad=True)
            share_S = torch.empty(count, dtype=measured.dtype, requires_grad=True)
            index_S = torch.empty(count, dtype=torch.long)
            some = {
                name: torch.empty(shape, dtype=measured.dtype, requires_grad=True)
                for name, shape in shapes.items()
            }

            def run() -> Activations:
                made = measured.program.experts(visit, some, (rows_SD, index_S, share_S))
                return {Ref(visit, RESULT): made}

            return eager_work(run, [rows_SD, share_S, index_S, *some.values()])

    return measured.once(("experts", id(layer.kind), count, *shapes.values()), measure)
