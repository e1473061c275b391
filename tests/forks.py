"""Children of the tests' process, which need not import anything anew."""

import gc
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any


def end() -> None:
    """End this process at once, as one that is killed."""
    os._exit(0)


def start(work: Callable[[], Any]) -> int:
    """The process id of a child that does `work` and ends with 0, as it exits, or with 1."""
    child = os.fork()
    if child:
        return child
    gc.freeze()  # what the parent has is no garbage of this process, and looking copies its pages
    # Else it is what torch's launcher of ranks left, which ran in the parent for other tests.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    code = 1
    try:
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, AttributeError):  # a full disk, or closed
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def forked(work: Callable[[], Any]) -> int:
    """The exit code of a child that does `work`; 1 with a traceback if that raises."""
    return os.waitstatus_to_exitcode(os.waitpid(start(work), 0)[1])


def forked_module(command: Sequence[str]) -> int:
    """The exit code of `[python, "-m", module, *arguments]`."""

    def work() -> None:
        sys.argv = list(command[2:])
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)

    return forked(work)
