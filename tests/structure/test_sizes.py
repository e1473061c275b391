"""Small units: the median and the tail of lengths are held, not each single one."""

import ast
import subprocess
from collections import Counter
from statistics import median, quantiles

from tests.structure.source_tree import ROOT, nodes, sources

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_ROOT_ENTRIES = 600, 90, 14
MAX_MEDIAN_LINES, MAX_90TH_PERCENTILE_LINES = 8, 24
BUILT = (".so", ".dylib", ".o", ".whl", ".pyc", ".egg-info", ".safetensors", ".gguf")


def test_files_are_short():
    long = {
        str(path.relative_to(ROOT)): count
        for path in [*sources(), *(ROOT / "megatrain").rglob("csrc/*")]
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    }
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"


def function_lengths():
    return {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in sources()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_functions_are_short():
    lengths = function_lengths()
    long = {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES}
    assert not long, f"over {MAX_FUNCTION_LINES} lines: {long}"
    assert median(lengths.values()) <= MAX_MEDIAN_LINES
    assert quantiles(lengths.values(), n=10)[-1] <= MAX_90TH_PERCENTILE_LINES


def tracked_files():
    """Files in version control; in an unpacked source archive, all that are not hidden."""
    run = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if run.returncode == 0:
        return run.stdout.splitlines()
    return [str(path.relative_to(ROOT)) for path in ROOT.iterdir() if path.name[0] != "."]


def test_the_root_is_small():
    """Hidden entries are other tools' files, whose place is not ours to choose."""
    entries = {name.split("/")[0] for name in tracked_files() if name[0] != "."}
    assert len(entries) <= MAX_ROOT_ENTRIES, sorted(entries)


def test_nothing_built_is_tracked():
    built = [name for name in tracked_files() if name.endswith(BUILT)]
    assert not built


def test_files_of_tests_have_names_of_their_own():
    """Folders that are no packages share one space of names: pytest collects no second file."""
    files = [p for p in (ROOT / "tests").rglob("*.py") if not (p.parent / "__init__.py").exists()]
    names = Counter(path.name for path in files)
    assert not [name for name, count in names.items() if count > 1]
