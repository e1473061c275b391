"""Planes on a disk: the bytes that were written come back, and what the disk refuses is told."""

import errno
import fcntl
import mmap
import os
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from megatrain import kernels
from megatrain.device import disk
from megatrain.device.disk import BLOCK, PlaneFile
from megatrain.errors import DoesNotFit, RunFailed
from megatrain.kernels import reference
from tests.inside import sized

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
    sized(monkeypatch, disk, PIECE_BYTES=3 * BLOCK)
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


def test_a_full_disk_is_told_at_the_start(tmp_path, monkeypatch):
    with pytest.raises(DoesNotFit, match=rf"{tmp_path}: no room .* 1048576.0 GiB wanted.*missing"):
        PlaneFile.create(tmp_path, 1 << 50)
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EDQUOT))
    with pytest.raises(DoesNotFit, match="quota exceeded"):
        PlaneFile.create(tmp_path, BLOCK)


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
