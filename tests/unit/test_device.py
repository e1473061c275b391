"""Devices: which GPU a name means, host threads as streams, planes in memory and on disks."""

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain import DoesNotFit, InputError, RunFailed, kernels
from megatrain.base.units import MIB
from megatrain.device import Buffer, cuda, disk, open_device
from megatrain.device.cpu import host_range
from megatrain.device.disk import BLOCK, PlaneFile
from megatrain.device.host_stream import AHEAD, HostStream, LaunchThrottle
from megatrain.driver import amd
from megatrain.driver.base import Gpu
from megatrain.kernels import reference
from megatrain.telemetry.gpu import find_driver, find_gpu
from megatrain.tile import Entry, TileLayout
from megatrain.tile.formats import FP32
from megatrain.tile.layout import ALIGNMENT
from tests.forks import forked
from tests.inside import answering, sized


@pytest.fixture
def opened(monkeypatch):
    """Three GPUs, of which torch takes the second; what was opened of them."""
    numbers: list[tuple[int, bool]] = []

    def note(index, *, shared):
        numbers.append((index, shared))

    answering(monkeypatch, torch.cuda, is_available=True, device_count=3, current_device=1)
    monkeypatch.setattr(cuda, "CudaDevice", note)
    return numbers


@pytest.mark.parametrize(
    ("name", "rank", "number"),
    [(None, None, 1), ("auto", None, 1), ("cuda", None, 1), ("cuda:0", None, 0),
     (None, 0, 0), ("cuda", 2, 2), ("cuda:1", 2, 1)],
)  # fmt: skip
def test_a_gpu_without_a_number_is_the_ranks_or_torchs_current_one(name, rank, number, opened):
    open_device(name, rank)
    assert opened == [(number, rank is not None)]


@pytest.mark.parametrize("chosen", [None, "4"])
def test_ranks_have_a_connection_for_each_stream_unless_cuda_was_in_use(
    chosen, monkeypatch, caplog
):
    name, fresh = "CUDA_DEVICE_MAX_CONNECTIONS", "import os, megatrain; print(os.environ[{!r}])"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    if chosen is not None:
        monkeypatch.setenv(name, chosen)
    said = subprocess.run(
        [sys.executable, "-c", fresh.format(name)], capture_output=True, check=True
    )
    assert said.stdout.decode().strip() == (chosen or "32")
    for used in (False, True):  # by a program that imported megatrain later
        if chosen is None:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda used=used: used)
        monkeypatch.setattr(torch.cuda, "get_device_properties", mock.Mock(side_effect=LookupError))
        with pytest.raises(LookupError):
            cuda.CudaDevice(shared=True)
        assert os.environ[name] == (chosen or "32")
        assert len(caplog.messages) == (used and chosen is None)


def test_a_gpu_that_is_not_there_is_refused(opened):
    with pytest.raises(InputError, match="cuda:3 was asked for, but torch sees 3 GPUs"):
        open_device("cuda:3")
    assert not opened


# Host threads that stand in for streams: order, errors that do not hang, and the end.


@pytest.fixture
def worker():
    worker = HostStream("update", torch.zeros(1, dtype=torch.int32))
    yield worker
    worker.close()


def test_work_is_done_in_order_and_counted(worker):
    done: list[int] = []
    gate = threading.Event()
    worker.put(gate.wait)
    marks = []
    for i in range(20):
        worker.put(lambda i=i: done.append(i))
        marks.append(worker.mark())
    assert not worker.passed(marks[0])
    gate.set()
    worker.wait(marks[9])
    assert done[:10] == list(range(10))
    worker.wait(marks[-1])
    assert done == list(range(20))
    assert worker.counter.item() == marks[-1]


def test_an_error_is_kept_stops_the_work_and_lets_nothing_hang(worker):
    done: list[int] = []
    worker.put(lambda: 1 / 0)
    worker.put(lambda: done.append(1))
    worker.wait(worker.mark())
    assert done == []
    for _ in range(2):  # it does not go away by being looked at
        with pytest.raises(RunFailed, match="update thread failed: division by zero") as caught:
            worker.check()
        cause = caught.value.__cause__
        assert isinstance(cause, ZeroDivisionError)
        assert cause.__traceback__ is not None


def test_an_error_of_ours_is_raised_as_it_is(worker):
    worker.put(mock.Mock(side_effect=InputError("this line")))
    worker.wait(worker.mark())
    with pytest.raises(InputError, match="^this line$"):
        worker.check()


