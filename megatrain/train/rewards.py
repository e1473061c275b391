"""Reward functions of a run file, with the signature that TRL's trainers call."""

import asyncio
import copy
import importlib.util
import inspect
import logging
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatrain.config import RolloutSection
from megatrain.errors import InputError, RunFailed, first_line

log = logging.getLogger(__name__)


class Rewards:
    """The reward functions of a run, called one after the other; `names` are those of the log."""

    def __init__(self, settings: RolloutSection) -> None:
        """Import the functions.

        Raises InputError: a module cannot be imported, or has no such function.
        """
        paths = {written: written.rpartition(":")[0] for written in settings.rewards}
        modules = {path: _module(path) for path in dict.fromkeys(paths.values())}
        self.names = [written.rpartition(":")[2] for written in settings.rewards]
        if len(set(self.names)) < len(self.names):
            raise InputError("rollout.rewards: two functions have one name; rename one")
        self._functions: list[Callable[..., Any]] = []
        for name, path in zip(self.names, paths.values(), strict=True):
            function = getattr(modules[path], name, None)
            if not callable(function):
                raise InputError(f"rollout.rewards: {path} has no function {name!r}")
            self._functions.append(function)
        self._weights = settings.weights or [1.0] * len(self.names)

    def of(self, prompts: Sequence[Any], replies: Sequence[Any], /, **columns: Any) -> Tensor:
        """The reward of each function for each reply `[R, F]`, fp64; NaN for None.

        Args: `columns`: further arguments of the functions; each function gets copies of all.

        Raises RunFailed: a function fails, or returns something else than a number for each reply.
        """
        rewards = []
        for name, function in zip(self.names, self._functions, strict=True):
            try:
                values = function(
                    **copy.deepcopy({"prompts": prompts, "completions": replies, **columns})
                )
                if inspect.isawaitable(values):
                    values = _waited_for(values)
            except (Exception, SystemExit) as error:  # whatever a user's function does
                log.error("the reward function %s failed", name, exc_info=error)
                kind = type(error).__name__
                raise RunFailed(f"reward {name} failed: {kind}: {first_line(error)}") from None
            rewards.append(_column(name, values, len(replies)))
        return torch.stack(rewards, 1)

    def together(self, each_RF: Tensor) -> Tensor:
        """The weighted sum `[R]`; NaN for a reply that no function has rewarded."""
        summed = (each_RF * torch.tensor(self._weights, dtype=torch.float64)).nansum(1)
        return summed.masked_fill(each_RF.isnan().all(1), math.nan)


def _waited_for(values: Any) -> Any:
    """The result of an `async` function, run in a thread because notebooks have a running loop."""

    async def awaited() -> Any:
        return await values

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, awaited()).result()


def _column(name: str, returned: Any, count: int) -> Tensor:
    if isinstance(returned, Tensor):
        returned = returned.tolist()
    try:
        if isinstance(returned, str | bytes):
            raise TypeError
        values = [math.nan if value is None else float(value) for value in returned]
    except (TypeError, ValueError):
        raise RunFailed(
            f"reward {name} returned {returned!r:.60}; it must return a list of numbers or None, "
            "one for each completion"
        ) from None
    if len(values) != count:
        raise RunFailed(f"reward {name} returned {len(values)} numbers for {count} completions")
    if infinite := [value for value in values if math.isinf(value)]:
        raise RunFailed(f"reward {name} returned {infinite[0]}; rewards must be finite")
    return torch.tensor(values, dtype=torch.float64)


def _module(where: str) -> ModuleType:
    """A module by import name or file, loaded once however many of its functions are used."""
    try:
        return _file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:  # the module's own code runs
        kind = type(error).__name__
        raise InputError(
            f"rollout.rewards: {where} cannot be imported: {kind}: {first_line(error)}; name a "
            "module of this Python, or a file such as rewards.py:reward"
        ) from error


def _file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError("no such file")
    name = f"{__name__}:{path}"  # no name that an import could mean
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def measured(each_RF: Tensor, together_R: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Means and standard deviations over replies, by TRL's names; NaN is left out."""
    columns = {f"rewards/{name}": each_RF[:, at] for at, name in enumerate(names)}
    named = {f"{name}/mean": (f"{name}/std", values) for name, values in columns.items()}
    measures: dict[str, float] = {}
    for mean, (std, values) in (named | {"reward": ("reward_std", together_R)}).items():
        numbers = values[~values.isnan()]
        measures |= {mean: float(numbers.mean())} if len(numbers) else {}
        measures |= {std: float(numbers.std())} if len(numbers) > 1 else {}
    return measures
