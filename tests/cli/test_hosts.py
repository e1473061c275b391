"""A run on several hosts is that of one rank; what a host lacks is said before a step."""

import os
from contextlib import contextmanager
from unittest import mock

import pytest
import torch.distributed as dist

from megatrain import Engine
from megatrain.checkpoint import files
from megatrain.errors import InputError
from tests.cli.test_ranks import CHANGED, assert_same_run, run_of, stopped_at
from tests.parity.ranks import run_ranks


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
    changed = [part for each in CHANGED for part in ("--set", each)]
    megatrain.done("train", run_file, *changed, "--set", "output.folder=one")
    folder = str(tmp_path / "several")

    def work(group):
        with laid_out("2") as shapes:
            return run_of(run_file, folder, at=stopped_at(3))(group), shapes

    (tmp_path / "ranks").mkdir()
    assert run_ranks(4, tmp_path / "ranks", work) == [("SIGTERM", [(2, 2)])] * 4
    megatrain.done("train", folder, "--resume", "--set", "engine.devices=1")
    assert_same_run(tmp_path / "one", tmp_path / "several")


def test_hosts_of_other_sizes_and_folders_are_refused(run_file, tmp_path):
    def work(group):
        rank, listed = dist.get_rank(), os.listdir
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(1 + (rank > 0))):
            words = "rank 1 is one of 2 on its host, and rank 0 one of 1: start as many"
            with pytest.raises(InputError, match=words):
                run_of(run_file, str(tmp_path / "sizes"))(group)
        assert not (tmp_path / "sizes").exists()
        other = mock.patch.object(files.os, "listdir", lambda at: [] if rank == 2 else listed(at))
        with other, pytest.raises(InputError, match=r"rank 0 has made, is not to be seen from"):
            run_of(run_file, str(tmp_path / "unseen"))(group)

    (tmp_path / "ranks").mkdir()
    run_ranks(3, tmp_path / "ranks", work)
    assert not [path for path in (tmp_path / "unseen").iterdir() if "seen" in path.name]


def test_full_sharding_keeps_the_model_once_on_all_hosts(run_file, tmp_path):
    changed = "engine.sharding=full", "training.steps=1"

    def work(group):
        with laid_out("1") as shapes:
            run_of(run_file, str(tmp_path / "full"), *changed)(group)
        return shapes

    (tmp_path / "ranks").mkdir()
    assert run_ranks(2, tmp_path / "ranks", work) == [[(1, 2)]] * 2
