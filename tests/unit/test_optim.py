"""AdamW's settings and groups: what Hugging Face would decay, and what is refused."""

import json
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from megatrain import SGD, AdamW, InputError
from megatrain.device import CpuDevice
from megatrain.kernels import reference
from megatrain.kernels.states import TileRange, UpdateOptions, load_moments
from megatrain.optim import (
    NO_DECAY,
    RULES,
    Plane,
    StreamedOptimizer,
)
from megatrain.source.source import DTYPES
from megatrain.store.store import Store
from megatrain.tile import TileLayout
from tests.families.plain import PlainSGD
from tests.families.tiny import tiny_model
from tests.inside import sized
from tests.rules import FLAT, PLAIN, SWEPT
from tests.unit.kernel_cases import exact_roots, gradient, randn  # noqa: F401

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "negative rate": ({"lr": -1e-5}, "lr is -1e-05; it must be a number, not negative"),
    "nan": ({"lr": math.nan}, "lr is nan"),
    "infinite": ({"lr": math.inf}, "lr is inf"),
    "text": ({"lr": "1e-5"}, "lr is '1e-5'"),
    "nothing": ({"lr": None}, "lr is None"),
    "true": ({"lr": True}, "lr is True"),
    "negative eps": ({"eps": -1e-8}, "eps is -1e-08"),
    "negative decay": ({"weight_decay": -0.1}, "weight_decay is -0.1"),
    "beta of one": ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\); .* two numbers in \[0, 1\)"),
    "negative beta": ({"betas": (-0.1, 0.9)}, "betas are"),
    "nan beta": ({"betas": (0.9, math.nan)}, "betas are"),
    "one beta": ({"betas": (0.9,)}, "betas are"),
    "three betas": ({"betas": (0.9, 0.95, 0.99)}, "betas are"),
    "dampened nesterov": (
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        "nesterov needs momentum and no dampening, and they are 0.9 and 0.1",
    ),
    "nesterov without momentum": (
        {"nesterov": True, "momentum": 0.0, "dampening": 0.0},
        "nesterov needs momentum",
    ),
    "nesterov of a name": ({"nesterov": "yes"}, "nesterov is 'yes'; it must be False or True"),
    "a beta alone": ({"betas": 0.9}, "betas are 0.9"),
    "beta as text": ({"betas": ("0.9", 0.95)}, "betas are"),
    "pattern alone": ({"no_decay": "bias"}, "no_decay is 'bias'; it must be a list of patterns"),
    "unknown states": ({"states": "fp8"}, "states is 'fp8'; it must be fp32 or bf16 or int8"),
    "a number": ({"no_decay": 3}, "no_decay is 3; it must be a list of patterns"),
    "bad pattern": ({"no_decay": ["("]}, r"no_decay is \['\('\]; it must"),
    "no pattern": ({"no_decay": [3]}, r"no_decay is \[3\]; it must"),
}


def test_patterns_without_decay_may_have_capitals_and_must_match():
    """Of a model that has `A_log`, as Mamba has; patterns of one letter take no other case."""
    model = tiny_model("mamba")
    for pattern, end in (("A_log", ".A_log"), (r"\.D$", ".D"), (r"norm_f\.", "norm_f.weight")):
        decaying, others = AdamW(no_decay=[pattern]).groups(model)
        assert {name.endswith(end) for name, _ in others["params"]} == {True}, pattern
        assert not any(name.endswith(end) for name, _ in decaying["params"]), pattern
    AdamW(no_decay=(*NO_DECAY, "A_log")).groups(model)  # the usual ones need not be there
    with pytest.raises(InputError, match="no_decay: no parameter has 'a_Log' in its"):
        AdamW(no_decay=["a_Log"]).groups(model)


@pytest.mark.parametrize("rule", RULES.values())
@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_impossible_settings_are_refused_in_one_line(settings, message, rule):
    if settings.keys() <= rule.__dataclass_fields__.keys():
        with pytest.raises(InputError, match=f"^{rule.__name__} {message}") as caught:
            rule(**settings)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "mixtral", "bloom", "mamba"])
def test_groups_are_those_of_transformers_trainer(family):
    model = tiny_model(family)
    decaying = set(Trainer.get_decay_parameter_names(None, model))
    optimizer = StreamedOptimizer(AdamW(weight_decay=0.3), model)
    named = {name for name, _ in model.named_parameters()}
    first, second = optimizer.param_groups
    assert set(first["param_names"]) == named & decaying
    assert set(second["param_names"]) == named - decaying
    assert (first["weight_decay"], second["weight_decay"]) == (0.3, 0.0)
    assert optimizer.group_of() == {name: int(name not in decaying) for name in named}


