"""A Trainer, plain or streamed, on a tiny Llama and rows of several lengths."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from megatrain.integrations import StreamedTrainer
from tests.parity.cases import VOCAB, llama
from tests.unit.data_cases import chat_tokenizer, talk

KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch")


class Streamed(StreamedTrainer, Trainer):
    """What a user writes."""


class Stop(TrainerCallback):
    """Ends a run after two steps, which are saved."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 2


def logged(made: Any) -> list[dict[str, float]]:
    """What both trainers log, but for the line at the end of the run."""
    history = made.state.log_history[:-1]
    return [{key: entry[key] for key in KEYS if key in entry} for entry in history]


def rows(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = torch.randint(10, VOCAB, (5 + number % 4,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": [-100, *ids[1:]]})
    return made


def padded(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(each["input_ids"]) for each in examples)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    full = [each | {"attention_mask": [1] * len(each["input_ids"])} for each in examples]
    return {
        name: torch.tensor([e[name] + [value] * (width - len(e[name])) for e in full])
        for name, value in fill.items()
    }


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3, "max_steps": 5, "learning_rate": 1e-2,
        "weight_decay": 0.1, "adam_epsilon": 1e-3, "lr_scheduler_type": "cosine",
        "warmup_steps": 2, "max_grad_norm": 0.7, "logging_steps": 1, "eval_strategy": "steps",
        "eval_steps": 2, "save_steps": 2, "report_to": [], "use_cpu": True, "bf16": False,
        "disable_tqdm": True, "remove_unused_columns": False, "per_device_eval_batch_size": 3,
    }  # fmt: skip
    return TrainingArguments(**(given | changes))


def trainer(kind: Any, folder: Path, *, options: Any = None, **changes: Any) -> Any:
    return kind(
        copy.deepcopy(llama()),
        arguments(folder, **changes),
        train_dataset=rows(16),
        eval_dataset=rows(5, seed=1),
        data_collator=padded,
        **(options or {}),
    )


def sft_trainers() -> tuple[Any, Any]:
    """TRL's SFTTrainer and the streamed one; skips the test where TRL is not installed."""
    plain = pytest.importorskip("trl").SFTTrainer
    return plain, type("StreamedSft", (StreamedTrainer, plain), {})


def sft_trainer(kind: Any, folder: Path, *, packing: bool, **options: Any) -> Any:
    """One of them on 16 conversations of several lengths."""
    datasets, tokenizer = pytest.importorskip("datasets"), chat_tokenizer("qwen")
    said = [(f"What is {n} + 30?", f"It is {n + 30}." * (1 + n % 3)) for n in range(16)]
    talks = [{"messages": talk(*each)} for each in said]
    config = pytest.importorskip("trl").SFTConfig(
        output_dir=str(folder / kind.__name__), per_device_train_batch_size=2,
        gradient_accumulation_steps=3, max_steps=5, learning_rate=1e-2, logging_steps=1,
        adam_epsilon=1e-3, eval_strategy="steps", eval_steps=3, report_to=[], use_cpu=True,
        bf16=False, max_length=160, packing=packing,
    )  # fmt: skip
    return kind(
        llama(vocab_size=len(tokenizer), max_position_embeddings=1024),
        config,
        train_dataset=datasets.Dataset.from_list(talks),
        eval_dataset=datasets.Dataset.from_list(talks[:5]),
        processing_class=tokenizer,
        **options,
    )
