"""What goes wrong around a run, done for real: disks, files, threads, memory, numbers.

Each run is a process of its own. What no test can order (a full disk at a given moment, a GPU
without memory) is brought about inside of it by a few lines that run before the command.
"""

import errno
import os
import shutil
import signal

import pytest

from megatrain.checkpoint import verify
from tests.cli.cases import records, sets
from tests.refusals import table
from tests.reliability.cases import AT_STEP, PLANTED, logged, model_bytes, start_run
from tests.sweeps import few

SLOW = pytest.mark.exhaustive
CHOICES = {"training__steps": 8, "training__eval_every": 4, "checkpoint__every": 3}


@pytest.fixture
def goes_on(start, whole, run):
    """Resumes the run, which must end like the one without a fault."""

    def resume():
        out = start("", "--resume").finish()
        ours = run.parent / "run"
        assert [r for r in logged(ours) if "failed" not in r] == logged(whole)
        assert model_bytes(ours) == model_bytes(whole)
        return out

    return resume


def test_a_second_run_in_the_same_folder_is_refused(start, goes_on):
    first = start(AT_STEP + "import time\nat = lambda step: step == 5 and time.sleep(60)")
    first.until("step 4/8")
    start("", "--resume").refused(f"process {first.pid} on ", "is writing there")
    start().refused("is not empty; choose another folder")
    first.send(signal.SIGKILL)  # its lock goes with it
    first.wait()
    goes_on()


def test_of_two_runs_that_start_at_once_in_one_folder_one_is_refused(start, run, whole):
    together = """
import os, time, pathlib
import megatrain.train.loop as loop
prepare = loop.prepare
def both(*args, **named):
    job = prepare(*args, **named)
    place = pathlib.Path({place!r})
    (place / str(os.getpid())).touch()
    while len(list(place.iterdir())) < 2:
        time.sleep(0.001)
    return job
loop.prepare = both
"""
    place = run.parent / "place"
    place.mkdir()
    both = [start(together.format(place=str(place))) for _ in range(2)]
    codes = sorted(process.wait() for process in both)
    assert codes == [0, 2], [process.output for process in both]
    assert model_bytes(run.parent / "run") == model_bytes(whole)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@SLOW
def test_a_full_disk_under_the_output_does_not_end_the_run(run, whole, tmp_path):
    log = tmp_path / "log"
    log.symlink_to("/dev/full")
    assert start_run("train", run, log=log).wait() == 0
    assert model_bytes(tmp_path / "run") == model_bytes(whole)


@SLOW
def test_closed_descriptors_do_not_end_the_run(run, whole, tmp_path):
    """No file of the run takes the place of the output, into which libraries write."""
    fault = (
        AT_STEP
        + """
import os, sys
for number in (0, 1, 2):
    os.close(number)
sys.stdin = sys.stdout = sys.stderr = None
at = lambda step: os.write(2, b"a warning of a library")
"""
    )
    assert start_run("train", run, log=tmp_path / "log", before=fault).wait() == 0
    assert logged(tmp_path / "run") == logged(whole)
    assert model_bytes(tmp_path / "run") == model_bytes(whole)


def test_a_full_disk_at_a_save_costs_that_checkpoint_only(start, run):
    """Files may not grow beyond 30 kB from step 14 to 19; the try after step 25 has room again.

    That one stays for ever in the place of step 15's.
    """
    fault = (
        AT_STEP
        + """
import resource
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
limited = 30_000, limits[1]
def at(step):
    if step in (14, 20):
        resource.setrlimit(resource.RLIMIT_FSIZE, limited if step == 14 else limits)
"""
    )
    saving = {"every": 15, "keep_every": 15, "at_end": False}
    choices = sets(training__steps=26, checkpoint=saving)
    out = start(fault, *choices).finish()
    reason = os.strerror(errno.EFBIG)
    assert f"cannot save the checkpoint of step 15: {reason}; nothing of it is left" in out
    assert "the run goes on and tries again after step 25" in out
    (saved,) = (run.parent / "run" / "checkpoints").iterdir()
    assert verify(saved).extra["step"] == 25
    assert (saved / "keep").exists()


