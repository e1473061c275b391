"""What a layer, or a part of one, takes: compiled, from its recorded operations, or as it is."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatrain.forecast.inductor_model import Compiled, Recorder, Traced
from megatrain.forecast.layer_work import LayerWork, Shape
from megatrain.forecast.op_counter import OpCounter
from megatrain.model.layer_template import KEPT_SHARE
from megatrain.model.program import Activations


@dataclass(frozen=True)
class Trace:
    """The operations of a layer's forward and backward, and its results."""

    ops: Traced
    outputs: dict[int, Shape]


def traced(run: Any, given: list[Any]) -> Trace:
    """A layer's forward and backward, recorded."""
    recorder = Recorder()
    with _Decomposed(), recorder:
        made = run()
        split = len(recorder.ops)
        values, gradients = _ends(made)
        input_grads = torch.autograd.grad(values, _leaves(given), gradients, allow_unused=True)
    ops = Traced(
        recorder.ops,
        recorder.sizes,
        split,
        recorder.numbers((given, gradients)),
        recorder.numbers(list(made.values())),
        recorder.numbers(input_grads),
        recorder.random,
    )
    return Trace(ops, _shapes(made))


class _Decomposed(TorchFunctionMode):
    """Gives a dense copy of part of a tensor that nothing is dropped of, as torch.compile does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        copied = func is F.dropout and made.nbytes < made.untyped_storage().nbytes()
        return made.clone() if copied else made


def compiled_work(trace: Trace) -> LayerWork:
    """What a layer takes once it is compiled."""
    works, random = Compiled(trace.ops), trace.ops.random
    # As model/layer_template.py compiles kept graphs.
    share = None if random else KEPT_SHARE
    return LayerWork(
        works.forward(),
        works.forward_keeping(),
        works.backward(),
        works.forward_keeping(share),
        works.backward(share),
        None if random else works.backward(0.0),
        trace.outputs,
    )


def eager_work(run: Any, given: list[Any]) -> LayerWork:
    """What a layer takes as it is."""
    plain, graph = OpCounter(), OpCounter()
    with torch.no_grad(), plain:
        plain.ignore(given)
        run()
    forward = plain.work._replace(peak_bytes=plain.peak_bytes)
    with graph:
        graph.ignore(given)
        made = run()
    values, gradients = _ends(made)
    graph.ignore(gradients)
    results = sum(value.nbytes for value in made.values())
    kept = graph.total_bytes - results
    first = graph.work._replace(peak_bytes=graph.peak_bytes, kept_bytes=kept)
    graph.restart()
    with graph:
        torch.autograd.grad(values, _leaves(given), gradients, allow_unused=True)
    second = graph.work._replace(peak_bytes=graph.peak_bytes - results)
    return LayerWork(forward, first, second, first, second, None, _shapes(made))


def _ends(made: Activations) -> tuple[list[Tensor], list[Tensor]]:
    """A layer's results that gradients flow through, and such gradients."""
    values = [value for value in made.values() if value.requires_grad]
    return values, [torch.empty_like(value) for value in values]


def _leaves(given: list[Any]) -> list[Tensor]:
    return [leaf for leaf in given if isinstance(leaf, Tensor) and leaf.requires_grad]


def _shapes(made: Activations) -> dict[int, Shape]:
    return {ref.leaf: Shape(tuple(v.shape), v.dtype) for ref, v in made.items()}
