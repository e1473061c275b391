"""`megatrain plan`: the memory and time of a run, before anything is allocated or downloaded."""

import glob
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from megatrain.autoplace.search import lacking
from megatrain.base.units import GIB, duration, gib, parse_bytes
from megatrain.cli.models import NamedModel, lora_adapter, model_of_run, named_config
from megatrain.compat.torch import one_thread
from megatrain.device.base import COMPUTE, COPY_IN, COPY_OUT
from megatrain.driver.base import Gpu
from megatrain.errors import DoesNotFit, InputError, explained
from megatrain.forecast.notes import Notes
from megatrain.forecast.op_counter import NotForeseeable
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import LIMITS, SEQUENCE_LENGTH, MediaRow, Second, Workload
from megatrain.machine import Machine, machine_for, present_machine, update_gbps
from megatrain.model.sizes import check_sequence_length, experts_of_a_token
from megatrain.plan.planner import PLANES, Plan, by_tier, compute_bound_tokens, make_plan
from megatrain.telemetry.console import end_passing, passing, say
from megatrain.telemetry.gpu import by_driver_name, find_gpu, named_gpu
from megatrain.telemetry.host import host_limit_bytes, usable_cores

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from megatrain.config import Config
    from megatrain.model.spec import ModelSpec

# More device memory in use than the driver and a desktop's windows take is other processes'.
_USUAL_BYTES = GIB
_UNQUANTISED = "take the unquantised model"
_OF_WORKLOAD = (
    *("tokens_per_step", "sequence_length", "micro_batch", "clip", "precision", "states"),
    *("master", "device_memory", "host_memory", "disk_space"),
)

Options = Mapping[str, Any]


def run_plan(options: Options) -> None:
    """Plan a run, and print the plan.

    Args: `options`: of the command, by name; `tokens` is called `tokens_per_step`.

    Raises InputError: options, model or run file cannot be used; or, once the plan is printed, data
    are missing; DoesNotFit: the run does not fit, as the printed plan says.
    """
    options = _with_one_memory(options)
    model, run = _model_and_run(options)
    gpus = options["gpus"] or (1 if run is None else run.engine.devices)
    if gpus > 1 and options["gpu"] and (gpu := named_gpu(options["gpu"])).shared:
        raise InputError(f"{gpus} GPUs: {gpu.name} is the only one of its machine; plan with 1")
    workload = Workload() if run is None else _workload_of(run, gpus)
    total_tokens = options["total_tokens"]
    if total_tokens is not None and math.isnan(total_tokens):  # typer up to 0.26 lets it pass
        raise InputError("--total-tokens: should be a number of tokens, got 'nan'")
    if total_tokens is None and run is not None and run.training.steps is not None:
        total_tokens = run.training.steps * workload.tokens_per_step
    workload = changed(workload, {name: options[name] for name in _OF_WORKLOAD})
    workload = replace(workload, media=_images(options["image"], options["model"], run))
    workload.check()
    check_sequence_length(model.config, workload.sequence_length)
    warnings: list[str] = []
    if model.quantised is not None and run is None:
        warnings.append(f"{model.quantised}: {_UNQUANTISED}; the plan is for that")
    if model.unpacked is not None:
        warnings.append(f"the weights of {model.name} are unpacked from {model.unpacked}")
    device = None if run is None else run.engine.device
    machine = _machine(options, device, workload, warnings)
    passing("reading the model's structure...")
    try:
        plan = _plan(
            model,
            machine,
            workload,
            total_tokens=total_tokens and int(total_tokens),
            gpus=gpus,
            must_clip=run is not None and run.training.refuses is not None,
            warnings=warnings,
        )
    finally:
        end_passing()
    experts = experts_of_step(model.config, plan.forecast)
    if options["as_json"]:
        print(json.dumps({"model": model.name, **plan.as_dict(), "experts": experts}, indent=2))
    else:
        show(plan, model.name, experts)
    if not plan.fits:
        raise DoesNotFit(f"{model.name} does not fit: {lacking(machine, plan.forecast.machine)}")
    problem = None if run is None else missing_data(run.data.path)
    if run is not None and model.quantised is not None:
        problem = f"model.path: {model.quantised}; {_UNQUANTISED}"
    if problem is not None:
        raise InputError(f"{problem} (it would fit; the plan is above)")


