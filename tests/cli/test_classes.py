"""Runs that teach heads of classes: rows, run files, evaluation, resume, and what is refused."""

import json

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, pipeline

from tests.cli.cases import MISTAKES, records, sets
from tests.sweeps import few

WORDS = {"good": "cat mat sat", "bad": "dog ran to", "odd": "the on a"}


def text(number):
    """A text in which the words of some classes are, and these classes."""
    names = [*WORDS][: 1 + number % 3][-1 - number % 2 :]
    said = " ".join(WORDS[name].split()[number % 3 - 1] for name in names)
    return f"{said} {number}", names


def rows_of(kind):
    for number in range(48):
        said, names = text(number)
        if kind == "token_classification":
            words = said.split()
            yield {"tokens": words, "ner_tags": [*names, -100][: len(words)], "id": number}
        elif kind == "several":
            yield {"sentence": said, "labels": names[: number % 4]}
        else:
            yield {"text": said, "label": [*WORDS].index(names[-1]) if number % 2 else names[-1]}


@pytest.fixture
def class_file(file_of_rows):
    def made(kind, rows=None, loss=None):
        name = "sequence_classification" if kind == "several" else kind
        chosen = {"name": name, "labels": [*WORDS]}
        if kind == "several":
            chosen["problem_type"] = "multi_label_classification"
        times = {"steps": 12, "batch_size": 8, "eval_every": 6}
        return file_of_rows(rows or rows_of(kind), chosen | (loss or {}), 0.01, **times)

    return made


@pytest.mark.parametrize(
    "kind", few(["token_classification", "sequence_classification", "several"], 0, 1)
)
def test_classes_are_learnt_exactly_and_transformers_loads_them(
    megatrain, class_file, tmp_path, kind
):
    file = class_file(kind)
    megatrain.resumed(file, 12, 5)
    evaluated = records(tmp_path / "run", "eval_loss")
    assert evaluated[-1]["eval_loss"] < 0.8 * evaluated[0]["eval_loss"]
    assert ("eval_accuracy" in evaluated[0]) == (kind != "several")
    assert "eval_perplexity" not in evaluated[0]
    folder = tmp_path / "run" / "model"
    assert [*AutoConfig.from_pretrained(folder).id2label.values()] == [*WORDS]
    task = "token-classification" if kind == "token_classification" else "text-classification"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    [said, *_] = pipeline(task, str(folder), tokenizer=tokenizer, device="cpu")("the cat sat")
    assert said.get("label", said.get("entity")) in WORDS
    assert "3 conversations" not in megatrain.done("data", file).output
    if kind == "token_classification":
        megatrain.done("plan", file, "--gpu", "4090")
    megatrain.refused("scores of rows or classes", "generate", tmp_path / "run", "--prompt", "a")


@pytest.mark.exhaustive
def test_a_head_of_classes_may_be_trained_beside_an_adapter(megatrain, class_file, tmp_path):
    file = class_file("token_classification")
    adapter = sets(adapter__method="lora", adapter__target_modules="all-linear")
    name = "adapter_model.safetensors"
    megatrain.resumed(file, 12, 2, *adapter, name=name)
    megatrain.done("plan", file, *adapter, "--gpu", "4090")
    keys = load_file(tmp_path / "run" / "model" / name)
    assert {name for name in keys if ".score." in name or ".classifier." in name}
    settings = json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())
    assert settings["task_type"] == "TOKEN_CLS"
    megatrain.done("export", tmp_path / "run", tmp_path / "out", "--merged")
    model = str(tmp_path / "out")
    again = sets(model__path=model, output__folder="again", training__steps=1)
    megatrain.done("train", file, *again)
    # PEFT's folder, and what is merged of it, has no names
    named = str(tmp_path / "again" / "model")
    other = sets(model__path=named, loss__labels=["good", "odd", "bad"], output__folder="other")
    megatrain.refused("the model's head has the labels good, bad, odd", "train", file, *other)


@pytest.mark.parametrize("said", MISTAKES["classes"])
def test_rows_without_right_classes_are_told_in_a_line(megatrain, class_file, said):
    kind, row, *loss = MISTAKES["classes"][said]
    megatrain.refused(said, "train", class_file(kind, [row], *loss))


def test_names_of_classes_stay_in_their_order_where_a_run_goes_on(megatrain, class_file):
    """The data may say numbers alone, and the head's outputs have the names that the run began."""
    rows = [{"text": text(n)[0], "label": n % 3} for n in range(16)]
    file = class_file("sequence_classification", rows=rows)
    once = sets(training__steps=1, training__eval_every=None, output__folder="run")
    megatrain.done("train", file, *once)
    other = sets(training__steps=2, loss__labels=[*WORDS][::-1])
    megatrain.refused("cannot change on resume", "train", file, *once, *other, "--resume")


def test_a_text_of_one_token_has_a_class_too(megatrain, class_file):
    """No token before it has to predict it."""
    words = ("cat", "dog", "mat", "sat")
    for kind, rows in (
        ("sequence_classification", [{"text": word, "label": "good"} for word in words]),
        ("token_classification", [{"tokens": [word], "tags": ["good"]} for word in words]),
    ):
        assert "dropped" not in megatrain.done("data", class_file(kind, rows=rows)).output
    file = class_file("sequence_classification", rows=[{"text": "", "label": "bad"}] * 4)
    megatrain.refused("all 4 documents have no text", "data", file)
