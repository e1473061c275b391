"""GRPO against TRL's own trainers: log-probabilities, loss, gradients, what is logged."""

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from megatrain.data.demo_corpus import train_bpe_tokenizer
from megatrain.loss import GRPO
from tests.parity.cases import gradients, llama, make_engine, relative_error
from tests.parity.test_policy import PLACEMENTS

pytestmark = pytest.mark.exhaustive
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

REPLIES, LENGTH = 4, 7
LOSSES: dict[str, Any] = {
    "grpo": GRPO(0.04, loss_type="grpo", temperature=0.7),
    "dapo": GRPO(0.1, 0.1, 0.15, temperature=1.3),
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
    kinds = ("GRPO", "loss_type", "importance_sampling_level", "use_bias_correction_kl")
    settings = getattr(trl, f"{kinds[0]}Config")(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
        gradient_checkpointing=False, per_device_train_batch_size=2 * REPLIES, beta=loss.beta,
        num_generations=REPLIES, max_completion_length=LENGTH, temperature=loss.temperature,
        epsilon=loss.epsilon, epsilon_high=loss.epsilon_high, num_iterations=2,
        disable_dropout=True,
        **{name: getattr(loss, name) for name in kinds[1:]},
    )  # fmt: skip
    rows = [{"prompt": text} for text in ("the sea", "a very long prompt")]
    return getattr(trl, f"{kinds[0]}Trainer")(
        model,
        lambda completion_ids, **_: [float(sum(ids) % 5) for ids in completion_ids],
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )


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
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text("a very long prompt of the sea " * 9)
    train_bpe_tokenizer([folder / "text.txt"], 300, folder)
    made = AutoTokenizer.from_pretrained(folder)
    made.pad_token = made.eos_token
    return made


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_policies_are_those_of_trl(tokenizer, tmp_path, loss, placement):
    trainer = trainer_of(loss, tmp_path, tokenizer)
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions(
        [row for row in trainer.train_dataset for _ in range(REPLIES)]
    )
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
    trainer.model.train()
    total = trainer.compute_loss(trainer.model, inputs)
    total.backward()
    result = engine.step(step, loss)
    assert result.loss == pytest.approx(total.item(), rel=1e-5, abs=1e-7)
    grads = {name: p.grad for name, p in trainer.model.named_parameters()}
    assert relative_error(gradients(engine), grads) < 5e-6
    said = {name: value for name, [value] in trainer._metrics["train"].items()}
    del said["entropy"]
    assert result.measures == pytest.approx(said, rel=1e-5, abs=1e-6)
    assert any(0 < value < 1 for name, value in said.items() if "clip" in name)