def moved():
    """torch's AdamW after a step, with moments."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    return optimizer


def changed(change, *, loads=False):
    """Change the groups themselves, or those of a state that is loaded."""

    def misuse(optimizer):
        state = optimizer.state_dict()
        change(state["param_groups"] if loads else optimizer.param_groups)
        optimizer.load_state_dict(state) if loads else optimizer.check()

    return misuse


FOREIGN, OTHER = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
MISUSED: dict[str, tuple[Any, str]] = {
    "other tensors": (
        lambda o: o.add_param_group({"params": [FOREIGN, OTHER]}),
        "a parameter that this engine does not train",
    ),
    "a foreign tensor": (
        changed(lambda groups: groups[0]["params"].__setitem__(0, FOREIGN)),
        "a parameter that this engine does not train",
    ),
    "in two groups": (
        changed(lambda groups: groups.append(dict(groups[0]))),
        "'model.embed_tokens.weight' in two groups",
    ),
    "in no group": (changed(lambda groups: groups.pop()), "norm.weight' in no group"),
    "amsgrad": (
        changed(lambda groups: groups[1].update(amsgrad=True)),
        "asks for amsgrad, unknown to AdamW",
    ),
    "no rate": (changed(lambda groups: groups[1].pop("lr")), "AdamW lr is None"),
    "step": (lambda o: o.step(), r"optimizer.step\(\) has nothing to do"),
    "a state read": (lambda o: o.state[o.param_groups[0]["params"][0]], "Engine.save"),
    "a state set": (lambda o: o.state.update({}) or o.state.__setitem__(1, {}), "Engine.save"),
    "a state loaded": (lambda o: o.load_state_dict(moved().state_dict()), "brings no moments"),
    "other groups loaded": (
        changed(lambda groups: groups[0]["param_names"].pop(), loads=True),
        "groups given are of other parameters",
    ),
    "no groups loaded": (lambda o: o.load_state_dict({}), "brings no moments"),
    "amsgrad loaded": (
        changed(lambda groups: groups[0].update(amsgrad=True), loads=True),
        "asks for amsgrad, unknown to AdamW",
    ),
    "no group loaded": (lambda o: o.load_state_dict({"param_groups": [1]}), "brings no moments"),
    "no rate loaded": (
        changed(lambda groups: groups[1].pop("lr"), loads=True),
        "AdamW lr is None",
    ),
    "frozen later": (
        changed(lambda groups: groups[0]["params"][0].requires_grad_(False)),
        r"embed_tokens.weight' was frozen after the engine was made",
    ),
    "coupled decay": (
        changed(lambda groups: groups[0].update(decoupled_weight_decay=False)),
        "asks for decoupled_weight_decay=False, unknown to AdamW",
    ),
    "a choice in a group": (
        changed(lambda groups: groups[0].update(states="int8")),
        "has states 'int8', and the engine was made with",
    ),
}


@pytest.mark.parametrize(("misuse", "message"), MISUSED.values(), ids=MISUSED)
def test_what_has_no_effect_is_refused_in_one_line(misuse, message):
    optimizer = StreamedOptimizer(AdamW(), tiny_model("llama"))
    with pytest.raises(InputError, match=message) as caught:
        misuse(optimizer)
    assert "\n" not in str(caught.value)
    assert optimizer.num_steps == 0


HYPER: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "lion": {"lr": 3e-4, "betas": (0.9, 0.99), "weight_decay": 0.5},
    "sgd": {"lr": 3e-3, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "sgd plain": {"lr": 3e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.1},
    "sgd nesterov": {"lr": 3e-3, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1},
}
HYPER |= {"adamw bf16": HYPER["adamw"], "adamw int8": HYPER["adamw"]}


@pytest.mark.parametrize("grad_scale", [1.0, 0.37])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", FLAT)
@pytest.mark.usefixtures("exact_roots")
def test_a_rule_s_update_is_its_plain_form_s_bit_for_bit(name, precision, grad_scale, monkeypatch):
    sized(monkeypatch, reference, UPDATE_BLOCK=1024)
    hyper = dict(HYPER[name])
    if "betas" in hyper and grad_scale < 1:
        hyper["betas"] = (0.3, 0.95)  # torch's lerp has a formula for either side of 0.5
    rule, dtype, size = SWEPT[name](**hyper), DTYPES[precision], 3001
    tile = Store(CpuDevice(), [TileLayout("t", [("a", torch.Size([size]), 0)])], dtype, rule=rule)
    [tile], master = tile.tiles, torch.nn.Parameter(randn(size, 0))
    tile.write_master(tile.layout.entries[0], master.detach())
    plain = PLAIN[name]([master], **hyper)
    planes = [tile.weights.data, None if tile.remainder is None else tile.remainder.data]
    states = [buffer.data for buffer in tile.states.values()]
    pieces = [slice(0, 1024), slice(1024, len(tile.weights.data))]  # an update is cut anywhere
    for step in range(1, 6):
        grad = torch.zeros(len(tile.weights.data))
        grad[:size] = gradient(size, step)
        for part in pieces:
            own = [None if plane is None else plane[part] for plane in planes]
            found = [b.data[p.place(part.start, part.stop)] for p, b in tile.states.items()]
            options = UpdateOptions(part.start, step, grad_scale)
            rule.update(TileRange(*own, found, grad[part]), hyper, options)
        master.grad = grad[:size] * grad_scale
        plain.step()
    assert torch.equal(tile.read_master(tile.layout.entries[0]), master)
    kept = [value for value in plain.state[master].values() if value.shape == master.shape]
    if "states" in rule.choices:
        states = load_moments(states)
    assert len(kept) == len(states)
    assert all(
        torch.equal(one[:size].float(), other) for one, other in zip(states, kept, strict=True)
    )


@pytest.mark.parametrize("name", FLAT)
def test_a_bad_gradient_is_seen_in_its_weights(name):
    rule, weights = SWEPT[name](), torch.ones(4)
    states = [torch.zeros(-(-4 // plane.per), dtype=plane.dtype) for plane in rule.state_planes]
    grad = torch.tensor([math.nan, 1.0, -1.0, 0.0])
    rule.update(TileRange(weights, None, states, grad), vars(rule), UpdateOptions(step=1))
    assert weights.isnan().tolist() == [True, False, False, False]
    rule.update(TileRange(weights, None, states, 0 * weights), vars(rule), UpdateOptions(step=2))
    assert weights[0].isnan()


def test_planes_may_have_a_value_for_many_elements_or_be_of_some_parameters():
    """As scales of 8-bit states, and the momentum of matrices, are going to be."""
    scales = Plane("scales", torch.bfloat16, per=64)
    matrices = Plane("momentum", torch.float32, only=lambda entry: len(entry.shape) == 2)
    shapes = [
        ("a", torch.Size([3, 50]), 0),
        ("b", torch.Size([7]), 0),
        ("c", torch.Size([9]), None),
    ]
    layout = TileLayout("tile", shapes)
    assert layout.trainable_numel == 256 + 128
    assert (scales.numel(layout), scales.bytes_per_parameter) == ((256 + 128) // 64, 1 / 32)
    assert scales.place(256, 256 + 7) == slice(4, 5)
    assert matrices.numel(layout) == 256
    assert [matrices.has(entry) for entry in layout.entries] == [True, False, False]
    assert Plane("weights", torch.float32, frozen=True).numel(layout) == layout.numel


@pytest.mark.parametrize(("first", "later"), [(0.9, 0.0), (0.0, 0.9)])
def test_a_group_that_asks_for_other_state_is_refused(first, later):
    optimizer = StreamedOptimizer(SGD(momentum=first), tiny_model("llama"))
    optimizer.param_groups[1]["momentum"] = later
    with pytest.raises(InputError, match="asks SGD to keep other state"):
        optimizer.check()


@pytest.mark.parametrize("hyper", [each for name, each in HYPER.items() if "sgd" in name])
def test_the_plain_sgd_is_torch_s(hyper):
    """Which multiplies and adds at once where the machine can."""
    ours, theirs = (torch.nn.Parameter(randn(100, 0)) for _ in range(2))
    nesterov = hyper["dampening"] == 0 < hyper["momentum"]
    kinds = PlainSGD, torch.optim.SGD
    optimizers = [
        k([p], **hyper, nesterov=nesterov) for k, p in zip(kinds, (ours, theirs), strict=True)
    ]
    for step in range(1, 6):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient(100, step)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_groups_are_saved_as_plain_values_and_taken_over_again():
    model = tiny_model("llama")
    optimizer, other = (StreamedOptimizer(AdamW(lr=2e-5), model) for _ in range(2))
    optimizer.param_groups[0].update(lr=torch.tensor(0.25), mine=None)
    saved = json.loads(json.dumps(optimizer.saved_groups()))
    assert (saved[0]["lr"], saved[1]["lr"]) == (0.25, 2e-5)
    other.restore(saved, 3)
    assert (other.param_groups[0]["lr"], other.num_steps) == (0.25, 3)
    assert other.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]
    for wrong in (saved[:1], [*saved, saved[1]], [saved[0], saved[1] | {"param_names": 3}]):
        with pytest.raises(InputError, match="of other parameters"):
            other.restore(wrong, 3)
    optimizer.param_groups[1]["mine"] = torch.zeros(2)
    with pytest.raises(InputError, match="'mine' is a Tensor, which no checkpoint can hold"):
        optimizer.saved_groups()
