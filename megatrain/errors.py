"""The errors that users see, each with its documented exit code."""

from collections.abc import Iterator
from contextlib import contextmanager


class MegatrainError(Exception):
    """Base of all errors that are reported as one line; `exit_code` is what the command returns.

    Attributes:
        by_all: True if every rank fails with this error, at the same place.
    """

    exit_code = 4
    by_all = False


class InputError(MegatrainError):
    """Bad configuration, data, model or checkpoint: nothing was started or written."""

    exit_code = 2


class DoesNotFit(MegatrainError):
    """The work needs more device or host memory than there is, or than the limits allow."""

    exit_code = 3


class RunFailed(MegatrainError):
    """A run has begun and cannot continue; its state is that of the last finished step."""

    exit_code = 4


class StepRefused(RunFailed):
    """The loss or gradient norm of a step is not finite, or the norm is above its limit.

    Attributes:
        intact: True if weights and optimizer state are still those of the step before.
        measured: the step's loss and gradient norm; None if the step is refused for another reason.
    """

    def __init__(
        self, message: str, *, intact: bool, measured: tuple[float, float] | None = None
    ) -> None:
        super().__init__(message)
        self.intact, self.measured = intact, measured


class Unsupported(InputError):
    """A model that cannot be streamed; the message says why."""


def in_one_line(message: object, limit: int | None = None) -> str:
    """A text, or an error's message, without line breaks, cut to `limit` characters."""
    text = " ".join(str(message).split())
    if not text and isinstance(message, BaseException):
        text = type(message).__name__
    return text if limit is None or len(text) <= limit else text[: limit - 3] + "..."


@contextmanager
def explained(
    problem: str,
    remedy: str = "",
    *,
    of: type[Exception] | tuple[type[Exception], ...] = Exception,
    into: type[MegatrainError] = InputError,
) -> Iterator[None]:
    """Within this context errors `of` these types become one line: problem, reason and remedy."""
    try:
        yield
    except of as error:
        reason = error.strerror if isinstance(error, OSError) else None
        reason = reason or in_one_line(error, None if isinstance(error, MegatrainError) else 400)
        raise into(f"{problem}: {reason}{remedy and f'; {remedy}'}") from error


def os_reason(error: OSError) -> str:
    """The reason of an operating system's error, and the file."""
    where = error.filename2 or error.filename
    reason = error.strerror or str(error) or type(error).__name__
    return reason if where is None else f"{where}: {reason}"
