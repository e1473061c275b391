"""Memory limits: what cannot fit is refused first, or computed again from less."""

import json
import logging
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig

from megatrain import AdamW, DoesNotFit, Engine, InputError, Placement, RunFailed, config
from megatrain.autoplace import auto
from megatrain.autoplace.auto import check_fits
from megatrain.base.units import GIB, MIB
from megatrain.device import CpuDevice
from megatrain.device.base import COPY_IN, Abilities
from megatrain.engine.batch import halved
from megatrain.engine.step import TrainingParts
from megatrain.forecast.cache import UNSUMMED, ForecastCache, needs_of
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import Workload
from megatrain.loss import CROSS_ENTROPY, DPO
from megatrain.machine import mapping_bytes
from megatrain.model.probe import spec
from megatrain.placement import ActivationPolicy, Planned
from megatrain.source.source import EngineSetup, open_source
from megatrain.source.tiles import Model
from megatrain.telemetry.host import process_bytes
from megatrain.train import setup
from tests.counted import CountedDevice
from tests.families.media import media_steps
from tests.families.tiny import tiny_multimodal
from tests.inside import answering
from tests.parity.cases import llama, make_batches, make_engine, masters, replies, same
from tests.parity.test_memory import MID
from tests.race.schedule import Alike
from tests.refusals import refused
from tests.sweeps import few, placements, swept
from tests.unit.forecast_cases import H200, experts_config, small_machine, tiny_config


class Card(CpuDevice):
    """A GPU as far as its memory goes; counts what it has handed out."""

    can = Abilities(counts_memory=True, overlaps=True)

    def __init__(self, size):
        self.size, self.taken, self.on_host = size, 0, 0

    def empty(self, name, numel, dtype):
        self.taken += numel * dtype.itemsize
        return super().empty(name, numel, dtype)

    def host(self, name, numel, dtype, *, pinned):
        self.on_host += numel * dtype.itemsize
        return super().host(name, numel, dtype, pinned=pinned)

    def limit(self, device_bytes, host_bytes):
        self.size = min(self.size, device_bytes or self.size)
        self._host_limit = host_bytes

    def memory(self):
        device = {"device_free_bytes": self.size - self.taken - MIB, "device_context_bytes": MIB}
        return {**super().memory(), **device, "device_bytes": 0, "device_total_bytes": self.size}


def setup_of(model, num_bytes, source=None):
    return EngineSetup(source, model, 1.0, "bf16", Card(num_bytes), None, None, None, 0)


def trained(config):
    return Model(spec(open_source(config).model), AdamW())


def needs(model, placement):
    """Of a step in bf16 with clipping."""
    return needs_of(model, placement, clip=True, tokens=None)


def open_engine(device, **options):
    options = {"placement": Placement(slots=3)} | options
    return Engine(MID, optimizer=AdamW(), device=device, **options)


def test_a_card_that_is_too_small_is_refused_with_nothing_allocated():
    device = Card(8 * GIB)
    with refused("device memory: at least", DoesNotFit) as told:
        open_engine(device, device_memory="20MiB")
    assert device.taken == device.on_host == 0
    for part in ("are allowed", "too few", "take placement: auto"):
        assert part in str(told.value)
    with pytest.raises(DoesNotFit, match=r"host memory: at least .* weights .*; raise host_memory"):
        open_engine(device := Card(8 * GIB), host_memory=process_bytes() + 100 * MIB)
    assert device.taken == device.on_host == 0


def test_a_step_that_is_too_large_is_told_to_be_smaller():
    """A model whose state has room is not told to keep fewer bits."""
    setup = setup_of(trained(MID), 8_000 * GIB)
    with pytest.raises(DoesNotFit, match=r"boundaries .* GiB.*; take fewer tokens a step") as told:
        check_fits(setup, Placement(slots=3, layer_inputs="host"), tokens=10**10)
    assert "states: int8" not in str(told.value)


