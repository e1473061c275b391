"""The command as tests call it, and one finished run for those that only look."""

import json

import pytest
from safetensors.torch import load_file
from tokenizers import AddedToken
from transformers import AutoTokenizer
from typer.testing import CliRunner

from megatrain.cli.app import app
from tests.cli.cases import (
    TALK,
    TEMPLATE,
    assert_refused,
    change_run,
    leave_out,
    sets,
    tiny_llama,
    trained_in_short,
    write_run_file,
)
from tests.parity.cases import same
from tests.unit.data_cases import write_jsonl


@pytest.fixture(autouse=True)
def no_more_than_needed(monkeypatch):
    leave_out(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def user_cache(monkeypatch, tmp_path_factory):
    """The user's cache folder, with what earlier tests' plans have learnt of models."""
    folder, kept = tmp_path_factory.mktemp("cache"), tmp_path_factory.getbasetemp() / "models"
    kept.mkdir(exist_ok=True)
    (folder / "megatrain").mkdir()
    (folder / "megatrain" / "models").symlink_to(kept)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "megatrain"


@pytest.fixture
def megatrain(monkeypatch, tmp_path):
    """Runs the command in an empty folder.

    `megatrain.done` is for what must end well, `megatrain.refused(words, ...)` for what must end
    with one line of error, `megatrain.resumed` for what goes on exactly, `megatrain.planned` for
    what `plan` says to programs.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    def done(*arguments):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        return result

    def refused(told, *arguments, code=2):
        result = run(*arguments)
        assert_refused(result, told, code)
        return result

    def resumed(file, steps, first, *options, name="model.safetensors"):
        """A run of `steps`, and one that is stopped after the `first`: the same; their folders."""
        folders = [tmp_path / "whole", tmp_path / "run"]
        for folder, number, *more in ((0, steps), (1, first), (1, steps, "--resume")):
            length = sets(output__folder=str(folders[folder]), training__steps=number)
            done("train", file, *options, *length, *more)
        assert same(*(load_file(folder / "model" / name) for folder in folders))
        return folders

    def planned(*arguments):
        return json.loads(done("plan", *arguments, "--json").stdout)

    run.done, run.refused, run.resumed, run.planned = done, refused, resumed, planned
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


@pytest.fixture(scope="session")
def base(tmp_path_factory, tokenizer_folder):
    """The folder of a base model that knows the end of a text, and nothing of turns."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_tokens([AddedToken("<|turn|>", special=True)])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    run_file = write_run_file(folder, folder / "tokenizer")
    chosen = sets(training__steps=1, model__config=tiny_llama(vocab_size=len(tokenizer)))
    trained_in_short(run_file, *chosen)
    return folder / "run" / "model"


@pytest.fixture
def file_of_rows(run_file, base):
    """Writes a run file that trains the base model on these rows, with this loss."""

    def made(rows, loss, lr, **training):
        data = write_jsonl(run_file.parent / "rows.jsonl", rows)
        return change_run(
            run_file,
            model={"path": str(base)},
            data={"path": str(data), "sequence_length": 48, "eval_fraction": 0.2},
            training={"micro_batch_size": 3} | training,
            optimizer={"lr": lr},
            schedule={"name": "constant"},
            loss=loss,
        )

    return made


@pytest.fixture(scope="session")
def talker(base, tmp_path_factory):
    """The folder of a run that trained it on one talk."""
    folder = tmp_path_factory.mktemp("chats")
    chats = write_jsonl(folder / "chats.jsonl", [{"messages": TALK}] * 8)
    run_file = write_run_file(
        folder,
        base,
        model={"path": str(base)},
        data={"path": str(chats), "sequence_length": 32, "cache_dir": str(folder / "cache")},
        optimizer__lr=0.02,
        training__steps=20,
        training__eval_every=None,
        schedule={"name": "constant"},
    )
    trained_in_short(run_file)
    return folder / "run"
