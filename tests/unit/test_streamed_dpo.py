"""TRL's DPOTrainer on the engine is the plain one: losses, norms, rewards, evaluations."""

import copy
from pathlib import Path
from typing import Any

import pytest
from data_cases import chat_tokenizer

from megatrain import DoesNotFit, Engine
from megatrain.errors import InputError
from megatrain.integrations import StreamedTrainer
from tests.parity.cases import llama

trl = pytest.importorskip("trl", reason="trl is no dependency")
datasets = pytest.importorskip("datasets")


def trained(streamed: bool, folder: Path, **changes: Any) -> Any:
    kind = type("Streamed", (StreamedTrainer, trl.DPOTrainer), {}) if streamed else trl.DPOTrainer
    tokenizer = chat_tokenizer("qwen")
    model = llama(vocab_size=max(128, len(tokenizer)))
    rows = datasets.Dataset.from_list(
        [
            {
                "prompt": f"the sea {number}",
                "chosen": " is blue" + " so" * (number % 3),
                "rejected": f" is {number}",
            }
            for number in range(16)
        ]
    )
    given: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 4,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "adam_epsilon": 1e-3,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "beta": 0.3,
        "gradient_checkpointing": False, "max_grad_norm": 0.5,
    }  # fmt: skip
    trainer = kind(
        model,
        args=trl.DPOConfig(**(given | changes)),
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        processing_class=tokenizer,
        **({} if streamed else {"ref_model": copy.deepcopy(model)}),
    )
    trainer.train()
    return trainer.state.log_history


@pytest.mark.parametrize(
    "changes", [{}, {"loss_type": ["robust"], "label_smoothing": 0.1}], ids=["sigmoid", "robust"]
)
def test_a_run_is_that_of_the_plain_trainer(tmp_path: Path, changes: dict[str, Any]) -> None:
    logs = [trained(streamed, tmp_path / str(streamed), **changes) for streamed in (False, True)]
    names = ("loss", "grad_norm", "eval_loss", "rewards/margins", "eval_rewards/chosen")
    names += ("rewards/accuracies", "logps/rejected")
    seen = set()
    for plain, streamed in zip(*logs, strict=True):
        for name in set(names) & set(plain):
            assert streamed[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6)
            seen.add(name)
    assert seen == set(names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": ["exo_pair"], "label_smoothing": 0.1}, "args.loss_type: it must be one of"),
        ({"loss_type": ["sigmoid", "sft"]}, "args.loss_type: it must be one of"),
        ({"f_divergence_type": "forward_kl"}, "args.f_divergence_type: it is .*forward_kl"),
        ({"precompute_ref_log_probs": True}, "args.precompute_ref_log_probs: the reference is"),
        ({"sync_ref_model": True}, "args.sync_ref_model|sync_ref_model=True"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((InputError, ValueError), match=message):
        trained(True, tmp_path, **changes)


def test_a_model_that_is_refused_leaves_no_reference_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Engine] = []
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine))
    monkeypatch.setattr(StreamedTrainer, "engine_options", {"host_memory": "1KiB"})
    with pytest.raises(DoesNotFit):
        trained(True, tmp_path)
    (reference,) = closed
    assert reference.optimizer is None
