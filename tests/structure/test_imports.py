"""Imports go one way, and each device and heavy library stays behind its door."""

import ast
import importlib
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.forks import forked
from tests.structure.source_tree import MODULES, ROOT, imports, level_of, nodes, own_imports

CUDA_FILE = "megatrain.device.cuda"

LAZY = {
    "pydantic": {"config", "checkpoint", "forecast"},
    "datasets": {"data"},
    "pyarrow": {"data"},
    "typer": {"cli"},
    "rich": {"cli", "telemetry", "train"},
    "matplotlib": {"telemetry"},
    "pynvml": {"driver"},
    "peft": {"compat"},
}
"""Packages that the engine must work without, and the only parts which may import them."""


def test_imports_go_downwards():
    wrong = []
    for name, path in MODULES.items():
        assert level_of(name) is not None, f"no level for {name}: see LEVELS in source_tree.py"
        for target, line in own_imports(path):
            same_part = name.split(".")[1:2] == target.split(".")[1:2]
            # The version is all that the parts may take from the top.
            if same_part or target == "megatrain":
                continue
            if level_of(target) >= level_of(name):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_only_the_version_is_taken_from_the_top():
    wrong = []
    for path in MODULES.values():
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module == "megatrain":
                for alias in node.names:
                    if f"megatrain.{alias.name}" not in MODULES and alias.name != "__version__":
                        wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {alias.name}")
    assert not wrong, "\n".join(wrong)


def test_there_are_no_import_cycles():
    graph = {
        name: {target for target, _ in own_imports(path)} - {"megatrain", name}
        for name, path in MODULES.items()
        if name != "megatrain"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def says_torch_cuda(node):
    if isinstance(node, ast.Attribute):
        return node.attr == "cuda" and ast.unparse(node) == "torch.cuda"
    if isinstance(node, ast.Import | ast.ImportFrom):
        return re.search(r"torch\.cuda|from torch import .*\bcuda\b", ast.unparse(node))
    return False


def test_torch_cuda_appears_in_one_file():
    found = {name for name, path in MODULES.items() if any(map(says_torch_cuda, nodes(path)))}
    assert found == {CUDA_FILE}


NAMES_DEVICES = ("megatrain.device", "megatrain.config.schema")  # schema: of run files


def asks_for_a_kind(node):
    """Compares a device's kind, or writes the name of a GPU's kind."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        kinds = [side for side in sides if isinstance(side, ast.Attribute) and side.attr == "kind"]
        return any("device" in ast.unparse(side.value) for side in kinds)
    return isinstance(node, ast.Constant) and re.fullmatch(
        r"(cuda|mps|hip)(:\d+)?", str(node.value)
    )


def test_devices_are_asked_what_they_can_and_not_what_they_are_called():
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for name, path in MODULES.items()
        if not name.startswith(NAMES_DEVICES)
        for node in nodes(path)
        if asks_for_a_kind(node)
    ]
    assert not wrong, "\n".join(wrong)


LIBRARIES = ("torch", "transformers", "accelerate")
OTHERS_PRIVATE = {"_exit", "_fingerprint"}  # of Python's os and of datasets


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def own_private_names():
    """Names with an underscore that the package itself defines."""
    found = set()
    for path in MODULES.values():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
                found |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return {name for name in found if is_private(name)}


def internals(node, own):
    """Names of libraries' internals that a piece of code uses."""
    if isinstance(node, ast.Attribute):
        names = [node.attr]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        given = node.args[1:2] if node.func.id in ("getattr", "hasattr", "setattr") else []
        names = [str(each.value) for each in given if isinstance(each, ast.Constant)]
    elif isinstance(node, ast.Import | ast.ImportFrom):
        module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        if module == "unittest" or module.startswith(("unittest.", "transformers.")):
            return [module]
        library = module.split(".")[0] in LIBRARIES
        return [
            f"{module}.{alias.name}"
            for alias in node.names
            if library and any(map(is_private, f"{module}.{alias.name}".split(".")))
        ]
    else:
        return []
    return [name for name in names if is_private(name) and name not in own | OTHERS_PRIVATE]


def test_internals_of_libraries_stay_in_compat():
    own = own_private_names()
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {name}"
        for module, path in MODULES.items()
        if not module.startswith("megatrain.compat.")
        for node in nodes(path)
        for name in internals(node, own)
    ]
    assert not wrong, "\n".join(wrong)


def test_optional_packages_stay_in_their_parts():
    wrong = []
    for name, path in MODULES.items():
        part = name.split(".")[1] if "." in name else ""
        for target, line in imports(path):
            package = target.split(".")[0]
            if package in LAZY and part not in LAZY[package]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {package}")
    assert not wrong, "\n".join(wrong)


def test_engine_and_plan_import_without_configuration_and_data_libraries():
    """In a fork, which has torch and transformers where other tests have imported them."""
    blocked = {"pydantic", "datasets", "pyarrow", "typer", "matplotlib", "rich"}
    blocked |= {"pandas", "sklearn", "torchvision", "triton"}

    def work():
        for name in [n for n in sys.modules if n.split(".")[0] in {"megatrain", *blocked}]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(blocked))
        importlib.import_module("megatrain").Engine  # noqa: B018
        del sys.modules["rich"]
        importlib.import_module("megatrain.cli.plan")

    assert forked(work) == 0


SLOW = {"torch", "transformers", "datasets", "pyarrow", "matplotlib", "rich", "pynvml"}
SLOW |= {"numpy", "yaml", "psutil", "safetensors", "jinja2"}


@pytest.mark.parametrize("arguments", ["", "--help", "train --help", "plan --help"])
def test_help_and_the_plain_import_load_nothing_slow(arguments):
    # typer reads a command's options by pydantic; the group has none.
    slow = SLOW if arguments.count(" ") else SLOW | {"pydantic"}
    command = "import megatrain.cli as cli; cli.main()" if arguments else "import megatrain"
    code = (
        f"import sys; sys.argv = ['megatrain', *{arguments.split()}]\n"
        f"try: {command}\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"print(*{slow} & set(sys.modules), file=sys.stderr)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stderr.split()) == (0, [])
    assert ("Usage: megatrain" in run.stdout) == bool(arguments)
