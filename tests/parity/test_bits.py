"""Bits that flip while nobody writes them: found in one step, wherever they are."""

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch

from megatrain import Engine, InputError, Placement, RunFailed
from megatrain.device import CpuDevice
from megatrain.engine import bit_checks
from tests.inside import host_gradients, store_of
from tests.parity.cases import llama, make_batches, make_engine, masters, same, trained
from tests.parity.ranks import run_ranks
from tests.rules import SWEPT
from tests.sweeps import few, swept

USUAL = [("adamw int8", "disk"), ("muon", "host"), ("lion", "device")]
PLACES = {
    "host": Placement(slots=1),
    "disk": Placement(slots=1, disk_moments=99, disk_remainder=99, disk_weights=99),
    "device": Placement(slots=1, resident=("layer 1", "head")),
}
ONE_BIT = (
    r"differs from its checksum in 1 blocks .*; one flipped bit may explain it, in byte [0-9,]+ of"
)


def flip(plane, byte, bit=3):
    """One bit of what a plane holds."""
    size = plane.data.itemsize
    place = slice(byte // size, byte // size + 1)
    value = plane.values(place).clone()
    value.view(torch.uint8)[byte % size] ^= 1 << bit
    with plane.writing(place) as memory:
        memory.copy_(value)


def layer(engine):
    [tile] = [tile for tile in store_of(engine).tiles if tile.name == "layer 1"]
    return tile


@pytest.mark.parametrize(
    ("rule", "place"),
    few(sorted(product(SWEPT, PLACES), key=lambda each: each not in USUAL)),
)
def test_checksums_change_nothing(rule, place):
    options: dict = {"rule": rule, "precision": "bf16", "placement": PLACES[place]}
    runs = [
        trained(llama(), make_batches(3), verify=verify, **options) for verify in ("step", "off")
    ]
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])


@swept(together=1, place=list(PLACES), rule=["adamw int8", "muon", "muon clipped"])
def test_a_flipped_bit_of_any_plane_stops_the_next_step(rule, place, tmp_path):
    steps = make_batches(2)
    options: dict = {"rule": rule, "precision": "bf16", "placement": PLACES[place]}
    with make_engine(llama(), **options) as engine:
        number = len(layer(engine).planes)
    for which in range(number):
        with make_engine(llama(), verify="step", **options) as engine:
            [plane, buffer] = [*layer(engine).planes.items()][which]
            if not len(buffer.data):
                continue
            engine.step(steps[0])
            flip(buffer, 4)
            where = "host" if plane.on_device and place == "disk" else place
            with pytest.raises(
                RunFailed, match=f"layer 1: the plane of {plane.name} \\({where}\\) "
            ):
                engine.step(steps[1])
                engine.save(tmp_path / "damaged")  # directions that wait for the norm come after it


def test_one_flipped_bit_is_told_from_several():
    assert bit_checks._flipped(0, 8) is None  # changes that cancel in one of the sums
    steps = make_batches(2)
    for bytes_flipped, said in (
        ((4321,), ONE_BIT.replace("[0-9,]+", "4,321")),
        ((8, 4321), "no single flipped"),
    ):
        with make_engine(llama(), verify="step") as engine:
            engine.step(steps[0])
            for byte in bytes_flipped:
                flip(layer(engine).weights, byte)
            with pytest.raises(RunFailed, match=said):
                engine.step(steps[1])


def test_a_loss_that_is_not_finite_because_of_a_bit_is_no_loss_that_diverges():
    for verify in ("step", "save"):
        with make_engine(llama(), verify=verify) as engine:
            engine.step(make_batches(1)[0])
            flip(layer(engine).weights, 7, bit=6)  # the highest one of an exponent
            with pytest.raises(RunFailed, match="layer 1: the plane of weights .*one flipped bit"):
                engine.step(make_batches(1)[0])


@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_that_changes_before_its_update_is_found(place):
    class Flipping(CpuDevice):
        armed: Callable[[], None] | None = None

        def run(self, stream, name, *work, **buffers):
            if name == ("check layer 1" if place == "device" else "note norm") and self.armed:
                self.armed()
            return super().run(stream, name, *work, **buffers)

    device, steps = Flipping(), make_batches(2)
    with make_engine(llama(), verify="step", device=device, placement=PLACES[place]) as engine:
        engine.step(steps[0])
        gradient = host_gradients(engine)[layer(engine).index].buffer
        device.armed = lambda: flip(gradient, 100)
        with pytest.raises(RunFailed, match="layer 1: the gradient .* differs from its checksum"):
            engine.step(steps[1])


