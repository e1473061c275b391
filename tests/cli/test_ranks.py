"""A run of several ranks is that of one, whatever happens to a rank on the way."""

import json
import os
import signal
import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatrain import Engine, InputError, RunFailed
from megatrain.checkpoint import files, verify
from megatrain.config import load
from megatrain.data import open_dataset
from megatrain.parallel.distributed import ProcessGroups, joined, launch
from megatrain.telemetry.host import usable_cores
from megatrain.train.loop import train
from megatrain.train.sharing import part_of, split_for_ranks
from megatrain.train.steps import Steps
from tests.cli.cases import records, sets
from tests.forks import end
from tests.parity.ranks import run_ranks
from tests.race.schedule import Alike

CHANGED = ("training.micro_batch_size=1", "training.batch_size=2", "checkpoint.every=3")


def run_of(run_file, folder, *changed, resume=False, at=None):
    """A run, as a process of several does it; before a step it calls `at` with what is done."""

    def work(group):
        @contextmanager
        def joined():
            yield ProcessGroups(dist.get_rank(), dist.get_world_size(), host=group)

        config = load(run_file, [*CHANGED, *changed, f"output.folder={folder}"])
        taken = Steps.take

        def take(steps):
            if at is not None:
                at(steps.done)
            return taken(steps)

        with (
            mock.patch("megatrain.train.loop.joined", joined),
            mock.patch.object(Steps, "take", take),
        ):
            return str(train(config, "run", resume=resume).stopped)

    return work


def one_rank(megatrain, run_file, *changed):
    """The same run by one rank, in the folder `one`."""
    options = [part for each in (*CHANGED, *changed) for part in ("--set", each)]
    megatrain.done("train", run_file, *options, *sets(output__folder="one"))


@pytest.mark.exhaustive
def test_a_run_goes_on_with_any_number_of_ranks(megatrain, run_file, tmp_path, caplog):
    """A rank of two dies, three are told to stop, and one finishes, as one that does all of it."""
    one_rank(megatrain, run_file)
    folder = tmp_path / "several"

    def dies(done):
        if done == 4 and dist.get_rank() == 1:
            while not (folder / "checkpoints" / "step-00000003").exists():
                time.sleep(0.01)
            end()

    def told(done):
        if done == 4 and dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def lost(group):
        with pytest.raises(RunFailed, match="rank 0 of 2 has lost the others"):
            run_of(run_file, str(folder), *on_disk, at=dies)(group)
        end()

    on_disk = f"engine.disk={tmp_path}", "engine.placement={disk_moments: 9, disk_weights: 2}"
    run_ranks(2, tmp_path / "two", lost, whole=False)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]
    verify(folder / "checkpoints" / "step-00000003")
    work = run_of(run_file, str(folder), resume=True, at=told)
    assert run_ranks(3, tmp_path / "three", work) == ["SIGTERM"] * 3
    started = json.loads((folder / "environment.json").read_text())
    assert (started["devices"], started["ranks"], started["hosts"]) == (["cpu"] * 3, 3, 1)
    assert load(folder).engine.devices == 3  # as it would be started again
    megatrain.done("train", folder, "--resume", *sets(engine__devices=1))
    assert "going on after step 5" in caplog.text
    assert_same_run(tmp_path / "one", tmp_path / "several")


def assert_same_run(one, several, least=1e-12):
    """Within the order of sums, in the log and the model.

    Args: `least`: what numbers of the log may differ by that are sums of both signs.
    """
    for mine, other in zip(records(several), records(one), strict=True):
        for name in ("step", "epoch", "loss", "grad_norm", "lr", "eval_loss", "tokens"):
            assert mine.get(name, 0) == pytest.approx(other.get(name, 0), rel=2e-6, abs=least), name
    weights = [load_file(each / "model/model.safetensors") for each in (one, several)]
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], rtol=2e-6, atol=1e-6), name


