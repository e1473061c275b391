"""TRL's RewardTrainer on the engine is the plain one: losses, norms, evaluations, weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from data_cases import chat_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl_cases import trained_by

from megatrain.errors import InputError
from tests.parity.cases import SIZES, noisy
from tests.sweeps import few

trl = pytest.importorskip("trl", reason="trl is no dependency")
datasets = pytest.importorskip("datasets")


def trained(
    streamed: bool,
    folder: Path,
    margin: bool,
    sizes: dict[str, Any] | None = None,
    count: int = 16,
    **changes: Any,
) -> Any:
    tokenizer = chat_tokenizer("qwen")
    own = {"vocab_size": max(128, len(tokenizer)), "num_labels": 1}
    own["pad_token_id"] = tokenizer.pad_token_id
    own = SIZES | own | (sizes or {})
    torch.manual_seed(0)
    model = noisy(LlamaForSequenceClassification(LlamaConfig(**own)))
    rows = datasets.Dataset.from_list(
        [
            {
                "chosen": f"the sea {number} is blue" + " so" * (number % 3),
                "rejected": f"the sea {number} is {number}",
            }
            | ({"margin": 0.1 * number} if margin else {})
            for number in range(count)
        ]
    )
    trainer = trained_by(
        trl.RewardTrainer,
        trl.RewardConfig,
        folder,
        rows,
        streamed=streamed,
        more=changes,
        model=model,
        processing_class=tokenizer,
    )
    trainer.save_model(str(folder / "model"))
    return trainer.state.log_history, folder / "model"


# 9 pairs in micro-batches of 2, 3 of them a step: the last step of an epoch has 2 and 1.
UNEVEN = {"count": 9, "gradient_accumulation_steps": 3, "logging_steps": 2}


@pytest.mark.parametrize(
    ("margin", "changes"),
    few([(False, {}), (True, {"center_rewards_coefficient": 0.3}), (True, UNEVEN)], 2),
    ids=["plain", "margins and a centre", "uneven"],
)
def test_a_run_is_that_of_the_plain_trainer(
    tmp_path: Path, margin: bool, changes: dict[str, Any]
) -> None:
    runs = [trained(each, tmp_path / str(each), margin, **changes) for each in (False, True)]
    names = {"loss", "grad_norm", "eval_loss", "accuracy", "margin", "mean_reward"}
    extremes = {f"{name}_reward" for name in ("min", "max")}
    names |= extremes | {f"eval_{name}" for name in (*extremes, "mean_reward", "margin")}
    seen = set()
    for plain, streamed in zip(runs[0][0], runs[1][0], strict=True):
        for name in names & set(plain):
            assert streamed[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6)
            seen.add(name)
    assert seen == names
    wanted, got = (LlamaForSequenceClassification.from_pretrained(run[1]) for run in runs)
    assert got.config.pad_token_id == wanted.config.pad_token_id
    for name, values in wanted.state_dict().items():
        torch.testing.assert_close(got.state_dict()[name], values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pad_token_id": None}, "pad_token_id is None: load it with .*pad_token_id=[0-9]"),
        ({"pad_token_id": 7}, "pad_token_id is 7: load it with"),
    ],
)
def test_models_that_score_otherwise_are_refused(
    tmp_path: Path, sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        trained(True, tmp_path, False, sizes)
