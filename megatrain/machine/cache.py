"""What `megatrain doctor` measured, kept for `megatrain plan` and `placement: auto`.

One JSON file a machine in the user's cache folder. A file that is old, of another machine or
version, somebody else's, or damaged is as good as none.
"""

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatrain.base.json_yaml import parse_json
from megatrain.machine.rates import Machine
from megatrain.telemetry.cores import usable_cores
from megatrain.telemetry.environment import cpu_name
from megatrain.telemetry.gpu import gpu_identity

VERSION = 1
_MAX_AGE_SECONDS = 180 * 24 * 3600
_MAX_BYTES = 1 << 20
# No rate of a real machine is outside.
_LEAST, _MOST = 1e-9, 1e16


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
    path = key.file
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "version": VERSION,
        "key": vars(key),
        "time": time.time(),
        "machines": {precision: machine.as_dict() for precision, machine in machines.items()},
    }
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".machine-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=2)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def read(key: Key, precision: str) -> Machine | None:
    """The measurements for `key`; None if there are none that can be trusted."""
    try:
        if not key.file.is_file():  # a pipe would be waited for
            return None
        with key.file.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or status.st_size > _MAX_BYTES:
                return None
            record = parse_json(file.read(_MAX_BYTES))
        if record["version"] != VERSION or record["key"] != vars(key):
            return None
        if not 0 <= time.time() - record["time"] <= _MAX_AGE_SECONDS:
            return None
        return _checked(record["machines"][precision])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checked(values: dict[str, Any]) -> Machine:
    """Raises ValueError, TypeError or KeyError: `megatrain doctor` has not written this."""
    later = {"link_gbps": None, "network_gbps": None}  # which earlier files have not
    if {*values, *later} != {field.name for field in fields(Machine)}:
        raise ValueError("other fields")
    values = later | values
    for field in fields(Machine):
        value = values[field.name]
        if value is None and field.name.startswith(("disk_", "link_", "network_")):
            continue
        if field.type is int and type(value) is not int:
            raise ValueError(field.name)
        if field.type not in (str, bool) and (isinstance(value, bool) or not _plausible(value)):
            raise ValueError(field.name)
    if values["measured"] is not True or not isinstance(values["name"], str):
        raise ValueError("measured")
    return Machine(**{**values, "name": values["name"][:200]})


def _plausible(value: float) -> bool:
    return math.isfinite(value) and _LEAST <= value <= _MOST
