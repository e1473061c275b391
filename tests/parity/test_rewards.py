"""Reward models: scores, loss and gradients as of plain torch, and what they cannot be given."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from megatrain import Engine, InputError, Placement
from megatrain.data.dataset import scored
from megatrain.loss import CROSS_ENTROPY, DPO, Reward, Score
from tests.parity.cases import (
    assert_step,
    llama,
    make_batches,
    make_engine,
    resumes,
    slopes,
)
from tests.parity.test_classes import PAD, classifier
from tests.sweeps import few, swept

LENGTHS = (9, 5, 7, 9, 3, 8)
LOSSES = {
    "plain": Reward(),
    "centred": Reward(center_rewards_coefficient=0.01),
    "with margins": Reward(margin=True),
    "both": Reward(0.3, margin=True),
}


def reward_model(family="llama"):
    return classifier("one label", family, labels=1)


def pairs():
    """Three pairs, the chosen replies first, padded; and the margins of the pairs."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 120, (6, 9), generator=generator)
    for row, length in enumerate(LENGTHS):
        ids[row, length:] = PAD
    labels = torch.full_like(ids, -100)
    labels[torch.arange(6), torch.tensor(LENGTHS) - 1] = 0
    rows = torch.arange(6)[:, None].expand(ids.shape)
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "labels": labels,
        "pair": (rows % 3).float(),
        "chosen": (rows < 3).float(),
        "margin": torch.tensor([0.5, 0.0, 2.0])[rows % 3],
    }


def taken(loss, cut):
    names = ("input_ids", "attention_mask", "labels", *loss.inputs)
    parts = {name: pairs()[name].split(cut) for name in names}
    return [{name: parts[name][i] for name in names} for i in range(len(cut))]


@swept(together=1, cut={"in one micro-batch": [6], "in several": [1, 3, 2]}, loss=LOSSES)
def test_value_and_gradients_are_plain_ones(loss, cut):
    """TRL's RewardTrainer computes it so (compute_loss)."""
    model, given = reward_model(), pairs()
    engine = make_engine(model, clip=1e9, placement=Placement(head_tokens=5))
    inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
    chosen, rejected = model.train()(**inputs).logits.squeeze(-1).chunk(2)
    margin = given["margin"][:3, 0] if loss.margin else 0.0
    wanted = -F.logsigmoid(chosen - rejected - margin).mean()
    if loss.center_rewards_coefficient is not None:
        wanted = wanted + loss.center_rewards_coefficient * ((chosen + rejected) ** 2).mean()
    wanted.backward()
    assert_step(engine, taken(loss, cut), (wanted.item(), slopes(model)), loss)


@pytest.mark.parametrize("family", few(["qwen2", "mixtral", "gpt2"]))
def test_scores_are_those_of_the_models_own_forward(family, tmp_path):
    """Also where padding and the end of a text are one token, and rows differ in length."""
    model, step = reward_model(family).eval(), taken(Reward(), [6])
    given = {name: step[0][name] for name in ("input_ids", "attention_mask")}
    given["input_ids"][0, 7:], given["input_ids"][3, 4] = PAD, PAD
    ids = given["input_ids"].where(given["attention_mask"] == 1, 7)  # a loader may pad otherwise
    step[0]["labels"] = scored(ids, given["attention_mask"], PAD)
    assert torch.equal((step[0]["labels"] == 0).sum(1), torch.ones(6, dtype=torch.long))
    with torch.no_grad():
        wanted = model(**given).logits[:, 0]
    with make_engine(model) as engine:
        [found] = engine.rewards([{n: step[0][n] for n in (*given, "labels")}])
        torch.testing.assert_close(found.sum(1), wanted, rtol=1e-6, atol=1e-6)
        assert engine.evaluate(step, Reward()) > 0
        engine.step(step, Reward())
        engine.save_pretrained(tmp_path / "out")
        [trained] = engine.rewards([{n: step[0][n] for n in (*given, "labels")}])
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(
            again(**given).logits[:, 0], trained.sum(1), rtol=1e-5, atol=1e-6
        )


def test_a_language_model_gets_a_head_and_goes_on_from_a_checkpoint(tmp_path):
    llama(eos_token_id=2).save_pretrained(tmp_path / "base")
    step = taken(Reward(), [6])
    with make_engine(tmp_path / "base", loss=Reward(), precision="fp32") as engine:
        drawn = dict(engine.named_masters())
        assert drawn["score.weight"].std() > 0
        torch.testing.assert_close(drawn["model.norm.weight"], llama().model.norm.weight.detach())
        engine.step(step, Reward())
        resumes(engine, tmp_path / "saved", [step], Reward())
    with Engine.load(tmp_path / "saved", device="cpu") as again:
        assert again.config.pad_token_id == 2


LABELS = {
    "several labels": lambda m: m["labels"][0].fill_(0),
    "labels holds token 1, outside": lambda m: m["labels"].masked_fill_(m["labels"] == 0, 1),
    "no label of a rejected reply": lambda m: m["labels"][3:].fill_(-100),
}


@pytest.mark.parametrize("reason", LABELS)
def test_labels_of_no_scores_are_refused(reason):
    [micro] = step = taken(Reward(), [6])
    LABELS[reason](micro)
    with pytest.raises(InputError, match=reason):
        make_engine(reward_model()).step(step, Reward())


def test_losses_and_heads_that_do_not_fit_are_refused():
    model, [step] = reward_model(), make_batches(1)
    engine = make_engine(model)
    for asked in (CROSS_ENTROPY, DPO(), Score()):
        with pytest.raises(InputError, match="is not for a LlamaForSequenceClassification"):
            engine.evaluate(step, asked)
    with pytest.raises(InputError, match="gives scores of rows"), engine.whole_model():
        pass
    with pytest.raises(InputError, match="Reward is not for a LlamaForCausalLM"):
        make_engine(llama()).step(taken(Reward(), [6]), Reward())
    two = make_engine(classifier("one label", labels=2))
    for asked in (Reward(), DPO()):
        with pytest.raises(InputError, match="is not for a LlamaForSequenceClassification"):
            two.step(taken(Reward(), [6]), asked)