# The launching thread is ahead of the GPU, but not so far that a full queue could stand still.


class SlowGpu:
    """Points of its work; it is slow, and reaches one when somebody waits for it."""

    def __init__(self):
        self.recorded = self.reached = 0

    def record(self):
        self.recorded += 1
        return self

    def synchronize(self):
        self.reached += 1


def test_it_is_a_few_pieces_ahead():
    gpu = SlowGpu()
    pace = LaunchThrottle(gpu.record)
    for number in range(5 * AHEAD):
        with pace.piece("layer"):
            assert gpu.recorded == number + 1
            assert gpu.recorded - gpu.reached <= AHEAD


@pytest.mark.parametrize(("seconds", "seen"), [(0.001, 0), (1.0, 1), (1.0, 10)])
def test_a_piece_that_may_be_large_waits_for_host_threads(worker, seconds, seen):
    """One that has not been seen, or was large: every one takes so long to launch."""
    clock, over = itertools.count(0, seconds), threading.Event()
    pace = LaunchThrottle(SlowGpu().record, lambda: next(clock))

    def launch():
        with pace.piece("layer"):
            pass

    for _ in range(seen):
        launch()
    worker.put(over.wait)
    pace.note_wait(worker, worker.mark())
    thread = threading.Thread(target=launch)
    thread.start()
    thread.join(0.1)
    waited = thread.is_alive()
    over.set()
    thread.join()
    assert waited


# What vendors' drivers are asked, by libraries that stand in for them: no GPU has answered AMD's.


class Library:
    """Notes the calls of a C library's functions; each returns its status, or 0."""

    def __init__(self, **statuses):
        self.calls, self.statuses, self.texts = [], statuses, {}

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *(getattr(each, "value", each) for each in arguments)))
            if name == "hipHostGetDevicePointer":
                arguments[0]._obj.value = arguments[1].value + (1 << 40)
            if name in self.texts:
                arguments[0].value = self.texts[name]
            return self.statuses.get(name, 0)

        return call


@pytest.fixture(params=[None, "7.0.51831"], ids=["CUDA", "HIP"])
def vendor(request, monkeypatch):
    """A library in place of each vendor's, and the names by which it was looked for."""
    library, names = Library(), []

    def load(name):
        names.append(name)
        return library

    monkeypatch.setattr(torch.version, "hip", request.param)
    monkeypatch.setattr(ctypes, "CDLL", load)
    return SimpleNamespace(library=library, names=names, hip=request.param)


def test_a_stream_waits_by_the_vendors_own_call(vendor):
    address, count = 0x7F0000000000, 2**31 + 5
    assert find_driver().wait(12, address, count) == 0
    *before, wait = vendor.library.calls
    if vendor.hip is None:
        assert vendor.names == ["libcuda.so.1"] and not before
        assert wait == ("cuStreamWaitValue32_v2", 12, address, count, 0)
    else:
        assert vendor.names == ["libamdhip64.so.7"]
        assert [name for name, *_ in before] == ["hipHostGetDevicePointer"]
        assert wait == ("hipStreamWaitValue32", 12, address + (1 << 40), count, 0, 2**32 - 1)


@pytest.mark.parametrize("status", [1, 801, 700])
def test_a_driver_without_such_waits_is_waited_for_by_the_launching_thread(
    vendor, status, worker, caplog
):
    """Once it has said so, it is not asked again; any other status ends the run."""
    call = "hipStreamWaitValue32" if vendor.hip else "cuStreamWaitValue32_v2"
    vendor.library.statuses[call] = status
    gpu = object.__new__(cuda.CudaDevice)  # no GPU is opened
    gpu._driver, gpu._waits_on_counters, gpu._workers = find_driver(), True, {}
    gpu._pace = SimpleNamespace(note_wait=lambda worker, count: None)
    gpu._streams = {"compute": SimpleNamespace(cuda_stream=12)}
    for _ in range(2):
        worker.put(lambda: time.sleep(0.05))
        event = cuda.HostEvent(worker, worker.mark())
        if status not in find_driver().unsupported:
            with pytest.raises(RunFailed, match=f"refused a stream wait .*{status}"):
                gpu.wait("compute", event, "updated")
            return
        gpu.wait("compute", event, "updated")
        assert worker.passed(event.count)
    assert [name for name, *_ in vendor.library.calls].count(call) == 1
    assert len(caplog.records) == 1 and "steps take longer" in caplog.text


