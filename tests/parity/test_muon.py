"""Muon against torch.optim.Muon and torch.optim.AdamW."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain import Engine, InputError, Muon, Placement
from megatrain.optim.muon import is_matrix
from megatrain.tile.layout import MOST_ELEMENTS
from tests.families.plain import accumulate
from tests.inside import store_of
from tests.parity.cases import (
    llama,
    make_batches,
    masters,
    model_of,
    parameters,
    relative_error,
    same,
)
from tests.sweeps import swept
from tests.unit.kernel_cases import exact_roots, randn  # noqa: F401  a fixture

CLIP = 0.5
PLACEMENTS = {"streamed": Placement(slots=1), "resident": Placement(resident=("layer 1", "head"))}


@dataclass(frozen=True)
class Recording(Muon):
    """Muon that notes the gradients it is given."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "matrices", [])
        object.__setattr__(self, "others", {})

    def average(self, gradient, *rest):
        self.matrices.append(gradient.clone())
        super().average(gradient, *rest)

    def update(self, tile, group, options):
        noted = tile.grad.clone(), options.grad_scale
        self.others[options.at] = noted
        super().update(tile, group, options)


def plain(engine, named):
    """torch's own with the engine's groups."""
    of_matrices, of_others = [], []
    for group in engine.optimizer.param_groups:
        parameters = [named[name] for name in group["param_names"]]
        own = {"params": parameters, "weight_decay": group["weight_decay"], "lr": group["lr"]}
        (
            of_matrices
            if parameters[0].ndim > 1 and is_matrix(group["param_names"][0], parameters[0].shape)
            else of_others
        ).append(own)
    rule = engine.optimizer.rule
    assert isinstance(rule, Muon)
    muon = torch.optim.Muon(
        of_matrices, momentum=rule.momentum, nesterov=rule.nesterov, adjust_lr_fn=rule.adjust_lr_fn
    )
    adamw = torch.optim.AdamW(of_others, betas=rule.betas, eps=rule.eps, foreach=False)
    return [muon, adamw]


def engine_of(model, rule, clip, **options):
    return Engine(
        model, optimizer=rule, max_grad_norm=clip, precision="fp32", device="cpu", **options
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "in fp32": {"ns_precision": "fp32"},
    "all clipped": {"clip": "all"},
    "other": {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "adamw_lr": 3e-3},
}


@swept(together=1, placement=PLACEMENTS, clip=[CLIP, None], settings=SETTINGS)
@pytest.mark.usefixtures("exact_roots")
def test_steps_are_torch_s_on_the_same_gradients(placement, clip, settings, monkeypatch):
    """Bit for bit. The iteration is in bf16, so gradients that are a little off would not do."""
    if "ns_precision" in settings:  # torch's has no such choice
        monkeypatch.setattr(Tensor, "bfloat16", Tensor.float)
    rule = Recording(lr=1e-2, eps=1e-3, **settings)
    engine = engine_of(llama(), rule, clip, placement=placement)
    named = {name: torch.nn.Parameter(p) for name, p in masters(engine).items()}
    optimizers = plain(engine, named)
    directed = [
        entry.name
        for tile in reversed(store_of(engine).tiles)
        for entry in tile.layout.trainable
        if is_matrix(entry.name, entry.shape)
    ]
    assert len(directed) == 3 * 7
    rest = rule.clip == "rest"
    if clip is not None and not rest:  # in the order of need, once the norm is known
        layers = [t for t in store_of(engine).tiles if t.name.startswith("layer")]
        directed = [e.name for t in layers for e in t.layout.trainable if e.name in directed]
    for step in make_batches(3):
        rule.matrices.clear()
        norm = engine.step(step).grad_norm
        engine.flush()
        for name, gradient in zip(directed, rule.matrices, strict=True):
            named[name].grad = gradient.view(named[name].shape)
        for tile, entry in store_of(engine).entries():
            if entry.name not in directed:
                gradient, scale = rule.others[tile.index * MOST_ELEMENTS + entry.offset]
                inside = (rest and "layers" in entry.name) or clip is None
                assert scale == (1.0 if inside else min(1.0, CLIP / (norm + 1e-6)))
                named[entry.name].grad = gradient.view(entry.shape) * scale
        for optimizer in optimizers:
            optimizer.step()
        assert same(masters(engine), {name: p.detach() for name, p in named.items()})


@pytest.mark.parametrize(("clip", "which"), [(CLIP, "rest"), (CLIP, "all"), (None, "rest")])
def test_a_step_is_that_of_plain_training(clip, which):
    model, [step] = llama(), make_batches(1)
    rule = Muon(lr=1e-2, eps=1e-3, clip=which)
    engine, start = engine_of(model, rule, clip), parameters(model)
    optimizers = plain(engine, named := dict(model.named_parameters()))
    report = engine.step(step)
    assert report.loss == pytest.approx(accumulate(model, step), rel=1e-6)
    norm = torch.nn.utils.get_total_norm([p.grad for p in named.values() if p.grad is not None])
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for name, parameter in named.items():
        clipped = which == "all" or "layers" not in name
        if clip is not None and clipped and parameter.grad is not None:
            parameter.grad *= min(1.0, clip / (float(norm) + 1e-6))
    for optimizer in optimizers:
        optimizer.step()
    assert relative_error(masters(engine), parameters(model), start) < 1e-5


def test_fused_experts_are_matrices_of_their_own():
    rule, proceed = Muon(), torch.tensor(True)
    together, momentum = randn(4 * 6 * 10, 0).view(4, 6, 10), torch.zeros(4, 6, 10)
    alone = [each.clone() for each in together]
    rule.average(together, momentum, vars(rule), proceed)
    rule.direct(together)
    for found, each in zip(together, alone, strict=True):
        rule.average(each, torch.zeros(6, 10), vars(rule), proceed)
        rule.direct(each)
        torch.testing.assert_close(found, each, rtol=0, atol=0.02)  # of bf16 products
        singular = torch.linalg.svdvals(found)
        assert singular.min() > 0.5 and singular.max() < 1.5
    names = [e.name for t in store_of(engine_of(model_of("mixtral"), rule, None)).tiles
             for e in t.layout.trainable if rule.directed(e)]  # fmt: skip
    assert any("experts" in name for name in names)
    assert not any("embed" in name or "norm" in name or "lm_head" in name for name in names)


@pytest.mark.parametrize("ns_steps", [1, 5, 6])
@pytest.mark.parametrize("shape", [(32, 96), (96, 32), (48, 40), (3, 32, 96)])
def test_directions_in_fp16_are_closer_to_the_iteration_in_fp32_than_those_in_bf16(shape, ns_steps):
    """The first two and the last shape take the products of Gram matrices."""
    gradients = randn(math.prod(shape), 0).view(shape) * torch.logspace(-5, -8, shape[-1])
    directions = {}
    for precision in ("fp32", "bf16", "fp16"):
        directions[precision] = gradients.clone()
        Muon(ns_precision=precision, ns_steps=ns_steps).direct(directions[precision])
    exact = directions.pop("fp32")
    of_bf16, of_fp16 = (float((x - exact).norm() / exact.norm()) for x in directions.values())
    assert of_fp16 < of_bf16 / 2 < 0.1


def test_products_in_fp32_are_for_layers_in_fp32():
    """Forecasts count them at the rate of the layers' products."""
    with pytest.raises(InputError, match="ns_precision is fp32, but layers are computed in bf16"):
        Engine(llama(), optimizer=Muon(ns_precision="fp32"), precision="bf16", device="cpu")
