"""Reports errors of a command as one line on stderr, with the documented exit code."""

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import typer
from typer.core import TyperGroup

from megatrain.errors import InputError, MegatrainError, RunFailed, in_one_line, os_reason
from megatrain.telemetry.console import end_passing, wrapped

_PATH_ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
    *(errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP),
)
# The base of typer's errors of usage, which typer does not export.
_UsageError = cast(type[Exception], typer.BadParameter.__base__)

_GONE = {
    "branch": "copy the run's folder and go on there: cp -r RUN NEW, then megatrain train NEW "
    "--resume --set optimizer.lr=1e-6; or begin anew from its weights, with model.path: RUN",
    "bench": "steps are measured in a checkout of MegaTrain's sources, by python -m "
    "benchmarks.step with the options of bench step",
}


class ReportingGroup(TyperGroup):
    """Turns errors into one line on stderr and the documented exit code."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name. Raises InputError: it has been given up."""
        if cmd_name in _GONE:
            raise InputError(f"{cmd_name}: {_GONE[cmd_name]}")
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command; `--debug` adds the traceback to the line."""
        with reported(ctx):
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command."""
        with reported(ctx):
            return super().parse_args(ctx, args)


@contextmanager
def reported(ctx: Any) -> Iterator[None]:
    """Within this context errors become one line on stderr and the documented exit code."""
    try:
        try:
            yield
        finally:
            end_passing()
    except (MegatrainError, OSError, _UsageError) as error:
        explained = error if isinstance(error, MegatrainError) else _as_megatrain_error(error)
        if explained is None:  # only help is shown
            raise
        if ctx.params.get("debug"):
            traceback.print_exc()
        with suppress(OSError):  # the exit code still tells of the error
            prefix = f"rank {os.environ['RANK']}: " if "TORCHELASTIC_RUN_ID" in os.environ else ""
            print(wrapped(f"megatrain: error: {prefix}{in_one_line(explained)}"), file=sys.stderr)
        raise typer.Exit(explained.exit_code) from error
    except KeyboardInterrupt as error:
        print("megatrain: interrupted", file=sys.stderr)
        raise typer.Exit(130) from error  # 128 + SIGINT, the shells' convention


def _as_megatrain_error(error: Any) -> MegatrainError | None:
    """The error of a path or of a wrong command line as one of ours; None: only help is shown."""
    if isinstance(error, OSError):
        if error.errno not in _PATH_ERRORS:
            return RunFailed(os_reason(error))
        return InputError(f"{os_reason(error)}; check the path and who may use it")
    if error.ctx is not None and error.message == error.ctx.get_help():
        return None
    text = in_one_line(error.format_message()).rstrip(".").replace("Value error, ", "")
    details: list[Any] = getattr(error.__cause__, "errors", list)()  # of pydantic
    got = f", got {details[0]['input']!r}" if details else ""
    command = "megatrain" if error.ctx is None else error.ctx.command_path
    return InputError(f"{text[:1].lower()}{text[1:]}{got}; see `{command} --help`")
