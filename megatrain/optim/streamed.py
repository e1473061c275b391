"""torch's view of the engine's optimizer: groups that the user reads, changes and schedules."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.errors import InputError
from megatrain.optim.rule import Rule

_NOT_HERE = (
    "moments rest in the engine's tiles: Engine.save writes them and Engine.load reads them; to "
    "change a setting, assign to engine.optimizer.param_groups"
)

# What torch's optimizers do besides, where a group asks for it.
_UNKNOWN = ("amsgrad", "maximize")


class _NoState(dict):
    """Stands for torch's `state`; refuses to be read or written by parameter."""

    def __missing__(self, key: object) -> Any:
        raise InputError(f"optimizer.state has no moments: {_NOT_HERE}")

    def __setitem__(self, key: object, value: object) -> None:
        self.__missing__(key)


class StreamedOptimizer(torch.optim.Optimizer):
    """The engine's optimizer as torch knows optimizers: groups to read, change and schedule.

    Its parameters are names and shapes only; state rests in the tiles. Groups are read anew in each
    step, so parameters may be moved between them at any time. A parameter is known by its tensor in
    `params`; `param_names` follows.
    """

    def __init__(self, rule: Rule, model: nn.Module) -> None:
        groups = rule.groups(model)
        if not groups:
            raise InputError("every parameter is frozen: there is nothing to train")
        self._names = {p: name for group in groups for name, p in group["params"]}
        self._in_engine = False
        self.rule = rule
        super().__init__(groups, {name: getattr(rule, name) for name in rule.settings})
        self.state = _NoState()  # type: ignore[assignment]
        self.num_steps = 0

    def group_of(self) -> dict[str, int]:
        """Index of each trainable parameter's group, by name.

        Raises:
            InputError: a parameter is in no group or in two, or is not one of the engine's.
        """
        found: dict[str, int] = {}
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                name = self._name(parameter)
                if name in found:
                    raise InputError(f"the optimizer has {name!r} in two groups or twice in one")
                found[name] = index
        missing = next((name for name in self._names.values() if name not in found), None)
        if missing is not None:
            raise InputError(
                f"the optimizer has {missing!r} in no group; set its group's lr and weight_decay "
                "to 0, or freeze it before the engine is made"
            )
        return found

    def _name(self, parameter: Any) -> str:
        name = self._names.get(parameter) if isinstance(parameter, Tensor) else None
        if name is None:
            raise InputError(
                "a group of the optimizer has a parameter that this engine does not train; take "
                "those of engine.optimizer.param_groups, not those of the model it was made of"
            )
        return name

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; takes the engine's parameters with or without their names.

        Raises:
            InputError: one is none of the engine's.
        """
        given = param_group["params"]
        if not isinstance(given, set):  # which torch refuses
            each = [given] if isinstance(given, Tensor) else list(given)
            tensors = [one[1] if isinstance(one, tuple) else one for one in each]
            param_group = param_group | {"params": [(self._name(p), p) for p in tensors]}
        super().add_param_group(param_group)

    def check(self) -> None:
        """Whether the groups, which anybody may change, still hold settings of the rule.

        Raises:
            InputError: one does not: a NaN for a learning rate would become every weight. Or the
                groups are not made of the engine's parameters, each of them once.
        """
        self.group_of()
        for group in self.param_groups:
            group["param_names"] = [self._names[parameter] for parameter in group["params"]]
            self._check(group)
            unknown = next((name for name in _UNKNOWN if group.get(name)), None)
            if unknown is not None:
                raise InputError(
                    f"a group of the optimizer asks for {unknown}, unknown to "
                    f"{type(self.rule).__name__}"
                )

    def _check(self, group: dict[str, Any]) -> None:
        own = replace(self.rule, **{n: _scalar(group.get(n)) for n in self.rule.settings})
        if own.state_planes != self.rule.state_planes:
            raise InputError(
                f"a group of the optimizer asks {type(self.rule).__name__} to keep other state "
                "than the engine was made with (momentum from 0, or to 0); make the engine with it"
            )

    def took_step(self) -> None:
        """Count a step that the engine has taken, by `step`, at which torch's schedulers look."""
        self._in_engine = True
        try:
            self.step()
        finally:
            self._in_engine = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refused: `Engine.step` updates the parameters.

        Raises:
            InputError: always, but within `took_step`.
        """
        if not self._in_engine:
            raise InputError(
                "optimizer.step() has nothing to do: Engine.step has updated the parameters; leave "
                "the call out"
            )
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        """The groups in torch's form, and under `note` that this is all."""
        return super().state_dict() | {"note": f"groups only; {_NOT_HERE}"}

    def load_state_dict(self, state_dict: Any) -> None:
        """Refused. Raises InputError: the moments would be left out."""
        raise InputError(f"optimizer.load_state_dict brings no moments: {_NOT_HERE}")

    def saved_groups(self) -> list[dict[str, Any]]:
        """The groups as plain JSON values: names of parameters, and what a schedule made of them.

        Raises:
            InputError: somebody put something into a group that is no number or text, or the groups
                are not made of the engine's parameters.
        """
        self.group_of()
        return [
            {
                **{name: _plain(name, value) for name, value in group.items() if name != "params"},
                "param_names": [self._names[parameter] for parameter in group["params"]],
            }
            for group in self.param_groups
        ]

    def restore(self, groups: Sequence[dict[str, Any]], num_steps: int) -> None:
        """Take over groups that `saved_groups` gave.

        Raises:
            InputError: they are of other parameters, or their settings are none.
        """
        by_name = {name: parameter for parameter, name in self._names.items()}
        lists = [group.get("param_names") for group in groups]
        names = [str(name) for names in lists if isinstance(names, list) for name in names]
        if sorted(names) != sorted(by_name) or not all(isinstance(each, list) for each in lists):
            raise InputError("the optimizer's groups are of other parameters than the model's")
        restored = []
        for group in groups:
            self._check(group)
            params = [by_name[str(name)] for name in group["param_names"]]
            pairs = {n: tuple(group[n]) for n in self.rule.settings if isinstance(group[n], list)}
            restored.append({**group, **pairs, "params": params})
        self.param_groups[:] = restored
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
