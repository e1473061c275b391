"""The rates of a machine, from which forecasts are made; `gpus.json` has those of GPUs."""

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.base.json_yaml import read_json
from megatrain.base.units import GIB, MIB
from megatrain.base.whole_files import user_cache, write_file
from megatrain.errors import InputError
from megatrain.placement import Precision
from megatrain.telemetry.gpu import by_driver_name, find_gpu, named_gpu
from megatrain.telemetry.host import cpu_name, host_limit_bytes, usable_cores

# The rates of an H200's disk, which reads and writes in turn (1.07 and 1.07 at once): they stand
# for those of a disk that nobody has measured.
DISK_READ_GBPS, DISK_WRITE_GBPS = 1.8, 2.6

# From a host to others, each way, for all its GPUs together: one port of 100 Gbit/s.
NETWORK_GBPS = 12.5

# The driver keeps some of the advertised memory: 0.4 % on an H200, 1.5 % on a 24 GiB card.
_VISIBLE = 0.98
# Device memory of an H200's process beside tensors (context, cuBLAS, cuDNN, Triton's modules): 837
# to 859 MiB in five steps with up to 35 GiB of planes on the host
# (benchmarks/results/driver-memory-h200.json).
CONTEXT_BYTES = 840 * MIB
# Copies reach 55.5 of the 63 GB/s of a PCIe 5 x16 link (H200).
_BUS_SHARE = 0.87
# Four H200s sum layers' gradients at 298 of NVLink's 450 GB/s, beside products
# (benchmarks/results/models-qwen3-30b-a3b-4-ranks-96x1024-int8-h200.json).
_LINK_SHARE = 0.66
# `megatrain doctor` measured 22 us on a virtual machine with an H200, and 27 while other jobs
# compiled.
_LAUNCH_SECONDS = 22e-6

# (cores, GB/s of host memory) while AdamW updates: up to 16 cores measured on a Xeon with 8
# channels of DDR5; above, the most that such a socket can give.
_SERVER_GBPS = ((1, 13.0), (2, 27.0), (4, 54.0), (8, 86.0), (16, 120.0), (32, 180.0), (64, 220.0))
# Of one memory, the host's part (process, arriving weights, inputs) is one part of so many.
_PROCESS_DIVISORS = (16, 8, 4)

# A desktop has two channels of DDR5, a workstation four.
_HOST_LIMIT_GBPS = {"desktop": 60.0, "workstation": 120.0, "server": 220.0}


def mapping_bytes(pinned_bytes: int) -> int:
    """Bytes of device memory that the driver takes to map pinned host memory.

    A process of 7B on an H200 took 142 MiB more with 108 GiB than one without, 260 with 193 GiB
    (benchmarks/results/driver-memory-h200.json).
    """
    return pinned_bytes // 1024


