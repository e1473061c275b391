"""Reward models: scores, loss and gradients as of plain torch, and what they cannot be given."""

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from megatrain import Engine, InputError, Placement
from megatrain.data.dataset import scored
from megatrain.loss import CROSS_ENTROPY, DPO, SCORE, Reward
from tests.families.tiny import tiny_config
from tests.parity.cases import (
    SIZES,
    gradients,
    llama,
    make_batches,
    make_engine,
    noisy,
    relative_error,
    resumes,
)

PAD, LENGTHS = 0, (9, 5, 7, 9, 3, 8)
CUT = {"in one micro-batch": [6], "in several": [1, 3, 2]}
LOSSES = {
    "plain": Reward(),
    "centred": Reward(center_rewards_coefficient=0.01),
    "with margins": Reward(margin=True),
    "both": Reward(0.3, margin=True),
}


def reward_model(family="llama"):
    torch.manual_seed(0)
    if family == "llama":
        config = LlamaConfig(**SIZES, num_labels=1, pad_token_id=PAD)
        return noisy(LlamaForSequenceClassification(config))
    config = tiny_config(family)
    config.num_labels, config.pad_token_id = 1, PAD
    return noisy(AutoModelForSequenceClassification.from_config(config))


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


def plain(model, loss):
    """As TRL's RewardTrainer computes it (compute_loss)."""
    given = pairs()
    inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
    chosen, rejected = model(**inputs).logits.squeeze(-1).chunk(2)
    margin = given["margin"][:3, 0] if loss.margin else 0.0
    made = -F.logsigmoid(chosen - rejected - margin).mean()
    if loss.center_rewards_coefficient is not None:
        made = made + loss.center_rewards_coefficient * ((chosen + rejected) ** 2).mean()
    return made


@pytest.mark.parametrize("cut", CUT.values(), ids=CUT)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_value_and_gradients_are_plain_ones(loss, cut):
    model = reward_model()
    engine = make_engine(model, clip=1e9, placement=Placement(head_tokens=5))
    result = engine.step(taken(loss, cut), loss)
    wanted = plain(model.train(), loss)
    wanted.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad
             for n, p in model.named_parameters()}  # fmt: skip
    assert result.loss == pytest.approx(wanted.item(), rel=1e-6)
    assert relative_error(gradients(engine), grads) < 2e-6


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "gpt2"])
def test_scores_are_those_of_the_models_own_forward(family, tmp_path):
    model, step = reward_model(family).eval(), taken(Reward(), [6])
    given = {name: step[0][name] for name in ("input_ids", "attention_mask")}
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
    for asked in (CROSS_ENTROPY, DPO(), SCORE):
        with pytest.raises(InputError, match="is not for a LlamaForSequenceClassification"):
            engine.evaluate(step, asked)
    with pytest.raises(InputError, match="gives scores of rows"), engine.whole_model():
        pass
    with pytest.raises(InputError, match="Reward is not for a LlamaForCausalLM"):
        make_engine(llama()).step(taken(Reward(), [6]), Reward())
    two = make_engine(LlamaForSequenceClassification(LlamaConfig(**SIZES, pad_token_id=0)))
    for asked in (Reward(), DPO()):
        with pytest.raises(InputError, match="is not for a LlamaForSequenceClassification"):
            two.step(taken(Reward(), [6]), asked)


def test_rows_are_scored_where_transformers_scores_them():
    """Also where padding and the end of a text are one token, and rows differ in length."""
    model, ids = reward_model().eval(), pairs()["input_ids"].clone()
    ids[0, 7:], ids[3, 4] = PAD, PAD
    mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    labels = scored(ids.where(mask, 7), mask.long(), PAD)  # a loader may pad with another token
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask.long()).logits[:, 0]
    with make_engine(model) as engine:
        given = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
        [found] = engine.rewards([given])
    assert torch.equal((labels == 0).sum(1), torch.ones(6, dtype=torch.long))
    torch.testing.assert_close(found.sum(1), wanted, rtol=1e-6, atol=1e-6)
