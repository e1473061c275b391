"""Runs in processes of their own."""

import pytest

from tests.cli.cases import trained_in_short
from tests.reliability.cases import start_run, toy_run


@pytest.fixture(scope="session", autouse=True)
def warm(tmp_path_factory, tokenizer_folder):
    """A run in this process: forks have what libraries import and compute once, a fifth of each."""
    trained_in_short(toy_run(tmp_path_factory.mktemp("warm"), tokenizer_folder, training__steps=1))


@pytest.fixture(scope="module")
def whole(request, tmp_path_factory, tokenizer_folder):
    """The folder of a run that nothing happened to, with the module's CHOICES."""
    folder = tmp_path_factory.mktemp("whole")
    run = toy_run(folder, tokenizer_folder, **request.module.CHOICES)
    start_run("train", run, log=folder / "log").finish()
    return folder / "run"


@pytest.fixture
def start(run, tmp_path):
    """Starts the run after some Python, with more arguments."""

    def begin(before: str = "", *arguments: object):
        log = tmp_path / f"log-{len(list(tmp_path.glob('log-*')))}"
        return start_run("train", run, *arguments, log=log, before=before)

    return begin


@pytest.fixture
def run(request, tmp_path, tokenizer_folder):
    """The run file of such a run, to be started."""
    return toy_run(tmp_path, tokenizer_folder, **request.module.CHOICES)
