"""Plants each fault in a copy of the tree and says which test notices it.

    python -m tests.mutants                 all faults, each with the tests near it
    python -m tests.mutants waits ranks     those of some areas
    python -m tests.mutants --rest          with all of `make test` where the tests near it miss it
    python -m tests.mutants --table         the table of CONTRIBUTING.md

Fails if a fault stays unnoticed. Each run is a fork of this process, which has imported torch and
transformers, but nothing of the tree.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers  # noqa: F401

from tests.mutants.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
COPIED = ("megatrain", "tests", "benchmarks", "examples", "docs")
PLAIN = "not gpu and not exhaustive"
LIMIT_SECONDS = 120  # of a test: a missing wait may hang it


class FirstFailure:
    """Writes the name of the first test that fails to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.file.write_text(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def copy_tree(to: Path) -> None:
    leave = shutil.ignore_patterns("__pycache__", ".*")
    for name in COPIED:
        shutil.copytree(ROOT / name, to / name, ignore=leave, symlinks=True)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, to / path.name)


def failing_test(tree: Path, fault: Fault, tests: list[str]) -> str:
    """The first test that fails in a tree with the fault; nothing if none does."""
    file, failure = fault.place(tree / "megatrain"), tree / "failure"
    text = file.read_text(encoding="utf-8")
    failure.unlink(missing_ok=True)
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    sys.stdout.flush()
    try:
        child = os.fork()
        if child == 0:
            run_in(tree, tests, failure)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        file.write_text(text, encoding="utf-8")
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        raise SystemExit(f"{fault.breaks}: the tests cannot be run (pytest ends with {code})")
    return failure.read_text() if failure.exists() else ""


def run_in(tree: Path, tests: list[str], failure: Path) -> None:
    """Run tests of a tree in this process, and end it."""
    code = 3
    try:
        os.chdir(tree)
        out = os.open(os.devnull, os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "megatrain")]:
            del sys.modules[name]
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
        # An editable installation's finder would import the package of the tree without the fault.
        sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
        assert find_spec("megatrain").origin == str(tree / "megatrain" / "__init__.py")
        os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        options = ["-x", "-q", "-m", PLAIN, f"--timeout={LIMIT_SECONDS}", "-p", "no:cacheprovider"]
        code = int(pytest.main([*options, *tests], plugins=[FirstFailure(failure)]))
    finally:
        os._exit(code)


def print_table() -> None:
    counts = Counter(fault.area for fault in FAULTS)
    print("| area | faults | such as |\n|---|---|---|")
    for area, count in counts.items():
        example = next(fault.breaks for fault in FAULTS if fault.area == area)
        print(f"| {area} | {count} | {example} |")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("areas", nargs="*", help="areas, or folders of the package")
    parser.add_argument("--rest", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print_table()
        return 0
    torch.set_num_threads(1)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        for fault in FAULTS:
            if options.areas and not {fault.area, fault.folder} & {*options.areas}:
                continue
            found = failing_test(tree, fault, [f"tests/{name}" for name in fault.tests])
            if not found and options.rest:
                found = failing_test(tree, fault, ["tests"])
            missed += not found
            print(f"{fault.area:12} {fault.breaks:70} {found or 'NOT NOTICED'}", flush=True)
    print(f"{missed} not noticed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