def poisoned_in(steps, times='float("nan")', then="pass"):
    return PLANTED["poisoned"].format(steps=steps, times=times, then=then)


def dying(module, owner, name, error="ValueError('lost')", when="True", call="None"):
    """A function that fails, at the call that `when` says."""
    names = {"module": module, "owner": owner, "name": name, "when": when, "call": call}
    return PLANTED["dying"].format(**names, error=error)


FAULTS = table(__file__, "faults.yaml")


def planted(fault):
    if "changed" in fault:
        return AT_STEP + PLANTED["changed"].replace("{change}", fault["changed"])
    return dying(**fault["dying"]) if "dying" in fault else poisoned_in(**fault["poisoned"])


@pytest.mark.parametrize("name", few(FAULTS, *range(7)))
def test_what_fails_ends_the_run_and_loses_no_step_that_was_whole(start, goes_on, run, name):
    fault, texts = planted(FAULTS[name]), FAULTS[name]["said"]
    process = start(fault.replace("{folder}", str(run.parent)), *sets(checkpoint__at_end=False))
    assert process.wait() == 4, process.output
    assert [text for text in texts if text not in process.output] == []
    traced = name in ("an evaluation", "an update")  # which no user can mend
    assert process.output.count("megatrain: error:") == (not traced)
    out = goes_on()
    assert "going on after step 3" in out or name != "an update"
    assert "made again" in out or "data" not in name


@SLOW
def test_a_norm_that_jumps_twice_is_believed(start, run):
    """The gradients below the head are a thousand times as large."""
    fault, logs = poisoned_in([24], "1e-3"), []
    for recheck in (True, False):
        out = start(fault, *sets(training__steps=26, training__recheck=recheck)).finish()
        assert ("step 24: " in out and "once more before" in out) == recheck
        logs.append(logged(run.parent / "run"))
        shutil.rmtree(run.parent / "run")
    assert logs[0] == logs[1]


def test_steps_that_are_not_finite_are_left_out_if_wanted(start, run):
    skip = sets(training__on_nonfinite="skip", training__steps=10)
    out = start(poisoned_in([4, 5, 6]), *skip).finish()
    ours = run.parent / "run"
    skipped, *_ = left_out = records(ours, "skipped")
    assert [record["step"] for record in left_out] == [4, 5, 6]
    assert [record["step"] for record in records(ours, "loss")] == [1, 2, 3, 7, 8, 9, 10]
    assert "the loss is nan" in skipped["skipped"] and "rows.jsonl:" in skipped["rows"]
    assert "step 4/10  left out: the loss is nan" in out
    kept = verify(run.parent / "run" / "checkpoints" / "step-00000010")
    assert kept.extra["step"] == 10 and kept.settings.steps == 7


@SLOW
def test_a_spike_is_left_out(start, run):
    """The limit follows from the norms before, which a resumed run remembers."""
    choices = sets(training__spike=1.02, training__on_nonfinite="skip", training__steps=60,
                   training__max_skips=100, optimizer__lr=0.1)  # fmt: skip
    start("", *choices).finish()
    shutil.copytree(run.parent / "run", run.parent / "kept")
    whole = logged(run.parent / "run")
    assert any("skipped" in record for record in whole)
    assert not any("skipped" in record for record in whole[:20])
    shutil.rmtree(run.parent / "run" / "model")
    shutil.rmtree(run.parent / "run" / "checkpoints" / "step-00000060")
    start("", "--resume", *choices).finish()
    assert logged(run.parent / "run") == whole


def test_a_disk_without_room_is_told_before_anything_is_written(start, run, tmp_path):
    fault = PLANTED["failing"].format(code="ENOSPC") + "\nos.posix_fallocate = fail"
    spilled = sets(engine__disk=str(tmp_path), engine__placement={"slots": 1, "disk_moments": 9})
    start(fault, *spilled).refused("no room for planes on this disk", "No space left", code=3)
    assert not (run.parent / "run" / "checkpoints").exists()
