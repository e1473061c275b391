"""The command as tests call it, and one finished run for those that only look."""

import json

import pytest
import yaml
from tokenizers import AddedToken
from transformers import AutoTokenizer
from typer.testing import CliRunner

from megatrain.cli.app import app
from tests.cli.cases import (
    TALK,
    TEMPLATE,
    assert_refused,
    leave_out,
    sets,
    tiny_llama,
    write_run_file,
)


@pytest.fixture
def all_of_it():
    """Asked for by tests of what runs of the others leave out."""


@pytest.fixture(autouse=True)
def no_more_than_needed(request, monkeypatch):
    if "all_of_it" not in request.fixturenames:
        leave_out(monkeypatch.setattr)


@pytest.fixture
def megatrain(monkeypatch, tmp_path):
    """Runs the command in an empty folder.

    `megatrain.done` is for what must end well, `megatrain.refused(words, ...)` for what must end
    with one line of error.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
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

    run.done, run.refused = done, refused
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


def trained_in_short(run_file, *arguments) -> None:
    """Train for fixtures, which are made before `no_more_than_needed`."""
    with pytest.MonkeyPatch.context() as patch:
        leave_out(patch.setattr)
        result = CliRunner().invoke(app, ["train", str(run_file), *arguments])
    assert result.exit_code == 0, result.output


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
        data = run_file.parent / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree = yaml.safe_load(run_file.read_text())
        tree["model"] = {"path": str(base)}
        tree["data"] |= {"kind": "auto", "path": str(data), "sequence_length": 48}
        tree["data"] |= {"eval_fraction": 0.2}
        tree["training"] |= {"micro_batch_size": 3} | training
        tree["optimizer"] = {"lr": lr}
        tree["schedule"] = {"name": "constant"}
        tree["loss"] = loss
        run_file.write_text(yaml.safe_dump(tree))
        return run_file

    return made


@pytest.fixture(scope="session")
def talker(base, tmp_path_factory):
    """The folder of a run that trained it on one talk."""
    folder = tmp_path_factory.mktemp("chats")
    tree = yaml.safe_load(write_run_file(folder, base).read_text())
    (folder / "chats.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 8)
    tree["model"] = {"path": str(base)}
    tree["data"] |= {"kind": "auto", "path": str(folder / "chats.jsonl"), "eval_fraction": 0.0}
    tree["training"] |= {"steps": 40, "eval_every": None}
    tree["schedule"] = {"name": "constant"}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    trained_in_short(folder / "run.yaml")
    return folder / "run"
