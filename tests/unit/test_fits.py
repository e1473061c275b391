"""Memory limits: what cannot fit is refused before anything is allocated."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from megatrain import AdamW, DoesNotFit, Engine, InputError, Placement
from megatrain.autoplace import auto
from megatrain.autoplace.auto import check_fits
from megatrain.base.units import GIB, MIB
from megatrain.device import CpuDevice
from megatrain.forecast.cache import UNSUMMED, ForecastCache, needs_of
from megatrain.forecast.workload import Workload
from megatrain.machine import mapping_bytes
from megatrain.model.probe import spec
from megatrain.model.program import ModelProgram
from megatrain.source.source import Model, open_source
from megatrain.telemetry import host
from megatrain.telemetry.host import process_bytes
from tests.inside import answering
from tests.parity.cases import llama, make_engine
from tests.parity.test_memory import MID
from tests.unit.forecast_cases import H200, experts_config, tiny_config


class Card(CpuDevice):
    """A GPU as far as its memory goes; counts what it has handed out."""

    kind = "cuda"

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
        free = self.size - self.taken - 1 * MIB
        return {**super().memory(), "device_free_bytes": free, "device_context_bytes": MIB}


class Asked:
    """A model to be trained in bf16 with clipping, in steps of so many tokens."""

    def __init__(self, tokens=None, config=MID):
        self.tokens, self.model = tokens, Model.trained(spec(open_source(config).model), AdamW())

    def needs(self, placement):
        program = ModelProgram(self.model.spec, torch.device("cpu"), torch.bfloat16)
        return needs_of(self.model, program, placement, clip=True, tokens=self.tokens)

    def check(self, card, placement):
        check_fits(card, self.model, placement, torch.bfloat16, None, clip=True)


def open_engine(device, model=MID, placement=None, **options):
    placement = placement or Placement(slots=3)
    return Engine(model, optimizer=AdamW(), device=device, placement=placement, **options)


def test_a_card_that_is_too_small_is_refused_with_nothing_allocated():
    device = Card(8 * GIB)
    with pytest.raises(DoesNotFit) as told:
        open_engine(device, device_memory="20MiB")
    assert device.taken == device.on_host == 0
    assert "\n" not in str(told.value)
    for part in ("device memory: at least", "are allowed", "too few", "take placement: auto"):
        assert part in str(told.value)


def test_what_is_counted_is_what_is_taken():
    device = Card(8 * GIB)
    device.kind = "cpu"  # there is no GPU to draw weights on
    placement = Placement(slots=3)
    engine = open_engine(device)
    needs = Asked().needs(placement)
    temporary = needs.device.pop(UNSUMMED)
    assert temporary == 2 * 16384 * 384  # of the head; a layer has 1.6 M parameters
    assert device.taken == sum(needs.device.values())
    assert device.on_host == sum(needs.host.values())
    engine.close()


# The head's gradient is the largest; a layer's; all the experts' of one.
WIDE = tiny_config().to_dict() | {"hidden_size": 512, "intermediate_size": 2048}
MODELS = {
    "head": MID,
    "layer": LlamaConfig(**WIDE),
    "experts": experts_config(),
}
WAYS: list[dict[str, Any]] = [
    {},
    {"slots": 3, "compile": True},
    {"slots": 1, "gradient_lanes": 1, "keep_rows": False, "layer_inputs": "host"},
    {"slots": 1, "gradient_lanes": 1, "resident": ("layer 0", "head")},
    {"save_activations": 2},
]


@pytest.mark.parametrize(
    ("model", "choices"),
    [
        *(
            pytest.param(model, way, marks=[pytest.mark.exhaustive] if (m + w) % 2 else [])
            for m, model in enumerate(MODELS)
            for w, way in enumerate(WAYS)
        ),
    ],
    ids=str,
)
def test_the_least_is_what_a_step_of_two_tokens_is_foretold_to_take(model, choices):
    asked, placement = Asked(None, MODELS[model]), Placement(**choices)
    machine = replace(H200, device_context_bytes=0)  # then that is to map the host's memory
    workload = Workload(2, 2, 1, True, "bf16", placement.compile)
    told = ForecastCache(asked.model.spec).of(machine, placement, workload, 1)
    # A share that the allocator may take, and may not.
    besides = told.device_bytes["allocator"] + told.device_bytes["context"]
    foretold = told.device_peak_bytes - besides
    least = sum(asked.needs(placement).device.values())
    assert 0.98 * foretold < least <= foretold


@pytest.mark.parametrize("model", MODELS)
def test_the_least_is_enough_and_less_is_refused(model):
    asked, placement = Asked(None, MODELS[model]), Placement(slots=2)
    needs = asked.needs(placement)
    least = sum(needs.device.values()) + mapping_bytes(sum(needs.host.values()))
    asked.check(Card(least + MIB), placement)
    with pytest.raises(DoesNotFit, match="device memory: at least"):
        asked.check(Card(least + MIB - 1), placement)


def test_host_memory_is_refused_before_it_is_taken():
    device = Card(8 * GIB)
    with pytest.raises(DoesNotFit, match=r"host memory: at least .* weights .* too few"):
        open_engine(device, host_memory=process_bytes() + 100 * MIB)
    assert device.on_host == 0


SMALL = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 999}
HUGE = {"hidden_size": 65536, "intermediate_size": 65536}
REMEDIES = {
    "raise host_memory, or train an adapter (LoRA), or train a smaller model": (
        {"vocab_size": 1 << 20},
        2,
    ),
    "train an adapter (LoRA), or train a smaller model": (HUGE, 2),
}


@pytest.mark.parametrize("remedies", REMEDIES)
def test_remedies_are_those_that_would_help(remedies):
    """Of a model that is too large itself no micro-batch is small enough, nor any limit."""
    sizes, rows = REMEDIES[remedies]
    model = LlamaConfig(**SMALL | sizes)
    limit = process_bytes() + 512 * MIB
    step = {"tokens_per_step": rows * 512, "sequence_length": 512, "micro_batch": rows}
    with pytest.raises(DoesNotFit, match=re.escape(f" too few; {remedies}") + "$"):
        Engine(model, optimizer=AdamW(), host_memory=limit, device="cpu", **step)


def taken(num_bytes, monkeypatch):
    """This process takes so many bytes, whatever else happens on the machine."""
    for module in (host, auto):
        answering(monkeypatch, module, process_bytes=num_bytes)


@pytest.mark.parametrize("limit", [MIB, 512 * MIB])
def test_a_limit_below_what_the_process_itself_takes_is_named_as_it_was_given(limit, monkeypatch):
    taken(600 * MIB, monkeypatch)
    with pytest.raises(DoesNotFit) as caught:
        make_engine(llama(), host_memory=limit)
    told = re.fullmatch(
        r"host memory: at least .* are needed \(the process itself .*, weights 1 MiB, .*\), "
        r"but (\d+ MiB) are allowed, .* too few; raise host_memory, or train a smaller model",
        str(caught.value),
    )
    assert told and told[1] == f"{limit // MIB} MiB", caught.value


@pytest.mark.parametrize("value", ["ten", "-3GiB", 0, -5, 1.5, True, ""])
def test_a_limit_that_is_no_size_is_refused(value):
    with pytest.raises(InputError, match="host_memory is"):
        make_engine(llama(), host_memory=value)
