"""A Trainer, plain or streamed, on a tiny Llama and rows of several lengths."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from megatrain.integrations import StreamedTrainer
from tests.parity.cases import VOCAB, llama


class Streamed(StreamedTrainer, Trainer):
    """What a user writes."""


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
