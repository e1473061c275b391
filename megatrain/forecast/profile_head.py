"""What the stages of a head take that is streamed in ranges of rows (engine/vocab_split.py)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatrain.device import Buffer
from megatrain.engine.sink import GradAccumulator
from megatrain.engine.vocab_split import HIDDEN, VocabRows
from megatrain.forecast.layer_work import LayerWork
from megatrain.forecast.meta_loss import chunks_left_out
from megatrain.forecast.op_counter import OpCounter, Work, foreseeing, shapes_only
from megatrain.forecast.profile import Profile, fakes
from megatrain.forecast.profile_layer import eager_work
from megatrain.model.capture import Ref
from megatrain.model.program import Activations
from megatrain.optim import tile_planes
from megatrain.store.store import Tile
from megatrain.tile import TileLayout


@shapes_only
def _range_statistics(logits_CR: Tensor, places_C: Tensor) -> tuple[Tensor, Tensor]:
    one, other = (logits_CR.new_empty(len(logits_CR), dtype=torch.float32) for _ in range(2))
    return one, other


@shapes_only
def _range_gradient(
    logits_CR: Tensor,
    places_C: Tensor,
    lse_C: Tensor,
    weights_C: Tensor,
    lse_slope_C: Tensor | None = None,
    mean_slope_C: Tensor | None = None,
    chosen_CK: Tensor | None = None,
    chosen_slope_CK: Tensor | None = None,
) -> Tensor:
    return torch.empty_like(logits_CR)


def projected(measured: Profile, rows: int, head_tokens: int) -> LayerWork:
    """The work of what comes before the projection."""
    spec = measured.spec

    def measure() -> LayerWork:
        tiles = measured.tiles_of_head(head_tokens)
        with foreseeing("the head"), tiles, fakes(), torch.enable_grad():
            micro = measured.micro_batch(rows)
            shapes = {ref: measured.shape(ref, rows) for ref in spec.epilogue_inputs}
            values = {ref: s.empty("cpu").requires_grad_() for ref, s in shapes.items()}
            names = (name for name in spec.epilogue if name not in spec.projection.names)
            sizes = {name: measured.parameters[name].shape for name in names}
            weights = {
                name: torch.empty(size, dtype=measured.dtype).requires_grad_()
                for name, size in sizes.items()
            }

            def run() -> Activations:
                made = measured.program.projected(weights, micro, values)
                return {Ref(len(spec.layers), HIDDEN): made}

            return eager_work(run, [*values.values(), *weights.values()])

    return measured.once(("projected", rows, head_tokens), measure)


def some_rows(
    measured: Profile, shapes: Mapping[str, torch.Size], rows: int, head_tokens: int
) -> tuple[Work, Work]:
    """The work of rows of the table, of these shapes: of `VocabRows.see`, and of `backward`.

    Of many chunks a few are run, and one more: each that is left out takes as much as that one.
    """
    tokens = rows * measured.tokens
    left_out = chunks_left_out(tokens, head_tokens)

    def run(chunks: int) -> tuple[Work, Work]:
        """The work without so many chunks."""
        *_, width = projected(measured, rows, head_tokens).outputs[HIDDEN].sizes
        with foreseeing("the head"), fakes():
            kernels = (_range_statistics, _range_gradient) if measured.compiled else ()
            computed = VocabRows(measured.program, head_tokens, 0, *kernels)
            hidden = torch.empty(1, tokens - chunks * head_tokens, width, dtype=measured.dtype)
            return _both(measured, computed, shapes, hidden)

    def measure() -> tuple[Work, Work]:
        few = run(left_out)
        if not left_out:
            return few
        see, backward = map(Work.between, few, run(left_out - 1), (left_out,) * 2, (1, 1))
        return see, backward

    return measured.once(("rows", *shapes.values(), rows, head_tokens), measure)


def _both(
    measured: Profile, computed: VocabRows, shapes: Mapping[str, torch.Size], hidden_BTD: Tensor
) -> tuple[Work, Work]:
    micro = measured.micro_batch(1, hidden_BTD.shape[1])
    values = {computed.hidden: hidden_BTD}
    weights = {
        name: torch.empty(shape, dtype=measured.dtype).requires_grad_()
        for name, shape in shapes.items()
    }
    layout = TileLayout("", [(name, shape, 0) for name, shape in shapes.items()])
    sums = Buffer("sums", torch.empty(layout.trainable_numel))
    tile = Tile(0, layout, dict.fromkeys(tile_planes(None, sums.data.dtype), sums))
    accumulator = GradAccumulator(tile, sums)
    given = [weights, sums.data, values, micro.inputs, micro.targets]
    with OpCounter() as first:
        first.ignore(given)
        values = computed.see(weights, micro, values)
    gradients = computed.gradients(micro, values, 1)
    with OpCounter() as second:
        second.ignore([*given, values, gradients])
        computed.backward(weights, micro, values, gradients, list(weights), accumulator)
    one, other = (t.work._replace(peak_bytes=t.peak_bytes) for t in (first, second))
    return one, other
