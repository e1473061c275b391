"""No mask for a plain row, however long; where one would not fit, that is said."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatrain import DoesNotFit, Placement
from megatrain.base.units import GIB
from megatrain.model.document_check import check_masks
from tests.inside import program_of
from tests.parity.cases import llama, make_engine

PLAIN = SimpleNamespace(_attn_implementation="sdpa", sliding_window=None)
LONG = 65_536


def rows(**more):
    return [{"input_ids": torch.zeros(1, LONG, dtype=torch.int64), **more}]


def test_a_plain_row_is_taken_at_any_length():
    positions = torch.arange(LONG)[None]
    ones = torch.ones(1, LONG, dtype=torch.int64)
    check_masks(rows(position_ids=positions, attention_mask=ones), PLAIN, 2, GIB)


@pytest.mark.parametrize(
    ("micro", "config", "reason"),
    [
        (rows(attention_mask=(torch.arange(LONG) < 9)[None].long()), PLAIN, "padding"),
        (rows(position_ids=(torch.arange(LONG) % 4096)[None]), PLAIN, "several documents"),
        (
            rows(),
            SimpleNamespace(_attn_implementation="sdpa", sliding_window=4096),
            "a sliding window of 4096",
        ),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(micro, config, reason):
    with pytest.raises(DoesNotFit, match=f"65536 tokens with {reason}: .* 12.0 GiB, and 11.0 GiB"):
        check_masks(micro, config, 2, 11 * GIB)
    check_masks(micro, config, 2, 12 * GIB)


def test_flash_attention_needs_no_mask():
    config = SimpleNamespace(_attn_implementation="flash_attention_2", sliding_window=16)
    check_masks(rows(), config, 2, 0)


def test_layers_of_a_plain_long_row_get_no_mask(monkeypatch):
    tokens = 3000
    engine = make_engine(llama(max_position_embeddings=tokens), placement=Placement())
    sizes = []
    layer = program_of(engine).layer

    def listen(visit, weights, batch, values, *options):
        leaves = batch.calls[visit].leaves
        sizes.extend(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
        return layer(visit, weights, batch, values, *options)

    monkeypatch.setattr(program_of(engine), "layer", listen)
    ids = torch.ones(1, tokens, dtype=torch.int64)
    engine.evaluate([{"input_ids": ids, "labels": ids}])
    assert sizes and max(sizes) <= tokens * 64
