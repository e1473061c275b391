"""Folders that are whole or not there, their locks, logs on resume, signals, evaluations."""

import json
import os
import signal
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatrain.base.whole_files import user_cache, whole_folder, write_file
from megatrain.config import TrainingSection
from megatrain.config.learning import LossSection
from megatrain.errors import InputError, RunFailed, StepRefused, os_reason
from megatrain.loss import IGNORED
from megatrain.parallel.distributed import ALONE
from megatrain.run_folder.layout import locked, make_run_folder, new_run_folder, run_to_resume
from megatrain.telemetry.metrics import read_metrics
from megatrain.train.evaluations import Evaluations
from megatrain.train.resume import cut_metrics
from megatrain.train.signals import Signals, Stopped
from megatrain.train.steps import BadSteps


def test_a_folder_appears_only_when_its_content_is_complete(tmp_path):
    target = tmp_path / "deep" / "model"
    with whole_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    with pytest.raises(OSError, match="not empty"), whole_folder(target) as folder:
        (folder / "a").write_text("2")
    assert (target / "a").read_text() == "1"
    empty = target.parent / "empty"
    empty.mkdir()
    with pytest.raises(RuntimeError, match="full"), whole_folder(empty) as folder:
        (folder / "a").write_text("1")
        raise RuntimeError("full")
    with whole_folder(empty) as folder:
        (folder / "a").write_text("1")
    assert {path.name for path in target.parent.iterdir()} == {"model", "empty"}


def test_a_full_disk_is_told_with_the_file(tmp_path):
    (tmp_path / ".a.html.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space") as full:
        write_file(tmp_path / "a.html", "much")
    assert os_reason(full.value) == f"{tmp_path}/a.html: No space left on device"
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_replaced_stays_until_the_new_one_is_whole(tmp_path):
    target = tmp_path / "model"
    for text, before in (("1", None), ("2", "1")):
        with whole_folder(target, replace=True) as folder:
            (folder / "a").write_text(text)
            assert before is None or (target / "a").read_text() == before
    with pytest.raises(RuntimeError, match="full"), whole_folder(target, replace=True):
        raise RuntimeError("full")
    target.rename(tmp_path / ".model.replaced")  # as a crash between two renames leaves it
    with pytest.raises(RuntimeError, match="full"), whole_folder(target, replace=True):
        raise RuntimeError("full")
    assert (target / "a").read_text() == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tilde_is_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert new_run_folder("~/run", "demo") == tmp_path / "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    assert run_to_resume("~/run", "demo") == tmp_path / "run"
    with pytest.raises(InputError, match="or go on with the run there by --resume$"):
        new_run_folder("~/run", "demo")


def test_what_a_run_left_that_was_killed_at_its_start_is_no_run(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".config.yaml.partial").touch()
    assert new_run_folder(str(tmp_path), "a") == tmp_path
    (tmp_path / "mine").touch()
    with pytest.raises(InputError, match="is not empty; choose another folder$"):
        new_run_folder(str(tmp_path), "a")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_no_lock_and_no_log(tmp_path, make):
    make(tmp_path / ".lock")
    with pytest.raises(InputError, match="not a plain file"), locked(tmp_path):
        pass
    make(tmp_path / "m.jsonl")
    with pytest.raises(InputError, match="not a plain file"):
        cut_metrics(tmp_path / "m.jsonl", 1)


