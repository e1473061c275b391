"""The base classes of all sections of a run file, and checks of values that sections share."""

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


def _a_name(text: str) -> str:
    """Return the text. Raises ValueError: it is no path, or empty (the current folder)."""
    try:
        path = Path(text).expanduser()
        is_name = bool(text) and b"\0" not in os.fsencode(text)
    except (UnicodeEncodeError, RuntimeError):  # half of a surrogate pair; an unknown user's home
        is_name = False
    if not is_name or (_VARIABLE.search(text) and not os.path.lexists(path)):
        raise ValueError(
            f"should be a name or a path, got {shown(text)}: write it without variables"
        )
    return text


Name = Annotated[str, AfterValidator(_a_name)]


def a_pattern(text: str) -> str:
    """Return the text. Raises ValueError: it is no regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error
    return text


Pattern = Annotated[str, AfterValidator(a_pattern)]

# Former keys with their defaults, which are in config.yaml of old runs, and are ignored.
_FORMER_KEYS = {
    "base_model": None, "z_loss": None, "gamma": None, "normalize_advantages": None,
    "packed": None, "neftune_alpha": None, "streaming": False, "shuffle_buffer": 4 << 20,
    "reference": "kept", "teacher_log_probs": "kept", "text_field": "text",
    "timeline_every": None, "samples": None,
    "server": None, "server_weights": None,
    "server_seconds": 600.0, "importance_sampling_mode": "sequence_mask",
    "importance_sampling_clip_max": 3.0, "importance_sampling_clip_min": None,
}  # fmt: skip


class Section(BaseModel):
    """One section of the run file; strict: `"8"` is an error where `8` is meant."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, values: Any) -> Any:
        """Drop a null for a section, or for a key that is 0, false or empty by default.

        Other keys refuse a null unless their type allows it, as its meaning would be unclear. Old
        keys are dropped if they have their default.
        """
        if not isinstance(values, dict):
            return values

        def is_dropped(name: Any, value: Any) -> bool:
            old_default = _FORMER_KEYS.get(name, ...)
            return cls._is_off_by_default(name) if value is None else value == old_default

        return {name: value for name, value in values.items() if not is_dropped(name, value)}

    @classmethod
    def _is_off_by_default(cls, name: Any) -> bool:
        """True if a key's value is a section, or its default is 0, false or empty."""
        field = cls.model_fields.get(name)
        if field is None:
            return name in _FORMER_KEYS
        kind, default = field.annotation, field.get_default(call_default_factory=True)
        is_section = isinstance(kind, type) and issubclass(kind, Section)
        return is_section or (default is not None and not field.is_required() and not default)

    def problems(self) -> Iterator[str]:
        """A message for each contradiction between values."""
        return iter(())

    @model_validator(mode="after")
    def _without_problems(self) -> Self:
        if messages := list(self.problems()):
            raise ValueError("; ".join(messages))
        return self


class NamedSection(Section):
    """A section whose `name` decides its other keys; null: the default for that name."""

    @classmethod
    def defaults(cls, name: Any) -> dict[str, Any] | None:
        """The keys for a name, with their defaults; None: no such name."""
        raise NotImplementedError

    @model_validator(mode="before")
    @classmethod
    def _of_its_name(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values  # pydantic refuses these
        name = values.get("name", cls.model_fields["name"].default)
        defaults = cls.defaults(name) if isinstance(name, str) else None
        if defaults is None:
            return values
        foreign = cls.model_fields.keys() - defaults.keys() - {"name"}
        if refused := sorted(key for key in foreign if values.get(key) is not None):
            section = cls.__name__.removesuffix("Section").lower()
            raise ValueError(
                f"{name} has no {' and no '.join(refused)}; it has {', '.join(defaults)} (to leave "
                f"a file's keys out: --set '{section}={{name: {name}, ...}}')"
            )
        return defaults | {key: value for key, value in values.items() if value is not None}


def nearest(name: str, names: Sequence[str]) -> str:
    """`; did you mean 'x'?`, or the valid names if none is near and they fit in a line."""
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid are {', '.join(names)}" if len(names) <= 20 else ""


def shown(value: Any) -> str:
    """A value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
