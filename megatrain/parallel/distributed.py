"""Ranks: the processes that train one model together, each with a device of its own.

The collectives are torch.distributed's. Launch and rendezvous are, too (`torchrun`).
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from itertools import takewhile
from math import prod
from operator import eq
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from megatrain.compat.torch import all_gather_single, reduce_scatter_single
from megatrain.errors import (
    DoesNotFit,
    InputError,
    MegatrainError,
    RunFailed,
    explained,
    in_one_line,
)

T = TypeVar("T")
Values = Mapping[str, Callable[[], Tensor]]  # functions that read tensors, by name

_LONGEST = 1_000_000  # seconds
# While rank 0 tokenises or a save writes to a slow disk; ranks that have ended are noticed at once.
_DAY = timedelta(hours=24)
_GATHERS, _GATHERED = 4, 1 << 23  # to measure the link: gathers, elements of a rank in each


def patience() -> timedelta:
    """The time after which a rank that others wait for counts as hanging. Raises InputError."""
    seconds = os.environ.get("MEGATRAIN_RANK_TIMEOUT", "600")
    if not seconds.isdecimal() or not 0 < int(seconds) <= _LONGEST:
        raise InputError(
            f"MEGATRAIN_RANK_TIMEOUT is {seconds!r}; it must be seconds, from 1 to {_LONGEST:,}"
        )
    return timedelta(seconds=int(seconds))


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks that share a model; this base class: alone, or in a forecast."""

    rank: int = 0
    size: int = 1
    on_host: int = 1  # ranks that share this machine's memory and cores
    host: ProcessGroup | None = None  # the ranks' process group for CPU tensors and objects
    link_gbps: float | None = None  # GB/s that a device receives in a gather, if measured
    hosts: int = 1  # number of hosts: groups of consecutive ranks that each keep the whole model
    saves: ProcessGroup | None = None  # another such group, for the thread of a save
    parts: tuple["Ranks", "Ranks"] | None = None  # `shards` and `replicas` of several hosts

    @property
    def shards(self) -> "Ranks":
        """The ranks of one host: each keeps a block of the model (FSDP's shard group)."""
        per_host = self.size // self.hosts
        return self.parts[0] if self.parts else self._part(self.rank % per_host, per_host)

    @property
    def replicas(self) -> "Ranks":
        """The ranks, of all hosts, that keep the same block (HSDP's replicate group)."""
        number = self.rank * self.hosts // self.size
        return self.parts[1] if self.parts else self._part(number, self.hosts)

    def _part(self, rank: int, size: int) -> "Ranks":
        if self.hosts == 1 and size == self.size:
            return self
        return ALONE if size == 1 else replace(self, rank=rank, size=size, hosts=1)

    def all_gather_object(self, value: T) -> list[T]:
        """The values of all ranks, in their order; pickled."""
        return [value]

    def barrier(self) -> None:
        """Wait until all ranks are here. Raises RunFailed: names the ranks that are late."""

    def all_gather(self, whole: Tensor) -> None:
        """Fill a tensor of `size` equal blocks; each rank has its own block in place already."""

    def reduce_scatter(self, whole: Tensor) -> None:
        """Put the sum over all ranks into this rank's block of a tensor; the rest is undefined."""

    def all_reduce(self, values: Tensor) -> None:
        """Replace a tensor by its sum over all ranks, which has the same bits on every rank."""

    def join(self, part: Tensor, place: slice, shape: Sequence[int]) -> Tensor:
        """Join the ranks' parts of an fp32 CPU tensor; `place`: this part in the flat tensor."""
        return part.view(tuple(shape))

    def agree(self, make: Callable[[], T]) -> list[T]:
        """Call `make` on every rank; return the results of all ranks.

        Raises MegatrainError on all ranks if `make` raises an error on any of them.
        """
        if self.size == 1:
            return [make()]
        try:
            results = [make()]
        except BaseException as error:  # on this rank
            kind = next((k for k in (InputError, DoesNotFit) if isinstance(error, k)), RunFailed)
            is_ours = isinstance(error, MegatrainError)  # else other ranks raise another error
            with suppress(RunFailed):  # if the other ranks are lost, raise this rank's own error
                message = str(error) if is_ours else repr(error)
                self.all_gather_object(([], (kind, message, is_ours)))
                if isinstance(error, MegatrainError):
                    error.by_all = True
            raise
        outcomes: list[tuple[list[T], Any]] = self.all_gather_object((results, None))
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                kind, message, is_ours = failure
                raised = kind(f"rank {rank}: {message}")
                raised.by_all = is_ours
                raise raised
        return [value for values, _ in outcomes for value in values]

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 alone; return its result on every rank. Raises as `agree` does."""
        return self.agree(lambda: None if self.rank else make())[0]  # type: ignore[return-value]

    def serve(self, read: Values, work: Callable[[Values], None]) -> None:
        """Run `work` on rank 0; whenever it calls a function of `read`, all ranks call it.

        Raises MegatrainError on all ranks if `work` raises it.
        """
        if self.size == 1:
            return work(read)
        lock = threading.Lock()

        def read_on_all(name: str) -> Tensor:
            with lock:
                self.all_gather_object(name)
                return read[name]()

        def lead() -> None:
            try:
                work({name: partial(read_on_all, name) for name in read})
            finally:
                self.all_gather_object(None)

        def follow() -> None:
            while (name := self.all_gather_object("")[0]) is not None:
                read[name]()

        self.agree(follow if self.rank else lead)
        return None


def require_same(values: Sequence[Mapping[str, str]]) -> None:
    """Raise InputError if a rank's named value differs from rank 0's."""
    first, *others = values
    for rank, named in enumerate(others, 1):
        for name, value in named.items():
            expected = str(first.get(name))
            if value == expected:
                continue
            same_beginning = takewhile(bool, map(eq, value, expected))
            start = max(0, sum(same_beginning) - 50)
            texts = (in_one_line(text[start:], 200) for text in (value, expected))
            raise InputError(
                f"rank {rank} has another {name} than rank 0: {' instead of '.join(texts)}"
            )


ALONE = Ranks()
numbered: list[Any] = []  # `ProcessGroups` by number: a graph's operation takes the number


@torch.library.custom_op("megatrain::exchange", mutates_args=())
def exchange(rows: Tensor, splits: Tensor | None, ranks: int) -> Tensor:
    """`ProcessGroups.exchange` as an operation of graphs.

    Args: `splits`: rows that go to each rank, and that come from each, `[2, N]` on the host; None:
        equally many. `ranks`: their number in `numbered`.
    """
    return numbered[ranks].exchange(rows, *(() if splits is None else splits.tolist()))


@exchange.register_fake
def _(rows: Tensor, splits: Tensor | None, ranks: int) -> Tensor:
    return rows.new_empty(rows.shape)  # forecasts assume that as many rows come as go


def _keep_splits(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, splits, ctx.ranks = inputs
    ctx.save_for_backward(splits)


def _send_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    [splits] = ctx.saved_tensors
    splits_back = None if splits is None else splits.flip(0)
    return exchange(gradient.contiguous(), splits_back, ctx.ranks), None, None


exchange.register_autograd(_send_back, setup_context=_keep_splits)


@dataclass(frozen=True)
class ProcessGroups(Ranks):
    """Ranks of an initialised torch.distributed."""

    # incoming, outgoing: groups for the device's gathers and sums, which run side by side
    incoming: ProcessGroup | None = None
    outgoing: ProcessGroup | None = None
    within_layers: ProcessGroup | None = None  # for exchanges on the compute stream, if any

    def _peer_errors(self) -> AbstractContextManager[None]:
        lost = f"rank {self.rank} of {self.size} has lost the others"
        remedy = "see the message of the rank that has ended, and go on from the last checkpoint"
        return explained(lost, remedy, of=RuntimeError, into=RunFailed)

    def all_gather_object(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        with self._peer_errors():
            dist.all_gather_object(values, value, group=self.host)
        return values

    def barrier(self) -> None:
        with self._peer_errors():
            dist.monitored_barrier(self.host, timeout=patience(), wait_all_ranks=True)

    def all_gather(self, whole: Tensor) -> None:
        flat = whole.view(torch.uint8)
        with self._peer_errors():
            all_gather_single(flat, self._block(flat), group=self.incoming)

    def reduce_scatter(self, whole: Tensor) -> None:
        with self._peer_errors():
            if self.outgoing is self.host:  # gloo's reduce-scatter sums the whole tensor, too
                dist.all_reduce(whole, group=self.outgoing)
            else:
                reduce_scatter_single(self._block(whole), whole, group=self.outgoing)

    def all_reduce(self, values: Tensor) -> None:
        with self._peer_errors():
            dist.all_reduce(values, group=self.outgoing)

    def join(self, part: Tensor, place: slice, shape: Sequence[int]) -> Tensor:
        joined = torch.zeros(prod(shape))
        joined[place] = part.view(-1)
        with self._peer_errors():  # as integers: a sum with zeros keeps every bit
            dist.all_reduce(joined.view(torch.int32), group=self.host)
        return joined.view(tuple(shape))

    def exchange(
        self, rows: Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> Tensor:
        """Send the first `sent[0]` rows to rank 0, the next to rank 1, ...; return received rows.

        `received[r]` rows come from rank r, in the ranks' order. None: equally many for each rank.
        """
        out = rows.new_empty((len(rows) if received is None else sum(received), *rows.shape[1:]))
        to, source = out.view(torch.uint8), rows.contiguous().view(torch.uint8)
        with self._peer_errors():
            dist.all_to_all_single(to, source, received, sent, group=self.within_layers)
        return out

    def _block(self, whole: Tensor) -> Tensor:
        block = len(whole) // self.size
        return whole[self.rank * block : (self.rank + 1) * block]


def local_rank(group: object) -> int | None:
    """The number of this process among those of its machine; None without a group."""
    if group is None:
        return None
    return int(os.environ.get("LOCAL_RANK", dist.get_rank() if dist.is_initialized() else 0))


def open_ranks(group: ProcessGroup | DeviceMesh | None, device: torch.device) -> Ranks:
    """The ranks of a group, with communicators of their own (NCCL or gloo, by the device).

    A mesh of two dimensions is one for HSDP: hosts, and the ranks of each, which share a model. All
    ranks of the group must call this. The communicators live as long as torch.distributed.

    Raises InputError: torch.distributed is not initialised, or this process is not in the group.
    """
    if group is None:
        return ALONE
    hosts, given_group, ready = 1, group, dist.is_available() and dist.is_initialized()
    if ready and isinstance(group, DeviceMesh) and group.ndim == 2:
        if group.mesh.flatten().tolist() == [*range(dist.get_world_size())]:
            hosts, group = len(group.mesh), dist.group.WORLD
    elif ready and isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    if not ready or not isinstance(group, ProcessGroup) or dist.get_rank(group) < 0:
        raise InputError(
            f"group is {given_group!r}; it must be a ProcessGroup with this process (see torchrun) "
            "or a DeviceMesh of one dimension, or of two that has all ranks in their order"
        )
    return ALONE if dist.get_world_size(group) == 1 else connected(group, device, hosts)


@cache  # else new groups could get the names of destroyed ones, whose keys the store still has
def connected(group: ProcessGroup, device: torch.device, hosts: int = 1) -> Ranks:
    """The ranks of a group, on `hosts` hosts that each keep the whole model."""
    members, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    full = _with_groups(members, device)
    hostnames = full.all_gather_object(socket.gethostname())
    saves = dist.new_group(members, _DAY, "gloo", use_local_synchronization=True)
    full = replace(full, on_host=hostnames.count(hostnames[rank]), saves=saves, hosts=hosts)
    if hosts == 1:
        return _connect(full, device)
    size = len(members) // hosts
    first = rank - rank % size
    parts = members[first : first + size], members[rank % size :: size]
    shards, replicas = (
        ALONE if len(part) == 1 else _connect(_with_groups(part, device), device) for part in parts
    )
    full.all_reduce(torch.zeros(1, device=device))
    return replace(full, parts=(shards, replicas))


def _with_groups(members: Sequence[int], device: torch.device) -> ProcessGroups:
    """Make the process groups of some ranks, for the host and for the device."""

    def new_group(backend: str) -> Any:
        return dist.new_group(members, patience(), backend, use_local_synchronization=True)

    host, rank = new_group("gloo"), members.index(dist.get_rank())
    incoming = outgoing = host
    backend = dist.get_default_backend_for_device(device)
    if backend != "gloo":
        incoming, outgoing = new_group(backend), new_group(backend)
    return ProcessGroups(rank, len(members), host=host, incoming=incoming, outgoing=outgoing)


def _connect(ranks: ProcessGroups, device: torch.device) -> ProcessGroups:
    """Let NCCL allocate its memory now, since that could deadlock in a step; measure the link."""
    if ranks.incoming is ranks.host:  # gloo
        return ranks
    values = torch.ones(ranks.size * _GATHERED, device=device)
    ranks.all_gather(values)
    ranks.reduce_scatter(values)
    ranks.all_reduce(values[:1])
    assert float(values[0]) > 0  # waits for the device
    ranks.barrier()
    started = time.perf_counter()
    for _ in range(_GATHERS):
        ranks.all_gather(values)
    assert float(values[0]) > 0
    received = _GATHERS * values.nbytes * (ranks.size - 1) / ranks.size
    gbps = received / (time.perf_counter() - started) / 1e9
    return replace(ranks, link_gbps=min(ranks.all_gather_object(gbps)))


def is_launched() -> bool:
    """True if torchrun has started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def is_restarted() -> bool:
    """True if torchrun has started this process again after a failure (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def launch(devices: int, arguments: Sequence[str]) -> int:
    """Run `megatrain` with `arguments` on `devices` devices by torchrun; return the exit code.

    A process that fails prints the reason itself. Raises InputError: more devices than cores.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    allowed = getattr(os, "sched_getaffinity", None)  # not on a Mac
    cores = len(allowed(0)) if allowed else os.cpu_count() or 1
    if devices > cores:
        raise InputError(
            f"engine.devices is {devices}, but this process may use {cores} cores, and each device "
            f"needs one; set engine.devices to at most {cores}"
        )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // devices)))
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
    """Join the ranks that torchrun has started, for the block; without torchrun yield ALONE."""
    if not is_launched():
        yield ALONE
        return
    problem = "the ranks do not find each other"
    with explained(problem, of=(RuntimeError, ValueError), into=RunFailed):
        store, rank, size = next(rendezvous("env://", timeout=_DAY))
        # After a restart torchrun's store may still have the addresses of processes that ended.
        store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_DAY)
    try:
        yield ProcessGroups(rank, size, host=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def open_sequence_ranks(ranks: Ranks, device: torch.device, number: Any) -> Ranks:
    """The ranks that share every row: all of them, or this one alone. All ranks call this.

    Raises InputError: `number` is neither 1 nor the number of all ranks, the ranks are on several
    hosts, or a rank has another number.
    """
    require_same(ranks.all_gather_object({"sequence_parallel": str(number)}))
    all_here = ranks.on_host == ranks.size and ranks.hosts == 1
    is_all = number == ranks.size and all_here
    if type(number) is not int or not (number == 1 or is_all):
        raise InputError(
            f"sequence_parallel is {number!r}; it must be 1 (each rank has rows of its own) or the "
            f"number of ranks, which is {ranks.size}, all of one host"
        )
    return ALONE if number == 1 else exchanging(ranks, device)


@cache  # the communicator lives as long as torch.distributed
def exchanging(ranks: Ranks, device: torch.device) -> ProcessGroups:
    """These ranks with a communicator for exchanges; all ranks call this."""
    assert isinstance(ranks, ProcessGroups)
    backend = dist.get_default_backend_for_device(device)
    if backend == "gloo":
        return replace(ranks, within_layers=ranks.host)
    members = dist.get_process_group_ranks(ranks.host)
    group: Any = dist.new_group(members, patience(), backend, use_local_synchronization=True)
    values = torch.ones(len(members), device=device)  # NCCL allocates its memory now
    dist.all_to_all_single(torch.empty_like(values), values, group=group)
    torch.get_device_module(device).synchronize()
    return replace(ranks, within_layers=group)
