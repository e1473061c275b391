"""Losses of replies against the published formulas, row by row in plain torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatrain import Engine, InputError, Placement
from megatrain.loss import DPO, KTO
from tests.parity.cases import gradients, llama, make_batches, make_engine, relative_error
from tests.sweeps import swept

PLACEMENTS = {
    "chunks": Placement(head_tokens=5),
    "a chunk": Placement(),
}
WIDE = 1000


def replies(loss):
    """Six replies in uneven micro-batches: chosen and rejected in turn, or of KTO three kinds."""
    [step] = make_batches(1)
    generator, number = torch.Generator().manual_seed(5), 0
    for micro in step:
        ids = micro["input_ids"]
        rows, width = ids.shape
        prompt = torch.arange(width) < 2
        numbers = torch.arange(number, number + rows)
        number += rows
        chosen = (numbers < 3)[:, None].expand(ids.shape)
        labels = micro["labels"].masked_fill(prompt, -100)
        micro["labels"] = labels
        micro["chosen"], micro["pair"] = chosen.float(), (numbers % 3)[:, None].expand(ids.shape)
        micro["example"] = numbers[:, None].expand(ids.shape).float()
        micro["desired"] = (1 - numbers % 3)[:, None].expand(ids.shape).float()  # 1, 0, -1
        micro["pair"] = micro["pair"].float()
        micro["reference_logp"] = -7 + torch.randn(ids.shape, generator=generator)
    return [{n: m[n] for n in ("input_ids", "labels", *loss.inputs)} for m in step]


def sums(model, step):
    """Of each row: sum of log-probabilities, and of the reference's, number of labels, kinds."""
    found = []
    for micro in step:
        targets = micro["labels"][:, 1:]
        every = model(input_ids=micro["input_ids"]).logits.float()[:, :-1].log_softmax(-1)
        log_prob = every.gather(2, targets.clamp(min=0)[..., None])[..., 0]
        counts = (targets != -100).float()
        reference = micro.get("reference_logp", torch.zeros(1, targets.shape[1] + 1))[:, 1:]
        for row in range(len(targets)):
            mask = counts[row]
            found.append(
                {
                    "sum": (log_prob[row] * mask).sum(),
                    "gain": ((log_prob[row] - reference[row % len(reference)]) * mask).sum(),
                    "length": mask.sum(),
                }
            )
    return found


def of_pairs(loss, rows):
    beta, wrong = loss.beta, getattr(loss, "label_smoothing", 0.0)
    by_length = loss.loss_type in ("ipo", "sigmoid_norm")
    gains = [r["gain"] / (r["length"] if by_length else 1) for r in rows]
    difference = torch.stack([gains[i] - gains[i + 3] for i in range(3)])
    if loss.loss_type == "ipo":
        return ((difference - 1 / (2 * beta)) ** 2).mean()
    if loss.loss_type == "hinge":
        return (1 - beta * difference).clamp(min=0).mean()
    right, other = F.logsigmoid(beta * difference), F.logsigmoid(-beta * difference)
    if loss.loss_type == "robust":
        return ((-(1 - wrong) * right + wrong * other) / (1 - 2 * wrong)).mean()
    return (-(1 - wrong) * right - wrong * other).mean()


def of_singles(loss, rows):
    kinds = [1 - number % 3 for number in range(6)]
    others = [r["gain"].detach() for r, kind in zip(rows, kinds, strict=True) if kind == -1]
    baseline = torch.stack(others).mean().clamp(min=0) * (loss.loss_type == "kto")
    good = [r["gain"] for r, kind in zip(rows, kinds, strict=True) if kind == 1]
    bad = [r["gain"] for r, kind in zip(rows, kinds, strict=True) if kind == 0]
    each = [loss.desirable_weight * (1 - torch.sigmoid(loss.beta * (g - baseline))) for g in good]
    each += [loss.undesirable_weight * (1 - torch.sigmoid(loss.beta * (baseline - g))) for g in bad]
    return torch.stack(each).mean()


LOSSES: dict[str, Any] = {
    "dpo": DPO(0.3),
    "dpo smoothed": DPO(0.3, 0.1),
    "dpo by length": DPO(2.0, loss_type="sigmoid_norm"),
    "robust": DPO(0.05, 0.2, "robust"),
    "ipo": DPO(0.5, loss_type="ipo"),
    "hinge": DPO(0.05, loss_type="hinge"),
    "kto": KTO(0.05, 1.5, 0.7),
    "apo": KTO(0.05, loss_type="apo_zero_unpaired"),
}


