"""Real numbers do not depend on when copies and host threads get round to their work."""

import functools
from dataclasses import replace

import pytest
import torch

from megatrain import Placement
from megatrain.device import CpuDevice, disk
from megatrain.device.base import COMPUTE, Memory, Name, kind_of
from megatrain.device.disk import BLOCK
from megatrain.engine import sink
from tests.inside import sized
from tests.parity.cases import llama, make_batches, make_engine, masters
from tests.race.late import LateDevice
from tests.sweeps import few, placements

# Each step has more tokens and longer rows than the one before: every room is replaced.
SHAPES = [[(1, 3), (1, 2)], [(2, 12), (1, 7), (3, 5)], [(4, 30), (2, 20)]]

PLACEMENTS = placements("late")

# Tied or not; clipped to a norm or not; an evaluation after each step, or step upon step; a rule.
CASES = [
    *((False, 0.5, False, "adamw"), (True, None, False, "adamw")),
    *((True, 0.5, True, "adamw"), (True, None, False, "lion"), (False, 0.5, True, "muon")),
    (True, 0.5, False, "muon clipped"),
]


def train(device, placement, tied, clip, evaluate, rule):
    """All numbers that a user sees, and the final masters."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model, numbers = llama(**sizes, tie_word_embeddings=tied), []
    options = {"clip": clip, "precision": "bf16", "rule": rule}
    with make_engine(model, placement=placement, device=device, **options) as engine:
        for shapes in SHAPES:
            [step] = make_batches(1, shapes)
            result = engine.step(step)
            numbers += [result.loss, result.grad_norm]
            if evaluate:
                numbers.append(engine.evaluate(step[:1]))
        return numbers, [master.clone() for master in masters(engine).values()]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """A gradient leaves, and the head is updated, in several pieces. (The head takes two slots.)"""
    sized(monkeypatch, sink, PIECE=500)
    sized(monkeypatch, disk, PIECE=BLOCK // 2)  # whole blocks of the remainder


@functools.cache
def wanted(case):
    """Of a device that does everything at once; no placement changes a bit of it."""
    return train(CpuDevice(), Placement(), *CASES[case])


# Each placement takes one case, as late as can be or with random eagerness; the others are
# exhaustive.
RUNS = [
    pytest.param(
        placement,
        case,
        eagerness,
        id=f"{name}-{case}-{eagerness}",
        marks=[]
        if (turn, case) == (number // len(CASES) % 2, number % len(CASES))
        else [pytest.mark.exhaustive],
    )
    for number, (name, placement) in enumerate(PLACEMENTS.items())
    for case in range(len(CASES))
    for turn, eagerness in enumerate((0.0, 0.1))
]


@pytest.mark.parametrize(("placement", "case", "eagerness"), RUNS)
def test_lateness_changes_no_bit(placement, case, eagerness):
    numbers, state = train(LateDevice(eagerness), placement, *CASES[case])
    assert numbers == wanted(case)[0]
    assert all(map(torch.equal, state, wanted(case)[1]))


class ApartDevice(LateDevice):
    """Its own work has memory of the host only as `in_place` gives it, as a GPU's has."""

    def __init__(self) -> None:
        super().__init__()
        self._host: list[tuple[int, int]] = []

    def host(self, name, numel, dtype, *, pinned):
        buffer = super().host(name, numel, dtype, pinned=pinned)
        if pinned:
            first = buffer.data.data_ptr()
            self._host.append((first, first + buffer.data.nbytes))
        return buffer

    def in_place(self, buffer):
        assert self._on_host(buffer) or not len(buffer.data), buffer.name
        return replace(buffer, name=Name(Memory.IN_PLACE, buffer.name))

    def run(self, stream, name, work, reads=(), writes=()):
        for buffer in (*reads, *writes) if stream == COMPUTE else ():
            in_place = kind_of(buffer.name) is Memory.IN_PLACE
            assert not len(buffer.data) or in_place == self._on_host(buffer), (name, buffer.name)
        return super().run(stream, name, work, reads, writes)

    def _on_host(self, buffer):
        return any(first <= buffer.data.data_ptr() < last for first, last in self._host)


# What AdamW and Lion do on the device is the same, and the others evaluate and share a table, too.
@pytest.mark.parametrize("name", [name for name in PLACEMENTS if name.startswith("shared")])
@pytest.mark.parametrize("case", few(range(len(CASES)), 0, 1, 4, 5))
def test_work_of_a_device_has_host_memory_only_in_place(case, name):
    numbers, state = train(ApartDevice(), PLACEMENTS[name], *CASES[case])
    assert numbers == wanted(case)[0]
    assert all(map(torch.equal, state, wanted(case)[1]))