def test_amds_gpu_is_known_by_its_runtime_and_the_kernels_files(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    sized(monkeypatch, amd, _SYSTEM=tmp_path)
    library = Library()
    library.texts = {
        "hipDeviceGetName": b"AMD Instinct MI300X",
        "hipDeviceGetPCIBusId": b"0000:C1:00.0",
    }
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    files = tmp_path / "bus/pci/devices/0000:c1:00.0"
    files.mkdir(parents=True)
    plain = Gpu("AMD Instinct MI300X", 0, "6.4.43482")
    assert find_gpu("cuda:2") == plain  # a container may hide the files
    texts = {"mem_info_vram_total": 192 << 30, "mem_info_vram_used": 5 << 30, "unique_id": "0xabc"}
    for name, text in texts.items():
        (files / name).write_text(f"{text}\n")
    assert find_gpu("cuda:2") == replace(
        plain, memory_bytes=192 << 30, uuid="0xabc", used_bytes=5 << 30
    )
    assert {call[-1] for call in library.calls} == {2}
    library.statuses["hipDeviceGetName"] = 101  # hipErrorInvalidDevice
    assert find_gpu("cuda:2") is None and find_gpu("cpu") is None


def test_without_a_library_the_driver_shows_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(ctypes, "CDLL", failing(errno.ENOENT))
    assert find_gpu() is None


# Planes: their layout, their memory on the host, their files on a disk.


shapes = st.lists(st.integers(1, 40), min_size=0, max_size=3).map(torch.Size)
groups = st.one_of(st.none(), st.integers(0, 3))
parameters = st.lists(st.tuples(shapes, groups), max_size=12).map(
    lambda found: [Entry(f"p{i}", (*shape,), 0, group) for i, (shape, group) in enumerate(found)]
)


@given(parameters)
def test_entries_are_disjoint_aligned_and_complete(given_parameters):
    layout = TileLayout("tile", given_parameters)
    assert {replace(entry, offset=0) for entry in layout.entries} == {*given_parameters}
    end = 0
    for entry in layout.entries:
        assert entry.offset >= end
        assert entry.offset % ALIGNMENT == 0
        end = entry.offset + entry.numel
    assert end <= layout.numel < end + ALIGNMENT
    plane = torch.arange(layout.numel)
    for name, view in layout.views(plane).items():
        entry = layout.by_name[name]
        assert torch.equal(view.flatten(), plane[entry.offset : entry.offset + entry.numel])
        assert torch.equal(entry.view(plane), view)
    assert layout.num_parameters == sum(prod(entry.shape) for entry in given_parameters)


@given(parameters, st.integers(1, 4), st.data())
def test_copies_in_fp32_are_whole_wherever_ranks_cut(given_parameters, ranks, data):
    """Each rank's copies lie in its block; together they are the parameters."""
    fp32 = [entry.name for entry in given_parameters if data.draw(st.booleans())]
    entries = [
        replace(e, **({"packed": FP32} if e.group is None else {"copied": True}))
        if e.name in fp32
        else e
        for e in given_parameters
    ]
    layout = TileLayout("tile", entries, ranks=ranks)
    plane, values = torch.zeros(layout.numel, dtype=torch.bfloat16), torch.rand(layout.numel)
    for pieces in layout.copies.values():
        for start, stop, at in pieces:
            plane[at : at + 2 * (stop - start)].view(torch.float32).copy_(values[start:stop])
            block = layout.trainable_numel // ranks
            rank = start // block
            assert (stop - 1) // block == rank
            assert [*layout.blocks(rank)][1][0] <= at < sum([*layout.blocks(rank)][1])
    views = layout.views(plane)
    assert layout.copies.keys() == {e.name for e in layout.trainable if e.name in fp32 and e.numel}
    for name in layout.copies:
        assert torch.equal(views[name], layout.by_name[name].view(values))
    assert {name for name, view in views.items() if view.dtype == torch.float32} >= {
        e.name for e in layout.entries if e.name in fp32 and e.numel
    }


# Memory of planes: in huge pages, and no forked child's.


def flags_of(address):
    """What the kernel notes of the mapping that an address lies in."""
    inside = False
    with open("/proc/self/smaps", encoding="ascii") as lines:
        for line in lines:
            name, *values = line.split()
            if "-" in name:
                start, stop = (int(end, 16) for end in name.split("-"))
                inside = start <= address < stop
            elif inside and name == "VmFlags:":
                return set(values)
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="flags are read of Linux")
def test_planes_ask_for_huge_pages_and_stay_with_their_process():
    planes = host_range("planes", MIB, torch.uint8)
    flags = flags_of(planes.data_ptr())
    assert "hg" in flags
    assert "sh" not in flags  # shared memory has small pages, whatever is asked for
    planes.fill_(1)

    def child():
        # Its address is taken, so that a child that drops the planes unmaps nothing else.
        assert flags_of(planes.data_ptr()) and not planes.any()

    assert forked(child) == 0
    assert planes.all()