def _with_one_memory(options: Options) -> Options:
    """The options, `memory` as `device_memory`, for a GPU that shares the host's memory."""
    gpu, memory = options["gpu"] and named_gpu(options["gpu"]), options.get("memory")
    if not gpu or not gpu.shared:
        if memory is None:
            return options
        raise InputError(
            "--memory is of a GPU that shares the host's (--gpu GB10, 'Strix Halo', 'M4 Max'); "
            "give --device-memory and --host-memory"
        )
    with explained("--memory", of=ValueError):
        memory = None if memory is None else parse_bytes(memory)
    for name in ("device-memory", "host-memory"):
        if options[name.replace("-", "_")] is not None:
            raise InputError(f"--{name}: {gpu.name} and the host share one memory; give --memory")
    return {**options, "device_memory": memory}


def _model_and_run(options: Options) -> "tuple[NamedModel, Config | None]":
    path, name, rank, base = (options[option] for option in ("run", "model", "lora_r", "base"))
    if (path is None) == (name is None):
        raise InputError("give either a run file or --model")
    if path is None:
        config = named_config(name, max_positions=options["sequence_length"] or SEQUENCE_LENGTH)
        if not rank and base != "bf16":
            raise InputError(f"--base {base} is of frozen layers; add --lora-r 16")
        title = f"{name} with LoRA of rank {rank}" if rank else name
        title += "" if base == "bf16" else f", base in {base}"
        return NamedModel(title, config, lora_adapter(rank), base), None
    if rank or base != "bf16":
        raise InputError(
            f"--lora-r and --base are for --model; add --set adapter.r={rank or 16} --set "
            f"adapter.target_modules=all-linear --set model.base={base}"
        )
    from megatrain.config import load

    run = load(path, options["overrides"] or [])
    return model_of_run(path.name, run.model, run.adapter.keys, head=run.loss.head), run


def _workload_of(run: "Config", gpus: int) -> Workload:
    """The workload of a run file. Raises InputError: another number of GPUs shares its rows."""
    from megatrain.config import ModelSection

    workload, ranks = Workload.of_run(run), run.engine.sequence_parallel
    if ranks not in (1, gpus):
        raise InputError(
            f"engine.sequence_parallel: {ranks} GPUs share every row; plan with --gpus {ranks}"
        )
    if run.loss.teacher is None:
        return workload
    section = ModelSection(path=run.loss.teacher, trust_remote_code=run.model.trust_remote_code)
    return replace(workload, second=Second("teacher", model_of_run("the teacher", section).spec()))


def _images(sizes: Sequence[str], path: str | None, run: "Config | None") -> MediaRow | None:
    """A row with images of the sizes of `--image`. Raises InputError: no model can have it."""
    if not sizes:
        return None
    from megatrain.data import ImageProcessor
    from megatrain.train.resolve import ResolvedModel

    if run is None:
        processor = ImageProcessor(Path(path or "").expanduser())
    else:
        processor = ResolvedModel.of(run.model, weights=False).images
    if not processor.identity:
        raise InputError(
            f"--image: {path if run is None else run.model.path} has no processor's files, so the "
            "model takes no images; leave --image out, or name the folder of a model that has them"
        )
    parsed = [re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text) for text in sizes]
    if not all(parsed):
        raise InputError(f"--image: write {', '.join(sizes)} like 1024x768 (99999 at most)")
    images = [("image", (int(m[1]), int(m[2])), "", 1) for m in parsed if m]  # `images.Shape`
    return MediaRow(processor.example(images))


