"""`megatrain plan`: what a run will take, before anything is allocated or downloaded."""

import glob
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatrain.base.units import GIB, gib
from megatrain.cli.models import NamedModel, lora_adapter, model_of_run, named_config
from megatrain.cli.plan_table import missing, show
from megatrain.cli.second_plan import check_kept_teacher, streamed_with
from megatrain.cli.workload import changed
from megatrain.errors import DoesNotFit, InputError
from megatrain.forecast.workload import SEQUENCE_LENGTH, Workload
from megatrain.machine import Machine, machine_for, present_machine
from megatrain.machine.published import update_gbps
from megatrain.placement import CPU_PLACEMENT
from megatrain.plan.planner import Plan, make_plan
from megatrain.plan.tiles import by_tier
from megatrain.telemetry.cores import usable_cores
from megatrain.telemetry.gpu import Gpu, find_gpu, gpu_state
from megatrain.telemetry.known_gpus import by_driver_name, named_gpu
from megatrain.telemetry.log import end_passing, passing
from megatrain.telemetry.memory import host_limit_bytes
from megatrain.telemetry.pictures import draw_memory

if TYPE_CHECKING:
    from megatrain.config import Config
    from megatrain.source.source import Base

DEVICE = "cuda"
_PICTURES = (".png", ".svg", ".pdf")
# What the driver keeps for itself, and a desktop's windows.
_USUAL_BYTES = GIB
_UNQUANTISED = "take the unquantised model"


class Asked(NamedTuple):
    """The model asked about; None: a run file names it.

    Attributes:
        lora_r, base: of its adapter, 0: none, and how the model is kept under it.
    """

    model: str | None
    lora_r: int = 0
    base: "Base" = "bf16"


class Where(NamedTuple):
    """The machine that a plan is for; without `gpu` and `cores` they are this machine's.

    Attributes:
        device: of the run file; None: there is none.
    """

    gpu: str | None
    cores: int | None
    device: str | None = None

    @property
    def here(self) -> str:
        """The GPU of this machine that the plan is about."""
        return self.device if self.device and self.device.startswith(DEVICE) else DEVICE


def run_plan(
    run: Path | None,
    overrides: Sequence[str],
    asked: Asked,
    options: Mapping[str, Any],
    where: Where,
    *,
    total_tokens: int | None,
    gpus: int | None,
    as_json: bool,
    picture: Path | None,
    **further: Any,
) -> None:
    """Plan, print, draw.

    Args:
        options: those of the workload, as `changed` takes them.
        gpus: None: `engine.devices` of the run.
        further: as `make_plan` takes it.

    Raises:
        InputError: options, model or run file cannot be used; also, after the plan has been
            printed, when the run file's data are missing.
        DoesNotFit: after the plan and its remedies have been printed.
    """
    if picture is not None and picture.suffix.lower() not in _PICTURES:
        raise InputError(
            f"--picture {picture}: give it a name that ends in {' or '.join(_PICTURES)}"
        )
    named, loaded = _opened(run, overrides, asked, options["sequence_length"])
    workload = Workload() if loaded is None else Workload.of_run(loaded)
    if loaded is not None:
        where = where._replace(device=loaded.engine.device)
        total_tokens = total_tokens or _all_tokens(loaded, workload)
        gpus = gpus or loaded.engine.devices
        _check_ranks(loaded, gpus, further["hosts"])
        workload = replace(workload, second=streamed_with(named, loaded))
    workload = changed(workload, options)
    workload.check()
    named.check_length(workload.sequence_length)
    warnings = [*_notes(named, workload, is_run=loaded is not None)]
    machine = _machine(where, workload, options, warnings)
    if loaded is not None and (said := check_kept_teacher(loaded, machine, workload)) is not None:
        warnings.append(said)
    if machine.unified:
        workload = replace(workload, placement=workload.placement or CPU_PLACEMENT)
    further |= {"total_tokens": total_tokens, "gpus": gpus or 1, "warnings": warnings}
    plan = _plan(named, machine, workload, **further)
    if as_json:
        print(json.dumps({"model": named.name, **plan.as_dict()}, indent=2))
    else:
        show(plan, named.name)
    if picture is not None:
        _draw(plan, named.name, picture)
    if plan.shortage is not None:
        raise DoesNotFit(f"{named.name} does not fit: {missing(plan)}")
    if loaded is not None and (lacking := _lacking(named, loaded)) is not None:
        raise InputError(f"{lacking} (it would fit; the plan is above)")


