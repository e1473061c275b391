"""Plans: bytes by tile, what is missing, which changes help, and how long it takes."""

import json
from dataclasses import replace

import pytest

from megatrain import InputError, config
from megatrain.base.units import GIB, parse_bytes
from megatrain.cli.plan import experts_of_step
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Generation, Workload
from megatrain.loss import DPO
from megatrain.machine import machine_for
from megatrain.model.build import load_config
from megatrain.model.probe import spec
from megatrain.optim import AdamW, Lion
from megatrain.placement import Placement
from megatrain.plan import planner
from megatrain.plan.planner import Planner, by_tier, fits, remedies, tile_bytes
from megatrain.source.source import open_source
from megatrain.source.tiles import Model
from megatrain.telemetry.timeline import Span
from tests.parity.cases import llama, qwen2

MACHINE = machine_for("H200", 64 * GIB, 16)
PLACED = Placement(slots=2)
ASKED = Workload(tokens_per_step=4096, sequence_length=256)


def toy_forecast(there, ask, device, host):
    """A step that takes a second for 1000 tokens, or two for its updates."""
    bounds = {"compute": ask.tokens_per_step / 1000, "update": 2.0, "copy in": 1.0, "copy out": 0.5}
    return Forecast(
        placement=ask.placement or PLACED,
        machine=there,
        parameters=10**9,
        computing=(10**9, 10**9),
        tokens_per_step=ask.tokens_per_step,
        sequence_length=ask.sequence_length,
        micro_batch=ask.micro_batch or 1,
        seconds=max(bounds.values()) + 0.25,
        spans=[Span(stream, stream, 0.0, seconds) for stream, seconds in bounds.items()],
        bounds=bounds,
        device_bytes={"working set": device},
        host_bytes={"host_weights_bytes": host},
    )


class Toy(Planner):
    """Device memory: 1 GiB for 256 tokens of a sequence, one for each kilotoken of a step.

    Besides, one for each row of a micro-batch. Host memory: 20 GiB, and 4 for gradients that wait.
    """

    def __init__(self):
        pass

    def needs(self, there, ask):
        device = ask.sequence_length * GIB // 256 + ask.tokens_per_step * GIB // 1024
        device += GIB if ask.micro_batch is None else ask.micro_batch * GIB
        host = (24 if ask.clip else 20) * GIB * (2 if ask.precision == "fp32" else 1)
        return toy_forecast(there, ask, device, host)

    def fitting(self, there, ask, *, thorough=True):
        found = self.needs(there, ask)
        return found if fits(found, there) else None

    def could_fit(self, there, ask):
        return fits(self.needs(there, ask), there)

    def least(self, there, ask):
        found = self.needs(there, ask)
        just = replace(
            there,
            device_memory_bytes=max(found.device_peak_bytes, there.device_memory_bytes),
            host_memory_bytes=max(found.host_peak_bytes, there.host_memory_bytes),
        )
        return replace(found, machine=just)


TOY = Toy()


def on(device_gib, host_gib, machine=MACHINE):
    device, host = int(device_gib * GIB), int(host_gib * GIB)
    return replace(machine, device_memory_bytes=device, host_memory_bytes=host)


def asked(device_gib=100, host_gib=64, **changes):
    return on(device_gib, host_gib), replace(ASKED, **changes)


def found_for(plans, ask):
    return remedies(plans, *ask, plans.least(*ask))


def test_fewer_tokens_a_step_come_before_another_training_and_hardware():
    """And changes that do not do alone do together; a run that needs the norm keeps clipping."""
    first, second, third = (each.text for each in found_for(TOY, asked(device_gib=4.5)))
    assert first == "take 2,048 tokens a step"  # the most that fits: 1 + 1 + 2 GiB
    assert second.startswith("let it use 6.") and third.startswith("take a larger GPU, RTX 3080")
    first, second, *_ = (each.text for each in found_for(TOY, asked(device_gib=4.5, host_gib=22)))
    assert first == "take 2,048 tokens a step and do not clip gradients"
    assert second == "let it use 6.0 GiB of device memory and 24.0 GiB of host memory"
    ask = asked(host_gib=22)
    kept = remedies(TOY, *ask, TOY.least(*ask), must_clip=True)
    assert kept and not any("clip" in remedy.text for remedy in kept)