def test_the_newest_run_of_a_name_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_to_resume(None, "a") is None
    for name in ("a-20260101-000000", "a-20270101-000000", "a-b-20280101-000000", "a-20290101"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    (tmp_path / "runs" / "a-20300101-000000").mkdir()  # nothing of a run in it
    assert str(run_to_resume(None, "a")) == "runs/a-20270101-000000"
    assert str(run_to_resume("runs/a-b-20280101-000000", "a")) == "runs/a-b-20280101-000000"
    assert run_to_resume("elsewhere", "a") is None


def test_the_last_run_is_the_newest_after_the_clock_was_set_back(tmp_path, monkeypatch):
    """As an hour is, each autumn; a name that is no time, or the last of all, costs no run."""
    monkeypatch.chdir(tmp_path)
    for before in ("a-29991231-235959", "a-99999999-999999"):
        (tmp_path / "runs" / before).mkdir(parents=True)
        (tmp_path / "runs" / before / "config.yaml").touch()
        made = make_run_folder(None, "a")
        (made / "config.yaml").touch()
        if before < "a-3":
            assert str(made) == "runs/a-30000101-000000" == str(run_to_resume(None, "a"))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"step": 1}\n{"step": 2}\n{"step": 2, "eval_loss": 1}\n{"step": 3}\n', [1, 2, 2]),
        ('{"step": 1}\n{"step": 2}', [1]),  # a kill cut the line short
        ('{"step": 1}\n{"st\n{"step": 2}\n{"step": 3}\n{"step": 2}\n', [1, 2]),
        ('{"step": 3}\n', []),
        ("[" * 100_000 + '\n{"step": 1}\n{"eval_loss": 1}\n{"step": [2]}\n', [1]),
        ("x" * 3_000_000 + '\n{"step": 1}\n', [1]),
        ("", []),
    ],
)
def test_a_log_is_cut_after_a_step(tmp_path, text, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    assert [record["step"] for record in cut_metrics(path, 2)] == kept
    assert [r["step"] for r in read_metrics(path) if isinstance(r.get("step"), int)] == kept
    assert path.read_text() == text[: len(path.read_text())]
    assert [record["step"] for record in cut_metrics(path, 2)] == kept


@pytest.mark.parametrize("swallowed", [False, True])
def test_a_signal_ends_a_block_that_may_be_interrupted(swallowed):
    before = signal.getsignal(signal.SIGTERM)
    done = []
    with Signals() as signals:
        swallowing = suppress(BaseException if swallowed else ())
        with pytest.raises(Stopped, match="SIGTERM"), signals.interruptible(), swallowing:
            signal.raise_signal(signal.SIGTERM)
            done.append(1)
        assert signals.stop == "SIGTERM" and not done
        with pytest.raises(Stopped), signals.interruptible():
            done.append(2)
    assert signal.getsignal(signal.SIGTERM) is before and not done


# Evaluations of a run: no more rows at once than a step has.


class Scale:
    """An engine whose loss of a labelled position is its label."""

    batch_ranks, label_shift = ALONE, 1

    def __init__(self):
        self.sizes: list[int] = []

    def score(self, rows):
        self.sizes.append(sum(len(micro["labels"]) for micro in rows))
        targets = torch.cat([micro["labels"][:, 1:].flatten() for micro in rows])
        labelled = targets[targets != IGNORED]
        if not len(labelled):
            raise InputError("no token has a label")
        return float(labelled.double().mean()), 0.5


def evaluated(labels, *, rows_per_step=4, stop=None, total=1):
    """The loss that is written after step 1 of `total`, and the rows of each pass."""
    engine, written = Scale(), {}
    micro = [{"input_ids": part, "labels": part} for part in labels.split(2)]
    job: Any = SimpleNamespace(
        engine=engine,
        evaluation={"": micro},
        total_steps=total,
        ranks=ALONE,
        loader=SimpleNamespace(rows_per_micro_batch=2),
        rollouts=None,
        data={},
    )
    training = SimpleNamespace(eval_every=1, batch_size=rows_per_step)
    metrics: Any = SimpleNamespace(write=lambda **record: written.update(record))
    job.config = cast(Any, SimpleNamespace(training=training, loss=LossSection(), rollout=None))
    signals: Any = SimpleNamespace(stop=stop)
    evaluations = Evaluations(job, metrics, [], signals)
    evaluations.after(1, lambda line: None, final=total == 1)
    return written.get("eval_loss"), engine.sizes


def test_rows_pass_as_many_at_once_as_a_step_has():
    labels = torch.arange(11 * 5).reshape(11, 5)
    labels[3:7, 2:] = IGNORED  # so that passes count for unlike numbers of tokens
    targets = labels[:, 1:]
    loss, sizes = evaluated(labels)
    assert sizes == [4, 4, 3]
    assert loss == pytest.approx(float(targets[targets != IGNORED].double().mean()))
    assert evaluated(labels, rows_per_step=1)[1] == [2, 2, 2, 2, 2, 1]


def test_rows_without_labels_are_left_out_and_a_signal_ends_all_evaluations_but_the_last():
    labels = torch.ones(10, 3, dtype=torch.long)
    assert evaluated(labels, total=2) == (1.0, [4, 4, 2])
    assert evaluated(labels, stop="SIGTERM", total=2) == (None, [])
    assert evaluated(labels, stop="SIGTERM", total=1) == (1.0, [4, 4, 2])
    labels[4:8] = IGNORED
    assert evaluated(labels) == (1.0, [4, 2])
    with pytest.raises(InputError, match="no token has a label"):
        evaluated(torch.full((8, 3), IGNORED))


# What a run remembers of steps that the engine refused.


def test_a_resumed_run_counts_on():
    settings = TrainingSection(steps=9, on_nonfinite="skip", max_skips=2, spike=2.0)
    before, after = BadSteps(settings), BadSteps(settings)
    for _ in range(20):
        before.note_norm(1.5)
    bad = StepRefused("the loss is nan", intact=True)
    before.skip(bad)
    before.skip(bad)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.norm_limit == before.norm_limit == 3.0
    with pytest.raises(RunFailed, match="3 bad steps in a row"):
        after.skip(bad)


def test_tests_keep_nothing_in_the_cache_of_who_runs_them(tmp_path_factory):
    assert user_cache("tokens").is_relative_to(tmp_path_factory.getbasetemp())
