"""The processes of a run on several devices, started by torchrun."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from megatrain.errors import InputError, RunFailed, first_line
from megatrain.parallel.distributed import ALONE, ProcessGroups, Ranks

# Rank 0 may tokenise for long, while the others wait; who has ended is noticed at once.
_OPENING = timedelta(hours=24)


def is_launched() -> bool:
    """True if torchrun has started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def is_restarted() -> bool:
    """True if torchrun has started it again, after a failure (`--max-restarts`)."""
    return _restarts() > 0


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def launch(devices: int, arguments: Sequence[str]) -> int:
    """Run `megatrain` with these arguments on `devices` devices by torchrun; returns the exit code.

    A process that fails prints the reason itself.

    Raises:
        InputError: there are more devices than cores.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    cores = len(os.sched_getaffinity(0))
    if devices > cores:
        raise InputError(
            f"engine.devices is {devices}, but this process may use {cores} cores, and each device "
            f"needs one; set engine.devices to at most {cores}"
        )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // devices)))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # device/cuda.py
    options = ["--standalone", "--nproc-per-node", str(devices), "-m", "megatrain", *arguments]
    try:
        run(parse_args(options))
    except ChildFailedError as error:
        return max(1, error.get_first_failure()[1].exitcode)
    except SignalException as signal:  # torchrun has passed it on, and the processes have ended
        return 128 + int(signal.sigval)
    return 0


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks of this run while the block runs; without torchrun this process alone."""
    if not is_launched():
        yield ALONE
        return
    try:
        store, rank, size = next(rendezvous("env://", timeout=_OPENING))
        # After a restart torchrun's store may still have the addresses of processes that ended.
        store = PrefixStore(f"start {_restarts()}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_OPENING)
    except (RuntimeError, ValueError) as error:
        raise RunFailed(f"the ranks do not find each other: {first_line(error)}") from error
    try:
        yield ProcessGroups(rank, size, host=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
