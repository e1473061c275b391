"""The engine's optimizer as torch code sees it: groups to read, change and schedule."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.base.changed import changed
from megatrain.compat.torch import is_scheduled
from megatrain.errors import InputError
from megatrain.optim.rule import Rule

_NOT_HERE = (
    "moments rest in the engine's tiles: Engine.save writes them and Engine.load reads them; to "
    "change a setting, assign to engine.optimizer.param_groups"
)

# Settings of torch's optimizers that the engine's rules do not have.
_UNKNOWN, _DECOUPLED = ("amsgrad", "maximize"), "decoupled_weight_decay"

# Attributes that a parameter without values has; `check` refuses one that was frozen.
_WITHOUT_VALUES = {
    "__len__", "__repr__", "device", "dim", "dtype", "is_leaf", "is_meta", "ndim", "nelement",
    "numel", "requires_grad", "requires_grad_", "shape", "size",
}  # fmt: skip

_log = logging.getLogger(__name__)


class _NoState(dict):
    """Replaces torch's `state`; raises when it is read or written."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise InputError(f"optimizer.state has no moments: {_NOT_HERE}")

    __missing__ = __setitem__ = __delitem__ = __iter__ = __contains__ = _refuse
    clear = get = items = keys = pop = popitem = setdefault = update = values = _refuse


