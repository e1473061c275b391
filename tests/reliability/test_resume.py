"""A run that was interrupted equals one that was not, bit for bit."""

import shutil

import pytest
import torch
from transformers import get_scheduler

from tests.checkpoint.cases import flip
from tests.cli.cases import sets, write_rows
from tests.refusals import table
from tests.reliability.cases import checkpoint_steps, logged, model_bytes, start_run, toy_run
from tests.sweeps import few

SLOW = pytest.mark.exhaustive
STEPS = 12
CHOICES = {
    "training__steps": STEPS,
    "training__eval_every": 4,
    "checkpoint__every": 4,
    "checkpoint__keep": 50,
    "schedule__name": "cosine",
}


@pytest.fixture
def cut(whole, tmp_path):
    """A copy of that run as a kill just after the checkpoint of step 8 would have left it."""
    folder = tmp_path / "cut"
    shutil.copytree(whole.parent, folder)
    shutil.rmtree(folder / "run" / "model")
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000012")
    for name in ("run.yaml", "run/config.yaml"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace(str(whole), f"{folder}/run"))
    return folder


def resume(folder, *options):
    """Go on with that run."""
    return start_run("train", folder / "run.yaml", "--resume", *options, log=folder / "log2")


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_resumed_run_equals_one_that_was_not_interrupted(whole, cut, evaluated):
    """Whether or not the kill came before the evaluation after the step that was saved."""
    log = cut / "run" / "metrics.jsonl"
    if evaluated:
        log.write_bytes(log.read_bytes()[:-20])  # the last line is torn; those after 8 are too many
    else:
        lines = log.read_text().splitlines(keepends=True)
        (place,) = (at for at, line in enumerate(lines) if '"step": 8, "eval_loss"' in line)
        log.write_text("".join(lines[:place]))
    out = resume(cut).finish()
    assert "going on after step 8 in" in out
    assert logged(cut / "run") == logged(whole)
    assert model_bytes(cut / "run") == model_bytes(whole)
    assert checkpoint_steps(cut / "run") == [4, 8, 12]
    again = resume(cut).finish().removeprefix(out)
    assert f"{STEPS} steps done; the model is in" in again  # and nothing is done twice
    assert "step" not in again.splitlines()[0] or "going on" not in again


