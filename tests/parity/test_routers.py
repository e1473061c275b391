"""The loss that balances experts: transformers' value and gradients, however a step is cut."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megatrain import InputError, Placement
from megatrain.loss import DPO
from tests.families.tiny import tiny_model
from tests.parity.cases import gradients, llama, make_batches, make_engine, relative_error, resumes
from tests.sweeps import few

WEIGHT = 0.5
ASKED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": WEIGHT}
# Jamba has a router in every other layer; ERNIE and Laguna have none in the first one.
FAMILIES = ["mixtral", "gpt_oss", "jamba", "ernie4_5_moe", "laguna", "qwen3_5_moe", "qwen4_exp"]
WRAPPED = ("qwen3_5_moe", "qwen4_exp")  # their routers are of the configuration inside
LAYER = 60_000  # bytes, less than a layer of the tiny Mixtral has


def a_step():
    """Uneven micro-batches, one of them padded."""
    [step] = make_batches(1)
    mask = torch.ones_like(step[0]["input_ids"])
    mask[0, 7:] = 0
    step[0] |= {"attention_mask": mask, "labels": step[0]["labels"].masked_fill(mask == 0, -100)}
    return step


def plain(model, step):
    """Loss and balance of a step by transformers' function: all micro-batches as one batch."""
    cross_entropy, routed, masks, labels = 0.0, [], [], 0
    for micro in step:
        given = {name: value for name, value in micro.items() if name != "labels"}
        made = model(**given, output_router_logits=True, use_cache=False)
        targets = micro["labels"][:, 1:].flatten()
        flat = made.logits[:, :-1].flatten(0, 1)
        cross_entropy = cross_entropy + F.cross_entropy(flat, targets, reduction="sum")
        routed.append([each.flatten(0, -2) for each in made.router_logits])
        masks.append(micro.get("attention_mask", torch.ones_like(micro["input_ids"])).flatten())
        labels += int((targets != -100).sum())
    layers = tuple(torch.cat(each) for each in zip(*routed, strict=True))
    experts, chosen = layers[0].shape[-1], model.config.num_experts_per_tok
    balance = load_balancing_loss_func(layers, experts, chosen, torch.cat(masks)[None])
    return cross_entropy / labels + WEIGHT * balance, balance


def slopes(model, step):
    """The gradients of what `plain` says."""
    model.zero_grad()
    plain(model.train(), step)[0].backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad
            for n, p in model.named_parameters() if p.requires_grad}  # fmt: skip


@pytest.mark.parametrize("family", few(FAMILIES, 0, 1, 2, 5))
def test_value_and_gradients_are_those_of_transformers(family):
    changes = {"text_config": ASKED} if family in WRAPPED else ASKED
    model, step = tiny_model(family, changes=changes), a_step()
    engine = make_engine(model, clip=1e9)
    result = engine.step(step)
    loss, balance = plain(model.train(), step)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.measures["aux_loss"] == pytest.approx(balance.item(), rel=1e-6)
    got, wanted = gradients(engine), slopes(model, step)
    far = {n for n in wanted if relative_error({n: got[n]}, {n: wanted[n]}) >= 2e-6}
    if family == "qwen3_5_moe":  # slopes of its states all but cancel: both round there
        states = {name for name in wanted if name.endswith(("A_log", "dt_bias"))}
        assert far <= states
        model.set_experts_implementation("eager")  # grouped products have no float64
        exact = {n: slope for n, slope in slopes(model.double(), step).items() if n in states}
        assert relative_error(got, exact) < 1.5 * relative_error(wanted, exact)
    else:
        assert not far


PLACEMENTS = {
    "boundaries on the host": Placement(layer_inputs="host"),
    "kept graphs, of passes": Placement(passes=3, save_activations=2),
    "graphs on the host": Placement(offload_activations=2),
    "kept attention": Placement(save_attention="device"),
    "tiles of tokens": Placement(chunk_tokens=4),
}


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_every_placement_has_the_same_loss(placement):
    model, step = tiny_model("mixtral", changes=ASKED), a_step()
    one, other = make_engine(model, clip=1e9), make_engine(model, clip=1e9, placement=placement)
    first, second = one.step(step), other.step(step)
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert second.measures["aux_loss"] == pytest.approx(first.measures["aux_loss"], rel=1e-6)
    assert relative_error(gradients(other), gradients(one)) < 2e-6


def test_one_micro_batch_is_the_models_own_loss():
    model, [micro, *_] = tiny_model("mixtral", changes=ASKED), a_step()
    own = model.train()(**micro).loss
    assert make_engine(model).step([micro]).loss == pytest.approx(own.item(), rel=1e-6)


def test_it_is_added_to_other_losses_and_not_to_evaluations():
    model, step = tiny_model("mixtral", changes=ASKED), make_batches(1, [(4, 9)])[0]
    rows = torch.arange(4)[:, None].expand(4, 9)
    step[0] |= {"pair": (rows // 2).float(), "chosen": (rows % 2).float()}
    step[0]["reference_logp"] = torch.zeros(4, 9)
    engine = make_engine(model)
    without = engine.evaluate(step, DPO())
    result = engine.step(step, DPO())
    assert result.loss == pytest.approx(without + WEIGHT * result.measures["aux_loss"], rel=1e-5)
    assert "rewards/margins" in result.measures


def test_the_weight_may_be_given_and_is_saved(tmp_path):
    model, step = tiny_model("mixtral", changes={"output_router_logits": False}), a_step()
    assert "aux_loss" not in make_engine(model).step(step).measures
    engine = make_engine(model, router_aux_loss_coef=WEIGHT)
    assert not model.config.output_router_logits
    engine.step(step)
    resumes(engine, tmp_path / "saved", [step])
    without = make_engine(tiny_model("mixtral", changes=ASKED), router_aux_loss_coef=0.0)
    assert "aux_loss" not in without.step(step).measures
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert "aux_loss" in make_engine(adapted, router_aux_loss_coef=WEIGHT).step(step).measures


class Other(MixtralForCausalLM):
    """Adds a router's z-loss as well."""

    def forward(self, input_ids, output_router_logits=None, **more):
        result = super().forward(input_ids, output_router_logits=output_router_logits, **more)
        if result.loss is not None and result.router_logits:
            result.loss = result.loss + 1e-3 * result.router_logits[0].logsumexp(-1).square().mean()
        return result


REFUSED = {
    "is not the usual one": lambda: other(),
    "does not say what its routers' loss is": lambda: llama(output_router_logits=True),
    "no layer of MixtralForCausalLM has a router": lambda: dense(),
}


def other():
    """Made as a Mixtral: the oldest transformers builds no experts for a class of this file."""
    model = tiny_model("mixtral", changes=ASKED)
    model.__class__ = Other
    return model


def dense():
    """A Mixtral whose layers have lost their routers."""
    model = tiny_model("mixtral", changes=ASKED)
    for layer in model.model.layers:
        layer.mlp = torch.nn.Linear(model.config.hidden_size, model.config.hidden_size)
    return model


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_usual_loss_of_routers_is_refused(reason):
    with pytest.raises(InputError, match=reason):
        make_engine(REFUSED[reason](), saveable=False)


def test_a_model_without_routers_has_no_weight_of_them():
    with pytest.raises(InputError, match="must be a number from 0 on"):
        make_engine(llama(), router_aux_loss_coef=-1.0)
    with pytest.raises(InputError, match="LlamaForCausalLM has no loss of routers"):
        make_engine(llama(), router_aux_loss_coef=0.01)
