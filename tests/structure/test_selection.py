"""Which exhaustive tests a change runs: those near it, as time allows, and all in ten commits."""

import pytest

from tests.selection import ALL, NEAR, PARTS, ROOT, choose, names_near
from tests.structure.source_tree import PACKAGE, sources

TESTS = [f"tests/{file}.py::test_{number}" for file in "ab" for number in range(50)]
TESTS += ["tests/c.py::test_0"]


def test_every_folder_is_in_the_table_and_every_name_there_exists():
    folders = {path.parent for path in sources() if path.parent != PACKAGE}
    missing = {str(folder.relative_to(ROOT)) for folder in folders} - set(NEAR)
    assert not missing, f"tests/near.yaml does not say which exhaustive tests are near {missing}"
    absent = [name for name in NEAR if not (ROOT / name).exists()]
    absent += [name for names in NEAR.values() for name in names if not [*ROOT.glob(f"{name}*")]]
    assert not absent, f"tests/near.yaml names what does not exist: {absent}"


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("megatrain/engine/step.py", NEAR["megatrain/engine"]),
        ("megatrain/kernels/csrc/CMakeLists.txt", NEAR["megatrain/kernels"]),
        ("megatrain/api.py", NEAR["megatrain"]),
        ("tests/parity/test_tiles.py", ("tests/parity/test_tiles.py",)),
        ("tests/parity/cases.py", ("tests/parity/",)),
        ("tests/sweeps.py", ALL),
        ("constraints.txt", ALL),
        ("README.md", ()),
    ],
)
def test_a_changed_file_needs_the_names_near_it(path, near):
    assert (ROOT / path).exists() and names_near(path) == near


def test_ten_commits_in_turn_run_each_test_once():
    runs = [choose(TESTS, [], turn)[0] for turn in range(7, 7 + PARTS)]
    assert sorted(test for run in runs for test in run) == sorted(TESTS)
    assert all(runs)


def test_the_names_near_a_change_follow_its_tenth_while_there_is_time():
    tenth, _ = choose(TESTS, [], 3)
    chosen, left_out = choose(TESTS, ["tests/b.py", "tests/c.py"], 3, len(tenth) + 3)
    assert chosen[: len(tenth)] == tenth and len(chosen) == len(tenth) + 3
    assert "tests/c.py::test_0" in chosen  # each file has its turn
    near = {test for test in TESTS if not test.startswith("tests/a.py")}
    assert {*chosen, *left_out} == near | {*tenth} and len({*chosen} & {*left_out}) == 0
    assert choose(TESTS, ALL, 3, 1)[0] == tenth
    assert sorted(choose(TESTS, ALL, 3)[0]) == sorted(TESTS)
