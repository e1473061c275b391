"""The launching thread is ahead of the GPU, but not so far that a full queue could stand still."""

import threading

import pytest
import torch

from megatrain.device.host_stream import AHEAD, HostStream, LaunchThrottle


class Gpu:
    """Points of its work; it is slow, and reaches one when somebody waits for it."""

    def __init__(self):
        self.recorded = self.reached = 0

    def record(self):
        self.recorded += 1
        return self

    def synchronize(self):
        self.reached += 1


@pytest.fixture
def busy():
    """A host thread, at work until it is told otherwise."""
    worker, over = HostStream("update", torch.zeros(1, dtype=torch.int32)), threading.Event()
    worker.put("work", over.wait)
    yield worker, over
    over.set()
    worker.close()


def paced(seconds=0.001):
    """Every piece takes so long to launch."""
    now = 0.0

    def clock():
        nonlocal now
        now += seconds
        return now

    return LaunchThrottle(Gpu().record, clock)


def launch(pace, name):
    """One piece, by a thread that is given a moment to be through."""

    def piece():
        with pace.piece(name):
            pass

    thread = threading.Thread(target=piece)
    thread.start()
    thread.join(0.1)
    return thread


def waits(pace, name, over):
    """Whether a piece is launched only when the host thread's work is over."""
    thread = launch(pace, name)
    waited = thread.is_alive()
    over.set()
    thread.join()
    return waited


def test_it_is_a_few_pieces_ahead():
    gpu = Gpu()
    pace = LaunchThrottle(gpu.record)
    for number in range(5 * AHEAD):
        with pace.piece("layer"):
            assert gpu.recorded == number + 1
            assert gpu.recorded - gpu.reached <= AHEAD


@pytest.mark.parametrize(("seconds", "seen"), [(0.001, 0), (1.0, 1), (1.0, 10)])
def test_a_piece_that_may_be_large_waits_for_host_threads(busy, seconds, seen):
    """One that has not been seen, or was large."""
    (worker, over), pace = busy, paced(seconds)
    for _ in range(seen):
        launch(pace, "layer").join()
    pace.note_wait(worker, worker.mark())
    assert waits(pace, "layer", over)
