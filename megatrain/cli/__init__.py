"""The `megatrain` command."""

import sys
import traceback


def main() -> None:
    """Run the command line; leaves through `SystemExit` with the documented exit code."""
    from megatrain.cli.app import app
    from megatrain.errors import RunFailed

    try:
        app(prog_name="megatrain")
    except Exception:  # a bug, not a mistake of the user: the traceback is what helps
        traceback.print_exc()
        sys.exit(RunFailed.exit_code)