class _Named(nn.Parameter):
    """A parameter of the groups: it has a shape but no values, and raises when they are used."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name in ("__get__", "__set__"):  # a property
            name = func.__self__.__name__
        if name not in _WITHOUT_VALUES:
            raise InputError(
                f"{name.strip('_')} was asked of a parameter in the optimizer's groups; the engine "
                "streams values and gradients, so these parameters have none"
            )
        return super().__torch_function__(func, types, args, kwargs or {})


class StreamedOptimizer(torch.optim.Optimizer):
    """The engine's optimizer as a torch optimizer: groups to read, change and schedule.

    Its parameters are names and shapes only; states rest in the tiles. Each step reads the groups
    again, so parameters may move between groups at any time. The tensors in `params` identify
    parameters; `param_names` is derived from them.
    """

    def __init__(self, rule: Rule, model: nn.Module) -> None:
        groups = rule.groups(model)
        if not groups:
            raise InputError("every parameter is frozen: there is nothing to train")
        for group in groups:
            group["params"] = [
                (n, _Named(torch.empty(p.shape, dtype=p.dtype, device="meta")))
                for n, p in group["params"]
            ]
        self._names = {p: name for group in groups for name, p in group["params"]}
        # the functions that `step` and `zero_grad` call for a trainer's loop (`drive`)
        self._driven_step: Callable[[], None] | None = None
        self._driven_zero_grad: Callable[[], None] | None = None
        self.rule = rule
        super().__init__(groups, {name: getattr(rule, name) for name in rule.settings})
        self.state = _NoState()  # type: ignore[assignment]
        self.num_steps = 0
        # the groups' learning rates that `restore` set, until the next step, or None
        self.restored_rates: list[float] | None = None

    def group_of(self) -> dict[str, int]:
        """The index of each trainable parameter's group, by name.

        Raises InputError: a parameter is in no group or in two, or is not the engine's.
        """
        groups: dict[str, int] = {}
        for index, group in enumerate(self.param_groups):
            for name in map(self._name, group["params"]):
                if name in groups:
                    raise InputError(f"the optimizer has {name!r} in two groups or twice in one")
                groups[name] = index
        missing = next((name for name in self._names.values() if name not in groups), None)
        if missing is not None:
            raise InputError(
                f"the optimizer has {missing!r} in no group; set its group's lr and weight_decay "
                "to 0, or freeze it before the engine is made"
            )
        return groups

    def _name(self, parameter: Any) -> str:
        name = self._names.get(parameter) if isinstance(parameter, Tensor) else None
        if name is None:
            raise InputError(
                "a group of the optimizer has a parameter that this engine does not train; take "
                "those of engine.optimizer.param_groups, not those of the model it was made of"
            )
        return name

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like torch's; takes the engine's parameters with or without their names.

        Raises InputError: a parameter is not the engine's.
        """
        params = param_group["params"]
        if not isinstance(params, set):  # torch refuses sets
            params = [params] if isinstance(params, Tensor) else params
            tensors = [item[1] if isinstance(item, tuple) else item for item in params]
            param_group = param_group | {"params": [(self._name(p), p) for p in tensors]}
        # Unwrapped: torch's wrapper for torch.compile imports torch._dynamo, which takes a second.
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Like torch's if a trainer's loop calls `step`; else refused: the hook would come late."""
        if self._driven_step is None:
            raise InputError("hooks before optimizer.step run late; call before Engine.step")
        return super().register_step_pre_hook(hook)

    def check(self) -> None:
        """Check that the groups, which the user may change, still hold valid settings.

        Raises InputError: a setting is invalid (a learning rate of NaN would make every weight
            NaN), or the groups do not have each of the engine's parameters once.
        """
        if not isinstance(self.state, _NoState):
            raise InputError(f"optimizer.state has been replaced: {_NOT_HERE}")
        self._name_parameters()
        for group in self.param_groups:
            self._check(group)
            frozen = next((p for p in group["params"] if not p.requires_grad), None)
            if frozen is not None:
                raise InputError(
                    f"{self._names[frozen]!r} was frozen after the engine was made; freeze it by "
                    "Engine(trained=Trained(...)), or set its group's lr and weight_decay to 0"
                )
        restored, self.restored_rates = self.restored_rates, None
        rates = [_scalar(group.get("lr")) for group in self.param_groups]
        # A schedule made after `restore` has replaced the restored rates by its first ones.
        if restored is not None and restored != rates and is_scheduled(self):
            _log.warning(
                "the learning rate is %s, and was %s in the checkpoint: a schedule sets its first "
                "rates when it is made; to keep those of the checkpoint, take "
                "engine.optimizer.state_dict() before that, and load it afterwards",
                ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(rates)),
                ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(restored)),
            )

    def _name_parameters(self) -> None:
        """Set `param_names` of each group. Raises InputError as `group_of` does."""
        self.group_of()
        for group in self.param_groups:
            group["param_names"] = [self._names[parameter] for parameter in group["params"]]

    def _check(self, group: dict[str, Any]) -> None:
        """Raise InputError if a group's settings are invalid, or differ from the engine's rule."""
        rule, kind = self.rule, type(self.rule).__name__
        unknown = [name for name in _UNKNOWN if group.get(name)]
        unknown += [] if group.get(_DECOUPLED, True) else [f"{_DECOUPLED}=False"]
        checked = replace(rule, **{n: _scalar(group.get(n)) for n in rule.settings})
        if checked.state_planes != rule.state_planes:
            unknown.append("other state (momentum from 0, or to 0)")
        choices = {name: getattr(rule, name) for name in rule.choices}
        unknown += [f"{n} {group[n]!r}" for n in choices if group.get(n, choices[n]) != choices[n]]
        if unknown:
            raise InputError(
                f"a group of the optimizer asks for {unknown[0]}, which {kind} does not know, or "
                "which differs from the engine's; make the engine with it, or leave it out"
            )

    def took_step(self) -> None:
        """Count a step of the engine, also for torch's schedulers, which count calls of `step`."""
        if self._driven_step is None:  # else a trainer has called `step`, and that call counts
            with changed([self], _driven_step=lambda: None):  # lets `step` do nothing, not refuse
                self.step()
        self.num_steps += 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refused: `Engine.step` updates the parameters.

        Raises InputError: always, except within `took_step` or after `drive`.
        """
        if self._driven_step is None:
            raise InputError(
                "optimizer.step() has nothing to do after Engine.step; leave the call out"
            )
        self._driven_step()

    def drive(self, step: Callable[[], None], zero_grad: Callable[[], None]) -> None:
        """Let `step` and `zero_grad`, which a trainer's loop calls, call these functions."""
        self._driven_step, self._driven_zero_grad = step, zero_grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the function that `drive` has set, if any: the engine keeps no gradients."""
        if self._driven_zero_grad is not None:
            self._driven_zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """A copy of the groups in torch's form; `note` says that moments are not included."""
        self._name_parameters()
        with changed([self], state={}):
            groups = deepcopy(super().state_dict())
        return groups | {"note": f"groups only; {_NOT_HERE}"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the groups' settings, such as the rates of a schedule, to those of a `state_dict()`.

        The engine keeps its moments, even if the settings are those of another step.

        Raises InputError: `state_dict` has moments, groups of other parameters, or bad settings.
        """
        has_no_state = isinstance(state_dict, Mapping) and not state_dict.get("state")
        groups = deepcopy(state_dict.get("param_groups")) if has_no_state else None
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise InputError(f"optimizer.load_state_dict brings no moments: {_NOT_HERE}")
        rates = self.restored_rates  # of the checkpoint, which `check` compares
        self.restore(groups, self.num_steps)
        self.restored_rates = rates

    def saved_groups(self) -> list[dict[str, Any]]:
        """The groups as JSON values: parameter names, and the current settings.

        Raises InputError: a group has a value that is neither number nor text, or the groups do not
            have the engine's parameters.
        """
        self._name_parameters()
        return [
            {name: _plain(name, value) for name, value in group.items() if name != "params"}
            for group in self.param_groups
        ]

    def restore(self, groups: Sequence[dict[str, Any]], num_steps: int) -> None:
        """Set the groups to those that `saved_groups` returned.

        Raises InputError: they have other parameters, or invalid settings.
        """
        by_name = {name: parameter for parameter, name in self._names.items()}
        lists = [group.get("param_names") for group in groups]
        names = [str(name) for names in lists if isinstance(names, list) for name in names]
        if sorted(names) != sorted(by_name) or not all(isinstance(names, list) for names in lists):
            raise InputError(
                "the saved groups of the optimizer have other parameters than this engine's; make "
                "the same groups first"
            )
        restored = []
        for group in groups:
            self._check(group)
            params = [by_name[str(name)] for name in group["param_names"]]
            # JSON has turned tuples (betas) into lists.
            tuples = {n: tuple(group[n]) for n in self.rule.settings if type(group[n]) is list}
            restored.append({**group, **tuples, "params": params})
        self.param_groups[:] = restored
        self.num_steps = num_steps
        self.restored_rates = [_scalar(group["lr"]) for group in restored]


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _plain(name: str, value: Any) -> Any:
    """The setting `name` as a JSON value."""
    if isinstance(value, tuple | list):
        return [_plain(name, item) for item in value]
    is_tensor = isinstance(value, Tensor)
    if getattr(value, "ndim", None) == 0 or (is_tensor and value.numel() == 1):
        value = _scalar(value)
    if value is not None and not isinstance(value, int | float | str):
        raise InputError(
            f"the optimizer's {name!r} is a {type(value).__name__}, which no checkpoint can hold"
        )
    return value