def test_what_is_counted_is_what_is_taken():
    device = Card(8 * GIB)
    needed = needs(trained(MID), Placement(slots=3))
    with open_engine(device):
        temporary = needed.device.pop(UNSUMMED)
        assert temporary == 2 * 16384 * 384  # of the head; a layer has 1.6 M parameters
        assert device.taken == sum(needed.device.values())
        assert device.on_host == sum(needed.host.values())


# The head's gradient is the largest; a layer's; all the experts' of one.
WIDE = tiny_config().to_dict() | {"hidden_size": 512, "intermediate_size": 2048}
MODELS = {"head": MID, "layer": LlamaConfig(**WIDE), "experts": experts_config()}
WAYS: list[dict[str, Any]] = [
    {},
    {"slots": 3, "compile": True},
    {"slots": 1, "gradient_lanes": 1, "keep_rows": False, "layer_inputs": "host"},
    {"slots": 1, "gradient_lanes": 1, "resident": ("layer 0", "head")},
    {"save_activations": 2},
]


@swept(together=1, config=MODELS, choices=WAYS)
def test_the_least_is_what_a_step_of_two_tokens_is_foretold_to_take(config, choices):
    model, placement = trained(config), Placement(**choices)
    machine = replace(H200, device_context_bytes=0)  # then that is to map the host's memory
    workload = Workload(2, 2, 1, True, "bf16", placement.compile)
    told = ForecastCache(model.spec).of(machine, placement, workload, 1)
    # A share that the allocator may take, and may not.
    besides = told.device_bytes["allocator"] + told.device_bytes["context"]
    foretold = told.device_peak_bytes - besides
    least = sum(needs(model, placement).device.values())
    assert 0.98 * foretold < least <= foretold


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_the_least_is_enough_and_less_is_refused(config):
    model, placement = trained(config), Placement(slots=2)
    needed = needs(model, placement)
    least = sum(needed.device.values()) + mapping_bytes(sum(needed.host.values()))
    check_fits(setup_of(model, least + MIB), placement)
    with pytest.raises(DoesNotFit, match="device memory: at least"):
        check_fits(setup_of(model, least + MIB - 1), placement)


# What `placement="auto"` takes on a GPU: by forecast, or where nothing can be foreseen.


def opened(layers=2, *, train=True):
    source = open_source(tiny_config(layers))
    found = spec(source.model)
    model = Model(found, AdamW() if train else None)
    return setup_of(model, 21 * MIB, source)


@pytest.fixture
def seen(monkeypatch):
    """The workloads for which `auto` looks for the fastest placement; it finds none."""
    workloads: list[Workload] = []
    monkeypatch.setattr(auto, "_fastest", lambda opened, workload: workloads.append(workload))
    return workloads


def settled(
    monkeypatch, asked, tokens=512, length=64, *, machine=None, compiler=True, loss=CROSS_ENTROPY
):
    answering(monkeypatch, auto, present_machine=machine)
    monkeypatch.setattr(asked.device, "can", replace(asked.device.can, compiles=compiler))
    answering(monkeypatch, auto, check_fits=None)
    return auto.settle(asked, "auto", tokens, length, None, loss)


@pytest.mark.parametrize(("tokens", "length", "wanted"), [
    (None, None, (98_304, 1024)), (512, None, (512, 512)), (None, 64, (98_304, 64)),
])  # fmt: skip
def test_sizes_that_nobody_gives_are_stated_ones(monkeypatch, tokens, length, wanted, seen):
    settled(monkeypatch, opened(), tokens, length, loss=DPO())
    assert [(each.tokens_per_step, each.sequence_length) for each in seen] == [wanted]
    assert seen[0].loss == DPO()


def test_of_several_ranks_each_is_planned_with_its_part_and_told_why(monkeypatch, caplog):
    """Of a step's rows, of host memory and of updates, by the link that was measured."""
    caplog.set_level(logging.INFO)
    alone, ranks = opened(), Alike(0, 3, on_host=3, link_gbps=0.25)
    model = Model(alone.model.spec, alone.model.rule, ranks.size)
    seen: list[Forecast] = []
    search = auto.fastest
    monkeypatch.setattr(auto, "fastest", lambda *given: seen.append(search(*given)) or seen[-1])
    machine = small_machine(1e6, host_gib=12)
    found = settled(monkeypatch, replace(alone, model=model, ranks=ranks), machine=machine)
    assert found.planned is not None and found.planned.tokens_per_step == 64 * 3  # of 8 rows
    [told] = seen
    assert told.machine.host_memory_bytes == 4 * GIB and told.machine.link_gbps == 0.25
    assert told.machine.update_gbps == pytest.approx(machine.update_gbps / 3)
    assert told.placement == found.placement
    assert found.planned.micro_batch_tokens == 64 * found.micro_batch
    for words in ("micro-batches of", "s a step expected", "bound by "):
        assert words in caplog.text


