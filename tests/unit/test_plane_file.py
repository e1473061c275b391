"""Planes on a disk: the bytes that were written come back, and what the disk refuses is told."""

import errno
import fcntl
import mmap
import os
import random
import resource
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from megatrain import kernels
from megatrain.device import plane_file
from megatrain.device.plane_file import BLOCK, PlaneFile
from megatrain.errors import DoesNotFit, InputError, RunFailed
from megatrain.kernels import reference

BLOCKS = 64


def room(num_bytes):
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def drawn(num_bytes, seed):
    data = room(num_bytes)
    return data.copy_(
        torch.frombuffer(bytearray(random.Random(seed).randbytes(num_bytes)), dtype=torch.uint8)
    )


@pytest.fixture(params=["as it is", "page cache", "without native kernels"])
def file(request, tmp_path, monkeypatch):
    """A file in small pieces, also on a file system without direct access."""
    monkeypatch.setattr(plane_file, "PIECE_BYTES", 3 * BLOCK)
    if request.param == "without native kernels":
        monkeypatch.setattr(kernels, "move_file", reference.move_file)
    if request.param == "page cache":
        monkeypatch.setattr(fcntl, "fcntl", failing(errno.EINVAL))
    made = PlaneFile.create(tmp_path, BLOCKS * BLOCK)
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


def test_threads_share_a_file(file):
    def visit(number):
        data, found = drawn(4 * BLOCK, number), room(4 * BLOCK)
        for _ in range(20):
            file.write(4 * BLOCK * number, data)
            file.read(4 * BLOCK * number, found)
            if not torch.equal(found, data):
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(visit, range(4)))


def test_a_file_that_has_become_shorter(file):
    """What is read of it ends in the middle of a block, which is asked for again."""
    data, found = drawn(9 * BLOCK, 2), room(9 * BLOCK)
    file.write(0, data)
    os.ftruncate(file._handle.fileno(), 8 * BLOCK + 1000)
    with pytest.raises(RunFailed, match="cannot read planes .*No data available; resume"):
        file.read(0, found)
    assert torch.equal(found[: 8 * BLOCK], data[: 8 * BLOCK])


def test_calls_that_do_less_than_asked(file, monkeypatch):
    """They are called again from the block on that was not whole."""
    for name in ("preadv", "pwritev"):
        whole = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda f, b, o, whole=whole: max(BLOCK, whole(f, b, o) - 1000)
        )
    data, found = drawn(10 * BLOCK, 2), room(10 * BLOCK)
    for writes, memory in ((True, data), (False, found)):
        reference.move_file(file._handle.fileno(), 0, memory, writes=writes, piece=BLOCK, threads=1)
    assert torch.equal(found, data)


def test_what_is_not_of_whole_blocks_is_refused(file):
    data = room(4 * BLOCK)
    for offset, part in (
        (512, data),
        (0, data[:-512]),
        (0, data[512 : 512 + BLOCK]),
        (-BLOCK, data),
        ((BLOCKS - 3) * BLOCK, data),
    ):
        for move in (file.read, file.write):
            with pytest.raises(ValueError, match="bytes at"):
                move(offset, part)


def test_the_file_has_no_name_and_leaves_with_its_last_user(tmp_path):
    one, other = (PlaneFile.create(tmp_path, BLOCK) for _ in range(2))
    assert os.listdir(tmp_path) == []
    one.write(0, drawn(BLOCK, 3))
    found = drawn(BLOCK, 4)
    other.read(0, found)
    assert not found.any()  # another run's file in the same folder
    one.close()
    other.close()
    with pytest.raises(RunFailed, match="closed"):
        one.read(0, found)


def test_room_is_taken_at_once(tmp_path):
    made = PlaneFile.create(tmp_path, 300 * BLOCK + 1)
    assert os.fstat(made._handle.fileno()).st_blocks * 512 >= 301 * BLOCK
    made.close()


def test_a_full_disk_is_told_at_the_start(tmp_path, monkeypatch):
    with pytest.raises(DoesNotFit, match=rf"{tmp_path}: no room .* 1048576.0 GiB wanted.*missing"):
        PlaneFile.create(tmp_path, 1 << 50)
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EDQUOT))
    with pytest.raises(DoesNotFit, match="quota exceeded"):
        PlaneFile.create(tmp_path, BLOCK)


@pytest.mark.parametrize("name", ["none", "a file"])
def test_a_folder_that_cannot_be_used(tmp_path, name):
    (tmp_path / "a file").touch()
    with pytest.raises(InputError, match=rf"{name}: no file for planes can be made there: \w"):
        PlaneFile.create(tmp_path / name, BLOCK)


def test_a_limit_met_while_writing_is_told(file):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * BLOCK, before[1]))
    try:
        with pytest.raises(RunFailed, match="cannot write planes .*File too large; make room"):
            file.write(4 * BLOCK, drawn(8 * BLOCK, 5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_failing_disk_is_told(file, monkeypatch, verb):
    """Here by a descriptor that allows no access."""
    closed = os.open(file.folder, os.O_PATH)
    monkeypatch.setattr(
        file, "_handle", SimpleNamespace(closed=False, fileno=lambda: closed, close=lambda: None)
    )
    with pytest.raises(
        RunFailed, match=f"{file.folder}: cannot {verb} planes .*descriptor; resume"
    ):
        getattr(file, verb)(0, room(8 * BLOCK))
    os.close(closed)


def test_the_page_cache_is_told_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fcntl, "fcntl", failing(errno.EINVAL))
    made = PlaneFile.create(tmp_path, BLOCK)
    for _ in range(3):
        made.write(0, room(BLOCK))
    assert [r.message for r in caplog.records if "O_DIRECT" in r.message] == [caplog.messages[0]]
    made.close()
