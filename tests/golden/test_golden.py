"""Moves and renames change no operation, no wait, no public name, no key, no help text."""

import pytest

from tests.golden.digests import GROUPS, PLACEMENTS, differences, snapshots, stored, traces
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