QUESTIONS = [
    asked(device, host, sequence_length=length, **changes)
    for device in (2.5, 4.5, 100)
    for host in (15, 22, 40)
    for length in (256, 1024)
    for changes in ({}, {"clip": False}, {"precision": "fp32"}, {"micro_batch": 4},
                    {"micro_batch": 4, "placement": PLACED})
]  # fmt: skip


def test_remedies_are_true_and_differ(tmp_path):
    """Of each kind of question; what they say is what a run file says."""
    lengths = set()
    for ask in QUESTIONS:
        if TOY.could_fit(*ask):
            continue
        found = found_for(TOY, ask)
        lengths.add(len(found))
        assert len({remedy.text for remedy in found}) == len(found)
        for remedy in found:
            assert TOY.fitting(remedy.forecast.machine, remedy.new) and remedy.text
            told = config_with(remedy, tmp_path)
            assert told.training.batch_size * told.data.sequence_length == (
                remedy.new.tokens_per_step
            )
            assert told.training.micro_batch_size == remedy.new.micro_batch
            assert (told.training.max_grad_norm is not None) == remedy.new.clip
            assert told.engine.precision == remedy.new.precision
            assert told.data.sequence_length == remedy.new.sequence_length
            assert (told.engine.placement == "auto") == (remedy.new.placement is None)
            host, there = told.engine.host_memory, remedy.forecast.machine.host_memory_bytes
            assert host is None or parse_bytes(host) == there
    assert {2, 3} <= lengths  # none fits where nothing helps


class Moments(Toy):
    """The host holds what the optimizer's rule keeps, and 10 GiB."""

    def needs(self, there, ask):
        kept = sum(plane.bytes_per_parameter for plane in ask.rule.state_planes)
        return toy_forecast(there, ask, GIB, int((10 + kept) * GIB))


def test_smaller_moments_come_before_more_memory_where_they_do(tmp_path):
    ask = asked(host_gib=13)
    first, *others = found_for(Moments(), ask)
    assert first.text == "keep AdamW's moments as 8-bit codes"
    told = config_with(first, tmp_path)
    assert told.optimizer.states == first.new.rule.states == "int8"
    assert [each.text for each in others] == ["let it use 18.0 GiB of host memory"]
    lion = asked(host_gib=13, rule=Lion())
    assert not any("codes" in each.text for each in found_for(Moments(), lion))


def config_with(remedy, folder):
    """A run file of the question, as the remedy changes it."""
    old = remedy.asked
    tree = {
        "model": {"path": "model"},
        "data": {"kind": "text", "path": "text", "sequence_length": old.sequence_length},
        "training": {
            "steps": 1,
            "batch_size": old.tokens_per_step // old.sequence_length,
            "micro_batch_size": old.micro_batch,
            "max_grad_norm": 1.0 if old.clip else None,
        },
        "engine": {
            "precision": old.precision,
            "placement": "auto" if old.placement is None else {"slots": 2},
        },
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(tree))
    return config.load(path, [f"{k}={json.dumps(v)}" for k, v in remedy.settings.items()])


def test_rows_of_one_token_are_refused():
    with pytest.raises(InputError, match="teach nothing"):
        replace(ASKED, sequence_length=1).check()


