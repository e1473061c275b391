"""Callbacks of several ranks: each calls its own, and what one asks for is done by all."""

import os

import pytest
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

import megatrain as package
from megatrain.errors import InputError, RunFailed
from tests.cli.test_callback_events import Recorder
from tests.cli.test_ranks import CHANGED, run_of
from tests.parity.ranks import run_ranks
from tests.reliability.cases import checkpoint_steps

USUAL = ("output.log_every=2", "training.eval_every=2", "training.steps=4")


def launched(work):
    """With what torchrun tells each process of its place."""

    def told(group):
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
        os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        return work(group)

    return told


@pytest.mark.exhaustive
def test_callbacks_of_every_rank_are_told_what_those_of_one_are(run_file, tmp_path):
    one, mine = Recorder(), Recorder()
    package.run(run_file, [*CHANGED, *USUAL, f"output.folder={tmp_path / 'one'}"], callbacks=[one])

    @launched
    def work(group):
        run_of(run_file, str(tmp_path / "several"), *USUAL, callbacks=[mine])(group)
        assert (mine.args.process_index, mine.args.world_size) == (dist.get_rank(), 2)
        assert mine.args.per_device_train_batch_size == 1
        return mine.seen, mine.saved, mine.state.is_world_process_zero, mine.logs

    found = run_ranks(2, tmp_path, work)
    assert [first for _, _, first, _ in found] == [True, False]
    for seen, saved, _, logs in found:
        assert seen == one.seen and saved == one.saved
        assert [list(each) for each in logs] == [list(each) for each in one.logs]
        losses = [each["loss"] for each in logs if "loss" in each]
        assert losses == pytest.approx([e["loss"] for e in one.logs if "loss" in e], rel=2e-6)


class Asks(TrainerCallback):
    """On the last rank alone: to save after step 2, to stop after step 3."""

    def on_step_end(self, args, state, control, **kwargs):
        last = args.process_index == args.world_size - 1
        control.should_save = last and state.global_step == 2
        control.should_training_stop = last and state.global_step == 3


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_all_ranks_do_what_a_callback_of_one_asks_for(run_file, tmp_path, size):
    changed = ("checkpoint.every=null", "checkpoint.keep=9", "training.steps=9")
    work = run_of(run_file, str(tmp_path / "several"), *changed, callbacks=[Asks()])
    assert run_ranks(size, tmp_path, launched(work)) == ["None"] * size
    assert checkpoint_steps(tmp_path / "several") == [2, 3]
    assert (tmp_path / "several" / "finished.json").exists()


class Counts(TrainerCallback, ExportableState):
    def __init__(self, count=0):
        self.count = count

    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1

    def state(self):
        return {"args": {}, "attributes": {"count": self.count}}


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 1:
            raise ValueError("mine")


def test_all_ranks_end_where_a_callback_of_one_fails_or_is_another(run_file, tmp_path):
    @launched
    def work(group):
        rank = dist.get_rank()
        kind, told = ((RunFailed, "rank 1: .*mine"), (ValueError, "mine"))[rank]
        with pytest.raises(kind, match=told):
            run_of(run_file, str(tmp_path / "failed"), callbacks=[Fails()])(group)
        other = [Counts()] if rank else []
        with pytest.raises(InputError, match="rank 1 has another callbacks than rank 0: .*Counts"):
            run_of(run_file, str(tmp_path / "never"), callbacks=other)(group)

    run_ranks(2, tmp_path, work)
