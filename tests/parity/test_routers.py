"""The loss that balances experts: transformers' value and gradients, however a step is cut."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megatrain import AdamW, Engine, InputError, Placement
from megatrain.compat.transformers import recorded_routers
from megatrain.errors import StepRefused
from megatrain.loss import DPO
from tests.families.tiny import routing, tiny_model
from tests.parity.cases import (
    Counting,
    assert_step,
    gradients,
    llama,
    make_batches,
    make_engine,
    masters,
    padded,
    relative_error,
    resumes,
    same,
    slopes,
)
from tests.sweeps import few, placements, swept

WEIGHT = 0.5
ASKED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": WEIGHT}
# Jamba has a router in every other layer; ERNIE and Laguna have none in the first one.
FAMILIES = ["mixtral", "gpt_oss", "jamba", "ernie4_5_moe", "laguna", "qwen3_5_moe", "qwen4_exp"]
WRAPPED = ("qwen3_5_moe", "qwen4_exp")  # their routers are of the configuration inside


def a_step():
    """Uneven micro-batches, one of them padded."""
    [step] = make_batches(1)
    return padded(step)


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


def plain_slopes(model, step):
    model.zero_grad()
    plain(model.train(), step)[0].backward()
    return slopes(model)


@pytest.mark.parametrize("family", few(FAMILIES, 0, 1, 2, 5))
def test_value_and_gradients_are_those_of_transformers(family):
    changes = {"text_config": ASKED} if family in WRAPPED else ASKED
    model, step = tiny_model(family, changes=changes), a_step()
    engine = make_engine(model, clip=1e9)
    result = engine.step(step)
    loss, balance = plain(model.train(), step)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.measures["aux_loss"] == pytest.approx(balance.item(), rel=1e-6)
    got, wanted = gradients(engine), plain_slopes(model, step)
    far = {n for n in wanted if relative_error({n: got[n]}, {n: wanted[n]}) >= 2e-6}
    if family == "qwen3_5_moe":  # slopes of its states all but cancel: both round there
        states = {name for name in wanted if name.endswith(("A_log", "dt_bias"))}
        assert far <= states
        model.set_experts_implementation("eager")  # grouped products have no float64
        exact = {n: slope for n, slope in plain_slopes(model.double(), step).items() if n in states}
        assert relative_error(got, exact) < 1.5 * relative_error(wanted, exact)
    else:
        assert not far


def adds_at_indices(function, arguments):
    """Sums over indices, which a GPU makes in no fixed order."""
    return "index_put" in str(function) and (*arguments, False)[3]


@pytest.mark.parametrize("family", few(["qwen3_moe", "mixtral"], 0))
def test_gradients_of_routed_tokens_are_added_in_a_fixed_order(family):
    model = tiny_model(family)
    with Counting(adds_at_indices) as plain_model:
        model.train()(**a_step()[1]).loss.backward()
    engine = make_engine(model)
    with Counting(adds_at_indices) as streamed:
        engine.step(a_step())
    assert plain_model.count and not streamed.count


@swept(together=0, placement=placements("routers"))
def test_every_placement_has_the_same_loss(placement):
    model, step = tiny_model("mixtral", changes=ASKED), a_step()
    one, other = make_engine(model, clip=1e9), make_engine(model, clip=1e9, placement=placement)
    first, second = one.step(step), other.step(step)
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert second.measures["aux_loss"] == pytest.approx(first.measures["aux_loss"], rel=1e-6)
    assert relative_error(gradients(other), gradients(one)) < 2e-6


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


REFUSED = {
    "is not the usual one": other,
    "does not say what its routers' loss is": lambda: llama(output_router_logits=True),
    "no layer of MixtralForCausalLM has a router": dense,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_usual_loss_of_routers_is_refused(reason):
    with pytest.raises(InputError, match=reason):
        make_engine(REFUSED[reason](), saveable=False)


def test_a_model_without_routers_has_no_weight_of_them():
    with pytest.raises(InputError, match="must be a number from 0 on"):
        make_engine(llama(), router_aux_loss_coef=-1.0)
    with pytest.raises(InputError, match="LlamaForCausalLM has no loss of routers"):
        make_engine(llama(), router_aux_loss_coef=0.01)


def routed(model, step):
    """A plain forward of a step: each router's logits and choices `[N, ...]` of what is no padding.

    By the router's number; of all micro-batches, one after the other.
    """
    routers = [kind for kind, *_ in recorded_routers(model)]
    outputs, hooks = [], []
    for part in model.modules():
        if type(part) in routers:
            number = len(outputs)
            outputs.append([])

            def note(part, args, output, number=number):
                [choices] = [x for x in output if x.dtype == torch.int64]
                outputs[number].append((output[0].flatten(0, -2), choices.flatten(0, -2)))

            hooks.append(part.register_forward_hook(note))
    for micro in step:
        model(**{name: value for name, value in micro.items() if name != "labels"})
    for hook in hooks:
        hook.remove()
    counted = torch.cat([micro.get("attention_mask", torch.ones_like(micro["input_ids"])).flatten()
                         for micro in step]).bool()  # fmt: skip
    return [[torch.cat(parts)[counted] for parts in zip(*each, strict=True)] for each in outputs]


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_z_loss_is_the_mean_square_of_logsumexp(family):
    asked = ASKED if family == "mixtral" else {}
    model, step = routing(family, changes=asked).train(), a_step()
    engine = make_engine(model, clip=1e9, router_z_loss_coef=0.3)
    z = torch.cat([logits for logits, _ in routed(model, step)]).logsumexp(-1).square().mean()
    bare = {"input_ids", "attention_mask"}
    labels = sum(int((micro["labels"][:, 1:] != -100).sum()) for micro in step)
    loss = 0.3 * z + (WEIGHT * plain(model, step)[1] if asked else 0)
    for micro in step:
        logits = model(**{n: v for n, v in micro.items() if n in bare}, use_cache=False).logits
        flat, targets = logits[:, :-1].flatten(0, 1), micro["labels"][:, 1:].flatten()
        loss = loss + F.cross_entropy(flat, targets, reduction="sum") / labels
    loss.backward()
    measures = assert_step(engine, step, (loss.item(), slopes(model))).measures
    assert measures["router_z_loss"] == pytest.approx(z.item(), rel=1e-6)
    assert ("aux_loss" in measures) == bool(asked)


RATE = 0.01
BIASED = ["deepseek_v3", "glm4_moe", "minimax_m2", "lfm2_moe"]


def biases(model):
    """The biases by which routers choose, by name."""
    ends = ("e_score_correction_bias", "expert_bias")
    return {n: b.clone() for n, b in model.named_buffers() if n.endswith(ends)}


@pytest.mark.parametrize("family", few(BIASED))
def test_biases_of_routers_move_towards_even_loads(family, tmp_path):
    plain_model, steps = routing(family).train(), [a_step(), *make_batches(2, seed=1)]
    engine = make_engine(plain_model, router_bias_update=RATE)
    passes = make_engine(plain_model, router_bias_update=RATE, placement=Placement(passes=3))
    wanted = biases(plain_model)
    for step in steps:
        plain_model.load_state_dict({**plain_model.state_dict(), **masters(engine), **wanted})
        loads = []
        for (_, choices), (name, bias) in zip(
            routed(plain_model, step), biases(plain_model).items(), strict=True
        ):
            load = torch.bincount(choices.flatten(), minlength=len(bias)).double()
            loads.append(load / load.mean())
            wanted[name] = bias + RATE * torch.sign(load.mean() - load).float()
        engine.evaluate(step)  # counts nothing, nor does a step that is refused
        with pytest.raises(StepRefused):
            engine.step(step, norm_limit=1e-9)
        counted = engine.step(step).experts
        assert counted["expert_load_max"] == pytest.approx(float(torch.stack(loads).max()))
        starved = (torch.stack(loads) < 0.1).double().mean()
        assert counted["experts_starved"] == pytest.approx(float(starved))
        assert passes.step(step).experts == counted
    for one in (engine, passes):
        one.save_pretrained(tmp_path / "model", dtype=torch.float32)
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        assert same(biases(exported), wanted)
        with one.whole_model() as whole:
            assert same(biases(whole), wanted)
    assert any(bias.any() for bias in wanted.values())
    engine.save(tmp_path / "saved")
    results = [engine.step(step).loss for step in steps]
    engine.save_pretrained(tmp_path / "model")
    with Engine.load(tmp_path / "saved", device="cpu") as again:
        assert [again.step(step).loss for step in steps] == results
        again.save_pretrained(tmp_path / "again")
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("model", "again"))
    assert same(one, other)


def test_biases_of_bf16_models_move_in_fp32(tmp_path):
    engine = make_engine(
        tiny_model("minimax_m2"), precision="bf16", router_bias_update=2.0**-12
    )  # transformers rounds these biases to bf16
    with torch.no_grad():
        for step in make_batches(3):
            engine.step(step)
    engine.save_pretrained(tmp_path / "model")
    names = load_file(tmp_path / "model" / "model.safetensors")
    moved = [v for n, v in names.items() if n.endswith("bias") and "score" in n]
    assert moved and all(v.dtype == torch.float32 for v in moved)


def test_experts_that_starve_are_warned_of_once_in_a_while(caplog):
    model, step = tiny_model("mixtral"), make_batches(1, [(1, 4)])[0]
    with torch.no_grad():
        for layer in model.model.layers:  # no token chooses the last expert
            layer.mlp.gate.weight[-1] = layer.mlp.gate.weight[0]
            layer.mlp.gate.weight[0] *= 1.001
    engine = make_engine(model, lr=0.0)
    for _ in range(40):
        engine.step(step)
    assert sum("experts starve: less than 10 %" in text for text in caplog.messages) == 2


BIAS: dict[str, Any] = {"router_bias_update": RATE}
NO_BIASES = {
    "none has a bias that could be moved": lambda: make_engine(tiny_model("mixtral"), **BIAS),
    "LlamaForCausalLM has no routers": lambda: make_engine(llama(), **BIAS),
    "LlamaForCausalLM has no routers; ": lambda: make_engine(llama(), router_z_loss_coef=0.1),
    "an adapter's folder does not hold": lambda: make_engine(
        routing("deepseek_v3"), adapter={"r": 2, "target_modules": ["o_proj"]}, **BIAS
    ),
}


@pytest.mark.parametrize("reason", NO_BIASES)
def test_biases_that_are_not_there_or_not_saved_are_refused(reason):
    with pytest.raises(InputError, match=reason):
        NO_BIASES[reason]()


@pytest.mark.parametrize("family", few(["afmoe", "ernie4_5_moe", "laguna"], 0))
def test_biases_that_choose_experts_alone_do_not_decay(family):
    changes = {"attention_dropout": 0.3} if family == "afmoe" else {}
    model = tiny_model(family, changes=changes).requires_grad_(True)  # as after `from_pretrained`
    biases = {n: p.data for n, p in model.named_parameters() if n.endswith("_bias")}
    for bias in biases.values():
        bias.normal_()
    random = torch.get_rng_state()
    with Engine(model, optimizer=AdamW(weight_decay=0.5), precision="fp32", device="cpu") as engine:
        assert torch.equal(torch.get_rng_state(), random)  # the trial of a layer draws dropout
        engine.step(make_batches(1)[0])
        after = masters(engine)
    assert biases and all(torch.equal(after[name], bias) for name, bias in biases.items())
    assert not torch.equal(after["model.norm.weight"], model.model.norm.weight)
