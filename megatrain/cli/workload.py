"""The workload that options of a command line ask for."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from megatrain.base.units import parse_bytes
from megatrain.errors import InputError
from megatrain.forecast.workload import LIMITS, Workload


def changed(workload: Workload, options: Mapping[str, Any]) -> Workload:
    """The workload with options for its fields and its rule's choices; None: not given.

    Raises:
        InputError: a limit is no size, or the rule lacks a choice.
    """
    values = {name: value for name, value in options.items() if value is not None}
    for name in values.keys() & LIMITS:
        option = f"--{name.replace('_', '-')}"
        try:
            num_bytes = parse_bytes(values[name])
        except ValueError as error:
            raise InputError(f"{option}: {error}") from error
        if num_bytes < 1:
            raise InputError(f"{option}: {values[name]} is no memory at all")
        values[name] = num_bytes
    if "disk_space" in values:
        values["disk"] = options.get("disk")  # None: any disk
    rule, of_workload = workload.rule, {field.name for field in fields(Workload)}
    choices = {name: values.pop(name) for name in values.keys() - of_workload}
    for name in choices.keys() - rule.choices.keys():
        raise InputError(f"--{name}: {rule.name} has no such choice; leave it out")
    return replace(workload, rule=replace(rule, **choices), **values)
