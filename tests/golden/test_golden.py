"""Moves and renames change no operation, no wait, no public name, no key, no help text."""

import pytest

from megatrain import Placement
from tests.golden.digests import GROUPS, PLACEMENTS, Noting, differences, snapshots, stored, traces
from tests.race import schedule
from tests.sweeps import few

REMEDY = "if that is meant: python -m tests.golden --update"
PARTS = 20


@pytest.mark.parametrize("part", few(range(PARTS)))
def test_operations_and_waits_are_those_of_before(part):
    """`python -m tests.golden --trace GROUP NUMBER` shows them, to compare two commits."""
    numbers = range(part, PLACEMENTS, PARTS)
    before = {
        group: {str(number): stored()["traces"][group][str(number)] for number in numbers}
        for group in GROUPS
    }
    changed = differences(before, traces(numbers))
    assert not changed, "\n".join([*changed, REMEDY])


def test_names_keys_and_texts_are_those_of_before():
    content = snapshots()
    changed = differences({name: stored()[name] for name in content}, content)
    assert not changed, "\n".join([*changed, REMEDY])


def test_a_wait_less_and_a_name_less_are_told(monkeypatch):
    before = {"names": {"one": "(a)", "two": "(b)"}, "texts": ["first", "last"]}
    assert differences(before, {"names": {"one": "(a, c)"}, "texts": ["first"]}) == [
        "/names/one: '(a)' is now '(a, c)'",
        "/names/two: '(b)' is now None",
        "/texts: - last",
    ]
    monkeypatch.setattr(schedule, "TraceDevice", Noting)
    notes = [
        schedule.trace(Placement(slots=slots), 1.0, False, **how).notes
        for slots, how in ((2, {}), (2, {}), (3, {}), (2, {"rule": "lion"}))
    ]
    assert notes[0] == notes[1] and notes[2] != notes[0] != notes[3]