def missing_data(paths: str | list[str]) -> str | None:
    """The first path of data that does not exist; data sets of the hub are not looked up."""
    for path in [paths] if isinstance(paths, str) else paths:
        expanded = os.path.expanduser(path)
        exists = os.path.exists(expanded) or any(glob.iglob(expanded, recursive=True))
        may_be_of_hub = re.fullmatch(r"[A-Za-z0-9][\w-]*(/[\w-]+)?", path) is not None
        if not exists and not may_be_of_hub:
            return f"data.path: {path} is not there"
    return None


def _machine(
    options: Options, device: str | None, workload: Workload, warnings: list[str]
) -> Machine:
    """The machine to plan for: this one or one with another GPU, with the workload's limits."""
    wanted_gpu = options["gpu"] and named_gpu(options["gpu"])
    cores, disk_bytes = options["cores"], workload.disk_bytes
    gpu_device = "auto" if device in (None, "cpu") else device
    gpu = find_gpu(gpu_device)  # of this machine
    if wanted_gpu and (gpu is None or by_driver_name(gpu.name) != wanted_gpu):
        host = host_limit_bytes() if workload.host_memory is None else workload.host_memory
        if workload.host_memory is None and not wanted_gpu.shared:
            warnings.append(f"--host-memory is not given: this machine's {gib(host)} are taken")
        if cores is None:
            cores = usable_cores()
            warnings.append(f"--cores is not given: this machine's {cores} are taken")
        machine = machine_for(
            wanted_gpu.name, host, cores, workload.device_memory, precision=workload.precision
        )
        return replace(machine, disk_space_bytes=disk_bytes)
    if not wanted_gpu and device == "cpu":
        raise InputError("engine.device is cpu, and plans are for GPUs; name one, as --gpu 4090")
    present = present_machine(gpu_device, precision=workload.precision)
    if present is None:
        reason = "there is no GPU here"
        if gpu is not None:
            reason = f"the GPU here ({gpu.name}) is neither measured (megatrain doctor) nor listed"
        raise InputError(f"{reason}; name one with --gpu, such as --gpu 4090 --device-memory 24GiB")
    if gpu is not None and workload.device_memory is None:
        present = _without_others(present, gpu, warnings)
    sizes: dict[str, Any] = {"disk_space_bytes": disk_bytes}
    for name in ("host_memory", "device_memory"):
        limit, available = getattr(workload, name), getattr(present, f"{name}_bytes")
        allowed = available if limit is None else min(limit, available)
        sizes[f"{name}_bytes"] = limit if options[name] else allowed  # options may ask for more
    machine = replace(present, **sizes)
    if cores is None or cores == machine.cores:
        return machine
    share = update_gbps(cores) / update_gbps(machine.cores)
    name = f"{machine.name.partition(',')[0]}, {cores} cores"
    return replace(machine, name=name, cores=cores, update_gbps=machine.update_gbps * share)


def _without_others(machine: Machine, gpu: Gpu, warnings: list[str]) -> Machine:
    """The machine without the GPU memory that other processes use."""
    used = gpu.used_bytes or 0
    if used <= _USUAL_BYTES:
        return machine
    pids = ", ".join(str(pid) for pid, _ in gpu.other_processes)
    warnings.append(
        f"other processes{f' ({pids})' if pids else ''} hold {gib(used)} of the GPU's memory; the "
        "plan leaves it to them (--device-memory plans with another amount)"
    )
    return replace(machine, device_memory_bytes=max(1, machine.device_memory_bytes - used))


def _plan(model: NamedModel, machine: Machine, workload: Workload, **further: Any) -> Plan:
    """The plan of `make_plan`, with kept measurements of the model."""
    notes = _notes(model, workload)
    remedy = "megatrain train streams all of it, and fewer tokens in a row may help"
    with one_thread(), explained(f"{model.name} cannot be planned", remedy, of=NotForeseeable):
        spec = notes.spec(model.config)
        if spec.media and workload.media is None:
            further["warnings"].append(
                "the plan is for text: --image 1024x1024 counts such an image in every row"
            )
        if workload.media is not None and not spec.media:
            raise InputError(f"--image: {model.name} takes no images; leave it out")
        plan = make_plan(spec, machine, workload, **further, notes=notes)
        notes.keep()
        return plan