@pytest.mark.exhaustive
def test_a_run_of_ranks_that_share_rows_is_that_of_one(megatrain, run_file, tmp_path):
    """Two stop on the way, and go on as one; rows are filled up to different lengths."""
    changed = ("data.packing=false", "training.micro_batch_size=2", "training.steps=4")
    one_rank(megatrain, run_file, *changed)
    several = str(tmp_path / "several")
    work = run_of(run_file, several, *changed, "engine.sequence_parallel=2", at=stopped_at(2))
    assert run_ranks(2, tmp_path, work) == ["SIGTERM"] * 2
    megatrain.done("train", several, "--resume", "--set", "engine.sequence_parallel=1")
    assert_same_run(tmp_path / "one", tmp_path / "several")


def two_then_three(run_file, tmp_path, at, *changed):
    """Two ranks begin a run in the folder `several` and are stopped after a step, three go on."""
    for size, resume in ((2, False), (3, True)):
        stop = None if resume else stopped_at(at)
        work = run_of(run_file, str(tmp_path / "several"), *changed, resume=resume, at=stop)
        ended = run_ranks(size, tmp_path / str(size), work)
        assert ended == ["None" if resume else "SIGTERM"] * size


def stopped_at(done):
    """The last rank is told to stop after so many steps."""

    def told(taken):
        if taken == done and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return told


def test_a_rank_with_other_rows_is_heard_by_all(run_file, tmp_path):
    """Rows that differ end the run before the step."""

    def work(group):
        rank = dist.get_rank()
        other = tmp_path / f"rows of {rank}.jsonl"
        rows = (tmp_path / "rows.jsonl").read_text().splitlines(True)
        other.write_text("".join(rows[::-1] if rank else rows))
        unheld = ("data.eval_fraction=0", "training.eval_every=null")
        differing = run_of(run_file, "differing", *unheld)

        def opened(given, **options):
            return open_dataset(str(other), **options)

        with (
            pytest.raises(RunFailed, match="step 1: .*rank 1 has another checksum of the step's"),
            mock.patch("megatrain.train.resolve.open_dataset", opened),
        ):
            differing(group)

    os.chdir(tmp_path)
    run_ranks(2, tmp_path, work)


def test_every_micro_batch_is_one_ranks_own():
    """In their order, and each rank has one, without labels if there are too few."""

    shares = (((4, 4, 4, 2), [[4, 4], [4, 2]]), ((2,), [[], [2]]), ((9, 1, 1), [[9], [1, 1]]))
    for rows, parts in shares:
        each = [torch.ones(n, 5).long() for n in rows]
        micro_batches = [{"input_ids": ids, "labels": ids} for ids in each]
        for rank, wanted in enumerate(parts):
            found = part_of(micro_batches, Alike(rank, 2))
            labelled = [each for each in found if (each["labels"] != -100).any()]
            assert [len(each["input_ids"]) for each in labelled] == wanted
            assert found


FEW = (
    *("loss.name=grpo", "loss.num_generations=2", "loss.max_completion_length=8"),
    "rollout.rewards=[few.py:few]",
)


def test_micro_batches_are_cut_for_ranks_that_would_have_none():
    """As far as there are rows, each of which comes once and in its order."""
    numbers = torch.arange(9)[:, None] + torch.zeros(9, 2).long()
    for rows, count, wanted in (
        ((5, 3, 1), 3, [5, 3, 1]),
        ((5, 3, 1), 5, [2, 1, 2, 3, 1]),
        ((9,), 2, [5, 4]),
        ((1, 1), 4, [1, 1]),
    ):
        parts = numbers[: sum(rows)].split(rows)
        found = split_for_ranks([{"input_ids": p, "labels": p + 1} for p in parts], Alike(0, count))
        assert [len(each["input_ids"]) for each in found] == wanted
        for name, more in (("input_ids", 0), ("labels", 1)):
            joined = torch.cat([each[name] for each in found])
            assert torch.equal(joined, numbers[: sum(rows)] + more)