def test_several_gpus_share_the_step_and_the_host():
    found, plans = spec(open_source(qwen2()).model), []

    class Seen(planner.Planner):
        def fitting(self, machine, workload, *, thorough=True):
            plans.append((machine, workload, super().fitting(machine, workload, thorough=thorough)))
            return plans[-1][-1]

    ask = Workload(tokens_per_step=1024, sequence_length=16, placement=Placement(slots=2))
    several = planner.several_gpus(Seen(found), MACHINE, ask, 4)
    machine, part, forecast = plans[-1]
    assert replace(ask, generation=Generation(8, rows=6)).shared(4).generation.rows == 2
    assert several["host_bytes"] == 4 * forecast.host_peak_bytes
    assert part.tokens_per_step == 256 and part.ranks == 4
    assert machine.host_memory_bytes == MACHINE.host_memory_bytes // 4
    assert several["gpus"] == 4 and several["tokens_per_second"] == 1024 / several["seconds"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_bytes_by_tile_add_up(tied, precision):
    found = spec(open_source(llama(tie_word_embeddings=tied, num_hidden_layers=4)).model)
    placement = Placement(resident=("embedding", "layer 0"))
    tiles = tile_bytes(found, placement, Workload(precision=precision))
    names = {layout.name: layout for layout in Model(found, AdamW()).layouts}
    assert [t.name for t in tiles] == [
        *([] if tied else ["embedding"]), "layer 0", "layer 1 ... layer 3", "head",
    ]  # fmt: skip
    for tile in tiles:
        layout = names[tile.name.split(" ...")[0]]
        per = 14 if precision == "bf16" else 16
        assert sum(tile.planes.values()) == per * layout.numel
        assert tile.parameters == layout.num_parameters
        assert tile.tier == ("device" if layout.name in placement.resident else "host")
    tiers = by_tier(tiles)
    assert sum(map(sum, (planes.values() for planes in tiers.values()))) == sum(
        tile.total_bytes for tile in tiles
    )


def test_a_given_placement_is_planned_as_it_is():
    found = spec(open_source(qwen2()).model)
    ask = Workload(
        tokens_per_step=256, sequence_length=16, placement=Placement(slots=2, layer_inputs="host")
    )
    plan = planner.make_plan(found, MACHINE, ask, total_tokens=1000, gpus=2)
    assert plan.fits and plan.remedies == [] and plan.forecast.placement == ask.placement
    assert plan.run_seconds == pytest.approx(1000 / plan.several["tokens_per_second"])
    told = json.loads(json.dumps(plan.as_dict()))
    assert told["fits"] is True and told["forecast"]["micro_batch"] == 16
    assert told["bytes_by_tier"]["device"]["weights"] == 0

    plan = planner.make_plan(found, on(2**-10, 2**-10), ask)
    assert not plan.fits and plan.missing_host_bytes > 0 and plan.missing_device_bytes > 0
    assert plan.forecast.host_peak_bytes <= plan.forecast.machine.host_memory_bytes
    assert Planner(found).fitting(plan.forecast.machine, ask).seconds > 0


def test_a_batch_of_pairs_has_two_rows_each():
    """A run file counts pairs: of 4,096 tokens in rows of 256 there are 8."""
    remedy = found_for(TOY, asked(device_gib=4.5, loss=DPO()))[0]
    assert remedy.text == "take 2,048 tokens a step"
    assert remedy.settings == {"training.batch_size": 4}
    ask = asked(device_gib=4, loss=DPO(), placement=PLACED, micro_batch=8)
    remedy = found_for(TOY, ask)[0]
    assert remedy.settings["training.micro_batch_size"] == remedy.new.micro_batch // 2 >= 1


# Facts of the models' own config.json: type, names of the two numbers, and the numbers.
EXPERTS = {
    "DeepSeek-V3": ("deepseek_v3", {"n_routed_experts": 256, "num_experts_per_tok": 8}),
    "Qwen3-235B-A22B": ("qwen3_moe", {"num_experts": 128, "num_experts_per_tok": 8}),
    "gpt-oss-120b": ("gpt_oss", {"num_local_experts": 128, "num_experts_per_tok": 4}),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_tokens_of_an_expert_and_tokens_that_hide_the_bus(name, tmp_path):
    kind, facts = EXPERTS[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **facts}))
    every, chosen = facts.values()
    forecast = toy_forecast(MACHINE, replace(ASKED, tokens_per_step=768), 0, 0)
    assert experts_of_step(load_config(tmp_path), forecast) == {
        "num": every,
        "of_a_token": chosen,
        "tokens_each": 768 * chosen // every,
        "bus_hidden_from_tokens": 1024,  # a second of the bus, a second for 1000 tokens, in rows
    }
    assert experts_of_step(llama().config, forecast) is None