def _opened(
    run: Path | None, overrides: Sequence[str], asked: Asked, length: int | None
) -> "tuple[NamedModel, Config | None]":
    """The model, and the run file that names it."""
    model, rank, base = asked
    if model is not None and run is None:
        config = named_config(model, max_positions=length or SEQUENCE_LENGTH)
        return _adapted(NamedModel(model, config), rank, base), None
    if run is None or model is not None:
        raise InputError("give either a run file or --model")
    if rank or base != "bf16":
        raise InputError(
            f"--lora-r and --base are for --model; add --set adapter.r={rank or 16} --set "
            f"adapter.target_modules=all-linear --set model.base={base}"
        )
    from megatrain import config as run_files
    from megatrain.train.resolve_model import begun_from

    loaded = run_files.load(run, overrides)
    scores = loaded.loss.name == "reward"
    section = begun_from(loaded)
    return model_of_run(run.name, section, loaded.adapter.keys, scores=scores), loaded


def _adapted(named: NamedModel, rank: int, base: "Base") -> NamedModel:
    if not rank and base != "bf16":
        raise InputError(f"--base {base} is of frozen layers; add --lora-r 16")
    if not rank:
        return named
    kept = "" if base == "bf16" else f", base in {base}"
    called = f"{named.name} with LoRA of rank {rank}{kept}"
    return replace(named, name=called, adapter=lora_adapter(rank), frozen=base)


def _check_ranks(run: "Config", gpus: int, hosts: int) -> None:
    if hosts > 1 and run.engine.sharding == "full":
        raise InputError(
            "--hosts plans a whole model on each host, and engine.sharding is full; add "
            "--set engine.sharding=hybrid"
        )
    shared = run.engine.sequence_parallel
    if shared not in (1, gpus) or (shared > 1 and hosts > 1):
        raise InputError(
            f"engine.sequence_parallel is {shared}: so many GPUs of one host share every row; plan "
            f"with --gpus {shared} --hosts 1"
        )


def _all_tokens(run: "Config", workload: Workload) -> int | None:
    steps = run.training.steps
    return None if steps is None else steps * workload.tokens_per_step


def _lacking(named: NamedModel, run: "Config") -> str | None:
    """What the run could not begin without; its shapes can be planned all the same."""
    if named.quantised is not None:
        return f"model.path: {named.quantised}; {_UNQUANTISED}"
    return missing_data(run.data.path)


def missing_data(paths: str | list[str]) -> str | None:
    """The first path that is certainly not there; data sets of the hub are not looked up."""
    for path in [paths] if isinstance(paths, str) else paths:
        expanded = os.path.expanduser(path)
        there = os.path.exists(expanded) or any(glob.iglob(expanded, recursive=True))
        hub = re.fullmatch(r"[A-Za-z0-9][\w-]*(/[\w-]+)?", path) is not None
        if not there and not hub:
            return f"data.path: {path} is not there"
    return None


def _notes(named: NamedModel, workload: Workload, *, is_run: bool) -> Iterator[str]:
    if named.quantised is not None and not is_run:
        yield f"{named.quantised}: {_UNQUANTISED}; the plan is for that"


def _machine(
    where: Where, workload: Workload, options: Mapping[str, Any], warnings: list[str]
) -> Machine:
    """The machine asked about, with the workload's limits: this one, or this host with another GPU.

    An option's limit may be more than there is, a run file's may not.
    """
    gpu, here = where.gpu and named_gpu(where.gpu), find_gpu(where.here)
    space = workload.disk_bytes
    if gpu and (here is None or by_driver_name(here.name) != gpu):
        return replace(_elsewhere(where, gpu.name, workload, warnings), disk_space_bytes=space)
    if not gpu and where.device == "cpu":
        there = _cpu(where, workload, warnings)
    else:
        there = _present(where, here, workload, warnings)
    limits = {}
    for name in ("host_memory", "device_memory"):
        limit, most = getattr(workload, name), getattr(there, f"{name}_bytes")
        limits[name] = most if limit is None else limit if options[name] else min(limit, most)
    there = replace(there, disk_space_bytes=space)
    return _changed(there, limits["host_memory"], limits["device_memory"], where.cores)


