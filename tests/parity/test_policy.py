"""GRPO against the published formulas, reply by reply in plain torch."""

from typing import Any

import pytest
import torch

from megatrain import InputError, Placement
from megatrain.loss import GRPO
from tests.parity.cases import gradients, llama, make_batches, make_engine, relative_error
from tests.sweeps import swept

PLACEMENTS = {
    "chunks": Placement(head_tokens=5),
    "a chunk": Placement(),
}
WIDE = 1000
LOSSES: dict[str, Any] = {
    "grpo": GRPO(0.04, 0.1, 0.3, loss_type="grpo"),
    "bnpo": GRPO(loss_type="bnpo"),
    "dr_grpo": GRPO(0.2, loss_type="dr_grpo", max_completion_length=9),
    "dapo": GRPO(epsilon=0.1, delta=1.2),
    "cispo": GRPO(epsilon_high=1.05, loss_type="cispo"),
    "gspo": GRPO(
        0.4,
        0.02,
        use_bias_correction_kl=False,
        loss_type="grpo",
        importance_sampling_level="sequence",
    ),
    "cool": GRPO(0.04, 0.1, temperature=0.7),
    "warm": GRPO(epsilon=0.1, temperature=1.3),
}


def replies(model, loss):
    """Six replies in uneven micro-batches, one of which has nothing to learn."""
    [step] = make_batches(1)
    generator, number = torch.Generator().manual_seed(5), 0
    for micro in step:
        ids = micro["input_ids"]
        shape, rows = ids.shape, len(ids)
        labels = micro["labels"].masked_fill(torch.arange(shape[1]) < 2, -100)
        labels[0] = -100 if number == 0 else labels[0]
        micro["labels"] = labels
        numbers = torch.arange(number, number + rows)[:, None].expand(shape)
        number += rows
        with torch.no_grad():
            logits = model(input_ids=ids).logits / loss.temperature
            every = logits.log_softmax(-1).roll(1, 1)
        near = every.gather(2, ids[..., None])[..., 0]
        micro["example"] = numbers.float()
        micro["advantage"] = torch.tensor([1.0, -0.5, 0.3, 2.0, -1.5, 0.7])[numbers]
        for name in ("old_logp", "reference_logp"):
            micro[name] = near + 0.2 * torch.randn(shape, generator=generator)
    return [{n: m[n] for n in ("input_ids", "labels", *loss.inputs)} for m in step]


def of_reply(loss, log_prob, old, reference, a):
    """The summed loss of one reply, of its labels' numbers `[L]`."""
    difference = log_prob - old
    if loss.importance_sampling_level == "sequence":
        difference = difference.mean().expand(len(difference))
    ratio = difference.exp()
    if getattr(loss, "loss_type", "") == "cispo":
        return -(ratio.detach().clamp(max=loss.epsilon_high) * a * log_prob).sum()
    high = 1 + (loss.epsilon if loss.epsilon_high is None else loss.epsilon_high)
    clipped = ratio.clamp(1 - loss.epsilon, high)
    bounded = ratio if getattr(loss, "delta", None) is None else ratio.clamp(max=loss.delta)
    each = -torch.minimum(bounded * a, clipped * a)
    if loss.beta:
        divergence = (reference - log_prob).exp() - (reference - log_prob) - 1
        each = each + loss.beta * divergence * (ratio if loss.use_bias_correction_kl else 1)
    return each.mean() if getattr(loss, "loss_type", "") == "grpo" else each.sum()


def formula(model, loss, step):
    total, labels, rows = torch.zeros(()), 0, 0
    for micro in step:
        logits = model(input_ids=micro["input_ids"]).logits / loss.temperature
        every = logits.log_softmax(-1)[:, :-1]
        for row, ids in enumerate(micro["labels"]):
            used = ids[1:] != -100
            rows, labels = rows + 1, labels + int(used.sum())
            if not used.any():
                continue
            log_prob = every[row][used].gather(1, ids[1:][used][:, None])[:, 0]
            old, reference = (
                micro.get(name, micro["old_logp"])[row, 1:][used]
                for name in ("old_logp", "reference_logp")
            )
            total = total + of_reply(loss, log_prob, old, reference, micro["advantage"][row, 0])
    kind = getattr(loss, "loss_type", "grpo")
    by = {"grpo": rows, "dr_grpo": rows * loss.max_completion_length}.get(kind, labels)
    return total / by


@swept(together=1, loss=LOSSES, placement=PLACEMENTS)
def test_values_and_gradients_are_those_of_the_formulas(loss, placement):
    model = llama(vocab_size=WIDE)
    step = replies(model, loss)
    engine = make_engine(model, clip=1e9, placement=placement)
    result = engine.step(step, loss)
    model.train()
    total = formula(model, loss, step)
    total.backward()
    assert result.loss == pytest.approx(total.item(), rel=1e-6)
    wanted = {n: p.grad for n, p in model.named_parameters()}
    assert relative_error(gradients(engine), wanted) < 2e-6
    clipped = "cispo_clip_ratio" if LOSSES.get("cispo") is loss else "clip_ratio/region_mean"
    assert result.measures[clipped] > 0
    assert ("kl" in result.measures) == (loss.beta > 0)


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


def test_a_step_whose_replies_are_all_masked_changes_nothing_by_a_gradient():
    for loss in (GRPO(), GRPO(loss_type="grpo")):
        model = llama()
        step = replies(model, loss)
        for micro in step:
            micro["labels"] = torch.full_like(micro["labels"], -100)
        result = make_engine(model).step(step, loss)
        assert (result.loss, result.grad_norm) == (0, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GRPO(loss_type="luspo"), "loss_type is 'luspo'; it must be one of grpo"),
        (lambda: GRPO(scale_rewards="all"), "scale_rewards is 'all'; it must be one of group"),
        (lambda: GRPO(num_generations=1), "num_generations is 1; it must be 2 or more"),
        (lambda: GRPO(delta=1.1), "delta is 1.1; it must be above 1"),
        (lambda: GRPO(delta=2.0, loss_type="cispo"), "cispo has no delta"),
        (lambda: GRPO(beta=-1), "beta is -1"),
        (lambda: GRPO(epsilon_high=-1), "epsilon_high is -1; it must be 0 or more"),
        (lambda: GRPO(max_completion_length=0), "max_completion_length is 0; it must be 1 or more"),
        (lambda: GRPO(temperature=0), "GRPO's temperature is 0; it must be above 0"),
    ],
)
def test_settings_of_policies_are_checked(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_replies_with_one_number_are_refused():
    model = llama()
    step = replies(model, GRPO())
    step[1]["example"] = torch.ones_like(step[1]["example"])
    with pytest.raises(InputError, match="example 1 has a reply in several rows of this step"):
        make_engine(model).step(step, GRPO())
