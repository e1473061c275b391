"""Several ranks as forked children of the tests' process, which talk by gloo."""

import gc
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
import torch.distributed as dist

Work = Callable[[Any], Any]


def run_ranks(size: int, folder: Path, work: Work, *, whole: bool = True) -> list[Any]:
    """What `work(group)` returns on each rank; any rank that fails fails the test.

    Nothing, if not all ranks live to the end (`whole`).
    """
    children = [_fork(rank, size, folder, work) for rank in range(size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    errors = [folder / f"error {rank}" for rank in range(size)]
    said = [path.read_text() for path in errors if path.exists()]
    assert not any(codes), "\n".join([f"they end with {codes}", *said])
    paths = [folder / f"result {rank}" for rank in range(size if whole else 0)]
    return [torch.load(path, weights_only=False) for path in paths]


def _fork(rank: int, size: int, folder: Path, work: Work) -> int:
    child = os.fork()
    if child:
        return child
    gc.freeze()  # what the parent has is no garbage of this process, and looking copies its pages
    code = 1
    try:
        torch.set_num_threads(1)
        # The parent's pool of compiling threads is inherited without its threads.
        inductor.compile_threads = 1
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        torch.save(work(dist.group.WORLD), folder / f"result {rank}")
        dist.destroy_process_group()
        code = 0
    except BaseException:
        (folder / f"error {rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