@pytest.mark.parametrize(
    "changes",
    [
        {"training__micro_batch_size": 1},
        pytest.param({"training__micro_batch_size": 4}, marks=SLOW),
        {"engine__placement": {"slots": 3, "prefetch": 2, "layer_inputs": "host"}},
        {"output__log_every": 5, "checkpoint__every": 3, "checkpoint__keep": 1},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_what_may_change_on_resume(whole, cut, changes):
    resume(cut, *sets(**changes)).finish()
    ours, others = logged(cut / "run"), logged(whole)
    assert [record["step"] for record in ours] == [record["step"] for record in others]
    if "training__micro_batch_size" in changes:  # the order of sums differs
        losses = [[r.get("loss", r.get("eval_loss")) for r in run] for run in (ours, others)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    else:
        assert ours == others
        assert model_bytes(cut / "run") == model_bytes(whole)


def test_another_learning_rate_is_taken_on_resume(whole, cut):
    """At the place in the schedule that the run has come to, down to that schedule's floor."""
    name, floor = "cosine_with_min_lr", {"min_lr": 0.0005}
    change = sets(optimizer__lr=0.001, schedule__name=name, schedule__options=floor)
    out = resume(cut, *change).finish()
    rates, before = ([r["lr"] for r in logged(run) if "lr" in r] for run in (cut / "run", whole))
    assert rates[:8] == before[:8]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.001)
    wanted = get_scheduler(name, optimizer, 2, STEPS, scheduler_specific_kwargs=floor)
    assert rates[8:] == pytest.approx([0.001 * wanted.lr_lambdas[0](n) for n in range(8, STEPS)])
    assert out.count("resume: optimizer.lr was 0.01, is 0.001 now") == 1


FIXED = table(__file__, "fixed.yaml")


@pytest.mark.parametrize("name", few(FIXED, *range(5)))
def test_what_may_not_change_is_refused_by_name(cut, name):
    change = FIXED[name]
    before = (cut / "run" / "metrics.jsonl").read_bytes()
    if "data__path" in change:
        change = {"data__path": str(write_rows(cut / "more.jsonl", 121))}
    resume(cut, *sets(**change)).refused(name)
    assert (cut / "run" / "metrics.jsonl").read_bytes() == before


def test_a_run_goes_on_without_the_model_that_it_began_from(whole, tmp_path, tokenizer_folder):
    base = tmp_path / "base"
    shutil.copytree(whole / "model", base)
    run = toy_run(tmp_path, tokenizer_folder, model__config=None, model__path=str(base))
    start_run("train", run, *sets(training__steps=3), log=tmp_path / "1").finish()
    shutil.rmtree(base)
    out = start_run("train", run, "--resume", log=tmp_path / "2").finish()
    assert "going on after step 3" in out and "6 steps done" in out


def test_a_folder_or_the_newest_run_of_a_name_is_resumed(tmp_path, tokenizer_folder):
    tmp_path = tmp_path / 'a "folder" of Zoë\'s \N{SLIGHTLY SMILING FACE}'
    run = toy_run(tmp_path, tokenizer_folder, output__folder=None, training__steps=1)
    before = f"import os; os.chdir({str(tmp_path)!r})"
    first = start_run("train", run, "--resume", log=tmp_path / "1", before=before).finish()
    assert "no earlier run of that name" in first
    (folder,) = (tmp_path / "runs").iterdir()
    (tmp_path / "runs" / "run-20000101-000000").mkdir()
    (tmp_path / "runs" / "run-2-29990101-000000").mkdir()
    more = sets(training__steps=2)
    out = start_run("train", run, "--resume", *more, log=tmp_path / "2", before=before).finish()
    assert f"going on after step 1 in runs/{folder.name}" in out
    more = sets(training__steps=3)
    arguments = ["train", folder, "--resume", *more]
    out = start_run(*arguments, log=tmp_path / "3", before=before).finish()
    assert f"going on after step 2 in {folder}" in out
    inside = start_run("train", folder / "checkpoints", "--resume", log=tmp_path / "5")
    inside.refused("no run there (no config.yaml)")
    start_run("train", folder, log=tmp_path / "4").refused("--resume to go on with it")


@pytest.mark.parametrize("damage", ["flipped", pytest.param("renamed", marks=SLOW)])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(whole, cut, damage):
    """Each kind of damage is in `checkpoint/test_damage.py`."""
    newest = cut / "run" / "checkpoints" / "step-00000008"
    if damage == "flipped":
        victim = sorted((newest / "tiles").iterdir())[1]
        flip(victim, victim.stat().st_size - 3)
    else:  # an older one, so that the newest would not be taken
        shutil.rmtree(newest)
        victim = newest.with_name("step-00000099")
        shutil.copytree(newest.with_name("step-00000004"), victim)
    out = resume(cut).finish()
    assert f"not resumed from: {victim}" in out.replace("\n", " ")
    assert "going on after step 4 in" in out
    assert logged(cut / "run") == logged(whole)
    assert model_bytes(cut / "run") == model_bytes(whole)


def test_a_run_is_not_begun_anew_where_its_checkpoints_are_out_of_reach(cut):
    """They may lie on another disk, which has not been mounted."""
    (cut / "run" / "checkpoints").rename(cut / "elsewhere")
    (cut / "run" / "checkpoints").symlink_to(cut / "elsewhere")
    (cut / "elsewhere").rename(cut / "unmounted")
    before = logged(cut / "run")
    resume(cut).refused("checkpoints: no folder, or a link to none; mount the disk")
    assert logged(cut / "run") == before
    (cut / "unmounted").rename(cut / "elsewhere")
    out = resume(cut).finish()
    assert "going on after step 8" in out


def test_nothing_is_begun_anew_where_all_checkpoints_are_damaged(cut):
    for checkpoint in (cut / "run" / "checkpoints").iterdir():
        (checkpoint / "manifest.json").write_text("{}")
    resume(cut).refused("none of its checkpoints is whole")
    assert logged(cut / "run")
