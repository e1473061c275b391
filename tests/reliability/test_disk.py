"""Planes on a disk: whatever becomes of it, the last checkpoint is whole and the run goes on."""

import os
import signal

import pytest

from tests.cli.cases import sets
from tests.reliability.cases import AT_STEP, model_bytes, toy_run
from tests.reliability.test_faults import CHOICES, failed_with, goes_on

__all__ = ["goes_on"]

FAILING = """
import errno, os
from megatrain import kernels
move = kernels.move_file
def fail(*given, writes=True, **at_once):
    if not writes:
        return move(*given, writes=writes, **at_once)
    raise OSError(errno.{code}, os.strerror(errno.{code}))
"""


@pytest.fixture
def spilled(tmp_path):
    """Options that put all moments on a disk."""
    (tmp_path / "disk").mkdir()
    placement = {"slots": 1, "disk_moments": 9, "disk_remainder": 2, "disk_weights": 9}
    return sets(engine__disk=str(tmp_path / "disk"), engine__placement=placement)


def test_a_disk_without_room_is_told_before_anything_is_written(start, spilled, run):
    fault = FAILING.format(code="ENOSPC") + "\nos.posix_fallocate = fail"
    failed_with(start(fault, *spilled), 3, "no room for planes on this disk", "No space left")
    assert not (run.parent / "run" / "checkpoints").exists()


@pytest.mark.exhaustive
def test_a_kill_leaves_nothing_and_two_runs_share_a_folder(
    start, goes_on, spilled, zygote, whole, tokenizer_folder, tmp_path
):
    at = "\nimport time\nat = lambda step: step == 5 and time.sleep(60)"
    first = start(AT_STEP + at, *spilled)
    first.until("step 4/8")
    other = toy_run(tmp_path / "other", tokenizer_folder, **CHOICES)
    zygote.start("train", other, *spilled, log=tmp_path / "log-other").finish()
    assert model_bytes(tmp_path / "other" / "run") == model_bytes(whole)
    first.send(signal.SIGKILL)
    first.wait()
    assert os.listdir(tmp_path / "disk") == []
    goes_on()
