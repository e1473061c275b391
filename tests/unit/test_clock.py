"""The device that keeps time: what runs at once, what waits, and what couples resources."""

import torch

from megatrain.device.base import COMPUTE, COPY_IN, COPY_OUT, UPDATE
from megatrain.device.trace import ClockDevice, Cost
from megatrain.telemetry.timeline import breakdown


class Fixed:
    """Work named `... 3` takes three seconds; a byte takes one second to copy.

    The caller takes none to put anything there, unless told so: `slow` work two, besides.
    """

    def __init__(self, put_seconds=0.0):
        self.put_seconds = put_seconds

    def run(self, stream, name, work, reads, writes):
        last = name.split()[-1]
        seconds = float(last) if last.isdigit() else 0.0
        return Cost(seconds, 2.0 * ("slow" in name), "blocking" in name, result=work())

    def copy(self, stream, num_bytes):
        return float(num_bytes)

    def empty(self, name, numel, dtype):
        return torch.empty(numel, dtype=dtype, device="meta")

    host = empty


def device():
    return ClockDevice(Fixed())


def put(clock, stream, name):
    return clock.run(stream, name, lambda: name)


def test_streams_run_at_once_and_each_in_order():
    clock = device()
    assert put(clock, COMPUTE, "a 2") == "a 2"
    put(clock, UPDATE, "b 3")
    put(clock, COMPUTE, "c 2")
    spans = [(s.name, s.start, s.end) for s in clock.spans]
    assert spans == [("a 2", 0, 2), ("b 3", 0, 3), ("c 2", 2, 4)]
    assert clock.now == 0  # nobody held up the caller


def test_a_stream_waits_for_an_event_and_says_why():
    clock = device()
    put(clock, UPDATE, "update 5")
    landed = clock.record(UPDATE)
    put(clock, UPDATE, "later 7")
    put(clock, COMPUTE, "a 1")
    clock.wait(COMPUTE, landed, "version due")
    put(clock, COMPUTE, "nothing")
    put(clock, COMPUTE, "b 1")
    last = clock.spans[-1]
    assert (last.start, last.end, last.after) == (5, 6, ("version due",))
    assert breakdown(clock.spans, COMPUTE).idle["version due"] == 4


def test_synchronize_holds_up_the_caller_and_all_that_it_puts_on_later():
    clock = device()
    put(clock, COPY_OUT, "out 4")
    put(clock, UPDATE, "update 9")
    clock.synchronize(clock.record(COPY_OUT), "report landed")
    assert clock.now == 4
    put(clock, COMPUTE, "next 1")
    assert clock.spans[-1].start == 4
    assert clock.spans[1].end == 9  # the update goes on under it


def spans_after(*names, put_seconds=0.0):
    clock = ClockDevice(Fixed(put_seconds))
    for name in names:
        put(clock, COMPUTE, name)
    return [(span.start, span.end) for span in clock.spans]


def test_a_device_that_is_faster_than_its_launches_waits_for_them():
    assert spans_after("slow 1", "slow 1") == [(0, 2), (2, 4)]
    assert spans_after("a 1", "b 1", put_seconds=1.5) == [(0, 1.5), (1.5, 3)]
    assert spans_after("nothing", "a 1", put_seconds=1.5) == [(1.5, 3)]  # no work, but a launch


def test_launches_hide_under_longer_work():
    assert spans_after("a 9", "slow 1", "slow 1") == [(0, 9), (9, 10), (10, 11)]


def test_work_may_hold_up_the_caller():
    """What comes next is launched afterwards."""
    assert spans_after("blocking 9", "slow 1") == [(0, 9), (9, 11)]


def test_host_threads_take_no_launches():
    clock = ClockDevice(Fixed(5.0))
    put(clock, UPDATE, "update 1")
    assert (clock.spans[0].end, clock.now) == (1, 0)


def test_copies_take_the_time_of_their_bytes():
    clock = device()
    here = clock.empty("slot", 8, torch.bfloat16)
    there = clock.host("weights", 8, torch.bfloat16, pinned=True)
    clock.copy(COPY_IN, here, there, 3)
    assert (clock.spans[-1].seconds, clock.spans[-1].num_bytes) == (6, 6)
