"""AdamW's settings and groups: what Hugging Face would decay, and what is refused."""

import json
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from megatrain import AdamW, InputError
from megatrain.optim import NO_DECAY, StreamedOptimizer
from tests.families.tiny import tiny_model

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
    "a beta alone": ({"betas": 0.9}, "betas are 0.9"),
    "beta as text": ({"betas": ("0.9", 0.95)}, "betas are"),
    "pattern alone": ({"no_decay": "bias"}, "no_decay is 'bias'; it must be a list of patterns"),
    "bad pattern": ({"no_decay": ["("]}, r"no_decay has a bad pattern '\('"),
    "no pattern": ({"no_decay": [3]}, "no_decay has a bad pattern 3"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_impossible_settings_are_refused_in_one_line(settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=f"^AdamW {message}") as caught:
        AdamW(**settings)
    assert "\n" not in str(caught.value)


def test_extreme_settings_that_make_sense_are_taken() -> None:
    AdamW(lr=0, betas=[0, 0.999], eps=0, weight_decay=0, no_decay=())


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "mixtral", "bloom", "mamba"])
def test_groups_are_those_of_transformers_trainer(family: str) -> None:
    model = tiny_model(family)
    decaying = set(get_parameter_names(model, [nn.LayerNorm], list(NO_DECAY)))
    optimizer = StreamedOptimizer(AdamW(weight_decay=0.3), model)
    named = {name for name, _ in model.named_parameters()}
    first, second = optimizer.param_groups
    assert set(first["param_names"]) == named & decaying
    assert set(second["param_names"]) == named - decaying
    assert (first["weight_decay"], second["weight_decay"]) == (0.3, 0.0)
    assert optimizer.group_of() == {name: int(name not in decaying) for name in named}


def test_frozen_parameters_are_in_no_group() -> None:
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    optimizer = StreamedOptimizer(AdamW(), model)
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    assert all("norm" in name for name in optimizer.group_of())
    model.requires_grad_(False)
    with pytest.raises(InputError, match="every parameter is frozen"):
        StreamedOptimizer(AdamW(), model)


def test_patterns_of_the_user_s_own() -> None:
    model = tiny_model("llama")
    optimizer = StreamedOptimizer(AdamW(no_decay=["q_proj"]), model)
    undecayed = [name for name, group in optimizer.group_of().items() if group == 1]
    assert undecayed and all("q_proj" in name for name in undecayed)


def test_torch_takes_it_for_an_optimizer() -> None:
    optimizer = StreamedOptimizer(AdamW(lr=2e-5), tiny_model("llama"))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [2e-5, 2e-5]
    optimizer.took_step()
    optimizer.zero_grad()
    assert optimizer.num_steps == 1
    saved = optimizer.state_dict()
    assert saved["state"] == {} and "Engine.save" in saved["note"]


def other_tensors(optimizer: StreamedOptimizer) -> None:
    optimizer.add_param_group({"params": list(tiny_model("llama").parameters())[:2]})


def foreign_tensor(optimizer: StreamedOptimizer) -> None:
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(2))
    optimizer.check()


def in_two_groups(optimizer: StreamedOptimizer) -> None:
    optimizer.param_groups.append(dict(optimizer.param_groups[0]))
    optimizer.check()


def in_no_group(optimizer: StreamedOptimizer) -> None:
    del optimizer.param_groups[1]
    optimizer.check()


def unknown_to_adamw(optimizer: StreamedOptimizer) -> None:
    optimizer.param_groups[1]["amsgrad"] = True
    optimizer.check()


def without_a_rate(optimizer: StreamedOptimizer) -> None:
    del optimizer.param_groups[1]["lr"]
    optimizer.check()


def of_a_parameter(optimizer: StreamedOptimizer) -> Any:
    return optimizer.param_groups[0]["params"][0]


MISUSED: dict[str, tuple[Any, str]] = {
    "other tensors": (other_tensors, "a parameter that this engine does not train"),
    "a foreign tensor": (foreign_tensor, "a parameter that this engine does not train"),
    "in two groups": (in_two_groups, "'model.embed_tokens.weight' in two groups"),
    "in no group": (in_no_group, "norm.weight' in no group"),
    "amsgrad": (unknown_to_adamw, "asks for amsgrad, unknown to AdamW"),
    "no rate": (without_a_rate, "AdamW lr is None"),
    "step": (lambda o: o.step(), r"optimizer.step\(\) has nothing to do"),
    "a state read": (lambda o: o.state[of_a_parameter(o)]["exp_avg"], "Engine.save"),
    "a state set": (lambda o: o.state.update({}) or o.state.__setitem__(1, {}), "Engine.save"),
    "a state loaded": (lambda o: o.load_state_dict(o.state_dict()), "brings no moments"),
}


@pytest.mark.parametrize(("misuse", "message"), MISUSED.values(), ids=MISUSED)
def test_what_has_no_effect_is_refused_in_one_line(misuse: Any, message: str) -> None:
    optimizer = StreamedOptimizer(AdamW(), tiny_model("llama"))
    with pytest.raises(InputError, match=message) as caught:
        misuse(optimizer)
    assert "\n" not in str(caught.value)
    assert optimizer.num_steps == 0


def test_groups_are_saved_as_plain_values_and_taken_over_again() -> None:
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
