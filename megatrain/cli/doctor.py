"""`megatrain doctor`: the machine as a table, or as JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatrain.base.units import MIB, duration, gib
from megatrain.plan.doctor import Diagnosis, diagnose
from megatrain.telemetry.console import say
from megatrain.telemetry.host import environment


def run_doctor(device: str, folder: Path, as_json: bool, share: bool) -> None:
    """Measure, and print. Raises InputError: there is no such device."""
    diagnosis = diagnose(device, folder)
    if as_json or share:
        print(json.dumps(shared(diagnosis, device) if share else asdict(diagnosis), indent=2))
        return
    show(diagnosis, Console(highlight=False))


def shared(diagnosis: Diagnosis, device: str) -> dict[str, Any]:
    """The facts with which a maintainer lists this machine, without names of folders or hosts."""
    gpu = diagnosis.facts.gpu
    return environment(device) | {
        "kernels": diagnosis.facts.kernels,
        "pcie": gpu and [gpu.pcie_generation, gpu.pcie_lanes],
        "measured": {m.label: [m.value, m.unit] for m in diagnosis.measurements},
        "rates": {name: machine.as_dict() for name, machine in diagnosis.machines.items()},
    }


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print the machine, its rates, and the findings."""
    facts, gpu = diagnosis.facts, diagnosis.facts.gpu
    lines = [
        f"host     {facts.cpu}, {facts.cores} cores for this process",
        f"memory   {gib(facts.allowed_bytes)} of {gib(facts.memory_bytes)}, "
        f"{gib(facts.free_bytes)} free; huge pages: {facts.huge_pages}",
        f"kernels  {facts.kernels}",
        f"runs     {facts.folder}, {gib(facts.disk_free_bytes)} free",
        "GPU      none"
        if gpu is None
        else f"GPU      {gpu.name}, driver {gpu.driver}, PCIe {gpu.pcie_generation} "
        f"x{gpu.pcie_lanes}",
    ]
    for line in lines:
        say(console, line)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("measured")
    table.add_column("", justify="right")
    table.add_column("")
    for measurement in diagnosis.measurements:
        if (value := measurement.value) is not None:
            unit = measurement.unit
            value, unit = (value / MIB, "MiB") if unit == "B" else (value, unit)
            number = f"{value:.3g}" if value < 100 else f"{value:.0f}"
            table.add_row(measurement.label, number, unit)
    console.print(table, soft_wrap=not console.is_terminal)
    for measurement in diagnosis.measurements:
        if measurement.value is None:
            say(console, f"{measurement.label}: not measured because {measurement.why_not}")
    wrong = [finding for finding in diagnosis.findings if finding.wrong]
    notes = [finding for finding in diagnosis.findings if not finding.wrong]
    for title, listed in (("Wrong or slow", wrong), ("To know", notes)):
        if listed:
            console.print(f"\n{title}:")
        for finding in listed:
            say(console, f"- {finding.what}\n  {finding.remedy}")
    if not wrong:
        console.print("\nNothing is wrong.")
    saved_note = f"kept in {diagnosis.kept}, which `megatrain plan` and `placement: auto` read"
    not_kept = f"not kept for `megatrain plan`: {diagnosis.not_kept}"
    say(console, f"\n{duration(diagnosis.seconds)}; {saved_note if diagnosis.kept else not_kept}")
