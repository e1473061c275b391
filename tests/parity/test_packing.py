"""Packed rows: each document as if it were alone, or the model is refused."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from megatrain import Engine, InputError
from megatrain.checkpoint.manifest import read_checkpoint
from megatrain.compat.transformers import attention_of
from megatrain.model.documents import check_documents, is_packed
from megatrain.model.probe import spec
from megatrain.source import state_io
from tests.families.tiny import tiny_model
from tests.inside import program_of
from tests.parity.cases import gradients, llama, make_engine, masters, relative_error, same
from tests.sweeps import few

REFUSED = "does not keep the documents .* apart; .*packing"


def packed(ids):
    """One row of documents; nothing predicts a document's first token."""
    labels = [torch.cat([torch.tensor([-100]), each[1:]]) for each in ids]
    positions = [torch.arange(len(each)) for each in ids]
    parts = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {key: torch.cat(values)[None] for key, values in parts.items()}


def documents():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(10, 110, (length,), generator=generator) for length in (9, 1, 4)]


def alone(ids):
    return [{"input_ids": each[None], "labels": each[None]} for each in ids]


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "mixtral", "mistral", "gpt_oss", "mimo_v2_flash"]
)
def test_packed_documents_train_as_separate_ones(family):
    model = llama() if family == "llama" else tiny_model(family)
    one, other = make_engine(model, clip=1e9), make_engine(model, clip=1e9)
    together, apart = one.step([packed(documents())]), other.step(alone(documents()))
    assert together.loss == pytest.approx(apart.loss, rel=1e-6)
    assert together.grad_norm == pytest.approx(apart.grad_norm, rel=1e-5)
    assert relative_error(gradients(one), gradients(other)) < 1e-5


def test_a_checkpoint_says_the_attention_that_the_model_was_made_with(tmp_path):
    """That of a packed step is nothing to make a model with, nor to go on with."""
    engine = make_engine(llama())
    engine.step([packed(documents())])
    engine.save(tmp_path / "saved")
    checkpoint = read_checkpoint(tmp_path / "saved")
    assert attention_of(state_io.open_model(checkpoint).config) == "sdpa"
    loaded = Engine.load(tmp_path / "saved", device="cpu")
    assert program_of(loaded).may_attend_by_lengths


def by_masks(model, **settings):
    """An engine that is never told the lengths of documents."""
    engine = make_engine(model, **settings)
    program_of(engine).may_attend_by_lengths = False
    return engine


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 3}),
        pytest.param("gemma3_text", {}, marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_lengths_of_documents_do_what_masks_do(family, changes, monkeypatch):
    model = tiny_model(family, changes=changes)
    one, other = make_engine(model), by_masks(model)
    micro_batches = [row(9, 1, 4, 2, rows=2), row(6), row(5, 8)]
    results = [engine.step(micro_batches) for engine in (one, other)]
    assert program_of(one).attends_by_lengths and not program_of(other).attends_by_lengths
    assert results[0].loss == results[1].loss
    assert same(masters(one), masters(other))

    monkeypatch.setattr("megatrain.compat.transformers.sdpa_mask", None)  # none is made
    one.step([row(9, 1, 4, 2, rows=2)])  # a step, not a trial, which compares with masks


class Deaf(torch.nn.Module):
    """A layer that does not hand on what it is told of documents."""

    def __init__(self, layer, complain):
        super().__init__()
        self.layer, self.complain = layer, complain

    def forward(self, *args, cu_seq_lens_q=None, **kwargs):
        if self.complain and cu_seq_lens_q is not None:
            raise ValueError("lengths are not for me")
        return self.layer(*args, **kwargs)


@pytest.mark.parametrize("complain", [False, True])
def test_models_that_lengths_do_not_reach_keep_their_masks(complain):
    model = llama()
    model.model.layers[0] = Deaf(model.model.layers[0], complain)
    one, other = make_engine(model, saveable=False), by_masks(model, saveable=False)
    results = [engine.step([row(9, 1, 4)]) for engine in (one, other)]
    assert not program_of(one).attends_by_lengths
    assert results[0].loss == results[1].loss
    assert same(masters(one), masters(other))


def test_positions_count_where_no_document_begins_anew():
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
MIXING = ["mamba", "jamba", "falcon_h1", "bloom", "minimax", "cpmant"]


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        *few([(family, "fp32") for family in MIXING], 4),
        *few([(family, "bf16") for family in MIXING]),
    ],
)
def test_models_that_mix_documents_are_refused(family, precision):
    engine = make_engine(tiny_model(family), precision=precision)
    before = masters(engine)
    for _ in range(2):
        for call in (engine.step, engine.evaluate):
            with pytest.raises(InputError, match=REFUSED):
                call([packed(documents())])
    assert same(before, masters(engine))
    engine.step(alone(documents()[::2]))  # documents of their own are welcome


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["gpt_oss", "opt"])
def test_documents_that_masks_mix_are_apart_by_their_lengths(family, precision):
    """Other rows keep the form of attention that the model has."""
    ids, plain = documents(), tiny_model(family).eval()
    losses = [float(plain(input_ids=x[None], labels=x[None]).loss) * (len(x) - 1) for x in ids[::2]]
    wanted = sum(losses) / 11
    engine, other = (make_engine(tiny_model(family), precision=precision) for _ in range(2))
    before = other.logits({"input_ids": ids[0][None]})
    close = 1e-6 if precision == "fp32" else 5e-3
    assert engine.evaluate([packed(ids)]) == pytest.approx(wanted, rel=close)
    assert torch.equal(engine.logits({"input_ids": ids[0][None]}), before)
    assert engine.step([packed(ids)]).loss == pytest.approx(wanted, rel=close)
    assert program_of(engine).attends_by_lengths


