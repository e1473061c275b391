"""Packed rows: each document as if it were alone, or the model is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain import InputError
from megatrain.engine.packing import is_packed, trial
from tests.families.tiny import tiny_model
from tests.parity.cases import gradients, llama, make_engine, masters, relative_error, same

LENGTHS = (9, 1, 4)


def packed(ids: list[Tensor]) -> dict[str, Tensor]:
    """One row of documents; nothing predicts a document's first token."""
    labels = [torch.cat([torch.tensor([-100]), each[1:]]) for each in ids]
    positions = [torch.arange(len(each)) for each in ids]
    parts = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {key: torch.cat(values)[None] for key, values in parts.items()}


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(10, 110, (length,), generator=generator) for length in LENGTHS]


def alone(ids: list[Tensor]) -> list[dict[str, Tensor]]:
    return [{"input_ids": each[None], "labels": each[None]} for each in ids]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "mistral"])
def test_packed_documents_train_as_separate_ones(family: str) -> None:
    model = llama() if family == "llama" else tiny_model(family)
    one, other = make_engine(model, clip=1e9), make_engine(model, clip=1e9)
    together, apart = one.step([packed(documents())]), other.step(alone(documents()))
    assert together.loss == pytest.approx(apart.loss, rel=1e-6)
    assert together.grad_norm == pytest.approx(apart.grad_norm, rel=1e-5)
    assert relative_error(gradients(one), gradients(other)) < 1e-5


def test_positions_count_where_no_document_begins_anew() -> None:
    """Given positions are used: a row that begins at 7 is not one that begins at 0."""
    model = llama(rope_parameters=None, partial_rotary_factor=1.0)
    [ids, *_] = documents()
    plain = {"input_ids": ids[None]}
    gpt2 = tiny_model("gpt2").eval()
    engine = make_engine(gpt2)
    shifted = {**plain, "position_ids": torch.arange(len(ids))[None] + 7}
    with torch.no_grad():
        wanted = gpt2(**shifted).logits
    torch.testing.assert_close(engine.logits(shifted), wanted)
    assert not torch.allclose(engine.logits(plain), wanted, atol=1e-3)
    rotary = make_engine(model)  # relative: only differences matter
    torch.testing.assert_close(rotary.logits(shifted), rotary.logits(plain), rtol=1e-4, atol=1e-4)


# States, both kinds of layers in turn or in one, masks made without positions, no causal order.
MIXING = ["mamba", "jamba", "falcon_h1", "opt", "gpt_oss", "bloom", "minimax", "cpmant"]


@pytest.mark.parametrize("family", MIXING)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_models_that_mix_documents_are_refused(family: str, precision: Any) -> None:
    engine = make_engine(tiny_model(family), precision=precision)
    before = masters(engine)
    for _ in range(2):
        with pytest.raises(InputError, match="does not keep the documents .* apart; .*packing"):
            engine.step([packed(documents())])
        with pytest.raises(InputError, match="does not keep the documents .* apart; .*packing"):
            engine.evaluate([packed(documents())])
    assert same(before, masters(engine))
    engine.step(alone(documents()[::2]))  # documents of their own are welcome


def test_the_trial_leaves_no_trace() -> None:
    """Training is the same whether or not an evaluation tried the packing before."""
    model = llama(attention_dropout=0.3)
    one, other = make_engine(model), make_engine(model)
    one.evaluate([packed(documents())])
    results = [engine.step([packed(documents())]) for engine in (one, other)]
    assert results[0].loss == results[1].loss
    assert same(masters(one), masters(other))


def test_padding_beside_packed_documents_is_refused() -> None:
    """With such a mask transformers takes the row for one document."""
    engine, micro = make_engine(llama()), packed(documents())
    mask = torch.ones_like(micro["input_ids"])
    engine.step([{**micro, "attention_mask": mask}])
    mask[0, -2:] = 0
    with pytest.raises(InputError, match="rows of several documents .* labels of -100"):
        engine.step([{**micro, "attention_mask": mask}])


POSITIONS = {
    "one document": ([0, 1, 2, 3], [1, 1, 1, 1], False),
    "a part of one": ([5, 6, 7, 8], [1, 1, 1, 1], False),
    "two documents": ([0, 1, 0, 1], [1, 1, 1, 1], True),
    "single tokens": ([0, 0, 0, 0], [1, 1, 1, 1], True),
    "a gap": ([0, 1, 5, 6], [1, 1, 1, 1], True),
    "padding before": ([1, 1, 0, 1], [0, 0, 1, 1], False),
    "padding after": ([0, 1, 1, 1], [1, 1, 0, 0], False),
    "documents and padding": ([0, 1, 0, 1], [1, 1, 1, 0], True),
}


@pytest.mark.parametrize(("positions", "mask", "expected"), POSITIONS.values(), ids=POSITIONS)
def test_packed_rows_are_told_by_their_positions(
    positions: list[int], mask: list[int], expected: bool
) -> None:
    micro = {"input_ids": torch.zeros(2, 4), "position_ids": torch.arange(4).repeat(2, 1)}
    micro["position_ids"][1] = torch.tensor(positions)
    micro["attention_mask"] = torch.ones(2, 4).long()
    micro["attention_mask"][1] = torch.tensor(mask)
    assert is_packed(micro) == expected
    if all(mask):
        del micro["attention_mask"]
        assert is_packed(micro) == expected
    del micro["position_ids"]
    assert not is_packed(micro)


@pytest.mark.parametrize("tokens", [2, 3, 9, 40])
def test_a_trial_changes_every_token_of_the_first_document(tokens: int) -> None:
    ids = torch.arange(tokens)[None] % 3
    rows = trial(ids)
    assert rows is not None
    a, c, b_first, also_b_first = (row["input_ids"][0] for row in rows)
    half = len(a) // 2
    assert len(a) == 2 * half <= min(tokens, 16)
    assert (a[:half] != c[:half]).all()
    assert torch.equal(a[half:], c[half:])
    assert torch.equal(b_first, torch.cat([a[half:], a[:half]]))
    assert torch.equal(also_b_first, torch.cat([a[half:], c[:half]]))
    assert set(torch.cat([a, c]).tolist()) <= set(ids[0].tolist())


def test_rows_of_one_kind_of_token_try_nothing() -> None:
    assert trial(torch.full((2, 8), 5)) is None
    assert trial(torch.tensor([[3], [4]])) is None
