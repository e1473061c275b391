"""PEFT's adapters under a streamed Trainer are trained as under the plain one."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from data_cases import chat_tokenizer
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForSequenceClassification, Trainer

from megatrain.errors import InputError
from megatrain.integrations import StreamedTrainer
from tests.parity.cases import llama
from tests.sweeps import few
from tests.unit.trainer_cases import (
    Stop,
    Streamed,
    arguments,
    logged,
    padded,
    rows,
    sft_trainer,
    sft_trainers,
)


def trainer(kind: Any, folder: Path, keys: dict[str, Any], **changes: Any) -> Any:
    torch.manual_seed(0)  # adapters are drawn
    config = LoraConfig(**({"r": 4, "target_modules": "all-linear"} | keys))
    return kind(
        get_peft_model(llama(), config),
        arguments(folder, weight_decay=0.5, **changes),
        train_dataset=rows(16),
        eval_dataset=rows(5, seed=1),
        data_collator=padded,
    )


def saved(made: Any) -> dict[str, torch.Tensor]:
    made.save_model(made.args.output_dir)
    return load_file(Path(made.args.output_dir) / "adapter_model.safetensors")


def same(plain: Any, streamed: Any) -> None:
    wanted, got = logged(plain), logged(streamed)
    assert [list(entry) for entry in wanted] == [list(entry) for entry in got]
    for one, other in zip(wanted, got, strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    first, second = saved(plain), saved(streamed)
    assert first.keys() == second.keys()
    for name, values in first.items():
        torch.testing.assert_close(second[name], values, rtol=1e-5, atol=1e-6)


BEST = {"load_best_model_at_end": True, "eval_steps": 1, "save_steps": 1}


@pytest.mark.parametrize(
    ("keys", "changes"),
    few(
        [
            ({"modules_to_save": ["norm"], "use_rslora": True}, {}),  # norms are not decayed
            ({}, {"remove_unused_columns": True}),  # by the base's forward; PeftModel's takes any
            ({"use_dora": True}, BEST),
        ]
    ),
)
def test_an_adapter_learns_what_it_does_under_the_plain_one(
    tmp_path: Path, keys: dict[str, Any], changes: dict[str, Any]
) -> None:
    made = [
        trainer(kind, tmp_path / kind.__name__, keys, **changes) for kind in (Trainer, Streamed)
    ]
    for each in made:
        each.train()
    same(*made)
    whole = PeftModel.from_pretrained(llama(), tmp_path / "Streamed")
    described = json.loads((tmp_path / "Streamed/adapter_config.json").read_text())
    assert described["r"] == 4 and whole.peft_config["default"].use_dora == ("use_dora" in keys)


def test_other_methods_of_peft_are_refused_by_name(tmp_path: Path) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(InputError, match=r"PromptTuning|PROMPT_TUNING"):
        Streamed(
            get_peft_model(llama(), config),
            arguments(tmp_path, eval_strategy="no"),
            train_dataset=rows(4),
        )


@pytest.mark.exhaustive
def test_an_adapter_goes_on_exactly(tmp_path: Path) -> None:
    whole = trainer(Streamed, tmp_path / "whole", {})
    whole.train()
    parted = trainer(Streamed, tmp_path / "parted", {})
    parted.add_callback(Stop())
    parted.train()
    again = trainer(Streamed, tmp_path / "parted", {})
    again.train(resume_from_checkpoint=True)
    first, second = saved(whole), saved(again)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert logged(whole) == logged(again)


@pytest.mark.exhaustive
@pytest.mark.parametrize("packing", [False, True])
def test_trls_peft_config_is_followed(tmp_path: Path, packing: bool) -> None:
    """Where TRL is installed, which no test needs."""
    made = []
    for kind in sft_trainers():
        torch.manual_seed(0)
        lora = LoraConfig(r=4, target_modules="all-linear")
        made.append(sft_trainer(kind, tmp_path, packing=packing, peft_config=lora))
        made[-1].train()
    same(*made)


PAIRS = [
    {"prompt": f"What is {n}?", "chosen": f" It is {n}.", "rejected": f" No {n * 7} idea"}
    for n in range(12)
]
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4,
    "learning_rate": 1e-2, "logging_steps": 1, "adam_epsilon": 1e-3, "eval_strategy": "steps",
    "eval_steps": 2, "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True,
    "max_length": 64,
}  # fmt: skip


def of_pairs(
    kind: Any,
    folder: Path,
    model: Any,
    data: list[dict[str, str]],
    *,
    new: bool = True,
    reference: Any = None,
    **keys: Any,
) -> Any:
    """A trainer, which makes the adapter if it is `new`."""
    datasets = pytest.importorskip("datasets")
    lora = LoraConfig(r=4, target_modules="all-linear", **keys)
    given: dict[str, Any] = {"peft_config": lora} if new else {}
    if reference is not None:
        given["ref_model"] = reference
    model = model if new else get_peft_model(model, lora)
    settings = pytest.importorskip("trl").DPOConfig
    if "prompt" not in data[0]:
        settings = pytest.importorskip("trl").RewardConfig
    made = datasets.Dataset.from_list(data)
    return kind(
        model,
        args=settings(output_dir=str(folder / kind.__name__), **COMMON),
        train_dataset=made,
        eval_dataset=made.select(range(4)),
        processing_class=chat_tokenizer("qwen"),
        **given,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", [True, False])
def test_an_adapter_prefers_as_under_the_plain_one(tmp_path: Path, first: bool) -> None:
    """A new one (`first`), or one whose model is the reference as it is given."""
    trl = pytest.importorskip("trl")
    made = []
    for kind in (trl.DPOTrainer, type("StreamedDpo", (StreamedTrainer, trl.DPOTrainer), {})):
        torch.manual_seed(0)
        model = llama(vocab_size=1024, max_position_embeddings=256)
        made.append(of_pairs(kind, tmp_path, model, PAIRS, new=first, init_lora_weights=first))
        made[-1].train()
    same(*made)
    norms = [entry["grad_norm"] for entry in made[0].state.log_history if "grad_norm" in entry]
    assert norms[0] > 0.1


@pytest.mark.exhaustive
def test_an_adapter_scores_as_under_the_plain_one(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    made = []
    data = [
        {name: each["prompt"] + each[name] for name in ("chosen", "rejected")} for each in PAIRS
    ]
    for kind in (trl.RewardTrainer, type("StreamedRm", (StreamedTrainer, trl.RewardTrainer), {})):
        torch.manual_seed(0)
        config = llama(vocab_size=1024, max_position_embeddings=256).config
        config.num_labels, config.pad_token_id = 1, chat_tokenizer("qwen").pad_token_id
        keys: dict[str, Any] = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
        model = LlamaForSequenceClassification(config)
        made.append(of_pairs(kind, tmp_path, model, data, **keys))
        made[-1].train()
    same(*made)


@pytest.mark.exhaustive
def test_a_new_adapter_that_changes_the_model_is_no_reference(tmp_path: Path) -> None:
    """DPOTrainer compares with the base alone, which would be another model."""
    trl = pytest.importorskip("trl")
    kind = type("StreamedDpo", (StreamedTrainer, trl.DPOTrainer), {})
    with pytest.raises(InputError, match="peft_config with init_lora_weights: False"):
        of_pairs(kind, tmp_path, llama(vocab_size=1024), PAIRS, init_lora_weights=False)
    made = of_pairs(
        kind, tmp_path, llama(vocab_size=1024), PAIRS, reference=llama(vocab_size=1024),
        init_lora_weights=False,
    )  # fmt: skip
    made.train()
    assert made.state.log_history[0]["loss"] != pytest.approx(math.log(2), abs=1e-4)
