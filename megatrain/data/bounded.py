"""Bounds for code that came with a file: what it may take of time and memory."""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from megatrain.units import MIB


class _Late(BaseException):
    """The time is over. No Exception: jinja takes each of those for an expression to try later."""


@contextmanager
def bounded(seconds: float, num_bytes: int) -> Iterator[None]:
    """Let a block take so much processor time and so much memory more than there is in use.

    Only on the main thread: Python runs signal handlers on no other, and the limit of memory is the
    process's, so that a block beside others would take from what they need.

    Raises:
        TimeoutError, MemoryError: the block took more.
    """
    with ExitStack() as held:
        if threading.current_thread() is threading.main_thread():
            held.enter_context(_memory(num_bytes))
            held.enter_context(_time(seconds))
        yield


@contextmanager
def _memory(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    limits = [limit for limit in (soft, used + num_bytes) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    except MemoryError as error:
        raise MemoryError(f"it takes more than {num_bytes // MIB} MiB of memory") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def _time(seconds: float) -> Iterator[None]:
    over = False

    def late(number: int, frame: FrameType | None) -> None:
        if not over:
            raise _Late

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except _Late as error:
        raise TimeoutError(f"it takes more than {seconds:g} seconds") from error
    finally:
        over = True
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        with suppress(TypeError):  # a handler that Python has not set cannot be put back
            signal.signal(signal.SIGVTALRM, before)
