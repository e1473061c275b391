"""Apple's device file with torch's CPU in the place of its GPU: the protocol, not the hardware.

Nobody has run it on a Mac. What is proved here: its own code runs, its results are the CPU's to the
bit, and no host stream touches memory while work that was put on the GPU may be running.
"""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatrain import DoesNotFit, Engine, InputError, Placement
from megatrain.device import base, mps, open_device
from megatrain.device.mps import MpsDevice
from megatrain.loss import DPO
from megatrain.model.float8 import require_float8
from tests.inside import answering
from tests.parity.cases import llama, make_batches, make_engine, masters, replies, same, trained
from tests.rules import SWEPT
from tests.sweeps import quick, swept

STEPS = make_batches(2)
pytestmark = pytest.mark.skipif(
    not hasattr(torch.mps, "_host_alias_storage"), reason="this torch lends a Mac's GPU no memory"
)


class Gpu(MpsDevice):
    """Work put on the GPU runs until something waits for it."""

    torch_device = torch.device("cpu")
    can = replace(MpsDevice.can, generators=())
    running = False

    def run(self, stream, name, work, reads=(), writes=()):
        if stream not in base.HOST_STREAMS:
            type(self).running = True
            return super().run(stream, name, work, reads, writes)

        def alone():
            assert not Gpu.running, f"{name} does not wait for the GPU"
            return work()

        return super().run(stream, name, alone, reads, writes)

    def copy(self, stream, to, source, numel=None):
        super().copy(stream, to, source, numel)
        Gpu.running = False  # torch waits for copies between the two

    def read(self, buffer):
        assert not Gpu.running
        return super().read(buffer)


@pytest.fixture
def gpu(monkeypatch):
    """The device; torch's functions of Apple's GPU are the CPU's."""

    def synchronize():
        Gpu.running = False

    seed = torch.default_generator.manual_seed
    monkeypatch.setattr(mps, "_gpu", SimpleNamespace(synchronize=synchronize, manual_seed=seed))
    monkeypatch.setattr(torch.mps, "_host_alias_storage", lambda storage: storage)
    return Gpu


PLACEMENTS = [
    "auto",
    Placement(slots=1),
    Placement(slots=0, passes=2, save_activations=1, layer_inputs="host"),
    Placement(slots=2, resident=("layer 0", "head"), disk_moments=2),
]


@swept(together=1, placement=PLACEMENTS, precision=["fp32", "bf16"], clip=[0.5, None])
def test_a_step_is_the_cpus_to_the_bit(gpu, placement, precision, clip):
    options = {"precision": precision, "clip": clip, "placement": placement}
    model = {"tie_word_embeddings": clip is None}
    ours, plain = (trained(llama(**model), STEPS, **o, **options) for o in ({"device": gpu()}, {}))
    assert ours[0] == plain[0] and same(ours[1], plain[1])


@pytest.mark.parametrize("rule", quick(SWEPT, ("adamw int8", "muon")))
def test_every_rule_updates_as_on_the_cpu(gpu, rule):
    assert same(*(trained(llama(), STEPS, rule=rule, **o)[1] for o in ({"device": gpu()}, {})))


def test_dropout_saves_evaluation_and_losses_of_pairs_are_the_cpus(gpu, tmp_path):
    def run(device, folder):
        with make_engine(llama(attention_dropout=0.3), device=device) as engine:
            engine.step(STEPS[0])
            engine.save(folder)
        loss = DPO(0.3)
        with Engine.load(folder, device=device) as engine:
            step = engine.step(replies(loss), loss)
            told = step.loss, step.grad_norm, engine.evaluate(STEPS[1])
            return told, masters(engine)

    ours, plain = run(gpu(), tmp_path / "gpu"), run("cpu", tmp_path / "cpu")
    assert ours[0] == plain[0] and same(ours[1], plain[1])


def test_what_it_cannot_do_is_refused_in_one_line(gpu):
    with pytest.raises(InputError, match="this device has no torch.compile"):
        make_engine(llama(), device=gpu(), placement=Placement(compile=True))
    with pytest.raises(InputError, match="fp8.*no float8 products"):
        require_float8(torch.device("mps"))
    with pytest.raises(InputError, match="own memory, but the device is mps; set host_memory"):
        make_engine(llama(), device=gpu(), device_memory="1GiB")
    with pytest.raises(DoesNotFit, match="no host memory for all of it: .* wanted, .* free"):
        gpu().empty("all of it", 1 << 50, torch.uint8)

    error = RuntimeError("Invalid buffer size: 64.00 GiB. Metal allows less")
    refusing = mock.patch.object(mps.torch, "empty", side_effect=error)
    told = pytest.raises(DoesNotFit, match=r"for x: .* wanted: Invalid buffer size: 64.00 GiB")
    with refusing, told:
        gpu().empty("x", 1, torch.uint8)


def test_a_sum_in_float64_ends_in_one_line(gpu):
    """As torch refuses it there."""
    with make_engine(llama(), device=gpu()) as engine:
        refusal = pytest.raises(InputError, match="needs float64, which mps lacks")
        with refusal, engine._undisturbed():
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")


def test_only_one_process_on_a_mac_has_it(monkeypatch):
    with pytest.raises(InputError, match="needs an Apple GPU that torch sees"):
        open_device("mps")
    answering(monkeypatch, torch.backends.mps, is_available=True)
    assert isinstance(open_device("mps"), MpsDevice)
    with pytest.raises(InputError, match="one process alone"):
        open_device("mps", 0)
