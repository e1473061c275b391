"""A plan as people read it."""

from collections.abc import Mapping
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from megatrain.base.units import GIB, duration, gib, size
from megatrain.forecast.simulate import Forecast
from megatrain.plan.planner import Plan, SeveralGpus
from megatrain.plan.remedies import Remedy
from megatrain.plan.tiles import PLANES, by_tier
from megatrain.telemetry.console import say

_WIDTH = 140
_NARROW = 90  # characters, where what is between columns is taken from

_BINDS = {
    "compute": "the GPU's arithmetic",
    "copy in": "the bus to the GPU",
    "copy out": "the bus from the GPU",
    "update": "the optimizer's update on the host",
    "disk in": "the disk",
    "disk out": "the disk",
    "disk weights": "the disk",
    "gather": "the link between GPUs",
    "reduce": "the link between GPUs",
    "hosts": "the network between hosts",
    "launches": "the thread that launches",
}
_BINDS_CPU = {
    "compute": "the CPU's arithmetic",
    "copy in": "host memory",
    "copy out": "host memory",
}


def show(plan: Plan, name: str) -> None:
    """Print it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH  # a file has no width, and tables should not be cut to guess one

    def say_all(lines: list[str]) -> None:
        for line in lines:
            say(console, line)

    say_all(_head(plan, name))
    console.print()
    console.print(_tiles(plan, gap=2 if console.width > _NARROW else 1))
    console.print()
    say_all([*_memory(plan), *_time(plan)])
    if not plan.fits:
        say_all(_remedies(plan))
    say_all([f"note: {warning}" for warning in plan.warnings])


def missing(plan: Plan) -> str:
    """What is missing of device and host memory, in one line."""
    short, told, machine = plan.shortage, plan.forecast.machine, plan.machine
    if short is None:
        return "nothing is missing"
    parts = [
        f"{size(lacking)} of {place} memory are missing ({size(least)} would do, {size(there)} "
        "are allowed)"
        for place, lacking, least, there in (
            ("device", short.device_bytes, told.device_memory_bytes, machine.device_memory_bytes),
            ("host", short.host_bytes, told.host_memory_bytes, machine.host_memory_bytes),
        )
        if lacking
    ]
    return " and ".join(parts)


def _head(plan: Plan, name: str) -> list[str]:
    told, machine = plan.forecast, plan.machine
    kind = "measured" if machine.measured else "from published figures, not measured"
    rows, asked = told.tokens_per_step // told.sequence_length, plan.workload
    verdict = "it fits" if plan.fits else f"it does not fit: {missing(plan)}"
    return [
        f"{name}, {_count(told.parameters)}, on {machine.name} ({kind}): {verdict}",
        f"a step of {told.tokens_per_step:,} tokens: {rows:,} x {told.sequence_length:,}, "
        f"{told.micro_batch} row{'s' if told.micro_batch > 1 else ''} at once; {asked.precision}"
        f", {'exact clipping' if asked.clip else 'no clipping'}",
        *(
            []
            if plan.fits
            else ["all below is for the least memory with which it would fit, all else as asked"]
        ),
    ]


def _tiles(plan: Plan, gap: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for title in ("tile", "parameters", "rests on", *PLANES, "in all"):
        justify: Literal["left", "right"] = "left" if title in ("tile", "rests on") else "right"
        table.add_column(title, justify=justify, overflow="fold")
    for tile in plan.tiles:
        sizes = [gib(tile.count * tile.planes[plane]) for plane in PLANES]
        count = tile.count * tile.parameters
        parameters = f"{count / 1e6:,.1f} M" if count >= 1e5 else f"{count:,}"
        tier = f"{tile.tier}{', disk' * bool(tile.disk)}{', copy' * tile.stays}"
        table.add_row(tile.name, parameters, tier, *sizes, gib(tile.total_bytes))
    for tier, planes in by_tier(plan.tiles).items():
        if any(planes.values()):
            sizes = [gib(planes[plane]) for plane in PLANES]
            table.add_row("together", "", tier, *sizes, gib(sum(planes.values())))
    return table


def _count(parameters: int) -> str:
    if parameters < 1e7:
        return f"{parameters:,} parameters"
    return f"{parameters / 1e9:.2f} billion parameters"


def _memory(plan: Plan) -> list[str]:
    told, machine = plan.forecast, plan.machine
    lines = []
    for place, parts, limit in (
        ("device", told.device_bytes, machine.device_memory_bytes),
        ("host", told.host_parts, machine.host_memory_bytes),
    ):
        if not parts:
            continue  # the CPU's memory is the host's
        largest = sorted(parts.items(), key=lambda part: -part[1])
        named = ", ".join(f"{part} {gib(taken)}" for part, taken in largest if taken >= GIB / 20)
        share = f"{gib(sum(parts.values()))} of {gib(limit)} at the peak"
        lines.append(f"{place:<9}{share}: {named}")
        if place == "device" and told.device_held_bytes > told.device_peak_bytes:
            held = gib(told.device_held_bytes)
            lines.append(f"{'':<9}the driver will show {held}: torch keeps freed memory for reuse")
    lines.append(f"saves    take up to {gib(plan.save_bytes)} more of the host beside training")
    return lines if plan.disk is None else [*lines, *_disk(plan.disk)]


def _disk(disk: Mapping[str, Any]) -> list[str]:
    days, worn = (
        disk["days_to_wear"],
        "--disk-tbw N says when a drive of N terabytes written is worn",
    )
    read, written = gib(disk["read_bytes_a_step"]), gib(disk["written_bytes_a_step"])
    if days is not None:
        worn = (
            f"a drive of {disk['endurance_terabytes']:,.0f} TBW is worn after {_long(86400 * days)}"
        )
    return [
        f"disk     {gib(disk['num_bytes'])} of planes; a step reads {read} and writes {written}",
        f"         {disk['written_terabytes_a_day']:,.1f} TB written a day at this speed; {worn}",
    ]


def _time(plan: Plan) -> list[str]:
    told = plan.forecast
    binds = _BINDS | (_BINDS_CPU if plan.machine.unified else {})
    bounds = sorted(told.bounds.items(), key=lambda bound: -bound[1])
    busy = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in bounds if seconds)
    lines = [
        f"step     {told.seconds:.2f} s, {told.tokens_per_second:,.0f} tokens/s, "
        f"{told.model_tflops:.0f} model TFLOPS",
        f"binds    {binds.get(told.binds, told.binds)} (busy: {busy})",
        f"         arithmetic binds from {plan.compute_bound_tokens:,} tokens a step on",
    ]
    if plan.several is not None:
        lines.append(_split(plan.several))
    rate = (plan.several or told).tokens_per_second
    tokens, seconds = plan.total_tokens, plan.run_seconds
    if tokens is None or seconds is None:
        lines.append(f"run      {_long(1e9 / rate)} for each billion tokens")
    else:
        lines.append(f"run      {_long(seconds)} for {tokens:,} tokens")
    return lines


def _split(several: SeveralGpus) -> str:
    """The line of several GPUs."""
    which, between = f"{several.gpus} GPUs  ", "half a bus between them"
    compared = "two steps of two H200s were within 3 %"
    if several.hosts > 1:
        which = f"{several.hosts} x {several.gpus} GPUs"
        between += f", {several.network_seconds:.2f} s of sums between hosts"
        compared = "no such forecast has been compared with a measured step"
    return (
        f"{which} {several.seconds:.2f} s, {several.tokens_per_second:,.0f} tokens/s; binds: "
        f"{_BINDS.get(several.binds, several.binds)}; {gib(several.device_bytes)} of each GPU, "
        f"{gib(several.host_bytes)} of each host. The same step split evenly, each GPU with its "
        f"own bus and its share of the host, and {between} ({compared})"
    )


def _long(seconds: float) -> str:
    """Days where there are more than two, years where it takes those."""
    days = seconds / 86400
    if days > 730:
        return f"{days / 365.25:.1f} years"
    return f"{days:.1f} days" if days > 2 else duration(seconds)


def _remedies(plan: Plan) -> list[str]:
    if not plan.remedies:
        return ["\nNothing that was tried makes it fit."]
    told = [f"{number}. {_remedy(each)}" for number, each in enumerate(plan.remedies, 1)]
    return ["\nIt would fit, the cheapest first:", *told]


def _remedy(remedy: Remedy) -> str:
    told = remedy.forecast
    keys = ", ".join(f"{k}: {'null' if v is None else v}" for k, v in remedy.settings.items())
    return (
        f"{remedy.text}{f' ({keys})' if keys else ''}: {told.seconds:.2f} s a step, "
        f"{told.tokens_per_second:,.0f} tokens/s; {_peaks(told)}"
    )


def _peaks(told: Forecast) -> str:
    host = f"host {gib(told.host_peak_bytes)}"
    return f"device {gib(told.device_peak_bytes)}, {host}" if told.device_bytes else host
