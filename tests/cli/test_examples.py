"""The examples run: on a tiny model and a few rows, with all other keys as they are written."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.cases import records, sets
from tests.parity.cases import llama
from tests.unit.data_cases import chat_tokenizer, talk, write_jsonl

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "training__batch_size": 4, "training__micro_batch_size": 2, "training__steps": 3,
    "training__epochs": None, "training__eval_every": 2, "data__sequence_length": 128,
    "data__eval_fraction": 0.2, "optimizer__lr": 0.01, "engine__precision": "fp32",
    "output__folder": "run",
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    tokenizer = chat_tokenizer("qwen")
    folder = tmp_path / "tiny"
    llama(vocab_size=len(tokenizer), max_position_embeddings=256).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def written(folder, rows):
    folder.mkdir()
    return write_jsonl(folder / "train.jsonl", rows)


TALKS = [{"messages": talk(f"What is {n} + 30?", f"It is {n + 30}.")} for n in range(24)]
PAIRS = [
    {"prompt": f"What is {n}?", "chosen": f" It is {n}.", "rejected": f" No {n * 7} idea"}
    for n in range(24)
]


@pytest.mark.parametrize(
    ("name", "rows"), [("lora", TALKS), ("qwen2.5-7b-chat", TALKS), ("dpo", PAIRS)]
)
def test_an_example_is_learnt(megatrain, model, tmp_path, name, rows):
    data = written(tmp_path / "data", rows)
    given = {"model__path": str(model), "data__path": str(data)} | SMALL
    megatrain.done("train", EXAMPLES / f"{name}.yaml", *sets(**given))
    steps = records(Path("run"))
    losses = [record["loss"] for record in steps if "loss" in record]
    assert len(losses) == 3 and losses[-1] < losses[0]
    file = "adapter_model.safetensors" if name == "lora" else "model.safetensors"
    assert load_file(Path("run/model") / file)
    assert any("eval_rewards/accuracies" in record for record in steps) == (name == "dpo")


@pytest.mark.exhaustive
def test_a_script_of_trl_trains(model, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = written(tmp_path / "data", TALKS).parent
    options = ["--model", model, "--data", data, "--out", tmp_path / "out", "--steps", 2, "--cpu"]
    monkeypatch.setattr(sys, "argv", ["trl_trainer.py", *map(str, options), "--length", "128"])
    runpy.run_path(str(EXAMPLES / "trl_trainer.py"), run_name="__main__")
    first, last = (load_file(each / "model.safetensors") for each in (model, tmp_path / "out"))
    assert any(not torch.equal(first[name], last[name]) for name in first)
