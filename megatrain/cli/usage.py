"""What typer says of a wrong command line, as the one line that every other error is."""

from typing import Any, cast

import typer

from megatrain.errors import InputError, in_one_line

# The base of all of typer's errors of usage, which it does not export itself.
UsageError = cast(type[Exception], typer.BadParameter.__base__)


def as_input_error(error: Any) -> InputError | None:
    """One line for a `UsageError`; None: it is the help that a command without arguments shows."""
    context = error.ctx
    if context is not None and error.message == context.get_help():
        return None
    parameter = getattr(error, "param", None)
    said = str(error.format_message())
    said = said[:1].lower() + said[1:]
    if parameter is not None and error.message:  # a value; what is missing has no message
        said = f"{_name(parameter)}: {_problem(error)}"
    command = "megatrain" if context is None else context.command_path
    return InputError(f"{in_one_line(said).rstrip('.')}; see `{command} --help`")


def _name(parameter: Any) -> str:
    """An option as it is typed, and an argument as the help has it."""
    return str(max(parameter.opts, key=len))


def _problem(error: Any) -> str:
    """What is wrong with a value, and the value where the message does not have it."""
    message = error.message
    for prefix in ("Input ", "Value error, "):
        message = message.removeprefix(prefix)
    details: list[Any] = getattr(error.__cause__, "errors", list)()
    given = str(details[0]["input"]) if details else ""
    return message if given in message else f"{message.rstrip('.')}, got {given!r}"