@swept(together=1, loss=LOSSES, placement=PLACEMENTS)
def test_values_and_gradients_are_those_of_the_formulas(loss, placement):
    model, step = llama(vocab_size=WIDE), replies(loss)
    engine = make_engine(model, clip=1e9, placement=placement)
    evaluated = engine.evaluate(step, loss)
    result = engine.step(step, loss)
    model.train()
    rows = sums(model, step)
    total = of_singles(loss, rows) if isinstance(loss, KTO) else of_pairs(loss, rows)
    total.backward()
    wanted = {n: p.grad for n, p in model.named_parameters()}
    assert result.loss == pytest.approx(total.item(), rel=1e-6)
    assert evaluated == pytest.approx(total.item(), rel=1e-6)
    assert relative_error(gradients(engine), wanted) < 2e-6


def test_measures_are_what_rewards_are():
    model = llama()
    for loss, key in ((DPO(0.3), "gain"),):
        with torch.no_grad():
            rows = sums(model, step := replies(loss))
        rewards = torch.stack([loss.beta * row[key] for row in rows])
        chosen, rejected = rewards.chunk(2)
        measures = make_engine(model).step(step, loss).measures
        assert measures["rewards/chosen"] == pytest.approx(chosen.mean().item(), rel=1e-5)
        assert measures["rewards/rejected"] == pytest.approx(rejected.mean().item(), rel=1e-5)
        margins = (chosen - rejected).mean().item()
        assert measures["rewards/margins"] == pytest.approx(margins, rel=1e-4)
        right = (chosen > rejected).float().mean().item()
        assert measures["rewards/accuracies"] == pytest.approx(right)
    loss = KTO(0.05)
    with torch.no_grad():
        rows = sums(model, step := replies(loss))
    measures = make_engine(model).step(step, loss).measures
    gains = torch.stack([row["gain"] for row in rows])
    assert measures["kl"] == pytest.approx(max(0.0, gains[2::3].mean().item()), rel=1e-5)
    assert measures["rewards/chosen"] == pytest.approx(0.05 * gains[::3].mean().item(), rel=1e-5)
    for micro in step:
        micro["reference_logp"] = micro["reference_logp"] + 9
    assert make_engine(model).step(step, loss).measures["kl"] == 0  # it would be negative
    bad_alone = [{n: v[:1] if n != "desired" else v[:1] * 0 for n, v in step[0].items()}]
    assert "rewards/chosen" not in make_engine(model).step(bad_alone, loss).measures


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_log_probabilities_are_those_of_the_labels(placement):
    model, [step] = llama(vocab_size=WIDE), make_batches(1)
    found = make_engine(model, placement=placement).logprobs(step)
    for each, micro in zip(found, step, strict=True):
        labels = micro["labels"]
        with torch.no_grad():
            every = model(input_ids=micro["input_ids"]).logits.log_softmax(-1)
        wanted = torch.zeros(labels.shape)
        wanted[:, 1:] = every[:, :-1].gather(2, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        wanted = wanted.masked_fill(labels == -100, 0)
        torch.testing.assert_close(each, wanted, rtol=1e-5, atol=1e-5)
        assert each.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPO(loss_type="exo"), "loss_type is 'exo'; it must be one of sigmoid"),
        (lambda: DPO(0.1, 0.1, "ipo"), "ipo has no label smoothing"),
        (lambda: DPO(0.0), "DPO's beta is 0.0"),
        (lambda: KTO(undesirable_weight=-1), "a weight of KTO is -1"),
        (lambda: KTO(loss_type="bco"), "KTO's loss_type is 'bco'"),
    ],
)
def test_settings_of_replies_are_checked(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_replies_that_are_none_are_refused():
    engine: Engine = make_engine(llama())
    wrong = replies(KTO())
    wrong[0]["desired"] = wrong[0]["desired"] + 0.5
    with pytest.raises(InputError, match="desired must be 1 in good replies"):
        engine.step(wrong, KTO())
    wrong = replies(KTO())
    wrong[1]["example"] = torch.zeros_like(wrong[1]["example"])
    with pytest.raises(InputError, match="example 0 has a reply in several rows of this step"):
        engine.step(wrong, KTO())
    loss = DPO()  # numbers that begin anew
    with pytest.raises(InputError, match="pair 0 has a reply in several rows of this step"):
        engine.step([*replies(loss), *replies(loss)], loss)
