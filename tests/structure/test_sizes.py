"""Small units: files under 400 lines, functions under 60, columns within 100."""

import ast
import subprocess

from tests.structure.source_tree import ROOT, nodes, sources

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_COLUMNS, MAX_ROOT_ENTRIES = 399, 59, 100, 14
BUILT = (".so", ".dylib", ".o", ".whl", ".pyc", ".egg-info", ".safetensors", ".gguf")


def test_files_are_short():
    long = {
        str(path.relative_to(ROOT)): count
        for path in [*sources(), *(ROOT / "megatrain").rglob("csrc/*")]
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    }
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"


def test_functions_are_short():
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines}"
        for path in sources()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def tracked_files() -> list[str]:
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


def test_native_sources_keep_to_the_columns():
    wide = [
        f"{path.name}:{number}"
        for path in (ROOT / "megatrain" / "kernels" / "csrc").iterdir()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]
    assert not wide
