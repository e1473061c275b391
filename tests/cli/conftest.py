"""The command as tests call it, and one finished run for those that only look."""

import pytest
from typer.testing import CliRunner

from megatrain.cli.app import app
from megatrain.data import train_bpe_tokenizer
from tests.cli.cases import SENTENCES, write_run_file


@pytest.fixture
def megatrain(monkeypatch, tmp_path):
    """Runs the command in an empty folder; `.exit_code`, `.stdout`, `.stderr`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    text = folder / "corpus.txt"
    text.write_text("\n".join(SENTENCES * 4))
    train_bpe_tokenizer([text], 300, folder)
    return folder


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