# Planes on a disk: the bytes that were written come back, and what the disk refuses is told.

BLOCKS = 64


def room(num_bytes):
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def drawn(num_bytes, seed):
    data = room(num_bytes)
    return data.copy_(
        torch.frombuffer(bytearray(random.Random(seed).randbytes(num_bytes)), dtype=torch.uint8)
    )


@pytest.fixture(params=["as it is", "page cache", "without native kernels", "a Mac's"])
def file(request, tmp_path, monkeypatch):
    """A file in small pieces, also on a file system without direct access."""
    sized(monkeypatch, disk, PIECE_BYTES=3 * BLOCK)
    if request.param == "without native kernels":
        monkeypatch.setattr(kernels, "move_file", reference.move_file)
    if request.param == "page cache":
        monkeypatch.setattr(fcntl, "fcntl", failing(errno.EINVAL))
    if request.param == "a Mac's":
        for name in ("O_DIRECT", "posix_fallocate", "posix_fadvise", "fdatasync"):
            monkeypatch.delattr(os, name, raising=False)
    made = PlaneFile(tmp_path, BLOCKS * BLOCK)
    yield made
    made.close()


def failing(code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    return fail


def test_random_requests_are_those_of_a_bytearray(file):
    plain, draw = bytearray(BLOCKS * BLOCK), random.Random(0)
    for number in range(200):
        count = draw.randint(1, BLOCKS)
        at, num_bytes = draw.randint(0, BLOCKS - count) * BLOCK, count * BLOCK
        if draw.random() < 0.5:
            data = drawn(num_bytes, number)
            file.write(at, data)
            plain[at : at + num_bytes] = data.numpy().tobytes()
        else:
            found = drawn(num_bytes, number)
            file.read(at, found)
            assert found.numpy().tobytes() == plain[at : at + num_bytes]


def test_the_file_has_no_name_and_leaves_with_its_last_user(tmp_path):
    one, other = (PlaneFile(tmp_path, BLOCK) for _ in range(2))
    assert os.listdir(tmp_path) == []
    one.write(0, drawn(BLOCK, 3))
    found = drawn(BLOCK, 4)
    other.read(0, found)
    assert not found.any()  # another run's file in the same folder
    one.close()
    other.close()
    with pytest.raises(RunFailed, match="closed"):
        one.read(0, found)


def test_a_full_disk_is_told_at_the_start(tmp_path, monkeypatch):
    with pytest.raises(DoesNotFit, match=rf"{tmp_path}: no room .* 1048576.0 GiB wanted.*missing"):
        PlaneFile(tmp_path, 1 << 50)
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EDQUOT), raising=False)
    with pytest.raises(DoesNotFit, match="quota exceeded"):
        PlaneFile(tmp_path, BLOCK)


@pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="opens without access on Linux alone")
@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_failing_disk_is_told(file, verb):
    """Here by a descriptor that allows no access."""
    closed = os.open(file.folder, os.O_PATH)
    file._handle = SimpleNamespace(closed=False, fileno=lambda: closed, close=lambda: None)
    with pytest.raises(
        RunFailed, match=f"{file.folder}: cannot {verb} planes .*descriptor; resume"
    ):
        getattr(file, verb)(0, room(8 * BLOCK))
    os.close(closed)


def test_a_gpu_reads_in_place_only_what_is_pinned():
    gpu = object.__new__(cuda.CudaDevice)  # no GPU is opened
    gpu.torch_device, host = torch.device("cpu"), torch.zeros(8)
    gpu._pinned = {host.data_ptr() + host.nbytes: host}
    assert not len(gpu.in_place(Buffer("empty", host[:0])).data)
    with pytest.raises(InputError, match="slots is 0, but weights is not pinned.*take slots: 1"):
        gpu.in_place(Buffer("weights", host))
