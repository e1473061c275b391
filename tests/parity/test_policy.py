"""GRPO against TRL's own trainer: log-probabilities, loss, gradients, what is logged."""

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from megatrain import InputError, Placement
from megatrain.loss import GRPO
from tests.parity.cases import gradients, llama, make_engine, relative_error, replies, slopes
from tests.sweeps import few, quick

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

REPLIES, LENGTH = 4, 7
LOSSES: dict[str, Any] = {
    "grpo": GRPO(0.04, loss_type="grpo", temperature=0.7),
    "bnpo": GRPO(loss_type="bnpo"),
    "dr_grpo": GRPO(0.2, loss_type="dr_grpo", max_completion_length=LENGTH),
    "dapo": GRPO(0.1, 0.1, 0.15, temperature=1.3),
    "bounded": GRPO(epsilon=0.1, delta=1.2),
    "gspo": GRPO(0.04, 0.01, loss_type="grpo", importance_sampling_level="sequence"),
    "biased": GRPO(0.4, use_bias_correction_kl=False, temperature=0.7),
    "cispo": GRPO(epsilon_high=1.05, loss_type="cispo", temperature=1.3),
    "sequences of cispo": GRPO(
        epsilon_high=1.01, loss_type="cispo", importance_sampling_level="sequence"
    ),
}


def trainer_of(loss, folder, tokenizer):
    """TRL's trainer of the same loss, whose reference is another model than the one it trains."""
    reference = llama(vocab_size=len(tokenizer))
    for parameter in reference.parameters():
        parameter.data *= 1.05
    reference.save_pretrained(folder / "model")
    model = type(reference).from_pretrained(folder / "model")
    model.load_state_dict(llama(vocab_size=len(tokenizer)).state_dict())
    named = ("loss_type", "importance_sampling_level", "use_bias_correction_kl", "delta")
    named += ("beta", "temperature", "epsilon", "epsilon_high")
    settings = trl.GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
        gradient_checkpointing=False, per_device_train_batch_size=2 * REPLIES,
        num_generations=REPLIES, max_completion_length=LENGTH, num_iterations=2,
        disable_dropout=True, **{name: getattr(loss, name) for name in named},
    )  # fmt: skip
    rows = [{"prompt": text} for text in ("the sea", "a very long prompt")]
    trainer = trl.GRPOTrainer(
        model,
        lambda completion_ids, **_: [float(sum(ids) % 5) for ids in completion_ids],
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def rows_of(inputs):
    """Each reply a micro-batch, without padding; `at`: where its labels are."""
    made = []
    for row, mask in enumerate(inputs["completion_mask"].bool()):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
        reply = inputs["completion_ids"][row][mask]
        ids = torch.cat([prompt, reply])[None]
        labels = ids.masked_fill(torch.arange(ids.shape[1]) < len(prompt), -100)
        made.append({"input_ids": ids, "labels": labels})
    return made


def placed(values, mask, micro):
    """Numbers of a row's reply in the places of its labels."""
    made = torch.zeros(micro["labels"].shape)
    made[micro["labels"] != -100] = values[mask.bool()]
    return made


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    made = AutoTokenizer.from_pretrained(tokenizer_folder)
    made.pad_token = made.eos_token
    return made


@pytest.mark.parametrize("name", quick(LOSSES, {*LOSSES} - {"grpo", "bnpo", "cispo"}))
@pytest.mark.parametrize("head_tokens", few([5, 4096]))
def test_policies_are_those_of_trl(tokenizer, tmp_path, name, head_tokens):
    loss = LOSSES[name]
    trainer = trainer_of(loss, tmp_path, tokenizer)
    prompts = [row for row in trainer.train_dataset for _ in range(REPLIES)]
    inputs = trainer._generate_and_score_completions(prompts)
    mask = inputs["completion_mask"]
    mask[1, 3:], mask[5, 1:] = 0, 0  # replies of several lengths
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    seen = torch.cat([inputs["prompt_mask"], mask], 1)
    with torch.no_grad():
        logps = [
            trainer._get_per_token_logps_and_entropies(model, ids, seen, mask.shape[1])[0]
            for model in (trainer.model, trainer.ref_model)
            if model is not None
        ]
    step = rows_of(inputs)
    placement = Placement(head_tokens=head_tokens)
    engine = make_engine(llama(vocab_size=len(tokenizer)), clip=1e9, placement=placement)
    for row, own in enumerate(engine.logprobs(step, temperature=loss.temperature)):
        wanted = placed(logps[0][row], mask[row], step[row])
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=2e-6)
    generator = torch.Generator().manual_seed(3)
    old = logps[0] + 0.1 * torch.randn(mask.shape, generator=generator)
    inputs |= {"old_per_token_logps": old, "old_logps": (old * mask).sum(1)}
    inputs["ref_per_token_logps"] = logps[-1]
    inputs["advantages"] = torch.randn(len(mask), generator=generator)
    inputs["num_items_in_batch"] = mask.sum()
    for row, micro in enumerate(step):
        numbers = {"example": float(row), "advantage": float(inputs["advantages"][row])}
        micro |= {name: torch.full(micro["labels"].shape, v) for name, v in numbers.items()}
        micro["old_logp"] = placed(old[row], mask[row], micro)
        if "reference_logp" in loss.inputs:
            micro["reference_logp"] = placed(logps[-1][row], mask[row], micro)
    trainer._metrics["train"].clear()
    total = trainer.compute_loss(trainer.model.train(), inputs)
    total.backward()
    result = engine.step(step, loss)
    assert result.loss == pytest.approx(total.item(), rel=1e-5, abs=1e-7)
    assert relative_error(gradients(engine), slopes(trainer.model)) < 5e-6
    said = {name: value for name, [value] in trainer._metrics["train"].items()}
    del said["entropy"]
    assert result.measures == pytest.approx(said, rel=1e-5, abs=1e-6)
    assert any(0 < value < 1 for name, value in said.items() if "clip" in name)


