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

ROOT = Path(__file__).parents[1]
MARKED = "exhaustive and not gpu"
PARTS = 10
COMMITS_BACK = 30
MOST = 12 * 60 * 2 * 10 // 23  # tests: two workers for twelve minutes, 2.3 seconds for each

ALL = ("tests/",)
STEP = (
    "tests/families/test_families.py",
    "tests/race/",
    *(f"tests/parity/test_{name}.py" for name in (
        "bf16", "disk", "dropout", "failures", "muon", "gradients", "losses", "neutrality",
        "ranks", "sequence_parallel", "tiles", "training", "waiting",
    )),
    *("tests/unit/test_forecast", "tests/unit/test_fits.py"),
)  # fmt: skip
MODELS = (
    *("tests/families/", "tests/parity/test_adapters.py", "tests/parity/test_bf16.py"),
    *("tests/parity/test_packing.py", "tests/parity/test_tiles.py", "tests/unit/test_program.py"),
)
SAVED = (
    *("tests/checkpoint/", "tests/reliability/test_kill.py", "tests/reliability/test_resume.py"),
    "tests/reliability/test_faults.py",
)
FORECASTS = (
    *("tests/unit/test_forecast", "tests/unit/test_fits.py", "tests/unit/test_plan"),
    *("tests/unit/test_search.py", "tests/cli/test_plan_command.py"),
    *("tests/parity/test_forecast_of_ranks.py", "tests/parity/test_generation.py"),
    "tests/parity/test_memory.py",
)
LOSSES = (
    *("tests/parity/test_losses.py", "tests/parity/test_policy.py"),
    *("tests/parity/test_trl", "tests/cli/test_distill.py", "tests/cli/test_preferences.py"),
    "tests/unit/test_trainer",
)
RUNS = ("tests/cli/", "tests/reliability/")
RANKS = (
    *("tests/parity/test_ranks.py", "tests/parity/test_sequence_parallel.py"),
    "tests/cli/test_ranks.py",
)
TRAINERS = (
    *("tests/unit/test_integrations.py", "tests/unit/test_trainer"),
    "tests/cli/test_examples.py",
)
NEAR: dict[str, tuple[str, ...]] = {
    "megatrain": (*RANKS, *SAVED, *STEP),
    "megatrain/autoplace": FORECASTS,
    "megatrain/base": RUNS,
    "megatrain/checkpoint": SAVED,
    "megatrain/cli": ("tests/cli/", "tests/unit/test_benchmarks.py"),
    "megatrain/compat": (*MODELS, *TRAINERS),
    "megatrain/config": RUNS,
    "megatrain/data": (*RUNS, "tests/unit/test_data", "tests/parity/test_trl.py"),
    "megatrain/device": (*STEP, *RANKS),
    "megatrain/driver": ("tests/cli/test_bench.py", "tests/unit/test_benchmarks.py"),
    "megatrain/engine": STEP,
    "megatrain/forecast": FORECASTS,
    "megatrain/generate": (*("tests/parity/test_generation", "tests/cli/test_rollout"),),
    "megatrain/integrations": TRAINERS,
    "megatrain/kernels": (
        *("tests/unit/test_kernels", "tests/unit/test_wheel.py", "tests/parity/test_neutrality.py"),
        "tests/parity/test_training.py",
    ),
    "megatrain/loss": LOSSES,
    "megatrain/machine": FORECASTS,
    "megatrain/model": MODELS,
    "megatrain/optim": (
        *("tests/parity/test_muon.py", "tests/checkpoint/"),
        "tests/parity/test_training.py",
    ),
    "megatrain/parallel": (*RANKS, *STEP),
    "megatrain/plan": FORECASTS,
    "megatrain/report": (),
    "megatrain/source": (*SAVED, *MODELS, "tests/parity/test_bf16.py"),
    "megatrain/store": (*SAVED, *STEP),
    "megatrain/telemetry": ("tests/cli/test_bench.py", "tests/unit/test_benchmarks.py"),
    "megatrain/tile": (*STEP, "tests/parity/test_quantised_folders.py"),
    "megatrain/run_folder": RUNS,
    "megatrain/train": RUNS,
    "benchmarks": ("tests/cli/test_bench.py", "tests/unit/test_benchmarks.py"),
    "docs": ("tests/cli/test_shown.py",),
    "examples": (*("tests/cli/test_examples.py", "tests/cli/test_shown.py"),),
    "tests": ALL,
}
"""By folder of what changed, the beginnings of the names of the test files that it needs.

A folder that is not in the table has those of the nearest one above it.
"""


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
