"""`kill -9` while a teacher is asked, or what it says is written: the run goes on equal."""

import shutil
import signal

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.cli.cases import tiny_llama
from tests.parity.cases import noisy
from tests.reliability.cases import logged, model_bytes, toy_run

# Kills before or after the file that a teacher's words go to is on the disk for the n-th time; or
# it has been cut short by then.
TEACHER = """
import os, signal, types
import megatrain.data.teacher_file as kept
times = []
def fsync(descriptor):
    times.append(descriptor)
    die = len(times) == {at}
    if die and {torn}:
        os.ftruncate(descriptor, max(0, os.fstat(descriptor).st_size - 5))
    if die and {before}:
        os.kill(os.getpid(), signal.SIGKILL)
    os.fsync(descriptor)
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
kept.os = types.SimpleNamespace(**{{**vars(os), "fsync": fsync}})
"""

# Kills in the middle of what is written last: the mark that all is there.
MARK = """
import os, signal
from pathlib import Path
write = Path.write_text
def torn(path, text, *more, **given):
    if path.name != "whole.json":
        return write(path, text, *more, **given)
    write(path, text[: len(text) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
Path.write_text = torn
"""


def finished(zygote, run, log):
    zygote.start("train", run, "--resume", log=log).finish()
    return logged(run.parent / "run"), model_bytes(run.parent / "run")


def killed(zygote, run, log, before):
    process = zygote.start("train", run, "--resume", log=log, before=before)
    assert process.wait() == -signal.SIGKILL, process.output


@pytest.fixture
def distilling(tokenizer_folder, tmp_path):
    """A run file in a folder of this name, all with one teacher."""
    folder = tmp_path / "teacher"
    shutil.copytree(tokenizer_folder, folder)
    size = len(AutoTokenizer.from_pretrained(folder))
    config = tiny_llama(vocab_size=size, hidden_size=48)
    config.pop("model_type")
    torch.manual_seed(3)
    noisy(LlamaForCausalLM(LlamaConfig(**config))).save_pretrained(folder)
    loss = {"name": "distill", "teacher": str(folder), "top_k": 3}
    given = {f"loss__{key}": each for key, each in loss.items()}
    return lambda name: toy_run(tmp_path / name, tokenizer_folder, **given)


def said(run):
    """Of each data set, what the teacher has said."""
    every = sorted((run.parent / "cache").glob("teacher-*/*.bin"))
    return [(path.parent.name, path.name, path.read_bytes()) for path in every]


@pytest.mark.exhaustive
def test_who_is_killed_while_a_teacher_is_asked_goes_on_equal(zygote, distilling, tmp_path):
    whole, run = distilling("whole"), distilling("killed")
    wanted = finished(zygote, whole, tmp_path / "log")
    moments = [(1, True, False), (2, False, False), (3, False, True), (2, True, True)]
    sizes = []
    for number, (at, before, torn) in enumerate(moments):
        hooks = TEACHER.format(at=at, before=before, torn=torn)
        killed(zygote, run, tmp_path / f"log-{number}", hooks)
        assert not list((run.parent / "cache").glob("teacher-*/whole.json"))
        sizes.append(sum(len(each) for _, name, each in said(run) if name == "rows.bin"))
    assert sizes[-1] > sizes[0]  # it goes on where it was
    [rows] = (run.parent / "cache").glob("teacher-*/rows.bin")
    with rows.open("ab") as file:
        file.write(b"torn")
    assert finished(zygote, run, tmp_path / "log-last") == wanted
    assert said(run) == said(whole)
    marked = distilling("marked")  # here all is asked again, so it would hide what is wrong above
    killed(zygote, marked, tmp_path / "log-mark", MARK)
    assert finished(zygote, marked, tmp_path / "log-marked") == wanted
    assert said(marked) == said(whole)