def test_advantages_compare_replies_to_one_prompt():
    rewards = torch.tensor([1.0, 2.0, 6.0, 4.0, 4.0, 4.0, float("nan"), 1.0, 0.0])
    group = GRPO(num_generations=3).advantages(rewards)
    deviation = 7**0.5 + 1e-4
    wanted = [-2 / deviation, -1 / deviation, 3 / deviation, 0, 0, 0, 0]
    torch.testing.assert_close(group[:7], torch.tensor(wanted))
    torch.testing.assert_close(group[7:], torch.tensor([0.5, -0.5]) / (0.5**0.5 + 1e-4))
    none = GRPO(num_generations=3, scale_rewards="none").advantages(rewards)
    assert none.tolist() == [-2, -1, 3, 0, 0, 0, 0, 0.5, -0.5]
    batch = GRPO(num_generations=3, scale_rewards="batch").advantages(rewards)
    there = rewards[~rewards.isnan()]
    torch.testing.assert_close(batch, none / (there.std() + 1e-4))
    with pytest.raises(InputError, match="8 rewards are no whole groups of 3"):
        GRPO(num_generations=3).advantages(rewards[:8])
    with pytest.raises(InputError, match="a reward is infinite"):
        GRPO(num_generations=3).advantages(rewards / 0)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_a_step_whose_replies_are_all_masked_changes_nothing_by_a_gradient(loss_type):
    step, loss = replies(GRPO()), GRPO(loss_type=loss_type)
    for micro in step:
        micro["labels"].fill_(-100)
    result = make_engine(llama()).step(step, loss)
    assert (result.loss, result.grad_norm) == (0, 0)


def test_replies_with_one_number_are_refused():
    step = replies(GRPO())
    step[1]["example"] = torch.ones_like(step[1]["example"])
    with pytest.raises(InputError, match="example 1 has a reply in several rows of this step"):
        make_engine(llama()).step(step, GRPO())
