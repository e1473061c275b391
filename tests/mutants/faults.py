"""Fifty planted faults: one small edit each, which the tests of `make test` must notice."""

from pathlib import Path
from typing import NamedTuple

import yaml


class Fault(NamedTuple):
    """An edit that breaks something.

    Attributes:
        area: what kind of thing it breaks.
        folder: below `megatrain/`; empty: all of it.
        old, new: a piece of text that occurs there once, in some file, and what takes its place.
        breaks: what goes wrong.
        tests: files or folders below `tests/` that are near it, the likeliest first.
    """

    area: str
    folder: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    def place(self, package: Path) -> Path:
        """The file of the package that has `old`. Raises ValueError: there is none, or two."""
        files = [
            path for path in (package / self.folder).rglob("*.py") if self.old in path.read_text()
        ]
        if len(files) != 1 or files[0].read_text().count(self.old) != 1:
            raise ValueError(f"{self.breaks}: {self.old!r} is not once below {self.folder!r}")
        return files[0]


TABLE = Path(__file__).with_name("faults.yaml")
FAULTS = [
    Fault(area, **{**fault, "tests": tuple(fault["tests"])})
    for area, faults in yaml.safe_load(TABLE.read_text(encoding="utf-8")).items()
    for fault in faults
]