def _changed(machine: Machine, host: int, device: int, cores: int | None) -> Machine:
    changes: dict[str, Any] = {"host_memory_bytes": host, "device_memory_bytes": device}
    if cores is not None and cores != machine.cores:
        share = update_gbps(cores) / update_gbps(machine.cores)
        name = f"{machine.name.partition(',')[0]}, {cores} cores"
        changes |= {"name": name, "cores": cores, "update_gbps": machine.update_gbps * share}
    return replace(machine, **changes)


def _elsewhere(where: Where, gpu: str, workload: Workload, warnings: list[str]) -> Machine:
    """This host with another GPU."""
    host, cores = workload.host_memory, where.cores
    if host is None:
        host = host_limit_bytes()
        warnings.append(f"--host-memory is not given: this machine's {gib(host)} are taken")
    if cores is None:
        cores = usable_cores()
        warnings.append(f"--cores is not given: this machine's {cores} are taken")
    return machine_for(gpu, host, cores, workload.device_memory, precision=workload.precision)


def _present(where: Where, here: Gpu | None, workload: Workload, warnings: list[str]) -> Machine:
    """This machine, with what other processes leave of its GPU."""
    machine = present_machine(where.here, precision=workload.precision)
    if machine is not None:
        shared = workload.device_memory is None
        return _shared(machine, where.here, warnings) if shared else machine
    if here is not None:
        raise InputError(
            f"this machine's GPU ({here.name}) is neither measured nor listed; run `megatrain "
            "doctor`, or name the most similar with --gpu and --device-memory"
        )
    raise InputError(
        "there is no GPU here to plan for; name one with --gpu, such as --gpu 4090"
        + (", or plan for the CPU with --set engine.device=cpu" if where.device else "")
    )


def _cpu(where: Where, workload: Workload, warnings: list[str]) -> Machine:
    """This machine's CPU."""
    from megatrain.plan.rates import measured_cpu

    if workload.device_memory is not None:
        raise InputError("device_memory limits a GPU, but the device is cpu; set host_memory")
    if where.cores not in (None, cores := usable_cores()):
        raise InputError(
            f"--cores {where.cores}: the device is cpu, and this machine's {cores} are measured; "
            "leave it out, or run this under taskset"
        )
    warnings.append("the times are rough: rates of this CPU were measured for seconds only")
    return measured_cpu(workload.precision)


def _shared(machine: Machine, device: str, warnings: list[str]) -> Machine:
    """What other processes hold of the present GPU cannot be planned with."""
    state = gpu_state(device)
    used = 0 if state is None or state.used_bytes is None else state.used_bytes
    if used <= _USUAL_BYTES:
        return machine
    pids = ", ".join(str(pid) for pid, _ in (state.other_processes if state else ()))
    warnings.append(
        f"other processes{f' ({pids})' if pids else ''} hold {gib(used)} of the GPU's memory; the "
        "plan leaves it to them (--device-memory plans with another amount)"
    )
    return replace(machine, device_memory_bytes=max(1, machine.device_memory_bytes - used))


def _plan(named: NamedModel, machine: Machine, workload: Workload, **further: Any) -> Plan:
    import torch

    from megatrain.forecast.op_counter import NotForeseeable

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two wait for each other, long where another process is at work
    try:
        passing("reading the model's structure...")
        return make_plan(named.spec(), machine, workload, **further)
    except NotForeseeable as error:
        raise InputError(
            f"{named.name} cannot be planned: {error}; megatrain train streams all of it, "
            "and fewer tokens in a row may help"
        ) from error
    finally:
        torch.set_num_threads(threads)
        end_passing()


def _draw(plan: Plan, name: str, picture: Path) -> None:
    told, machine = plan.forecast, plan.machine
    title = f"{name} on {machine.name}: {told.tokens_per_step:,} tokens a step"
    planes = by_tier(plan.tiles)["disk"]
    places = {
        "device memory": (told.device_bytes, machine.device_memory_bytes),
        "host memory": (told.host_parts, machine.host_memory_bytes),
        "disk": ({name: size for name, size in planes.items() if size}, None),
    }
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw_memory(places, picture, title)
    except OSError as error:
        raise InputError(f"--picture {picture}: cannot be written: {error.strerror}") from error
