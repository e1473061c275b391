"""A README whose every command exists, and what makefile and documents name."""

import re

import pytest
import typer
import yaml

from megatrain.cli.app import app
from tests.structure.source_tree import PACKAGE, ROOT

MAX_README_LINES = 120
COMMANDS = typer.main.get_command(app).commands


def readme():
    return (ROOT / "README.md").read_text(encoding="utf-8")


def make_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, flags=re.MULTILINE))


def shown_commands(text):
    """The words of every command line in a document's code blocks, and of every inline command."""
    for block in re.findall(r"^```.*?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            yield line.removeprefix("$ ").split("#")[0].split()
    for inline in re.findall(r"`((?:megatrain|make) [^`\n]+)`", text):
        yield inline.split()


def test_modules_that_make_runs_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"\$\(RUN\) ((?:megatrain|benchmarks|tests)[.\w]*)", makefile)
    assert "megatrain" in named and "benchmarks.kernels" in named
    for name in named:
        path = ROOT.joinpath(*name.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def test_the_readme_is_short():
    assert len(readme().splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_shown_commands_exist(document):
    wrong = []
    for words in shown_commands((ROOT / document).read_text(encoding="utf-8")):
        if words[:1] == ["megatrain"] and words[1:2] and words[1] not in COMMANDS:
            wrong.append(" ".join(words))
        if words[:1] == ["make"]:
            wrong += [f"make {word}" for word in words[1:] if word not in make_targets()]
    assert not wrong, wrong


def test_every_command_is_in_the_readme():
    shown = {tuple(words[:2]) for words in shown_commands(readme())}
    missing = [name for name in COMMANDS if ("megatrain", name) not in shown]
    assert not missing, f"not in the README: {missing}"
    for target in ("demo", "test"):
        assert ("make", target) in shown


@pytest.mark.parametrize("path", [".github/workflows/ci.yml", ".pre-commit-config.yaml"])
def test_other_tools_run_what_anyone_can_run(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    yaml.safe_load(text)
    commands = re.findall(r"(?:run|entry): (.+)", text)
    assert commands
    for command in commands:
        program, *words = command.split()
        if program == "make":
            assert set(words) <= make_targets(), command
        else:
            assert (ROOT / program).is_file(), command


def test_every_document_is_a_page_of_the_site():
    """`make site` refuses others; here it shows before that."""
    pages = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if f"/{path.name}" not in pages]
    assert not missing, f"not in mkdocs.yml: {missing}"


def test_what_to_read_first_is_there():
    """The files that docs/engine.md names beside each package are in one of its packages."""
    text = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    table = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| `")]
    rows = [[re.findall(r"`([\w/]+(?:\.py|/))`", cell) for cell in row] for row in table]
    packages = [(parts, files) for parts, _, files in rows if parts and files]
    assert len(packages) > 8
    for parts, files in packages:
        folders = [PACKAGE / part for part in parts if part.endswith("/")]
        for file in files:
            assert any((folder / file).is_file() for folder in (*folders, PACKAGE)), (parts, file)
