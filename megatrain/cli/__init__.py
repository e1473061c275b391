"""The `megatrain` command."""

import os
import sys
import traceback
from io import TextIOWrapper


def main() -> None:
    """Run the command line; leaves through `SystemExit` with the documented exit code."""
    _have_streams()
    # Read when torch is loaded. OpenMP threads that spin while they wait take the cores from update
    # threads and other programs: on two busy cores the demo ran ten times slower with them.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from megatrain.cli.app import app
    from megatrain.errors import RunFailed

    try:
        app(prog_name="megatrain")
    except Exception:  # a bug, not a mistake of the user: the traceback is what helps
        traceback.print_exc()
        sys.exit(RunFailed.exit_code)
    finally:
        _flush()


def _have_streams() -> None:
    """Nothing that is opened may become the standard output: a library would write into it.

    And no name or sample may end a run because the terminal cannot show it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the caller has closed this one
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if isinstance(sys.stdout, TextIOWrapper):  # stderr does so from the start
        sys.stdout.reconfigure(errors="backslashreplace")


def _flush() -> None:
    """A full disk under the output, or a reader that went away, makes no good end a bad one."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
