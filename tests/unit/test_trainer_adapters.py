"""PEFT's adapters under a streamed Trainer are trained as under the plain one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import Trainer

from megatrain.errors import InputError
from tests.parity.cases import llama
from tests.sweeps import few, quick
from tests.unit.trainer_cases import (
    Streamed,
    arguments,
    mixed,
    padded,
    rows,
    same,
    same_weights,
    text_trainer,
)


def trainer(kind, folder, keys, **changes):
    torch.manual_seed(0)  # adapters are drawn
    config = LoraConfig(**({"r": 4, "target_modules": "all-linear"} | keys))
    return kind(
        get_peft_model(llama(), config),
        arguments(folder, weight_decay=0.5, **changes),
        train_dataset=rows(16),
        eval_dataset=rows(5, seed=1),
        data_collator=padded,
    )


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
def test_an_adapter_learns_what_it_does_under_the_plain_one(tmp_path, keys, changes):
    made = [
        trainer(kind, tmp_path / kind.__name__, keys, **changes) for kind in (Trainer, Streamed)
    ]
    for each in made:
        each.train()
    same(*made, near=1e-5)
    same_weights(*made)
    whole = PeftModel.from_pretrained(llama(), tmp_path / "Streamed")
    described = json.loads((tmp_path / "Streamed/adapter_config.json").read_text())
    assert described["r"] == 4 and whole.peft_config["default"].use_dora == ("use_dora" in keys)


def test_other_methods_of_peft_are_refused_by_name(tmp_path):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(InputError, match=r"PromptTuning|PROMPT_TUNING"):
        Streamed(
            get_peft_model(llama(), config),
            arguments(tmp_path, eval_strategy="no"),
            train_dataset=rows(4),
        )


def lora(**keys):
    torch.manual_seed(0)
    return LoraConfig(r=4, target_modules="all-linear", **keys)


# The class, what it is made with, and what its adapter is for.
OF_TRL: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "rows": ("SFTTrainer", {}, {}, "CAUSAL_LM"),
    "packed": ("SFTTrainer", {}, {"packing": True, "max_length": 24}, "CAUSAL_LM"),
    "pairs": ("DPOTrainer", {}, {}, "CAUSAL_LM"),
    "scores": (
        "RewardTrainer",
        {"modules_to_save": ["score"], "task_type": "SEQ_CLS"},
        {},
        "SEQ_CLS",
    ),
    "scores of no task": ("RewardTrainer", {"modules_to_save": ["score"]}, {}, "SEQ_CLS"),
}


@pytest.mark.parametrize("name", quick(OF_TRL, ("scores of no task",)))
def test_trls_peft_config_is_followed(tmp_path, name):
    """Where TRL is installed, which no test needs."""
    trl = pytest.importorskip("trl")
    of, keys, changes, task = OF_TRL[name]
    plain, made = getattr(trl, of), []
    for kind in (plain, mixed(plain)):
        made.append(text_trainer(kind, tmp_path, options={"peft_config": lora(**keys)}, **changes))
        made[-1].train()
    same(*made, near=1e-5)
    same_weights(*made)
    described = Path(made[1].args.output_dir) / "adapter_config.json"
    assert json.loads(described.read_text())["task_type"] == task
