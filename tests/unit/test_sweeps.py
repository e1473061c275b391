"""The few of many combinations that the plain run of the tests has."""

from itertools import product

from tests.sweeps import few, swept

AXES = {"one": [1, 2, 3], "other": {"a": None, "b": 0.5}, "third": [False, True]}


def shown(together):
    """All combinations, and those of them that are not exhaustive."""
    rows = swept(together, **AXES).args[1]
    return {row.values for row in rows}, {row.values for row in rows if not row.marks}


def test_each_value_meets_each_of_another_axis_in_few_combinations():
    every, chosen = shown(2)
    assert every == set(product([1, 2, 3], [None, 0.5], [False, True]))
    for one, two in ((0, 1), (0, 2), (1, 2)):
        assert {(row[one], row[two]) for row in chosen} == {(row[one], row[two]) for row in every}
    assert len(chosen) < 8 and len(shown(1)[1]) == 3


def test_of_a_list_those_at_some_places_or_the_first_stay():
    for places, wanted in (((), [1]), ((1, 2), [(2, 3), None])):
        rows = few([1, (2, 3), None], *places)
        assert [row.values for row in rows] == [(1,), (2, 3), (None,)]
        stay = [row.values for row in rows if not row.marks]
        assert stay == [each if isinstance(each, tuple) else (each,) for each in wanted]