class FlippingCopies(CpuDevice):
    """Flips a bit of the copy of `layer 1` that the visit with this number uses in a step."""

    visit: int | None = None
    byte = 4321

    def run(self, stream, name, work, reads=(), writes=()):
        if name == "sum copy of layer 1" and self.visit is not None:
            self.visit -= 1
            if self.visit < 0:
                reads[0].data.view(torch.uint8)[self.byte] ^= 8
                self.visit = None
        return super().run(stream, name, work, reads, writes)


SLOTTED = Placement(slots=1)
COPIES: dict[str, dict] = {
    "host": {"placement": SLOTTED},
    "disk": {"placement": PLACES["disk"], "rule": "adamw int8", "precision": "bf16"},
    "without clipping": {"clip": None, "placement": SLOTTED},
    "stays": {"placement": Placement(slots=1, keep_weights=3)},
    "frozen": {"adapter": {"r": 2, "target_modules": ["q_proj"]}, "placement": SLOTTED},
    "packed": {"adapter": {"r": 2}, "base": "nf4", "precision": "bf16", "placement": SLOTTED},
}


@swept(together=1, kind=list(COPIES), visit=[0, 1])
def test_a_flipped_bit_of_a_copy_on_the_device_ends_its_step(kind, visit):
    device, steps = FlippingCopies(), make_batches(2)
    with make_engine(llama(), verify="step", device=device, **COPIES[kind]) as engine:
        engine.step(steps[0])
        before, device.visit = masters(engine), visit
        with pytest.raises(RunFailed, match="layer 1: the copy of weights on .*" + ONE_BIT[12:]):
            engine.step(steps[1])
        assert kind == "without clipping" or same(before, masters(engine))


def test_frozen_planes_are_compared_in_each_step():
    adapter = {"r": 2, "target_modules": ["q_proj"]}
    for place in ("host", "device"):
        options: dict = {"adapter": adapter, "placement": PLACES[place], "verify": "step"}
        with make_engine(llama(), **options) as engine:
            tile = layer(engine)
            engine.step(make_batches(1)[0])
            flip(tile.weights, tile.weights.data.nbytes - 4096)
            with pytest.raises(RunFailed, match="layer 1: the plane of weights"):
                engine.step(make_batches(1)[0])


@swept(together=1, place=list(PLACES), verify=["save", "off"])
def test_a_state_with_a_flipped_bit_is_not_saved(verify, place, tmp_path):
    step = make_batches(1)[0]
    with make_engine(llama(), verify=verify, placement=PLACES[place]) as engine:
        engine.step(step)
        engine.save(tmp_path / "whole")
        flip(next(iter(layer(engine).states.values())), 8)
        if verify == "off":
            engine.save(tmp_path / "damaged")
            return
        with pytest.raises(RunFailed, match="layer 1: the plane of first moment .*one flipped bit"):
            engine.save(tmp_path / "damaged")
        assert not (tmp_path / "damaged").exists()
    with Engine.load(tmp_path / "whole", device="cpu", disk=tmp_path, verify="step") as engine:
        flip(layer(engine).weights, 8)
        with pytest.raises(RunFailed, match="layer 1: the plane of weights"):
            engine.step(step)


def said_of(engine, steps):
    try:
        for step in steps:
            engine.step(step)
    except RunFailed as error:
        return str(error)
    return "nothing was found"


@pytest.mark.parametrize("place", few(["host", "device"]))
def test_ranks_stop_together(place, tmp_path):
    def work(group):
        options: dict = {"verify": "step", "group": group, "placement": PLACES[place]}
        engine = make_engine(llama(), **options)
        steps = make_batches(3)
        engine.step(steps[0])
        if group.rank() == 1:
            flip([*layer(engine).states.values()][1], 16)
        return said_of(engine, steps[1:])

    others, own = run_ranks(2, tmp_path, work)
    assert re.match("layer 1: the plane of second moment .*one flipped bit", own), own
    assert "of another rank has changed" in others or "has lost the others" in others


@pytest.mark.parametrize("byte", few([-4321, 4321]), ids=["second rank's", "first rank's"])
def test_a_copy_of_any_ranks_block_is_compared(byte, tmp_path):
    def work(group):
        device = FlippingCopies()
        engine = make_engine(llama(), verify="step", group=group, device=device)
        engine.step(make_batches(1)[0])
        device.visit, device.byte = 0 if group.rank() == 1 else None, byte
        return said_of(engine, make_batches(1))

    _, own = run_ranks(2, tmp_path, work)
    assert re.match("layer 1: the copy of weights on the device .*one flipped bit", own), own


def test_other_words_are_refused():
    with pytest.raises(InputError, match="verify is 'always'; it must be step, save or off"):
        make_engine(llama(), verify="always")
