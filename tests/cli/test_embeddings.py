"""Runs that teach embeddings: rows, run files, evaluation, resume, folders, and refusals."""

import json
from itertools import permutations

import pytest
from transformers import AutoModel

from megatrain.errors import InputError
from megatrain.model.companions import sentence_files
from tests.cli.cases import MISTAKES, records, sets


def rows_of(kind="plain"):
    """Two words are near those that follow them in the list."""
    words = ("cat", "dog", "mat", "sat", "ran", "on")
    for at, also in permutations(range(len(words)), 2):
        one, two = words[at - 1], words[also - 1]
        row = {"anchor": f"{words[at]} {words[also]}", "positive": f"{one} the {two}", "id": 1}
        if kind == "list":
            row["negatives"] = [f"{two} the {one}", f"{one} a", "never used"]
        elif kind == "columns":
            row = {"query": row["anchor"], "positive": row["positive"]}
            row |= {"negative_1": f"{two} the {one}", "negative_2": f"{one} a"}
        yield row


@pytest.fixture
def embedding_file(file_of_rows):
    def made(kind="plain", rows=None, **loss):
        times = {"steps": 12, "batch_size": 8, "eval_every": 6}
        chosen = {"name": "contrastive", "negatives": 2 * (kind != "plain")} | loss
        return file_of_rows([*(rows or rows_of(kind))], chosen, 0.008, **times)

    return made


@pytest.mark.parametrize(("kind", "pooling"), [("plain", "last"), ("columns", "mean")])
def test_embeddings_are_learnt_exactly_and_their_folder_loads(
    megatrain, embedding_file, tmp_path, kind, pooling
):
    file = embedding_file(kind, pooling=pooling)
    megatrain.resumed(file, 12, 5)
    *_, last = records(tmp_path / "run", "eval_loss")
    steps = records(tmp_path / "run", "grad_norm")
    assert last["eval_loss"] < 0.5 * steps[0]["loss"] and "eval_accuracy" in last
    assert all("accuracy" in step for step in steps)
    folder = tmp_path / "run" / "model"
    modules = json.loads((folder / "modules.json").read_text())
    assert [each["path"] for each in modules] == ["", "1_Pooling", "2_Normalize"]
    pooled = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert pooled["pooling_mode_lasttoken" if pooling == "last" else "pooling_mode_mean_tokens"]
    width = AutoModel.from_pretrained(folder).config.hidden_size
    assert pooled["word_embedding_dimension"] == width
    pools = sets(loss__pooling="mean" if pooling == "last" else "last")
    megatrain.refused("loss.pooling: ", "train", file, *pools, "--resume")


def test_a_run_of_embeddings_is_exported_planned_and_begun_from_as_what_it_is(
    megatrain, embedding_file, tmp_path
):
    file, folder = embedding_file(), tmp_path / "run" / "model"
    megatrain.done("train", file, *sets(training__steps=1, training__eval_every=None))
    megatrain.done("export", tmp_path / "run", tmp_path / "out", "--dtype", "bfloat16")
    assert (tmp_path / "out" / "1_Pooling" / "config.json").exists()
    assert "texts" in megatrain.done("data", file).output
    megatrain.done("plan", file, "--gpu", "4090")
    megatrain.refused("and no texts", "generate", tmp_path / "run", "--prompt", "a")
    megatrain.refused("and no texts", "chat", tmp_path / "run")
    short = sets(data__overlong="error", data__sequence_length=2)
    megatrain.refused("texts are longer than sequence_length 2", "data", file, *short)
    again = sets(model__path=str(folder), output__folder="again", training__steps=1)
    megatrain.done("train", file, *again)
    other = sets(loss__pooling="mean", output__folder="b")
    megatrain.refused("another one than is trained", "train", file, *again, *other)
    text = sets(loss={"name": "sft"}, output__folder="c")
    megatrain.refused("which has no head of a language model", "train", file, *again, *text)


def test_evaluations_take_batches_whatever_the_micro_batches(megatrain, embedding_file, tmp_path):
    file = embedding_file()
    for size in (1, 3):
        keys = {"steps": 1, "batch_size": 4, "micro_batch_size": size}
        chosen = {f"training__{name}": value for name, value in keys.items()}
        megatrain.done("train", file, *sets(output__folder=str(size), **chosen))
    [one], [other] = (records(tmp_path / str(size), "eval_loss") for size in (1, 3))
    assert other["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)


@pytest.mark.exhaustive
def test_an_adapter_of_embeddings(megatrain, embedding_file, tmp_path):
    file = embedding_file("list")
    adapter = sets(adapter__method="lora", adapter__target_modules="all-linear")
    megatrain.done("train", file, *adapter)
    settings = json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())
    assert settings["task_type"] == "FEATURE_EXTRACTION"
    megatrain.done("export", tmp_path / "run", tmp_path / "out", "--merged")
    assert AutoModel.from_pretrained(tmp_path / "out")
    begun = sets(model__path=str(tmp_path / "run" / "model"), output__folder="more")
    megatrain.done("train", file, *begun)


@pytest.mark.parametrize(
    ("modules", "pooling"),
    [
        ("{", "{}"),
        ('{"a": 1}', "{}"),
        ("[1]", "{}"),
        ("[]", "[1]"),
        ("[]", '{"pooling_mode": [1]}'),
    ],
)
def test_malformed_files_of_sentence_transformers_are_told_in_a_line(modules, pooling):
    beside = {"modules.json": modules.encode(), "1_Pooling/config.json": pooling.encode()}
    with pytest.raises(InputError, match="modules.json, 1_Pooling/config.json: malformed"):
        sentence_files(beside, 8, "mean")


def test_texts_that_would_be_changed_first_are_refused():
    beside = {"sentence_bert_config.json": b'{"max_seq_length": 8, "do_lower_case": true}'}
    with pytest.raises(InputError, match="do_lower_case would change texts"):
        sentence_files(beside, 8, "mean")


ONE = sets(training__batch_size=1, training__micro_batch_size=1)
TABLE = {**MISTAKES["embedded"], "one row a step without": [{}, {}, *ONE]}


@pytest.mark.parametrize("said", TABLE)
def test_rows_that_are_no_texts_to_embed_are_told_in_a_line(megatrain, embedding_file, said):
    more, loss, *keys = TABLE[said]
    row = {n: v for n, v in ({"anchor": "a", "positive": "b"} | more).items() if v is not None}
    megatrain.refused(said, "train", embedding_file(rows=[row], **loss), *keys)