def test_a_step_with_fewer_replies_than_ranks_is_refused(run_file):
    @contextmanager
    def joined():
        yield Alike(0, 9)

    config = load(run_file, [*FEW, "training.batch_size=4"])
    with (
        mock.patch("megatrain.train.loop.joined", joined),
        pytest.raises(InputError, match="a step has 8 replies for 9 ranks"),
    ):
        train(config, "run")


def test_a_restart_by_torchrun_does_not_see_addresses_of_processes_that_ended(monkeypatch):
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": kept.port, "RANK": 0, "WORLD_SIZE": 2}
    for name, value in {**given, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=int):
        for restarts in range(2):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
            with joined():
                store = dist.init_process_group.call_args.kwargs["store"]
            assert not store.check(["address of rank 1"])
            store.set("address of rank 1", "it")


def test_more_devices_than_cores_are_refused_before_a_process_is_started():
    cores = usable_cores()
    with pytest.raises(InputError, match=f"may use {cores} cores.* to at most {cores}$"):
        launch(cores + 1, ["train", "no-such-run.yaml"])


def test_devices_are_started_by_torchrun(megatrain, run_file):
    with mock.patch("megatrain.parallel.distributed.launch", return_value=3) as launched:
        result = megatrain("train", run_file, *sets(engine__devices=2), "--resume")
    given = ["train", str(run_file), "--set", "engine.devices=2", "--resume"]
    launched.assert_called_once_with(2, given)
    assert result.exit_code == 3


# A run on several hosts is that of one rank; what a host lacks is said before a step.


@contextmanager
def laid_out(ranks_of_a_host):
    """As torchrun starts them; of engines made meanwhile, how many hosts and ranks of each."""
    shapes: list[tuple[int, int]] = []
    opened = Engine.__init__

    def noted(engine, *given, **options):
        opened(engine, *given, **options)
        shapes.append((engine.ranks.replicas.size, engine.ranks.shards.size))

    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=ranks_of_a_host),
        mock.patch.object(Engine, "__init__", noted),
    ):
        yield shapes


@pytest.mark.exhaustive
def test_a_run_on_two_hosts_goes_on_with_one_rank(megatrain, run_file, tmp_path):
    one_rank(megatrain, run_file)
    folder = str(tmp_path / "several")

    def work(group):
        with laid_out("2") as shapes:
            return run_of(run_file, folder, at=stopped_at(3))(group), shapes

    assert run_ranks(4, tmp_path / "ranks", work) == [("SIGTERM", [(2, 2)])] * 4
    megatrain.done("train", folder, "--resume", "--set", "engine.devices=1")
    assert_same_run(tmp_path / "one", tmp_path / "several")


def test_hosts_of_other_sizes_and_folders_are_refused(run_file, tmp_path):
    def work(group):
        rank, listed = dist.get_rank(), os.listdir
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(1 + (rank > 0))):
            words = "the host of rank 1 has 2 ranks, that of rank 0 has 1: start as many"
            with pytest.raises(InputError, match=words):
                run_of(run_file, str(tmp_path / "sizes"))(group)
        assert not (tmp_path / "sizes").exists()
        other = mock.patch.object(files.os, "listdir", lambda at: [] if rank == 2 else listed(at))
        with other, pytest.raises(InputError, match=r"made by rank 0, but not there on"):
            run_of(run_file, str(tmp_path / "unseen"))(group)

    run_ranks(3, tmp_path / "ranks", work)
    assert not [path for path in (tmp_path / "unseen").iterdir() if "seen" in path.name]


def test_full_sharding_keeps_the_model_once_on_all_hosts(run_file, tmp_path):
    changed = "engine.sharding=full", "training.steps=1"

    def work(group):
        with laid_out("1") as shapes:
            run_of(run_file, str(tmp_path / "full"), *changed)(group)
        return shapes

    assert run_ranks(2, tmp_path / "ranks", work) == [[(1, 2)]] * 2
