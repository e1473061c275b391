"""The choice of trained parameters, by patterns of their names."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from megatrain.errors import InputError, explained


@dataclass(frozen=True)
class Trained:
    """Regular expressions that are searched for in the names of a model's parameters.

    A tied parameter has its first name alone, that of the embedding.
    """

    freeze: Sequence[str] = ()  # parameters whose names match are not trained
    # only parameters whose names match are trained; None: those that require gradients; of a
    # folder's model not its encoders of images and sounds
    train_only: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Raises InputError: a field is no list of regular expressions."""
        for key, patterns in (("freeze", self.freeze), ("train_only", self.train_only or ())):
            if not isinstance(patterns, tuple | list):
                raise InputError(f"{key} is {patterns!r}; it must be a list of patterns")
            for pattern in patterns:
                with explained(f"{key} has a bad pattern {pattern!r}", of=(re.error, TypeError)):
                    re.compile(pattern)

    def choose(self, model: nn.Module) -> None:
        """Set `requires_grad` of a model's parameters."""
        names = [name for name, _ in model.named_parameters()]
        patterns = [("freeze", p) for p in self.freeze]
        patterns += [("train_only", p) for p in self.train_only or ()]
        for key, pattern in patterns:
            if not any(re.search(pattern, name) for name in names):
                raise InputError(
                    f"{key}: {pattern!r} matches the name of no parameter; there are "
                    f"{', '.join(names[:2])} ... {names[-1]}"
                )
        for name, parameter in model.named_parameters():
            if self.train_only is not None:
                parameter.requires_grad_(_matches(self.train_only, name))
            if _matches(self.freeze, name):
                parameter.requires_grad_(False)


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
