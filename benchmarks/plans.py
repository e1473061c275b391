"""`python -m benchmarks.plans OUT.json`: what plans take and say, over shapes, GPUs, tokens, hosts.

Give a part of the sweep (`--shapes 120b --gpus H200 --disks 0 4000`), and `--before OLD.json` to
compare with what another commit wrote. Processor seconds are those of one process after imports.
"""

import argparse
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from megatrain.base.units import GIB
from megatrain.cli.models import SHAPES, NamedModel, named_config
from megatrain.errors import MegatrainError
from megatrain.forecast.workload import Workload
from megatrain.machine import machine_for
from megatrain.plan.planner import make_plan
from megatrain.telemetry.gpu import known_gpus

TOKENS = (1024, 8192, 98_304, 524_288, 1_000_000)
HOST_GIB, DISK_GIB, CORES = (64, 128, 512, 2048), (0, 4000), 16


def planned(shape: str, gpu: str, tokens: int, host_gib: int, disk_gib: int) -> dict[str, Any]:
    """Processor seconds of a plan, and what it says."""
    machine = machine_for(gpu, host_gib * GIB, CORES, precision="bf16")
    machine = replace(machine, disk_space_bytes=disk_gib * GIB or None)
    gc.collect()
    start = time.process_time()
    spec = NamedModel(shape, named_config(shape, max_positions=1024)).spec()
    try:
        plan = make_plan(spec, machine, Workload(tokens, 1024))
    except MegatrainError as error:
        return {"processor_seconds": time.process_time() - start, "error": str(error)}
    return {
        "processor_seconds": time.process_time() - start,
        "fits": plan.fits,
        "seconds": plan.forecast.seconds,
        "device_bytes": plan.forecast.device_peak_bytes,
        "host_bytes": plan.forecast.host_peak_bytes,
        "remedies": {each.text: each.forecast.seconds for each in plan.remedies},
    }


def changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """What differs by more than 1 %."""
    for name in ("fits", "error"):
        if old.get(name) != new.get(name):
            yield f"{name}: {old.get(name)} -> {new.get(name)}"
    for name in ("seconds", "device_bytes", "host_bytes"):
        if name in old and name in new and abs(new[name] / old[name] - 1) > 0.01:
            yield f"{name}: {old[name]:.4g} -> {new[name]:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES])
    parser.add_argument("--gpus", nargs="+", default=[gpu.name for gpu in known_gpus()])
    for name, values in (("tokens", TOKENS), ("hosts", HOST_GIB), ("disks", DISK_GIB)):
        parser.add_argument(f"--{name}", nargs="+", type=int, default=values)
    options = parser.parse_args()
    before = {} if options.before is None else json.loads(options.before.read_text())
    found = {}
    gc.disable()  # as the command does
    sweep = options.shapes, options.gpus, options.tokens, options.hosts, options.disks
    for case in product(*sweep):
        name = " ".join(map(str, case))
        found[name] = told = planned(*case)
        options.out.write_text(json.dumps(found, indent=1))
        old = before.get(name, told)
        seconds = f"{old['processor_seconds']:.2f} -> {told['processor_seconds']:.2f} s"
        print(name, seconds, *changes(old, told), sep="  ", flush=True)


if __name__ == "__main__":
    main()