BY_STRUCTURE = [
    "bart",
    "blt",
    "roberta",
    "cpmant",
    "mpt",
    "xlnet",
    "bloom",
    "falcon",
    "openai-gpt",
    "xglm",
    "deepseek_v4",
    "falcon_mamba",
    "lfm2_moe",
    "minimax",
    "qwen3_next",
]


@pytest.mark.parametrize("family", BY_STRUCTURE)
def test_models_that_show_other_documents_are_known_before_there_is_data(family):
    """By positions that are not read or are others than alone, masks, states, convolutions..."""
    with pytest.raises(InputError, match=f"{family} does not keep the documents .*packing"):
        check_documents(spec(tiny_model(family)))


def test_models_that_keep_documents_apart_pass_before_there_is_data():
    for family in ("llama", "gemma2", "gpt2", "gptj", "gpt_oss", "whisper"):
        check_documents(spec(tiny_model(family)))


def test_the_trial_leaves_no_trace():
    """Training is the same whether or not an evaluation tried the packing before."""
    model = llama(attention_dropout=0.3)
    one, other = make_engine(model), make_engine(model)
    one.evaluate([packed(documents())])
    results = [engine.step([packed(documents())]) for engine in (one, other)]
    assert results[0].loss == results[1].loss
    assert same(masters(one), masters(other))


@pytest.mark.parametrize("hidden", [0, 2])
def test_documents_beside_a_mask_see_each_other_as_in_transformers(hidden):
    model, micro = llama(), packed(documents())
    mask = torch.ones_like(micro["input_ids"])
    mask[0, mask.shape[1] - hidden :] = 0
    micro |= {"attention_mask": mask, "labels": micro["labels"].masked_fill(mask == 0, -100)}
    with torch.no_grad():
        wanted = float(model.eval()(**micro).loss)
    engine = make_engine(model)
    assert engine.evaluate([micro]) == pytest.approx(wanted, rel=1e-6)
    assert engine.step([micro]).loss == pytest.approx(wanted, rel=1e-6)


POSITIONS = {
    "one document": ([0, 1, 2, 3], False),
    "a part of one": ([5, 6, 7, 8], False),
    "two documents": ([0, 1, 0, 1], True),
    "single tokens": ([0, 0, 0, 0], True),
    "a gap": ([0, 1, 5, 6], True),
}


@pytest.mark.parametrize(("positions", "expected"), POSITIONS.values(), ids=POSITIONS)
def test_packed_rows_are_told_by_their_positions(positions, expected):
    micro = {"input_ids": torch.zeros(2, 4), "position_ids": torch.arange(4).repeat(2, 1)}
    micro["position_ids"][1] = torch.tensor(positions)
    assert is_packed(micro) == expected
    assert not is_packed({**micro, "attention_mask": torch.ones(2, 4).long()})
    del micro["position_ids"]
    assert not is_packed(micro)


def row(*lengths, rows=1):
    """Random documents of these lengths, the same lengths in each row."""
    generator = torch.Generator().manual_seed(1)
    made = [
        packed([torch.randint(10, 110, (length,), generator=generator) for length in lengths])
        for _ in range(rows)
    ]
    return {name: torch.cat([each[name] for each in made]) for name in made[0]}


def forgetful(when):
    """A Llama whose attention sees all of a row before a token `when` its queries are so."""

    def attention(module, query, key, value, mask, **options):
        causal = torch.ones(query.shape[2], query.shape[2]).tril().bool()[None, None]
        given = causal if when(query) else mask
        return sdpa_attention_forward(module, query, key, value, given, **options)

    AttentionInterface.register("forgetful", attention)
    AttentionMaskInterface.register("forgetful", sdpa_mask)
    model = llama(max_position_embeddings=512)
    model.set_attn_implementation("forgetful")
    return model


def test_rows_of_one_kind_of_token_hide_nothing():
    engine, micro = make_engine(tiny_model("mamba")), packed(documents())
    micro["input_ids"] = torch.full_like(micro["input_ids"], 12)
    with pytest.raises(InputError, match=REFUSED):
        engine.step([micro])


@pytest.mark.parametrize("tokens", [3, 9])
def test_documents_of_one_token_are_no_row_without_labels(tokens):
    """As in a row that only fills a micro-batch up: nothing of it is predicted."""
    positions = torch.stack([torch.arange(tokens), torch.zeros(tokens, dtype=torch.int64)])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 110, (2, tokens), generator=generator)
    labels = ids.clone()
    labels[1] = -100
    step = [{"input_ids": ids, "labels": labels, "position_ids": positions}]
    found = make_engine(llama()).step(step).loss
    row = [{name: each[:1] for name, each in step[0].items() if name != "position_ids"}]
    assert found == pytest.approx(make_engine(llama()).step(row).loss, rel=1e-6)


def test_longer_rows_are_tried_anew():
    engine = make_engine(forgetful(lambda query: query.shape[2] > 40))
    engine.step([row(9, 20)])
    with pytest.raises(InputError, match=REFUSED):
        engine.step([row(9, 20), row(30, 15)])


def test_several_rows_are_tried_apart_from_one():
    """Attention by lengths knows documents only where a micro-batch has one row."""
    engine = make_engine(forgetful(lambda query: query.shape[0] > 1))
    engine.step([row(9, 20)])
    with pytest.raises(InputError, match=REFUSED):
        engine.step([row(9, 20, rows=2)])


def test_weights_that_hide_what_is_before_a_token_are_tried_again():
    """Attention that adds nothing yet mixes nothing; a step later it does."""
    model = forgetful(lambda query: True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    engine = make_engine(model)
    engine.step([row(9, 20)])
    with pytest.raises(InputError, match=REFUSED):
        engine.step([row(9, 20)])
