"""Host threads that stand in for streams: order, errors that do not hang, and the end."""

import threading

import pytest
import torch

from megatrain.device.host_stream import HostStream
from megatrain.errors import InputError, RunFailed


@pytest.fixture
def worker():
    worker = HostStream("update", torch.zeros(1, dtype=torch.int32))
    yield worker
    worker.close()


def test_work_is_done_in_order_and_counted(worker):
    done: list[int] = []
    gate = threading.Event()
    worker.put("wait", gate.wait)
    marks = []
    for i in range(20):
        worker.put("append", lambda i=i: done.append(i))
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
    worker.put("fail", lambda: 1 / 0)
    worker.put("append", lambda: done.append(1))
    worker.wait(worker.mark())
    assert done == []
    for _ in range(2):  # it does not go away by being looked at
        with pytest.raises(RunFailed, match="update thread failed: division by zero") as caught:
            worker.check()
        cause = caught.value.__cause__
        assert isinstance(cause, ZeroDivisionError)
        assert cause.__traceback__ is not None


def test_an_error_of_ours_is_raised_as_it_is(worker):
    def fail():
        raise InputError("this line")

    worker.put("fail", fail)
    worker.wait(worker.mark())
    with pytest.raises(InputError, match="^this line$"):
        worker.check()
