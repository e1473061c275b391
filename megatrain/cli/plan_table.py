"""Shows a plan as tables."""

from collections.abc import Mapping
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from megatrain.base.units import GIB, duration, gib, size
from megatrain.plan.planner import PLANES, Plan, by_tier
from megatrain.telemetry.console import say

_WIDTH = 140
_NARROW = 90  # characters; narrower terminals get less space between columns

_BINDS = {
    "compute": "the GPU's arithmetic",
    "copy in": "the bus to the GPU",
    "copy out": "the bus from the GPU",
    "update": "the optimizer's update on the host",
    **dict.fromkeys(("disk in", "disk out", "disk weights"), "the disk"),
    **dict.fromkeys(("gather", "reduce"), "the link between GPUs"),
    "hosts": "the network between hosts",
    "launches": "the thread that launches",
}


def show(plan: Plan, name: str) -> None:
    """Print the plan."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH  # a file has no width, and tables should not be cut
    lines = _memory(plan) + _time(plan)
    if not plan.fits:
        lines += _remedies(plan)
    for line in _head(plan, name):
        say(console, line)
    console.print()
    console.print(_tiles(plan, gap=2 if console.width > _NARROW else 1))
    console.print()
    for line in [*lines, *(f"note: {warning}" for warning in plan.warnings)]:
        say(console, line)


def missing(plan: Plan) -> str:
    """The missing device and host memory, in one line."""
    needed, machine = plan.forecast.machine, plan.machine
    parts = [
        f"{size(lacking)} of {place} memory are missing ({size(least)} would do, {size(most)} "
        "are allowed)"
        for place, lacking, least, most in (
            (
                "device",
                plan.missing_device_bytes,
                needed.device_memory_bytes,
                machine.device_memory_bytes,
            ),
            ("host", plan.missing_host_bytes, needed.host_memory_bytes, machine.host_memory_bytes),
        )
        if lacking
    ]
    return " and ".join(parts)


def _head(plan: Plan, name: str) -> list[str]:
    forecast, machine, workload = plan.forecast, plan.machine, plan.workload
    kind = "measured" if machine.measured else "from published figures, not measured"
    rows = forecast.tokens_per_step // forecast.sequence_length
    count = forecast.parameters
    parameters = f"{count / 1e9:.2f} billion" if count >= 1e7 else f"{count:,}"
    verdict = "it fits" if plan.fits else f"it does not fit: {missing(plan)}"
    lines = [
        f"{name}, {parameters} parameters, on {machine.name} ({kind}): {verdict}",
        f"a step of {forecast.tokens_per_step:,} tokens: {rows:,} x {forecast.sequence_length:,}, "
        f"{forecast.micro_batch} row{'s' if forecast.micro_batch > 1 else ''} at once; "
        f"{workload.precision}, {'exact' if workload.clip else 'no'} clipping",
    ]
    if not plan.fits:
        lines.append("all below is for the least memory with which it would fit, all else as asked")
    return lines


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


def _memory(plan: Plan) -> list[str]:
    forecast, machine = plan.forecast, plan.machine
    lines = []
    for place, parts, limit in (
        ("device", forecast.device_bytes, machine.device_memory_bytes),
        ("host", forecast.host_parts, machine.host_memory_bytes),
    ):
        if not parts:
            continue  # the CPU's memory is the host's
        largest = sorted(parts.items(), key=lambda part: -part[1])
        named = ", ".join(f"{part} {gib(taken)}" for part, taken in largest if taken >= GIB / 20)
        share = f"{gib(sum(parts.values()))} of {gib(limit)} at the peak"
        lines.append(f"{place:<9}{share}: {named}")
        if place == "device" and forecast.device_held_bytes > forecast.device_peak_bytes:
            held = gib(forecast.device_held_bytes)
            lines.append(f"{'':<9}the driver will show {held}: torch keeps freed memory for reuse")
    lines.append(f"saves    take up to {gib(plan.save_bytes)} more of the host beside training")
    return lines if plan.disk is None else [*lines, *_disk(plan.disk)]


def _disk(disk: Mapping[str, Any]) -> list[str]:
    days, endurance = disk["days_to_wear"], disk["endurance_terabytes"]
    read, written = gib(disk["read_bytes_a_step"]), gib(disk["written_bytes_a_step"])
    worn = "--disk-tbw N says when a drive of N terabytes written is worn"
    if days is not None:
        worn = f"a drive of {endurance:,.0f} TBW is worn after {_long(86400 * days)}"
    return [
        f"disk     {gib(disk['num_bytes'])} of planes; a step reads {read} and writes {written}",
        f"         {disk['written_terabytes_a_day']:,.1f} TB written a day at this speed; {worn}",
    ]


def _time(plan: Plan) -> list[str]:
    forecast, tokens = plan.forecast, plan.total_tokens
    binds = _BINDS.get(forecast.binds, forecast.binds)
    bounds = sorted(forecast.bounds.items(), key=lambda bound: -bound[1])
    busy = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in bounds if seconds)
    counted = f"{tokens:,} tokens" if tokens else "each billion tokens"
    seconds = (tokens or 1e9) / plan.tokens_per_second
    return [
        f"step     {forecast.seconds:.2f} s, {forecast.tokens_per_second:,.0f} tokens/s, "
        f"{forecast.model_tflops:.0f} model TFLOPS",
        f"binds    {binds} (busy: {busy})",
        f"         arithmetic binds from {plan.compute_bound_tokens:,} tokens a step on",
        *([] if plan.several is None else [_split(plan.several)]),
        f"run      {_long(seconds)} for {counted}",
    ]


def _split(several: Mapping[str, Any]) -> str:
    """The line on several GPUs."""
    which, between = f"{several['gpus']} GPUs  ", "half a bus between them"
    compared = "two steps of two H200s were within 3 %"
    if several["hosts"] > 1:
        which = f"{several['hosts']} x {several['gpus']} GPUs"
        between += f", {several['network_seconds']:.2f} s of sums between hosts"
        compared = "no such forecast has been compared with a measured step"
    binds = _BINDS.get(several["binds"], several["binds"])
    return (
        f"{which} {several['seconds']:.2f} s, {several['tokens_per_second']:,.0f} tokens/s; binds: "
        f"{binds}; {gib(several['device_bytes'])} of each GPU, {gib(several['host_bytes'])} of "
        "each host. The same step split evenly, each GPU with its own bus and its share of the "
        f"host, and {between} ({compared})"
    )


def _long(seconds: float) -> str:
    """A duration in days if it has more than two, in years if it takes years."""
    days = seconds / 86400
    if days > 730:
        return f"{days / 365.25:.1f} years"
    return f"{days:.1f} days" if days > 2 else duration(seconds)


def _remedies(plan: Plan) -> list[str]:
    lines = []
    for number, remedy in enumerate(plan.remedies, 1):
        forecast, settings = remedy.forecast, remedy.settings.items()
        keys = ", ".join(f"{key}: {'null' if v is None else v}" for key, v in settings)
        device = f"device {gib(forecast.device_peak_bytes)}, " if forecast.device_bytes else ""
        lines.append(
            f"{number}. {remedy.text}{f' ({keys})' if keys else ''}: {forecast.seconds:.2f} s a "
            f"step, {forecast.tokens_per_second:,.0f} tokens/s; {device}host "
            f"{gib(forecast.host_peak_bytes)}"
        )
    if not lines:
        return ["\nNothing that was tried makes it fit."]
    return ["\nIt would fit, the cheapest first:", *lines]
