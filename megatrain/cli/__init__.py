"""The `megatrain` command."""

import os
import sys
import traceback
from io import TextIOWrapper


def main() -> None:
    """Run the command line; leaves through `SystemExit` with the documented exit code."""
    _have_streams()
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
            except OSError:  # a full disk, or a reader that went away: no other exit code
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _have_streams() -> None:
    """Open closed standard streams, so that no later file takes their place and gets output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the caller has closed this one
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if isinstance(sys.stdout, TextIOWrapper):  # stderr does so from the start
        sys.stdout.reconfigure(errors="backslashreplace")