def _notes(model: NamedModel, workload: Workload) -> Notes:
    """Measurements of the model; kept in a file if they depend on its configuration alone."""

    def opened() -> "ModelSpec":
        from megatrain.model.attention import attend_by_kernel

        spec = model.spec()
        attend_by_kernel(spec, workload.precision)
        return spec

    config, adapter = model.config, model.adapter
    key: dict[str, Any] = {
        "class": type(config).__name__,
        "config": config.to_dict(),
        "adapter": adapter.to_dict() if hasattr(adapter, "to_dict") else adapter,
        "opening": [model.frozen, model.opening, model.trained, model.pretrained],
        "precision": workload.precision,
    }
    has_known_code = not model.opening.get("trust_remote_code")
    # fp8's operands depend on modules, and packed weights on a folder.
    needs_config_alone = workload.precision != "fp8" and model.packed_folder is None
    return Notes(opened, key if has_known_code and needs_config_alone else None)


_WIDTH = 140
_NARROW = 90  # characters; narrower terminals get less space between columns

_BINDS = {
    "compute": "the GPU's arithmetic",
    "copy in": "the bus to the GPU",
    "copy out": "the bus from the GPU",
    "update": "the optimizer's update on the host",
    **dict.fromkeys(("disk in", "disk out", "disk weights"), "the disk"),
    **dict.fromkeys(("gather", "reduce"), "the link between GPUs"),
    "launches": "the thread that launches",
}


def experts_of_step(config: "PreTrainedConfig", forecast: Forecast) -> dict[str, int] | None:
    """The tokens of each expert, and tokens a step that hide the bus; None: no experts."""
    chosen, total = experts_of_a_token(config)
    if not chosen or not total:
        return None
    tokens, bounds = forecast.tokens_per_step, forecast.bounds
    bus = {name: bounds.get(name, 0.0) for name in (COMPUTE, COPY_IN, COPY_OUT)}
    return {
        "num": total,
        "of_a_token": chosen,
        "tokens_each": tokens * chosen // total,
        "bus_hidden_from_tokens": compute_bound_tokens(bus, tokens, forecast.sequence_length),
    }


