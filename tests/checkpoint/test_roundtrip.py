"""An engine that was loaded goes on bit for bit as the one that was saved."""

import itertools
import json
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, OneCycleLR
from transformers import get_scheduler

from megatrain import AdamW, Engine, InputError
from megatrain.checkpoint import open_checkpoint, verify
from megatrain.checkpoint.read import read_tiles
from megatrain.device import CpuDevice
from megatrain.parallel.distributed import ALONE
from megatrain.store.store import Store
from megatrain.tile import TileLayout
from tests.checkpoint.cases import batches, engine_of, state
from tests.families.plain import go_on
from tests.inside import store_of
from tests.parity.cases import frozen, llama, masters, same
from tests.rules import SWEPT, with_rules
from tests.sweeps import placements, swept

PLACEMENTS = placements("roundtrip")
# Precision, clipping, tied, dropout; each placement in turn.
CASES = list(itertools.product(("fp32", "bf16"), (0.5, None), (False, True), (0.0, 0.3)))


def saved_in_the_middle(engine, folder, steps=4):
    """A checkpoint, and what the rest of the run says and leaves."""
    given = batches(steps)
    go_on(engine, given[: steps // 2])
    saving = engine.save(folder / "saved", wait=False)
    wanted, _ = go_on(engine, given[steps // 2 :])
    saving.wait()
    return saving.folder, given[steps // 2 :], wanted, state(engine)


def goes_on(saved, rest, wanted, end, **load):
    """The engine that is loaded of a checkpoint, and has gone on as the one that was saved."""
    again = Engine.load(saved, device="cpu", **load)
    assert again.steps == len(rest)
    assert go_on(again, rest)[0] == wanted
    assert same(state(again), end)
    return again


def check(engine, tmp_path):
    return goes_on(*saved_in_the_middle(engine, tmp_path), disk=tmp_path)


@swept(
    together=1, precision=["fp32", "bf16"], clip=[0.5, None], tied=[False, True], dropout=[0.0, 0.3]
)
def test_a_loaded_engine_goes_on_bit_for_bit(precision, clip, tied, dropout, tmp_path):
    number = CASES.index((precision, clip, tied, dropout))
    placement = list(PLACEMENTS.values())[number % len(PLACEMENTS)]
    sizes = {"tie_word_embeddings": tied, "attention_dropout": dropout}
    check(engine_of(sizes=sizes, precision=precision, clip=clip, placement=placement), tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run by its placement and rule, for all placements that go on with it; and its rule."""

    @cache
    def made(name, rule):
        with engine_of(precision="bf16", placement=PLACEMENTS[name], rule=rule) as engine:
            run = saved_in_the_middle(engine, tmp_path_factory.mktemp("saved"), steps=2)
            return run, engine.optimizer.rule

    return made


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    with_rules(list(itertools.permutations(PLACEMENTS, 2)), 20, plain=6),
)
def test_another_placement_goes_on_bit_for_bit(before, after, rule, saved, tmp_path):
    run, kept = saved(before, rule)
    again = goes_on(*run, disk=tmp_path, placement=PLACEMENTS[after])
    assert again.placement == PLACEMENTS[after] and again.optimizer.rule == kept


def test_frozen_parameters_stay_frozen(tmp_path):
    model = frozen(llama(), lambda name: "layers.1" in name or name == "lm_head.weight")
    again = check(engine_of(model=model, precision="bf16"), tmp_path)
    trained = {n for g in again.optimizer.param_groups for n in g["param_names"]}
    assert all("layers.1" in name or name == "lm_head.weight" for name in trained)


def test_groups_that_were_split_come_back_and_go_on(tmp_path):
    engine = engine_of()
    first = engine.optimizer.param_groups[0]
    first |= {"lr": 1 / 300, "betas": (0.1 + 0.2, 0.95), "initial_lr": torch.tensor(0.25)}
    first["eps"] = np.float32(0.1)
    moved = [first["params"].pop(place) for place in (5, 2)]
    engine.optimizer.add_param_group({"params": moved, "lr": 0.0, "betas": (0.3, 0.4)})
    before = masters(engine)
    again = check(engine, tmp_path)
    groups = [group["param_names"] for group in again.optimizer.param_groups]
    assert groups == [group["param_names"] for group in engine.optimizer.param_groups]
    first = again.optimizer.param_groups[0]
    assert (first["lr"], first["betas"]) == (1 / 300, (0.1 + 0.2, 0.95))
    assert (first["initial_lr"], first["eps"]) == (0.25, np.float32(0.1))
    after = masters(again)
    assert {name for name in after if torch.equal(after[name], before[name])} == set(groups[2])


def test_an_engine_without_optimizer(tmp_path):
    """It holds weights alone."""
    engine = Engine(llama(), device="cpu", precision="bf16")
    engine.save(tmp_path / "saved")
    again, [batch] = Engine.load(tmp_path / "saved", device="cpu"), batches(1)
    for each in (engine, again):
        memory = each.memory()
        assert memory["host_remainder_bytes"] == memory["host_moments_bytes"] == 0
        with pytest.raises(InputError, match="has no optimizer"):
            each.step(batch)
    assert again.optimizer is None
    assert torch.equal(again.logits(batch[0]), engine.logits(batch[0]))


def test_the_extra_state_comes_back(tmp_path):
    extra: dict[str, Any] = {"loader": {"row": 3, "seeds": [1, 2]}, "text": "é\n", "none": None}
    engine = engine_of()
    engine.step(batches(1)[0])
    saving = engine.save(tmp_path / "saved", extra=extra, wait=False)
    extra["loader"]["row"] = 4  # later changes are not saved
    saving.wait()
    checkpoint = open_checkpoint(tmp_path / "saved")
    assert checkpoint.extra == {"loader": {"row": 3, "seeds": [1, 2]}, "text": "é\n", "none": None}
    assert checkpoint.step == 1
    records = verify(tmp_path / "saved").manifest.files.values()
    assert sum(record.num_bytes for record in records) > 12 * engine.num_parameters


@pytest.mark.parametrize("extra", [{"x": {1, 2}}, {"x": float("nan")}, {1: 0, "1": 0}])
def test_an_extra_state_that_could_not_be_read_is_refused(extra, tmp_path):
    with pytest.raises(InputError, match="extra state"):
        engine_of().save(tmp_path / "saved", extra=extra)
    assert not (tmp_path / "saved").exists()


def test_a_change_of_precision_is_refused(tmp_path):
    engine_of(precision="bf16").save(tmp_path / "saved")
    with pytest.raises(InputError, match="'fp32'.*trained with 'bf16'"):
        Engine.load(tmp_path / "saved", precision="fp32")
    assert Engine.load(tmp_path / "saved", precision="bf16", device="cpu").optimizer is not None


def test_another_limit_of_the_norm(tmp_path):
    engine_of(clip=1.0).save(tmp_path / "saved")
    steps = batches(2)
    clipped, free = (
        Engine.load(tmp_path / "saved", device="cpu", **chosen)
        for chosen in ({}, {"max_grad_norm": None})
    )
    for step in steps:
        clipped.step(step)
        free.step(step)
    assert not same(masters(clipped), masters(free))


def test_other_tiles_are_filled_by_name(tmp_path):
    """Every parameter in a tile of its own, last ones first."""
    engine = engine_of(precision="bf16", model=frozen(llama(), lambda n: "layers.0" not in n))
    for step in batches(2):
        engine.step(step)
    engine.save(tmp_path / "saved")
    entries = [(tile, entry) for tile, entry in store_of(engine).entries()][::-1]
    layouts = [TileLayout(entry.name, [entry]) for _, entry in entries]
    store = Store(CpuDevice(), layouts, torch.bfloat16, rule=AdamW())
    read_tiles(open_checkpoint(tmp_path / "saved"), store.tiles, threads=2)
    for (tile, entry), other in zip(entries, store.tiles, strict=True):
        [there] = other.layout.entries
        assert torch.equal(other.whole_master(there, ALONE), tile.whole_master(entry, ALONE))
        assert other.version == tile.version
        if entry.group is not None:
            for one, two in zip(tile.states.values(), other.states.values(), strict=True):
                assert torch.equal(entry.view(one.data), there.view(two.data))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    engine_of().save(tmp_path / "saved")
    checkpoint = open_checkpoint(tmp_path / "saved")
    other = engine_of(sizes={"num_hidden_layers": 2})
    with pytest.raises(InputError, match=r"layers\.2.* unknown to the model"):
        read_tiles(checkpoint, store_of(other).tiles, 1)
    wider = engine_of(sizes={"intermediate_size": 64})
    with pytest.raises(InputError, match="has shape"):
        read_tiles(checkpoint, store_of(wider).tiles, 1)
    other = engine_of(precision="bf16")
    with pytest.raises(InputError, match="of another model or precision"):
        read_tiles(checkpoint, store_of(other).tiles, 1)


def test_24_bits_of_layers_in_fp32_are_refused(monkeypatch):
    monkeypatch.setitem(SWEPT, "short", partial(AdamW, master=24))
    with pytest.raises(InputError, match="master is 24, but layers in fp32 keep all 32 bits"):
        engine_of(precision="fp32", rule="short")


SCHEDULES = {
    "cosine": lambda optimizer: get_scheduler("cosine", optimizer, 2, 20),
    "linear": lambda optimizer: LinearLR(optimizer, 0.1, total_iters=10),  # by factors of the last
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 1e-2, total_steps=20),  # betas, too
}


@swept(together=1, name=[*SCHEDULES], taken=[True, False])
def test_a_schedule_of_torch_goes_on_or_its_first_rates_are_told(name, taken, tmp_path, caplog):
    steps, engine = batches(4), engine_of()
    schedule = SCHEDULES[name](engine.optimizer)
    for step in steps[:2]:
        engine.step(step)
        schedule.step()
    engine.save(tmp_path / "saved", extra={"schedule": schedule.state_dict()} if taken else None)
    again, kept = Engine.load(tmp_path / "saved", device="cpu"), schedule.state_dict()
    groups = json.loads(json.dumps(again.optimizer.state_dict()))
    resumed = SCHEDULES[name](again.optimizer)
    resumed.load_state_dict(
        open_checkpoint(tmp_path / "saved").extra["schedule"] if taken else kept
    )
    if taken:
        again.optimizer.load_state_dict(groups)
    for step in steps[2:]:
        caplog.clear()
        engine.step(step)
        again.step(step)
        told = "a schedule sets its first rates when it is made" in caplog.text
        assert told == (not taken and step is steps[2])
        schedule.step()
        resumed.step()
    assert same(state(again), state(engine)) == taken
