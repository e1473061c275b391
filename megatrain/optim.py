"""AdamW with decoupled weight decay: the user's settings, and torch's view of them.

The arithmetic is in megatrain/kernels; it runs on a tile where the tile's state rests.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from megatrain.errors import InputError

# Patterns of parameter names without weight decay: those of transformers.Trainer (5.23).
NO_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")


_SETTINGS = ("lr", "betas", "eps", "weight_decay")  # of a group


@dataclass(frozen=True)
class AdamW:
    """Settings of AdamW (Loshchilov and Hutter 2019), with torch.optim.AdamW's defaults for LLMs.

    Attributes:
        no_decay: patterns of names that do not decay, besides the parameters of nn.LayerNorm.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    no_decay: Sequence[str] = NO_DECAY

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < math.inf:
                raise InputError(f"AdamW {name} is {value!r}; it must be a number, not negative")
        pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        if not pair or not all(is_number(beta) and 0 <= beta < 1 for beta in self.betas):
            raise InputError(f"AdamW betas are {self.betas!r}; they must be two numbers in [0, 1)")
        if isinstance(self.no_decay, str):
            raise InputError(f"AdamW no_decay is {self.no_decay!r}; it must be a list of patterns")
        for pattern in self.no_decay:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise InputError(
                    f"AdamW no_decay has a bad pattern {pattern!r}: {error}"
                ) from error

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """torch parameter groups of the trainable parameters: those that decay, those that do not.

        The rule is transformers.Trainer's (`get_decay_parameter_names`).
        """
        decaying = set(get_parameter_names(model, [nn.LayerNorm], list(self.no_decay)))
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [(n, p) for n, p in named if n in decaying]},
            {"params": [(n, p) for n, p in named if n not in decaying], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]


def is_number(value: object) -> bool:
    """Whether a setting is a number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


class StreamedOptimizer(torch.optim.Optimizer):
    """The engine's optimizer as torch knows optimizers: groups to read and to schedule.

    Its parameters are names and shapes only; state rests in the tiles. `step` is called by
    `Engine.step` and only counts, which is what torch's schedulers look at.
    """

    def __init__(self, settings: AdamW, model: nn.Module) -> None:
        groups = settings.groups(model)
        if not groups:
            raise InputError("every parameter is frozen: there is nothing to train")
        defaults = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
        super().__init__(groups, {**defaults, "weight_decay": settings.weight_decay})
        self.num_steps = 0

    def group_of(self) -> dict[str, int]:
        """Index of each trainable parameter's group, by name."""
        return {
            name: index
            for index, group in enumerate(self.param_groups)
            for name in group["param_names"]
        }

    def check(self) -> None:
        """Whether the groups, which anybody may change, still hold settings of AdamW.

        Raises:
            InputError: one does not: a NaN for a learning rate would become every weight.
        """
        for group in self.param_groups:
            AdamW(**{name: _scalar(group[name]) for name in _SETTINGS})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Count an optimizer step; the update itself is the engine's."""
        self.num_steps += 1

    def saved_groups(self) -> list[dict[str, Any]]:
        """The groups as plain JSON values: names of parameters, and what a schedule made of them.

        Raises:
            InputError: somebody put something into a group that is no number or text.
        """
        return [
            {name: _plain(name, value) for name, value in group.items() if name != "params"}
            for group in self.param_groups
        ]

    def restore(self, groups: Sequence[dict[str, Any]], num_steps: int) -> None:
        """Take over groups that `saved_groups` gave.

        Raises:
            InputError: they are of other parameters, or their settings are none.
        """
        names = [group["param_names"] for group in self.param_groups]
        if [group.get("param_names") for group in groups] != names:
            raise InputError("the optimizer's groups are of other parameters than the model's")
        for group, saved in zip(self.param_groups, groups, strict=True):
            values = {name: value for name, value in saved.items() if name != "param_names"}
            known: dict[str, Any] = {name: values.get(name) for name in self.defaults}
            AdamW(**known)  # refuses what is no setting
            group.update(values, betas=tuple(values["betas"]))
        self.num_steps = num_steps


def _scalar(value: Any) -> Any:
    """Numbers of torch and numpy as Python's."""
    return value.item() if hasattr(value, "item") else value


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(name, each) for each in value]
    if getattr(value, "ndim", None) == 0 or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    ):
        value = _scalar(value)
    if value is not None and not isinstance(value, int | float | str):
        raise InputError(
            f"the optimizer's {name!r} is a {type(value).__name__}, which no checkpoint can hold"
        )
    return value
