"""What the stages of a head take that is streamed in ranges of rows (engine/vocab_split.py)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatrain.device import Buffer
from megatrain.engine.sink import GradAccumulator
from megatrain.engine.vocab_split import HIDDEN, VocabRows
from megatrain.forecast.op_counter import OpCounter, Work, foreseeing, shapes_only
from megatrain.forecast.profile import Profile, fakes, in_chunks
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


def some_rows(
    measured: Profile, shapes: Mapping[str, torch.Size], rows: int, head_tokens: int
) -> tuple[Work, Work]:
    """The work of `VocabRows.add_statistics` and of its `backward` for rows of these shapes."""

    def run(tokens: int) -> tuple[Work, Work]:
        *_, width = measured.projected(rows, head_tokens).outputs[HIDDEN].sizes

        def measure() -> tuple[Work, Work]:
            with foreseeing("the head"), fakes():
                kernels = (_range_statistics, _range_gradient) if measured.compiled else ()
                computed = VocabRows(measured.program, head_tokens, 0, *kernels)
                hidden = torch.empty(1, tokens, width, dtype=measured.dtype)
                return _both(measured, computed, shapes, hidden)

        return measured.once(("rows", *shapes.values(), head_tokens, tokens), measure)

    def work(number: int) -> Work:
        return in_chunks(rows * measured.tokens, head_tokens, lambda tokens: run(tokens)[number])

    return work(0), work(1)


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
        values = computed.add_statistics(weights, micro, values)
    gradients = computed.gradients(micro, values, 1)
    with OpCounter() as second:
        second.ignore([*given, values, gradients])
        computed.backward(weights, micro, values, gradients, list(weights), accumulator)
    one, other = (t.work._replace(peak_bytes=t.peak_bytes) for t in (first, second))
    return one, other
