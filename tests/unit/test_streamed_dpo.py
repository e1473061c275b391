"""TRL's DPOTrainer on the engine is the plain one: losses, norms, rewards, evaluations."""

import copy
from pathlib import Path
from typing import Any

import pytest
from data_cases import chat_tokenizer
from trl_cases import trained_by

from megatrain import DoesNotFit, Engine
from megatrain.errors import InputError
from megatrain.integrations import StreamedTrainer
from megatrain.integrations.accumulation import Waiting, shares
from tests.parity.cases import llama
from tests.sweeps import few

trl = pytest.importorskip("trl", reason="trl is no dependency")
datasets = pytest.importorskip("datasets")


def trained(streamed: bool, folder: Path, count: int = 16, **changes: Any) -> Any:
    tokenizer = chat_tokenizer("qwen")
    model = llama(vocab_size=max(128, len(tokenizer)))
    rows = datasets.Dataset.from_list(
        [
            {
                "prompt": f"the sea {number}",
                "chosen": " is blue" + " so" * (number % 3),
                "rejected": f" is {number}",
            }
            for number in range(count)
        ]
    )
    trainer = trained_by(
        trl.DPOTrainer,
        trl.DPOConfig,
        folder,
        rows,
        streamed=streamed,
        more={"beta": 0.3} | changes,
        model=model,
        processing_class=tokenizer,
        **({} if streamed else {"ref_model": copy.deepcopy(model)}),
    )
    return trainer.state.log_history


# 9 pairs in micro-batches of 2, 3 of them a step: the last step of an epoch has 2 and 1.
UNEVEN = {"count": 9, "gradient_accumulation_steps": 3, "logging_steps": 2}


@pytest.mark.parametrize(
    "changes",
    few([{}, {"loss_type": ["robust"], "label_smoothing": 0.1}, UNEVEN], 2),
    ids=["sigmoid", "robust", "uneven"],
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
        ({"label_smoothing": 0.1}, "args.label_smoothing: DPOTrainer's sigmoid has none"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
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


def test_a_micro_batch_counts_by_its_own_step_of_the_trainer() -> None:
    """A stream may end within a step, whose part is then added to the next one."""
    assert shares([Waiting({}, None, 4), Waiting({}, None, 2)]) == (1 / 4, 1 / 2)