@dataclass(frozen=True)
class Machine:
    """One GPU with its host. Rates are those of work of real size, not nominal peaks."""

    name: str
    device_memory_bytes: int
    device_context_bytes: int  # device memory that driver and libraries take before any tensor
    # host_memory_bytes, cores: of this process, at most
    host_memory_bytes: int
    cores: int
    matmul_tflops: float  # of dense products in the compute dtype
    # attention_forward_tflops, attention_backward_tflops: of causal attention over long rows; only
    # the unmasked half counts
    attention_forward_tflops: float
    attention_backward_tflops: float
    device_gbps: float  # of device memory, reads and writes together
    # to_device_gbps, from_device_gbps: of copies from and to pinned host memory
    to_device_gbps: float
    from_device_gbps: float
    update_gbps: float  # of host memory during updates (26 bytes a parameter)
    disk_write_gbps: float | None
    # from one piece of device work to the next if there is nothing to compute
    launch_seconds: float
    measured: bool  # True if rates were measured here; False: published figures times usual shares
    disk_read_gbps: float | None = None
    disk_both_gbps: float | None = None  # of reads while equally many bytes are written
    # bytes that planes may take on a disk; None: there is no disk
    disk_space_bytes: int | None = None
    # link_gbps, network_gbps: at which a GPU receives in a gather on one host, or from another host
    # while all GPUs of its host receive; None, as for a disk: not known
    link_gbps: float | None = None
    network_gbps: float | None = None
    # True if device and host share one memory, of which the process itself has `host_memory_bytes`
    one_memory: bool = False
    # the share of `matmul_tflops` that grouped products reach, beside their bytes
    experts: float = 0.9

    @property
    def both_bytes(self) -> int:
        """Memory of device and host together."""
        return self.device_memory_bytes + self.host_memory_bytes

    @property
    def disk_gbps(self) -> float:
        """The rate of a disk's reads, and of its writes, while it does both at once."""
        if self.disk_both_gbps:
            return self.disk_both_gbps
        read = self.disk_read_gbps or DISK_READ_GBPS
        return 1 / (1 / read + 1 / (self.disk_write_gbps or DISK_WRITE_GBPS))

    @property
    def memories(self) -> dict[str, int]:
        """Bytes of each memory, by a name for people."""
        if self.one_memory:
            return {"the one memory": self.both_bytes}
        return {"device memory": self.device_memory_bytes, "host memory": self.host_memory_bytes}

    def splits(self) -> list["Machine"]:
        """This machine; or, if host and device share memory, copies that divide it differently."""
        if not self.one_memory:
            return [self]
        both, sizes = self.both_bytes, [self.both_bytes // n for n in _PROCESS_DIVISORS]
        return [replace(self, device_memory_bytes=both - n, host_memory_bytes=n) for n in sizes]

    def shared(
        self, on_host: int, link_gbps: float | None, network_gbps: float | None = None
    ) -> "Machine":
        """The machine of one of `on_host` ranks: host memory, update and disk rates are divided."""
        space, both_gbps = self.disk_space_bytes, self.disk_both_gbps
        return replace(
            self,
            host_memory_bytes=self.host_memory_bytes // on_host,
            cores=max(1, self.cores // on_host),
            update_gbps=self.update_gbps / on_host,
            disk_read_gbps=(self.disk_read_gbps or DISK_READ_GBPS) / on_host,
            disk_write_gbps=(self.disk_write_gbps or DISK_WRITE_GBPS) / on_host,
            disk_both_gbps=both_gbps and both_gbps / on_host,
            disk_space_bytes=space and space // on_host,
            link_gbps=link_gbps or None,
            network_gbps=network_gbps or None,
        )

    def as_dict(self) -> dict[str, Any]:
        """The machine as plain data."""
        return asdict(self)


def machine_for(
    gpu_name: str,
    host_memory: int,
    cores: int,
    device_memory: int | None = None,
    *,
    precision: Precision = "bf16",
) -> Machine:
    """The expected rates of a GPU in `gpus.json`, by its common name or the driver's.

    Args:
        device_memory: bytes that programs see; None: the advertised size, less 2 %. If GPU and host
            share one memory, its size: the host has a sixteenth of it, whatever `host_memory` is.

    Raises InputError: the GPU is not listed; the message has the nearest names.
    """
    gpu = named_gpu(gpu_name)
    memory = int(gpu.memory_gib * GIB * _VISIBLE) if device_memory is None else device_memory
    if gpu.shared:
        memory = int(gpu.shared * (device_memory or gpu.memory_gib * GIB))
        host_memory = memory // _PROCESS_DIVISORS[0]
        memory -= host_memory
    peak = gpu.fp32_tflops if precision == "fp32" else gpu.bf16_tflops
    return Machine(
        name=f"{gpu.name}, {cores} cores",
        device_memory_bytes=memory,
        device_context_bytes=CONTEXT_BYTES,
        host_memory_bytes=host_memory,
        cores=cores,
        matmul_tflops=peak * gpu.shares["matmul"],
        attention_forward_tflops=peak * gpu.shares["attention_forward"],
        attention_backward_tflops=peak * gpu.shares["attention_backward"],
        device_gbps=gpu.memory_gbps * gpu.shares["memory"],
        to_device_gbps=gpu.bus_gbps * _BUS_SHARE,
        from_device_gbps=gpu.bus_gbps * _BUS_SHARE,
        update_gbps=update_gbps(cores, gpu.host),
        disk_write_gbps=None,
        launch_seconds=_LAUNCH_SECONDS,
        measured=False,
        one_memory=bool(gpu.shared),
        link_gbps=gpu.link_gbps * _LINK_SHARE or None,
        experts=gpu.shares["experts"],
    )


def update_gbps(cores: int, host: str = "server") -> float:
    """The expected rate of host memory during updates, GB/s."""
    core_counts, gbps = zip(*_SERVER_GBPS, strict=True)
    return min(float(np.interp(cores, core_counts, gbps)), _HOST_LIMIT_GBPS[host])


VERSION = 1
_MAX_AGE_SECONDS = 180 * 24 * 3600
_LEAST, _MOST = 1e-9, 1e16  # limits of all rates of real machines


@dataclass(frozen=True)
class Key:
    """The facts for which a measurement is valid; if one changes, the machine is measured again."""

    gpu: str
    driver: str
    cpu: str
    cores: int

    @property
    def file(self) -> Path:
        digest = hashlib.sha256(json.dumps(vars(self), sort_keys=True).encode())
        return user_cache("machines") / f"{digest.hexdigest()[:16]}.json"


def key_of(device: str) -> Key:
    """The key of this machine with the GPU `device`, if there is one."""
    gpu = find_gpu(device)
    uuid, driver = ("none", "none") if gpu is None else (gpu.uuid, gpu.driver)
    return Key(uuid, driver, cpu_name(), usable_cores())


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
    """The measurements of `key`; None: there are none, or they cannot be trusted."""
    try:
        record = read_json(key.file)
        is_valid = record["version"] == VERSION and record["key"] == vars(key)
        is_recent = 0 <= time.time() - record["time"] <= _MAX_AGE_SECONDS
        is_own_file = key.file.stat().st_uid == os.getuid()
        is_usable = is_valid and is_recent and is_own_file
        return _checked(record["machines"][precision]) if is_usable else None
    except (InputError, OSError, ValueError, KeyError, TypeError):
        return None


def _checked(values: dict[str, Any]) -> Machine:
    """The machine of these values. Raises ValueError or TypeError: a value is impossible."""
    machine = Machine(**{name: value for name, value in values.items() if name != "unified"})
    for field in fields(Machine):
        value = getattr(machine, field.name)
        if field.type in (str, bool):
            valid = type(value) is field.type
        elif value is None:
            valid = field.name.startswith(("disk_", "link_", "network_"))
        else:
            valid = type(value) in (int, field.type if field.type is int else float)
            valid = valid and _LEAST <= value <= _MOST
        if not valid or not machine.measured:
            raise ValueError(field.name)
    return replace(machine, name=machine.name[:200])


def present_machine(device: str = "auto", *, precision: Precision = "bf16") -> Machine | None:
    """The rates of this machine with the GPU `device`, and the memory that it may use now.

    None: there is no GPU, or it is neither measured nor listed.
    """
    gpu, memory = find_gpu(device), host_limit_bytes()
    if gpu is None:
        return None
    listing = by_driver_name(gpu.name)
    one_memory = listing is not None and listing.shared
    if not (gpu.memory_bytes or one_memory):
        return None
    measured = read(key_of(device), "fp32" if precision == "fp32" else "bf16")
    if measured is not None and not one_memory:
        link = listing.link_gbps * _LINK_SHARE if listing else 0.0
        return replace(measured, host_memory_bytes=memory, link_gbps=link or None)
    try:
        listed = machine_for(
            gpu.name,
            memory,
            usable_cores(),
            memory if one_memory else int(gpu.memory_bytes * 0.99),
            precision=precision,
        )
    except InputError:
        return None
    names = ("device_memory_bytes", "host_memory_bytes", "one_memory")
    sizes = {name: getattr(listed, name) for name in names}
    return listed if measured is None else replace(measured, **sizes)
