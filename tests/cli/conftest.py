"""The command as tests call it, and one finished run for those that only look."""

import pytest
from typer.testing import CliRunner

from megatrain.cli.app import app
from tests.cli.cases import write_run_file


@pytest.fixture
def megatrain(monkeypatch, tmp_path):
    """Runs the command in an empty folder; `.exit_code`, `.stdout`, `.stderr`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def run_file(tmp_path, tokenizer_folder):
    return write_run_file(tmp_path, tokenizer_folder)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, tokenizer_folder):
    """Folder and output of one finished run; to be read only."""
    folder = tmp_path_factory.mktemp("trained")
    run_file = write_run_file(folder, tokenizer_folder)
    result = CliRunner().invoke(app, ["train", str(run_file)])
    assert result.exit_code == 0, result.output
    return folder / "run", result
