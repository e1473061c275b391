"""Ranks that own experts train as one rank does, and go on with any number of ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatrain import Engine, InputError, Placement
from megatrain.device import disk
from megatrain.device.disk import BLOCK
from megatrain.loss import CROSS_ENTROPY, DPO, TokenWeights
from megatrain.model.trained import Trained
from tests.families.tiny import tiny_model
from tests.inside import store_of
from tests.parity.cases import llama, make_batches, make_engine, masters, same
from tests.parity.ranks import assert_as_one, refused, run_ranks, train_as_one, training
from tests.parity.test_adapters import EXPERTS
from tests.parity.test_ranks import ROUTED, SHAPES, pairs, part_of, weighed
from tests.sweeps import few

SIX = {"num_experts": 6}  # which 2 and 3 ranks can share
GPT_OSS = {"num_local_experts": 4, "intermediate_size": 32, "hidden_size": 64}
ON_DISK = {"slots": 2, "disk_moments": 9, "disk_remainder": 9, "disk_weights": 9}
RESIDENT = {"slots": 2, "passes": 2, "resident": ("layer 1",), "keep_weights": 2}


def placed(group, **choices):
    """A rank has 1, 1 and 2 micro-batches fewer than the first; with one rank nothing is owned."""
    return Placement(**{"slots": 1, "own_experts": group is not None} | choices)


def case(family="qwen3_moe", changes=SIX, loss=CROSS_ENTROPY, batches=None, placement=None, **more):
    """A training by a group, each rank with micro-batches of its own, or alone; then text."""

    def work(group):
        options = {"placement": placed(group, **placement or {}), "group": group} | more
        with (
            mock.patch.object(disk, "PIECE", BLOCK // 2),
            make_engine(tiny_model(family, changes=changes), **options) as engine,
        ):
            steps = [part_of(step, group) for step in batches or make_batches(2, SHAPES)]
            left = training(engine, steps, loss)
            with engine.whole_model() as model:
                left["ids"] = model.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=4)
            return left

    return work


def exact(*given, **options):
    """In bf16, with gradients of zero on all ranks but one."""
    steps = weighed(make_batches(2, SHAPES))
    options = {"clip": 1e9, "precision": "bf16", "batches": steps} | options
    return case(*given, loss=TokenWeights(), **options)


CLOSE: dict[str, Callable[[Any], dict]] = {
    "resident, in passes": case(placement=RESIDENT),
    "routers, graphs on the host": case("mixtral", ROUTED, placement={"offload_activations": 2}),
    "preferences": case(loss=DPO(), batches=pairs(DPO())),
    "adapter of experts": case(
        adapter={"r": 3, "target_modules": ["q_proj"], "target_parameters": EXPERTS}
    ),
    "frozen in part": case(trained=Trained(freeze=[".*[.]0[.].*", ".*[.]1.*down_proj"])),
    "frozen experts, not clipped": case(clip=None, trained=Trained(freeze=[".*experts.*"])),
    "attention kept": case(placement={"save_attention": "device", "layer_inputs": "host"}),
    "graphs kept": case(placement={"slots": 2, "save_activations": 2, "save_all": 1}),
}
EXACT: dict[str, Callable[[Any], dict]] = {
    "biases, lion": exact("gpt_oss", GPT_OSS, rule="lion"),
    "dense layers, too, 8-bit states": exact(
        "deepseek_v3", {"n_routed_experts": 12}, rule="adamw int8", placement=RESIDENT
    ),
    "some in fp32, on a disk": exact(
        "hunyuan_v1_moe", SIX, rule="adamw bf16", placement=ON_DISK, verify="step"
    ),
}
USUAL = [
    *("resident, in passes", "routers, graphs on the host", "preferences", "adapter of experts"),
    *EXACT,
]
REST = [name for name in CLOSE | EXACT if name not in USUAL]
OF_FOUR = ("routers, graphs on the host", "biases, lion")  # experts
LAYOUTS = [(2, USUAL), (2, REST), (3, [n for n in CLOSE | EXACT if n not in OF_FOUR])]


@pytest.mark.parametrize(("size", "names"), few(LAYOUTS))
def test_ranks_that_own_experts_train_as_one(size, names, tmp_path):
    """To the order of sums; and to the bit where all ranks but one have gradients of zero."""
    train_as_one(size, tmp_path, CLOSE | EXACT, names, EXACT)


def test_a_rank_streams_its_own_experts_and_no_others(tmp_path):
    """Nothing of them is gathered or summed, and tokens may all go to experts of one rank."""

    def work(group):
        model = tiny_model("qwen3_moe", changes=SIX)
        with torch.no_grad():  # all tokens to the first two experts
            for layer in model.model.layers:
                layer.mlp.gate.weight.zero_().requires_grad_(False)
        with make_engine(model, group=group, placement=placed(group)) as engine:
            if group is not None:
                layer = next(t.layout for t in store_of(engine).tiles if t.name == "layer 0")
                own = [e for e in layer.local.entries if "experts" in e.name]
                assert [e.shape for e in own] == [(3, 32, 32), (3, 32, 16)]
                moved = sum(stop - start for start, stop in layer.gathered)
                assert layer.numel == moved + 2 * sum(e.numel for e in own)
            steps = [part_of(step, group) for step in make_batches(2, SHAPES)]
            return {"left": training(engine, steps, CROSS_ENTROPY)}

    assert_as_one(work(None), run_ranks(2, tmp_path, work))


@pytest.mark.parametrize("rule", few(("adamw int8", "adamw")))
def test_any_number_of_ranks_goes_on_owning_or_not(rule, tmp_path):
    """The same masters from one checkpoint, and the same next step to the order of sums."""
    options = {"precision": "bf16", "rule": rule}
    first, second = make_batches(2, SHAPES)

    def begin(group):
        model = tiny_model("qwen3_moe", changes=SIX)
        with make_engine(model, group=group, placement=placed(group), **options) as engine:
            engine.step(part_of(first, group))
            engine.save(tmp_path / "checkpoint")
            return masters(engine)

    def go_on(owning, group):
        placement = Placement(slots=1, own_experts=owning)
        folder = tmp_path / "checkpoint"
        with Engine.load(folder, device="cpu", group=group, placement=placement) as engine:
            before = masters(engine)
            result = engine.step(part_of(second, group))
            numbers = torch.tensor([result.loss, result.grad_norm])
            return before, {"numbers": numbers}

    saved = run_ranks(2, tmp_path / "2", begin)[0]
    before, wanted = go_on(True, None)
    assert same(before, saved)
    for size, owning in ((3, True), (2, False)):
        folder = tmp_path / f"{size} {owning}"
        for before, found in run_ranks(size, folder, partial(go_on, owning)):
            assert same(before, saved)
            assert torch.allclose(found["numbers"], wanted["numbers"], rtol=1e-3)


def test_what_ranks_cannot_own_is_refused_in_a_line(tmp_path):
    def work(group):
        owning = {"group": group, "placement": placed(group)}
        qwen3 = partial(tiny_model, "qwen3_moe")
        narrow = tiny_model("gpt_oss", changes=GPT_OSS | {"num_local_experts": 6})
        for words, model, options in (
            ("has 5 experts, not as many for each rank", qwen3(changes={"num_experts": 5}), {}),
            ("gate_up_proj_bias gives a rank 192 elements", narrow, {}),
            ("no layer has stacked experts", llama(), {}),
            ("not for several hosts, sequence_parallel, Muon", qwen3(), {"rule": "muon"}),
            ("not for several hosts, sequence_parallel, Muon", qwen3(), {"sequence_parallel": 2}),
        ):
            refused(InputError, words, make_engine, model, **owning, **options)

    run_ranks(2, tmp_path, work)
    for choices in ({"compile": True}, {"chunk_tokens": 8}):
        refused(InputError, "are not compiled", Placement, own_experts=True, **choices)
