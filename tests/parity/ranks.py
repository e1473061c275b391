"""Several ranks as forked children of the tests' process, which talk by gloo."""

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
import torch.distributed as dist

from tests.forks import start

Work = Callable[[Any], Any]


def run_ranks(size: int, folder: Path, work: Work, *, whole: bool = True) -> list[Any]:
    """What `work(group)` returns on each rank; any rank that fails fails the test.

    Nothing, if not all ranks live to the end (`whole`).
    """
    children = [start(partial(_rank, rank, size, folder, work)) for rank in range(size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    errors = [folder / f"error {rank}" for rank in range(size)]
    said = [path.read_text() for path in errors if path.exists()]
    assert not any(codes), "\n".join([f"they end with {codes}", *said])
    paths = [folder / f"result {rank}" for rank in range(size if whole else 0)]
    return [torch.load(path, weights_only=False) for path in paths]


def _rank(rank: int, size: int, folder: Path, work: Work) -> None:
    torch.set_num_threads(1)
    # The parent's pool of compiling threads is inherited without its threads.
    inductor.compile_threads = 1
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        torch.save(work(dist.group.WORLD), folder / f"result {rank}")
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error {rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
