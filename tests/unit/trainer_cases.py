"""A Trainer, plain or streamed, on a tiny Llama and rows of several lengths."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForSequenceClassification, Trainer, TrainingArguments

from megatrain.integrations import StreamedTrainer
from tests.parity.cases import VOCAB, llama, noisy
from tests.unit.data_cases import chat_tokenizer

small = partial(llama, num_hidden_layers=1)


class Streamed(StreamedTrainer, Trainer):
    """What a user writes."""


def lines(made: Any) -> list[dict[str, float]]:
    """All that a trainer logs, but for how long it takes and what MegaTrain does not measure."""
    hidden = ("runtime", "per_second", "entropy", "accuracy", "num_tokens", "logits/", "aux_loss")
    return [
        {n: v for n, v in entry.items() if not any(part in n for part in hidden)}
        for entry in made.state.log_history
    ]


def same(plain: Any, streamed: Any, near: float = 2e-5) -> None:
    """Both have logged the same."""
    wanted, got = lines(plain), lines(streamed)
    assert [list(entry) for entry in got] == [list(entry) for entry in wanted]
    for one, other in zip(wanted, got, strict=True):
        assert other == pytest.approx(one, rel=near, abs=1e-6)


def alike(
    make: Callable[[Any], Any], kinds: Sequence[Any] = (), *, near: float = 2e-5
) -> list[Any]:
    """The trainers that `make` makes of two classes, plain and streamed, which log the same."""
    made = []
    for kind in kinds or (Trainer, Streamed):
        made.append(make(kind))
        made[-1].train()
    same(*made, near=near)
    return made


def weights(made: Any) -> dict[str, torch.Tensor]:
    """What a trainer saves."""
    made.save_model(made.args.output_dir)
    [file] = Path(made.args.output_dir).glob("*.safetensors")
    return load_file(file)


def same_weights(plain: Any, streamed: Any) -> None:
    first, second = weights(plain), weights(streamed)
    assert first.keys() == second.keys()
    for name, values in first.items():
        torch.testing.assert_close(second[name], values, rtol=1e-5, atol=1e-6)


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


def trainer(
    kind: Any, folder: Path, *, model: Any = None, options: Any = None, **changes: Any
) -> Any:
    return kind(
        model or small(),
        arguments(folder, **changes),
        train_dataset=rows(16),
        eval_dataset=rows(5, seed=1),
        data_collator=padded,
        **(options or {}),
    )


def mixed(kind: Any) -> Any:
    """The streamed trainer of a class."""
    return type(f"Streamed{kind.__name__}", (StreamedTrainer, kind), {})


def text_trainer(
    kind: Any,
    folder: Path,
    model: Any = None,
    *,
    count: int = 8,
    margins: bool = False,
    spread: bool = False,
    data: list[dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A trainer of TRL, plain or streamed, on short texts, or pairs of them.

    Args:
        spread: the collator adds positions, every second one.
        data: rows to take in the place of these.
        options: of the trainer; None: a plain DPOTrainer gets the model as its reference.
    """
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer = chat_tokenizer("marked" if changes.get("assistant_only_loss") else "qwen")
    plain, settings = next(
        (getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config"))
        for name in ("SFT", "DPO", "Reward")
        if issubclass(kind, getattr(trl, f"{name}Trainer"))
    )
    texts: list[dict[str, Any]] = [
        {"prompt": f"the {n}", "completion": " sea is" + " so" * (n % 3)} for n in range(count)
    ]
    if plain is not trl.SFTTrainer:
        texts = [
            {"prompt": e["prompt"], "chosen": e["completion"], "rejected": f" {n}"}
            | ({"margin": 0.1 * n} if margins else {})
            for n, e in enumerate(texts)
        ]
    if model is None:
        model = small(vocab_size=len(tokenizer), max_position_embeddings=256)
    if options is None:
        options = {"ref_model": copy.deepcopy(model)} if kind is plain is trl.DPOTrainer else {}
    if plain is trl.RewardTrainer and not hasattr(model, "score"):
        torch.manual_seed(0)
        config = copy.deepcopy(model.config)
        config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
        model = noisy(LlamaForSequenceClassification(config))
    usual: dict[str, Any] = {
        "output_dir": str(folder / kind.__name__), "per_device_train_batch_size": 2,
        "max_steps": 3, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
        "adam_epsilon": 1e-3, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False,
        "disable_tqdm": True,
    }  # fmt: skip
    rows_read = datasets.Dataset.from_list(data or texts)
    made = kind(
        model=copy.deepcopy(model),
        args=settings(**(usual | changes)),
        train_dataset=rows_read,
        eval_dataset=rows_read.select(range(4)),
        processing_class=tokenizer,
        **options,
    )
    if spread:
        collate = made.data_collator

        def with_positions(examples: Any) -> Any:
            batch = collate(examples)
            return batch | {"position_ids": 2 * torch.ones_like(batch["input_ids"]).cumsum(1)}

        made.data_collator = with_positions
    return made
