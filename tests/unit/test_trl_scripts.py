"""The scripts that TRL installs train with the engine as with its own trainers.

Their command line, loading of models and data, adapters, evaluations, saves and resumes are theirs.
"""

import json
from typing import Any

import pytest
import torch
from data_cases import chat_tokenizer
from safetensors.torch import load_file
from transformers import LlamaForSequenceClassification

from megatrain.integrations import StreamedTrainer
from tests.parity.cases import llama

pytestmark = pytest.mark.exhaustive

KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch")
ADAPTER = ("--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear")


def inputs(folder, kind):
    """A model with a tokenizer, and a folder of rows to train and to test on."""
    tokenizer = chat_tokenizer("qwen")
    model: Any = llama(vocab_size=len(tokenizer), max_position_embeddings=256)
    if kind == "reward":
        model.config.num_labels, model.config.pad_token_id = 1, tokenizer.pad_token_id
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(model.config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    data = folder / "data"
    data.mkdir()
    for split, numbers in {"train": range(12), "test": range(12, 17)}.items():
        made = [_row(kind, number) for number in numbers]
        (data / f"{split}.jsonl").write_text("\n".join(map(json.dumps, made)))
    return folder / "model", data


def _row(kind, n):
    if kind == "sft":
        question = {"role": "user", "content": f"What is {n} + 30?"}
        return {"messages": [question, {"role": "assistant", "content": f"It is {n + 30}."}]}
    pair = {"chosen": f" It is {n}.", "rejected": f" No {n * 7} idea"}
    if kind == "reward":
        return {name: f"What is {n}?{reply}" for name, reply in pair.items()}
    return {"prompt": f"What is {n}?", **pair}


def run(script, model, data, folder, *options):
    """What the script's main has logged, with these options of its command line."""
    lines = (
        "--model_name_or_path", model, "--dataset_name", data, "--output_dir", folder,
        "--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2, "--max_steps", 4,
        "--learning_rate", 1e-2, "--logging_steps", 1, "--adam_epsilon", 1e-3, "--eval_strategy",
        "steps", "--eval_steps", 2, "--save_steps", 2, "--report_to", "none", "--use_cpu", "true",
        "--bf16", "false", "--max_length", 64, "--disable_tqdm", "true", *options,
    )  # fmt: skip
    parser = script.make_parser()
    script.main(*parser.parse_args_and_config([str(each) for each in lines]))
    [state] = sorted(folder.glob("checkpoint-4/trainer_state.json"))
    history = json.loads(state.read_text())["log_history"]
    return [{key: entry[key] for key in KEYS if key in entry} for entry in history]


@pytest.mark.parametrize("adapter", [(), ADAPTER])
@pytest.mark.parametrize(
    ("kind", "name"), [("sft", "SFTTrainer"), ("dpo", "DPOTrainer"), ("reward", "RewardTrainer")]
)
def test_a_script_trains_with_the_engine(kind, name, adapter, tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    script: Any = pytest.importorskip(f"trl.scripts.{kind}")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model, data = inputs(tmp_path, kind)
    if adapter and kind == "sft":  # the others switch dropout off
        adapter = (*adapter, "--lora_dropout", "0")
    if adapter and kind == "reward":
        adapter = (*adapter, "--lora_task_type", "SEQ_CLS", "--lora_modules_to_save", "score")
    plain = run(script, model, data, tmp_path / "plain", *adapter)
    monkeypatch.setattr(trl, name, type("Streamed", (StreamedTrainer, getattr(trl, name)), {}))
    streamed = run(script, model, data, tmp_path / "streamed", *adapter)
    assert [list(entry) for entry in streamed] == [list(entry) for entry in plain]
    assert sum("eval_loss" in entry for entry in plain) == 2 and len(plain) == 6
    for wanted, got in zip(plain, streamed, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    file = "adapter_model.safetensors" if adapter else "model.safetensors"
    first, second = (load_file(tmp_path / each / file) for each in ("plain", "streamed"))
    assert first.keys() == second.keys()
    for parameter, values in first.items():
        torch.testing.assert_close(second[parameter], values, rtol=1e-5, atol=1e-6)
    again = ("--resume_from_checkpoint", str(tmp_path / "streamed" / "checkpoint-2"))
    resumed = run(script, model, data, tmp_path / "again", *adapter, *again)
    assert resumed == streamed
