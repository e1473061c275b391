"""The machine this process runs on: as `megatrain doctor` measured it, or as it is listed.

What `megatrain doctor` measured is one JSON file a machine in the user's cache folder. A file that
is old, of another machine or version, somebody else's, or damaged is as good as none.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatrain.base.json_yaml import read_json
from megatrain.base.whole_files import write_file
from megatrain.errors import InputError
from megatrain.machine.rates import Machine, machine_for
from megatrain.placement import Precision
from megatrain.telemetry.gpu import find_gpu, gpu_identity
from megatrain.telemetry.host import cpu_name, host_limit_bytes, usable_cores

VERSION = 1
_MAX_AGE_SECONDS = 180 * 24 * 3600
_LEAST, _MOST = 1e-9, 1e16  # no rate of a real machine is outside


@dataclass(frozen=True)
class Key:
    """The facts for which a measurement is valid; if one changes, it is measured again."""

    gpu: str
    driver: str
    cpu: str
    cores: int

    @property
    def file(self) -> Path:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        text = json.dumps(vars(self), sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        return Path(root) / "megatrain" / "machines" / f"{name}.json"


def key_of(device: str) -> Key:
    """The key of this machine with GPU `device`, or without a GPU."""
    gpu, driver = gpu_identity(device) or ("none", "none")
    return Key(gpu, driver, cpu_name(), usable_cores())


def write(key: Key, machines: Mapping[str, Machine]) -> Path:
    """Save `machines` (by precision) for `key`, atomically; raises OSError."""
    record = {
        "version": VERSION,
        "key": vars(key),
        "time": time.time(),
        "machines": {precision: machine.as_dict() for precision, machine in machines.items()},
    }
    key.file.parent.mkdir(parents=True, exist_ok=True)
    write_file(key.file, json.dumps(record, indent=2))
    return key.file


def read(key: Key, precision: str) -> Machine | None:
    """The measurements for `key`; None if there are none that can be trusted."""
    try:
        record = read_json(key.file)
        if record["version"] != VERSION or record["key"] != vars(key):
            return None
        if not 0 <= time.time() - record["time"] <= _MAX_AGE_SECONDS:
            return None
        if key.file.stat().st_uid != os.getuid():
            return None
        return _checked(record["machines"][precision])
    except (InputError, OSError, ValueError, KeyError, TypeError):
        return None


def _checked(values: dict[str, Any]) -> Machine:
    """Raises ValueError, TypeError or KeyError: `megatrain doctor` has not written this."""
    values = {"link_gbps": None, "network_gbps": None} | values  # which earlier files have not
    if values.keys() != {field.name for field in fields(Machine)}:
        raise ValueError("other fields")
    for field in fields(Machine):
        value = values[field.name]
        if field.type in (str, bool):
            continue
        if value is None and field.name.startswith(("disk_", "link_", "network_")):
            continue
        whole = type(value) is int
        plausible = math.isfinite(value) and _LEAST <= value <= _MOST
        if isinstance(value, bool) or not plausible or (field.type is int and not whole):
            raise ValueError(field.name)
    if values["measured"] is not True or not isinstance(values["name"], str):
        raise ValueError("measured")
    return Machine(**{**values, "name": values["name"][:200]})


def present_cpu() -> Machine:
    """This machine without a GPU, for counting memory; its unknown rates are all 1."""
    memory, cores = host_limit_bytes(), usable_cores()
    return Machine(
        name=f"{cpu_name()}, {cores} cores",
        device_memory_bytes=memory,
        device_context_bytes=0,
        host_memory_bytes=memory,
        cores=cores,
        matmul_tflops=1.0,
        attention_forward_tflops=1.0,
        attention_backward_tflops=1.0,
        device_gbps=1.0,
        to_device_gbps=1.0,
        from_device_gbps=1.0,
        update_gbps=1.0,
        disk_write_gbps=None,
        launch_seconds=1.0,
        measured=False,
        unified=True,
    )


def present_machine(device: str = "cuda", *, precision: Precision = "bf16") -> Machine | None:
    """The rates of this machine with GPU `device`.

    The host's memory is the amount that this process may use now.

    Returns:
        None without a GPU, or with one that was neither measured nor is listed.
    """
    gpu = find_gpu(device)
    if gpu is None:
        return None
    memory = host_limit_bytes()
    measured = read(key_of(device), "fp32" if precision == "fp32" else "bf16")
    if measured is not None:
        return replace(measured, host_memory_bytes=memory)
    try:
        return machine_for(
            gpu.name, memory, usable_cores(), int(gpu.memory_bytes * 0.99), precision=precision
        )
    except InputError:
        return None
