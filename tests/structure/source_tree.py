"""The package as the structure tests see it: files, syntax trees, imports."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatrain"

LEVELS = (
    {"errors"},
    {"base"},
    {"compat", "driver"},
    {"loss", "placement", "tile", "telemetry", "kernels", "parallel"},
    {"machine", "optim"},
    {"config", "device"},
    {"model", "data", "run_folder"},
    {"store"},
    {"checkpoint"},  # it knows tiles, files and a disk, no steps
    {"source"},
    {"engine"},
    {"forecast"},  # it runs the engine's own step, on a device that keeps time
    {"autoplace"},
    {"api", "plan"},
    {"generate", "report"},
    {"train", "integrations"},
    {"cli"},
    {"__main__"},
)
"""A part imports only from lower levels. megatrain/__init__.py only re-exports, and is on top."""


def sources(folder: Path = PACKAGE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sources()}


def level_of(module: str) -> int | None:
    """The level of a module; None if its part has none, which a test reports."""
    if module == "megatrain":
        return len(LEVELS)
    part = module.split(".")[1]
    return next((level for level, parts in enumerate(LEVELS) if part in parts), None)


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All that a file's syntax tree consists of."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every imported module with its line, also those inside functions."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in MODULES else str(node.module)), node.lineno


def own_imports(path: Path) -> Iterator[tuple[str, int]]:
    for name, line in imports(path):
        if name.split(".")[0] == "megatrain":
            yield name, line
