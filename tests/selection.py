"""The part of the exhaustive tests that a change needs: those near it, and a tenth of all.

    python -m tests.selection > build/selected.txt
    python -m pytest -m "exhaustive and not gpu" @build/selected.txt

The change is what differs from the commit that last passed: `CI_BASE`, if the environment names it,
else `refs/ci/passed`, which `.ci/run` sets, else the commit some first parents ago. Without such a
history everything counts as changed. The tenth moves on with each commit, so that ten commits in
turn run all; the tests near the change follow, until the time is spent.
"""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from zlib import crc32

import pytest

from tests.refusals import table

ROOT = Path(__file__).parents[1]
MARKED = "exhaustive and not gpu"
PARTS = 10
COMMITS_BACK = 30
MOST = 12 * 60 * 2  # tests: two workers for twelve minutes; all took 0.93 seconds each on average

ALL = ("tests/",)
_GROUPS, _NEAR = table(__file__, "near.yaml").values()
NEAR: dict[str, tuple[str, ...]] = {
    folder: tuple(f"tests/{each}" for name in names for each in _GROUPS.get(name, [name]))
    for folder, names in _NEAR.items()
}
"""By folder of what changed, the beginnings of the names of the test files that it needs."""


def names_near(path: str) -> tuple[str, ...]:
    """The beginnings of names of test files that a changed file needs."""
    file = PurePosixPath(path)
    if path in ("pyproject.toml", "constraints.txt"):
        return ALL
    if file.parts[0] == "tests" and len(file.parts) > 2:
        return (path,) if file.name.startswith("test_") else (f"{file.parent}/",)
    return next((NEAR[str(folder)] for folder in file.parents if str(folder) in NEAR), ())


def git(*arguments: str) -> list[str] | None:
    """The lines that git prints, or None if it fails: there is no repository, or no such commit."""
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return None if run.returncode else run.stdout.splitlines()


def base_commit() -> str | None:
    for name in (os.environ.get("CI_BASE"), "refs/ci/passed", f"HEAD~{COMMITS_BACK}"):
        if name and git("rev-parse", "-q", "--verify", f"{name}^{{commit}}"):
            return name
    return None


def changed_files(base: str) -> list[str]:
    """Files that differ from a commit, those not yet added to git among them."""
    differing = git("diff", "--name-only", "--no-renames", base)
    new = git("ls-files", "--others", "--exclude-standard")
    if differing is None or new is None:
        raise SystemExit(f"git cannot tell what differs from {base}")
    return differing + new


def turn_of_the_commit() -> int:
    """Which tenth comes first: the commits are counted along first parents."""
    count = git("rev-list", "--count", "--first-parent", "HEAD")
    return int(count[0]) % PARTS if count else 0


def choose(
    tests: Iterable[str], near: Iterable[str], turn: int, most: int = MOST
) -> tuple[list[str], list[str]]:
    """The tests to run, the tenth first and whole, and those near that would be too many.

    Of those near, a file's first tests come before any file's second ones.
    """
    prefixes = tuple(near)
    chosen: list[str] = []
    by_file: dict[str, list[str]] = {}
    for place, test in sorted(((crc32(test.encode()) - turn) % PARTS, test) for test in tests):
        if place == 0:
            chosen.append(test)
        elif test.startswith(prefixes):
            by_file.setdefault(test.split("::")[0], []).append(test)
    in_turn = [test for row in zip_longest(*by_file.values()) for test in row if test]
    fitting = max(0, most - len(chosen))
    return chosen + in_turn[:fitting], in_turn[fitting:]


class Collected:
    """A plugin of pytest that keeps the names of the tests it collects."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = [item.nodeid for item in session.items]


def exhaustive_tests() -> list[str]:
    collected = Collected()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = pytest.main(["-qq", "--collect-only", "-m", MARKED], plugins=[collected])
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"{output.getvalue()}the tests cannot be collected: {code!r}")
    return collected.tests


def main() -> None:
    base = base_commit()
    near = {prefix for path in changed_files(base) for prefix in names_near(path)} if base else ALL
    every, turn = exhaustive_tests(), turn_of_the_commit()
    chosen, left_out = choose(every, near, turn)
    if not chosen:
        raise SystemExit(f"no test is chosen of {len(every)}")
    print(*chosen, sep="\n")
    print(
        f"{len(chosen)} of {len(every)} exhaustive tests: tenth {turn}, and those near what "
        f"differs from {base or 'nothing'}; {len(left_out)} of these are left out for time",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
