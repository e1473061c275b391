"""Replies of a server: importance sampling against TRL's own trainer, which gets the same ones."""

from typing import Any

import pytest
import torch

from megatrain.config import RolloutSection
from megatrain.loss import GRPO, ImportanceSampling
from megatrain.train.rollouts import compare
from tests.parity.cases import gradients, llama, make_engine, relative_error
from tests.parity.test_policy import PLACEMENTS
from tests.parity.test_trl_policy import LENGTH, REPLIES, placed, rows_of, tokenizer, trainer_of

__all__ = ["tokenizer"]  # a fixture
pytestmark = pytest.mark.exhaustive
trl = pytest.importorskip("trl")

CASES: dict[str, Any] = {
    "usual": (ImportanceSampling(), GRPO(0.04)),
    "both bounds of replies": (
        ImportanceSampling("sequence_mask", 1.5, 0.8), GRPO(loss_type="grpo", epsilon=0.1),
    ),
    "replies": (ImportanceSampling("sequence_truncate", 1.3, 0.9), GRPO(0.1, temperature=0.7)),
    "tokens": (ImportanceSampling("token_truncate", 1.1, 0.9), GRPO(0.04, loss_type="grpo")),
    "a least one": (ImportanceSampling("token_mask", None, 0.9), GRPO(loss_type="bnpo")),
    "cispo": (ImportanceSampling("token_mask", 1.1), GRPO(loss_type="cispo", epsilon_high=1.05)),
    "gspo": (
        ImportanceSampling("token_truncate", 1.05),
        GRPO(0.04, loss_type="grpo", importance_sampling_level="sequence"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("by", "loss"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_replies_of_a_server_count_as_in_trl(tokenizer, tmp_path, by, loss, placement):
    trainer = trainer_of(loss, tmp_path, tokenizer)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer.use_vllm = True
    trainer.vllm_importance_sampling_mode = by.mode
    trainer.vllm_importance_sampling_clip_max = by.clip_max
    trainer.vllm_importance_sampling_clip_min = by.clip_min
    engine = make_engine(llama(vocab_size=len(tokenizer)), clip=1e9, placement=placement)
    generator = torch.Generator().manual_seed(7)
    drawn_at: list[list[float]] = []

    def served(prompt_ids, *_):
        """Replies of several lengths, and what a server would say of them: bf16 and less."""
        replies = []
        for row, prompt in enumerate(prompt_ids):
            reply = torch.randint(9, 200, (LENGTH - row % 4,), generator=generator).tolist()
            ids = torch.tensor([[*prompt, *reply]])
            labels = ids.masked_fill(torch.arange(ids.shape[1]) < len(prompt), -100)
            plain = {"input_ids": ids, "labels": labels}
            [own] = engine.logprobs([plain], temperature=loss.temperature)
            said = own[labels != -100] + 0.15 * torch.randn(len(reply), generator=generator)
            replies.append(reply)
            drawn_at.append(said.tolist())
        return replies, drawn_at

    trainer._generate_single_turn = served
    inputs = trainer._generate_and_score_completions(
        [row for row in trainer.train_dataset for _ in range(REPLIES)]
    )
    said = {n: v[-1] for n, v in trainer._metrics["train"].items() if n.startswith("sampling/")}

    mask, step = inputs["completion_mask"], rows_of(inputs)
    for row, micro in enumerate(step):
        micro["old_logp"] = placed(inputs["old_per_token_logps"][row], mask[row], micro)
    told = compare(RolloutSection(), step, drawn_at, by)
    assert told == pytest.approx(said, rel=1e-5, abs=1e-6)
    wanted = inputs["importance_sampling_ratio"].expand(mask.shape)
    for row, micro in enumerate(step):
        ratio = placed(wanted[row], mask[row], micro)
        torch.testing.assert_close(micro["importance_sampling_ratio"], ratio, rtol=1e-5, atol=1e-6)
    assert len(wanted.unique()) > 1

    old = inputs["old_per_token_logps"] + 0.1 * torch.randn(mask.shape, generator=generator)
    inputs["old_per_token_logps"] = old
    inputs["advantages"] = torch.randn(len(mask), generator=generator)
    for row, micro in enumerate(step):
        numbers = {"example": float(row), "advantage": float(inputs["advantages"][row])}
        micro |= {name: torch.full(micro["labels"].shape, v) for name, v in numbers.items()}
        micro["old_logp"] = placed(old[row], mask[row], micro)
        if loss.beta:
            micro["reference_logp"] = placed(inputs["ref_per_token_logps"][row], mask[row], micro)
    total = trainer.compute_loss(trainer.model, inputs)
    total.backward()
    result = engine.step(step, GRPO(**{**vars(loss), "importance_sampling": by}))
    assert result.loss == pytest.approx(total.item(), rel=1e-6, abs=1e-7)
    grads = {name: p.grad for name, p in trainer.model.named_parameters()}
    assert relative_error(gradients(engine), grads) < 5e-6
