"""The `megatrain` command."""

import os
import sys
import traceback
from io import TextIOWrapper


def main() -> None:
    """Run the command line; raises `SystemExit` with the documented exit code."""
    _open_streams()
    # torch reads this at import. OpenMP threads that spin while they wait take cores from update
    # threads and other programs: on two busy cores the demo ran ten times slower with them.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from megatrain.cli.app import app
    from megatrain.errors import RunFailed

    try:
        app(prog_name="megatrain")
    except Exception:  # a bug, not the user's mistake: show the traceback
        traceback.print_exc()
        sys.exit(RunFailed.exit_code)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # a full disk, or a reader that has ended, keeps the exit code
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_streams() -> None:
    """Open standard streams that the caller has closed, before another file gets their number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if isinstance(sys.stdout, TextIOWrapper):  # as Python does for stderr
        sys.stdout.reconfigure(errors="backslashreplace")