def show(plan: Plan, name: str, experts: Mapping[str, int] | None = None) -> None:
    """Print the plan; `experts` as of `experts_of_step`."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH  # a file has no width, and tables should not be cut
    lines = _memory(plan) + _time(plan)
    if experts is not None:
        least = experts["bus_hidden_from_tokens"]
        hides = "hides" if plan.forecast.tokens_per_step >= least else "does not hide"
        lines.append(
            f"experts  {experts['of_a_token']} of {experts['num']} a token: "
            f"{experts['tokens_each']:,} tokens each a step; the bus {hides} behind arithmetic "
            f"(from {least:,} tokens a step on)"
        )
    if not plan.fits:
        lines += _remedies(plan)
    for line in _head(plan, name):
        say(console, line)
    console.print()
    console.print(_tiles(plan, gap=2 if console.width > _NARROW else 1))
    console.print()
    for line in [*lines, *(f"note: {warning}" for warning in plan.warnings)]:
        say(console, line)


def _head(plan: Plan, name: str) -> list[str]:
    forecast, machine, workload = plan.forecast, plan.machine, plan.workload
    kind = "measured" if machine.measured else "from published figures, not measured"
    rows = forecast.tokens_per_step // forecast.sequence_length
    count = forecast.parameters
    parameters = f"{count / 1e9:.2f} billion" if count >= 1e7 else f"{count:,}"
    verdict = "it fits" if plan.fits else f"it does not fit: {lacking(machine, forecast.machine)}"
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
        tier = f"{tile.tier}{', disk' if tile.disk else ''}{', copy' if tile.stays else ''}"
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
        sizes = sorted(parts.items(), key=lambda part: -part[1])
        named_parts = ", ".join(f"{part} {gib(used)}" for part, used in sizes if used >= GIB / 20)
        limit_text = gib(limit)
        if machine.one_memory:
            limit_text = f"{gib(machine.both_bytes)} that device and host share,"
        share = f"{gib(sum(parts.values()))} of {limit_text} at the peak"
        lines.append(f"{place:<9}{share}: {named_parts}")
        if place == "device" and forecast.device_held_bytes > forecast.device_peak_bytes:
            total = gib(forecast.device_held_bytes)
            lines.append(f"{'':<9}the driver will show {total}: torch keeps freed memory for reuse")
    if (disk := plan.disk) is not None:
        names = ("num_bytes", "read_bytes_a_step", "written_bytes_a_step")
        total, read, written = (gib(disk[name]) for name in names)
        lines += [
            f"disk     {total} of planes; a step reads {read} and writes {written}",
            f"         {disk['written_terabytes_a_day']:,.1f} TB written a day at this speed; "
            "drives are rated for so many terabytes (TBW)",
        ]
    return lines


def _time(plan: Plan) -> list[str]:
    forecast, tokens = plan.forecast, plan.total_tokens
    binds = _BINDS.get(forecast.binds, forecast.binds)
    bounds = sorted(forecast.bounds.items(), key=lambda bound: -bound[1])
    busy = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in bounds if seconds)
    counted = f"{tokens:,} tokens" if tokens else "each billion tokens"
    seconds = (tokens or 1e9) / plan.tokens_per_second
    lasts = f"{seconds / 86400:,.1f} days" if seconds > 2 * 86400 else duration(seconds)
    return [
        f"step     {forecast.seconds:.2f} s, {forecast.tokens_per_second:,.0f} tokens/s, "
        f"{forecast.model_tflops:.0f} model TFLOPS",
        f"binds    {binds} (busy: {busy})",
        f"         arithmetic binds from {plan.compute_bound_tokens:,} tokens a step on",
        *([] if plan.several is None else [_on_several_gpus(plan.several)]),
        f"run      {lasts} for {counted}",
    ]


def _on_several_gpus(several: Mapping[str, Any]) -> str:
    binds = _BINDS.get(several["binds"], several["binds"])
    return (
        f"{several['gpus']} GPUs   {several['seconds']:.2f} s, {several['tokens_per_second']:,.0f} "
        f"tokens/s; binds: {binds}; {gib(several['device_bytes'])} of each GPU, "
        f"{gib(several['host_bytes'])} of the host. Each GPU takes an equal part of the step. The "
        "forecast gives it a bus, a share of the host, and half a bus to the others if no link "
        "is known (it was within 3 % of two steps on two H200s)"
    )


def _remedies(plan: Plan) -> list[str]:
    lines = []
    for number, remedy in enumerate(plan.remedies, 1):
        forecast, settings = remedy.forecast, remedy.settings.items()
        keys = ", ".join(f"{key}: {'null' if v is None else v}" for key, v in settings)
        lines.append(
            f"{number}. {remedy.text}{f' ({keys})' if keys else ''}: {forecast.seconds:.2f} s a "
            f"step, {forecast.tokens_per_second:,.0f} tokens/s; device "
            f"{gib(forecast.device_peak_bytes)}, host {gib(forecast.host_peak_bytes)}"
        )
    if not lines:
        return ["\nNothing that was tried makes it fit."]
    return ["\nIt would fit, the cheapest first:", *lines]


def changed(workload: Workload, options: Mapping[str, Any]) -> Workload:
    """The workload with the options that are not None.

    An option is a field of `Workload`, or one of the choices of the workload's rule.
    """
    values = {name: value for name, value in options.items() if value is not None}
    for name in values.keys() & LIMITS:
        with explained(f"--{name.replace('_', '-')}", of=ValueError):
            values[name] = parse_bytes(values[name])
    if "disk_space" in values:
        values["disk"] = options.get("disk")  # None: any disk
    rule, of_workload = workload.rule, {field.name for field in fields(Workload)}
    choices = {name: values.pop(name) for name in values.keys() - of_workload}
    for name in choices.keys() - rule.choices.keys():
        raise InputError(f"--{name}: {rule.name} has no such choice; leave it out")
    return replace(workload, rule=replace(rule, **choices), **values)