def test_a_model_that_is_run_rests_on_a_device_with_twice_the_room(monkeypatch):
    small, large = opened(2, train=False), opened(8, train=False)
    rests = settled(monkeypatch, small).placement.resident
    assert {"embedding", "layer 0", "layer 1", "head"} <= set(rests) and "unused" not in rests
    assert settled(monkeypatch, large).placement == Placement(slots=3, head_tokens=8192)


# A device, or a host, that runs out of memory in the middle of a step.

STEP = make_batches(1, ((4, 40), (3, 30), (1, 7)))[0]
PLACEMENTS = placements("fits")


def peak_of(step, loss=None, placement=None):
    """What a step takes at most where nothing is limited."""
    device = CountedDevice()
    with make_engine(llama(), placement=placement or Placement(), device=device) as engine:
        engine.step(step, *([loss] if loss else []))
    return device.peak_bytes


@pytest.mark.parametrize("loss", few([None, DPO(0.3)]))
@pytest.mark.parametrize("placement", few(PLACEMENTS.values(), 3))
def test_a_step_without_memory_is_computed_again_from_less(placement, loss, caplog):
    """As plain training on the halves of its micro-batches, to the bit; and so are later steps."""
    step, losses = STEP if loss is None else replies(loss), [] if loss is None else [loss]
    lean = Placement(passes=placement.passes, layer_inputs=placement.layer_inputs)
    whole, least = peak_of(step, loss, placement), peak_of(halved(step), loss, lean)
    assert least < 0.95 * whole
    device = CountedDevice((whole + least) // 2)
    plain, uncut = (make_engine(llama(), placement=Placement(slots=1)) for _ in range(2))
    with (
        caplog.at_level(logging.WARNING),
        make_engine(llama(), placement=placement, device=device) as engine,
    ):
        for _ in range(2):
            result, wanted = engine.step(step, *losses), plain.step(halved(step), *losses)
            assert (result.loss, result.grad_norm) == (wanted.loss, wanted.grad_norm)
            assert result.loss == pytest.approx(uncut.step(step, *losses).loss, rel=1e-4)
        assert same(masters(engine), masters(plain)) and engine.steps == 2
    [said] = [line for line in caplog.messages if "computed again" in line]
    assert said.startswith("step 1: the device has no memory left") and "\n" not in said


class Full(CpuDevice):
    """Has no memory the next time that `what` is asked for."""

    what: str | None = None

    def empty(self, name, *given):
        return self._given(super().empty, name, *given)

    def host(self, name, *given, **options):
        return self._given(super().host, name, *given, **options)

    def _given(self, take, name, *given, **options):
        if self.what is not None and self.what in name:
            self.what = None
            raise DoesNotFit(f"no memory for {name}")
        return take(name, *given, **options)


@pytest.mark.parametrize("what", ["scratch arena", "staged rows"])
def test_a_step_that_found_no_memory_for_more_rows_than_before_is_computed_again(what):
    device = Full()
    engine, plain = (make_engine(llama(), placement=Placement(), device=d) for d in (device, "cpu"))
    assert engine.step(STEP[2:]).loss == plain.step(STEP[2:]).loss
    device.what = what
    result, wanted = engine.step(STEP), plain.step(halved(STEP))
    assert device.what is None
    assert (result.loss, result.grad_norm) == (wanted.loss, wanted.grad_norm)


class BrokenOff(CpuDevice):
    """The user ends a call, by Ctrl-C, at the copy to the device behind `left` others."""

    left = -1

    def copy(self, stream, *given):
        if stream == COPY_IN:
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        super().copy(stream, *given)


def test_weights_that_stay_are_loaded_again_where_their_load_was_broken_off():
    device, placement = BrokenOff(), Placement(keep_weights=4)
    engine, plain = (make_engine(llama(), placement=placement, device=d) for d in (device, "cpu"))
    for each in (engine, plain):
        each.step(STEP)
    for left in range(3):
        device.left = left
        with pytest.raises(KeyboardInterrupt):
            engine.evaluate(STEP)
    assert engine.evaluate(STEP) == plain.evaluate(STEP)


def test_a_step_that_is_broken_off_before_it_counts_is_not_saved(tmp_path):
    """Its updates have begun; whoever goes on would count one step too few."""
    with make_engine(llama(), clip=None, placement=Placement()) as engine:
        engine.optimizer.took_step = mock.Mock(side_effect=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step(STEP)
        with pytest.raises(RunFailed, match="broken off when updates had begun"):
            engine.save(tmp_path / "checkpoint")


def test_micro_batches_whose_routers_are_weighed_one_by_one_are_not_cut():
    device = CountedDevice((peak_of(STEP) + peak_of(halved(STEP))) // 2)
    with make_engine(llama(), placement=Placement(slots=1), device=device) as engine:
        with pytest.raises(DoesNotFit):
            engine.step(STEP, router_shares=[0.5, 0.4, 0.1])
        assert engine.step(STEP).loss > 0  # without them they are
        with pytest.raises(DoesNotFit):
            engine.step(STEP, router_shares=[0.5, 0.4, 0.1])


@pytest.mark.parametrize("clip", [1.0, None])
def test_out_of_memory_is_one_line_and_changes_no_weight(clip):
    """Also where a step is tried again; without clipping updates may have begun, and it is not."""
    device = CountedDevice()
    rule = AdamW(lr=0.1)
    with Engine(llama(), optimizer=rule, device=device, precision="fp32", max_grad_norm=clip) as e:
        before = {name: master.clone() for name, master in e.named_masters()}
        device.most_bytes = 1 + peak_of(STEP[2:])
        with refused("out of memory.*micro-batches", DoesNotFit) as told:
            e.step(STEP)
        if clip is not None:
            assert "no weight has been changed" in str(told.value)
            assert all(torch.equal(master, before[name]) for name, master in e.named_masters())
            device.most_bytes = None
            assert e.step(STEP).loss > 0  # and the engine goes on
            assert any(not torch.equal(m, before[name]) for name, m in e.named_masters())


# A step that is larger than planned, or than the limit, computes again what should wait.


@pytest.mark.parametrize(("shapes", "graphs"), [([], 1), ([((4, 40), (3, 30))], 0)])
def test_a_first_step_larger_than_planned_goes_without(shapes, graphs, monkeypatch):
    """46 tokens, and 250, where `auto` plans for 125 in rows of 25."""
    placement = Placement(offload_activations=2, save_activations=1)
    settled = auto.Settled(placement, 5, Planned(125, 5 * 25))
    answering(monkeypatch, auto, _chosen=settled)
    engine, under = (
        make_engine(llama(), placement="auto"),
        mock.Mock(wraps=TrainingParts.with_policies),
    )
    monkeypatch.setattr(TrainingParts, "with_policies", lambda *given: under(*given))
    engine.step(make_batches(1, *shapes)[0])
    assert (engine.memory()["host_kept_bytes"] > 0) == (graphs > 0)
    [(_, policies)] = [call.args for call in under.mock_calls]
    assert policies.count(ActivationPolicy("graph", "device")) == graphs


@pytest.mark.parametrize("planned", [False, True])
def test_a_first_step_with_images_that_no_one_planned_goes_without(planned, monkeypatch, caplog):
    """The second micro-batch is text; the log names the remedy once."""
    settled = auto.Settled(Placement(save_activations=1), 5, Planned(999, 999, planned))
    answering(monkeypatch, auto, _chosen=settled)
    model = tiny_multimodal("qwen3_vl")
    [(pictures, text, *_), *_] = media_steps(model, "qwen3_vl")
    engine, under = (
        make_engine(model, placement="auto"),
        mock.Mock(wraps=TrainingParts.with_policies),
    )
    monkeypatch.setattr(TrainingParts, "with_policies", lambda *given: under(*given))
    for step in ([text], [pictures, text], [pictures]):
        engine.step(step)
    saved = [call.args[1].count(ActivationPolicy("graph", "device")) for call in under.mock_calls]
    assert saved == [1, planned, planned]
    assert caplog.text.count("as media=") == (not planned)


def test_a_step_that_the_limit_refused_now_fits():
    """Graphs of the large step take 125 MiB, which the limit does not leave: it keeps none."""
    ids = torch.randint(100, (400, 60), generator=torch.Generator().manual_seed(0))
    small, large = ([{"input_ids": part, "labels": part}] for part in (ids[:20], ids))
    limit = process_bytes() + 50 * MIB
    engine = make_engine(llama(), placement=Placement(offload_activations=3), host_memory=limit)
    engine.step(small)
    taken = engine.memory()["host_kept_bytes"]
    assert 400 / 20 * taken > 120 * MIB
    engine.step(large)
    assert engine.memory()["host_kept_bytes"] == 0


# Engines of a checkpoint, which says nothing of the steps to come.


def test_auto_plans_a_loaded_engine_for_the_steps_it_is_told(tmp_path, seen):
    model = tiny_multimodal("gemma3")
    with Engine(model, optimizer=AdamW(), placement=Placement(), precision="fp32") as engine:
        engine.save(tmp_path / "saved")
    media = {"input_ids": torch.zeros(1, 8, dtype=torch.long)}
    steps = {"tokens_per_step": 640, "sequence_length": 64, "micro_batch": 5, "loss": DPO()}
    for told in ({}, steps | {"media": media}):
        loaded = Engine.load(tmp_path / "saved", placement="auto", device=Card(1 << 40), **told)
        loaded.close()
    assert [{name: getattr(seen[1], name) for name in steps}, seen[1].media.tensors] == [
        steps, media
    ]  # fmt: skip
    assert seen[0].media is None


def test_auto_plans_a_resumed_run_for_its_steps_and_micro_batches(tmp_path, monkeypatch):
    """A run that goes on on another kind of device keeps the rows of its micro-batches."""
    sizes = {"data": {"path": "rows.jsonl", "sequence_length": 64}, "loss": {"name": "dpo"}}
    run = {"model": {"path": "m"}, "training": {"steps": 9, "batch_size": 6}} | sizes
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    state = SimpleNamespace(data={"rows_per_micro_batch": 3}, config={})
    start: Any = SimpleNamespace(checkpoint=tmp_path, state=state)
    load = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(Engine, "load", load)
    with pytest.raises(InterruptedError), ExitStack() as stack:
        setup._saved_engine(config.load(tmp_path / "run.yaml"), start, {}, stack)
    told = load.call_args.kwargs
    found = [told[name] for name in ("tokens_per_step", "sequence_length", "micro_batch")]
    assert found == [6 * 2 * 64, 64, 3 * 2] and isinstance(told["loss"], DPO)


def test_weights_are_read_in_place_only_where_memory_is_shared():
    with pytest.raises(InputError, match="placement.slots is 0, but this device"):
        open_engine(Card(8 * GIB), placement=Placement(slots=0))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_shared_memory_takes_no_slots_lanes_or_staging(precision):
    """In fp32 sums neither; what is left beside the planes are rows and small numbers."""
    model = Model(spec(open_source(MID).model), AdamW(), precision=precision)
    one, shared = (
        needs_of(model, Placement(slots=slots), clip=True, tokens=64) for slots in (1, 0)
    )
    assert one.host["rows on their way"] and not shared.host["rows on their way"]
    assert not shared.device["slots"] and not shared.device["gradients on their way"]
    assert (shared.device["sums and rows"] < MIB) == (precision == "fp32")
    planes = {"weights", "remainder", "moments", "gradient"}
    assert all(one.host[name] == shared.host[name] for name in planes)
