"""`megatrain plan`: what a run will take, before anything is allocated or downloaded."""

import glob
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatrain.cli.models import named_config
from megatrain.cli.plan_table import missing, show
from megatrain.errors import DoesNotFit, InputError
from megatrain.forecast.workload import SEQUENCE_LENGTH, Workload
from megatrain.machine import Machine, machine_for, present_machine
from megatrain.machine.published import update_gbps
from megatrain.placement import CPU_PLACEMENT, Placement, Precision
from megatrain.plan.ask import Ask
from megatrain.plan.planner import Plan, make_plan
from megatrain.plan.tiles import by_tier
from megatrain.plane_file import disk_bytes
from megatrain.telemetry.cores import usable_cores
from megatrain.telemetry.gpu import find_gpu
from megatrain.telemetry.gpu_state import gpu_state
from megatrain.telemetry.known_gpus import by_driver_name, named_gpu
from megatrain.telemetry.memory import host_limit_bytes
from megatrain.telemetry.pictures import draw_memory
from megatrain.units import GIB, gib, parse_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from megatrain.config import Config

DEVICE = "cuda"
_PICTURES = (".png", ".svg", ".pdf")
# What the driver keeps for itself, and a desktop's windows.
_USUAL_BYTES = GIB


@dataclass(frozen=True)
class Options:
    """The command line; None: not given."""

    run: Path | None
    overrides: Sequence[str]
    model: str | None
    gpu: str | None
    device_memory: str | None
    host_memory: str | None
    cores: int | None
    tokens_per_step: int | None
    sequence_length: int | None
    micro_batch: int | None
    total_tokens: int | None
    gpus: int
    clip: bool | None
    precision: Precision | None
    states: Literal["fp32", "bf16", "int8"] | None
    disk_space: str | None
    disk_tbw: float | None
    master: int | None


@dataclass
class Subject:
    """The model and settings that are planned, from a run file or from the options."""

    name: str
    config: "PreTrainedConfig"
    workload: Workload
    placement: Placement | None = None
    total_tokens: int | None = None
    device_memory: str | int | None = None
    host_memory: str | int | None = None
    disk: str | None = None
    disk_space: str | int | None = None
    device: str = DEVICE
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    frozen: Sequence[str] = ()
    train_only: Sequence[str] | None = None
    missing: str | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def gpu(self) -> str:
        """This machine's GPU that it is about."""
        return self.device if self.device.startswith(DEVICE) else DEVICE


def run_plan(options: Options, *, as_json: bool, picture: Path | None) -> None:
    """Plan, print, draw.

    Raises:
        InputError: options, model or run file cannot be used; also, after the plan has been
            printed, when the run file's data are missing.
        DoesNotFit: after the plan and its remedies have been printed.
    """
    if picture is not None and picture.suffix.lower() not in _PICTURES:
        raise InputError(
            f"--picture {picture}: give it a name that ends in {' or '.join(_PICTURES)}"
        )
    subject = _subject(options)
    space = _bytes(subject.disk_space, "--disk-space")
    if options.disk_space is None and subject.disk is not None:
        space = disk_bytes(subject.disk, space)
    machine = replace(_machine(options, subject), disk_space_bytes=space)
    plan = _plan(options, subject, machine)
    if as_json:
        print(json.dumps({"model": subject.name, **plan.as_dict()}, indent=2))
    else:
        show(plan, subject.name)
    if picture is not None:
        _draw(plan, subject.name, picture)
    if plan.shortage is not None:
        raise DoesNotFit(f"{subject.name} does not fit: {missing(plan)}")
    if subject.missing is not None:
        raise InputError(f"{subject.missing} (it would fit; the plan is above)")


def _subject(options: Options) -> Subject:
    if (options.run is None) == (options.model is None):
        raise InputError("give either a run file or --model")
    if options.run is not None:
        subject = _of_run_file(options.run, options.overrides)
    else:
        length = options.sequence_length or SEQUENCE_LENGTH
        config = named_config(str(options.model), max_positions=length)
        subject = Subject(str(options.model), config, Workload())
    names = ("tokens_per_step", "sequence_length", "micro_batch", "clip", "precision")
    subject.workload = replace(subject.workload, **_given(options, names))
    limits = ("device_memory", "host_memory", "disk_space")
    for name, value in _given(options, ("total_tokens", *limits)).items():
        setattr(subject, name, value)
    _check_length(subject)
    _note_quantised(subject, is_run=options.run is not None)
    rule = subject.workload.rule
    if choices := _given(options, ("states", "master")):
        for name in choices.keys() - rule.choices.keys():
            raise InputError(f"--{name}: {rule.name} has no such choice; leave it out")
        rule = replace(rule, **choices)
        subject.workload = replace(subject.workload, rule=rule)
    if rule.pace < 1:
        subject.warnings.append(
            f"updates of {rule.name} on the host have no kernel yet: the plan counts with "
            f"{rule.pace:g} of the memory's speed, roughly"
        )
    return subject


def _given(options: Options, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _of_run_file(run: Path, overrides: Sequence[str]) -> Subject:
    from megatrain import config as run_files

    loaded = run_files.load(run, overrides)
    training, length = loaded.training, loaded.data.sequence_length
    placement = loaded.engine.placement_value()
    tokens = training.batch_size * length
    return Subject(
        name=run.name,
        config=_model_of(loaded),
        workload=Workload(
            tokens_per_step=tokens,
            sequence_length=length,
            micro_batch=training.micro_batch_size,
            clip=training.max_grad_norm is not None,
            precision=loaded.engine.precision,
            rule=loaded.optimizer.rule(),
        ),
        placement=placement if isinstance(placement, Placement) else None,
        total_tokens=None if training.steps is None else training.steps * tokens,
        device_memory=loaded.engine.device_memory,
        host_memory=loaded.engine.host_memory,
        disk=loaded.engine.disk,
        disk_space=loaded.engine.disk_space,
        device=loaded.engine.device,
        trust_remote_code=loaded.model.trust_remote_code,
        attn_implementation=loaded.model.attn_implementation,
        frozen=loaded.model.freeze,
        train_only=loaded.model.train_only,
        missing=missing_data(loaded.data.path),
    )


def _note_quantised(subject: Subject, *, is_run: bool) -> None:
    """Shapes can be planned; what a run would read must be what it can train."""
    if getattr(subject.config, "quantization_config", None) is None:
        return
    told = f"the weights of {subject.name} are quantised, and such are not trained"
    remedy = "take the unquantised model"
    if is_run:
        subject.missing = f"model.path: {told}; {remedy}"
    else:
        subject.warnings.append(f"{told}: {remedy}; the plan is for that")


def _model_of(loaded: "Config") -> "PreTrainedConfig":
    from megatrain.data import load_tokenizer
    from megatrain.train.model_config import model_config

    section = loaded.model
    if section.path is not None:
        return named_config(section.path, trust_remote_code=section.trust_remote_code)
    tokenizer = load_tokenizer(str(section.tokenizer), trust_remote_code=section.trust_remote_code)
    return model_config(section, tokenizer)


def missing_data(paths: str | list[str]) -> str | None:
    """The first path that is certainly not there; data sets of the hub are not looked up."""
    for path in [paths] if isinstance(paths, str) else paths:
        expanded = os.path.expanduser(path)
        there = os.path.exists(expanded) or any(glob.iglob(expanded, recursive=True))
        hub = re.fullmatch(r"[A-Za-z0-9][\w-]*(/[\w-]+)?", path) is not None
        if not there and not hub:
            return f"data.path: {path} is not there"
    return None


def _check_length(subject: Subject) -> None:
    text = subject.config.get_text_config(decoder=True)
    allowed = getattr(text, "max_position_embeddings", None)
    if isinstance(allowed, int) and 0 < allowed < (length := subject.workload.sequence_length):
        raise InputError(
            f"sequences of {length} tokens are longer than {subject.name} allows "
            f"({allowed}, its max_position_embeddings)"
        )


def _machine(options: Options, subject: Subject) -> Machine:
    """The machine asked about: this one, or this host with another GPU, as the options say."""
    host = _bytes(subject.host_memory, "--host-memory")
    device = _bytes(subject.device_memory, "--device-memory")
    cores = usable_cores() if options.cores is None else options.cores
    here = find_gpu(subject.gpu)
    asked = None if options.gpu is None else named_gpu(options.gpu)
    if asked is None and subject.device == "cpu":
        return _cpu(options, subject, host, device)
    if asked is None or (here is not None and by_driver_name(here.name) == asked):
        machine = present_machine(subject.gpu, precision=subject.workload.precision)
        if machine is not None:
            host = _within(options.host_memory, host, machine.host_memory_bytes)
            device = _within(options.device_memory, device, machine.device_memory_bytes)
            return _changed(_shared(machine, subject, device), host, device, options.cores)
        if here is not None:
            raise InputError(
                f"this machine's GPU ({here.name}) is neither measured nor listed; run `megatrain "
                "doctor`, or name the most similar with --gpu and --device-memory"
            )
        raise InputError(
            "there is no GPU here to plan for; name one with --gpu, such as --gpu 4090"
            + (", or plan for the CPU with --set engine.device=cpu" if options.run else "")
        )
    if host is None:
        host = host_limit_bytes()
        subject.warnings.append(f"--host-memory is not given: this machine's {gib(host)} are taken")
    if options.cores is None:
        subject.warnings.append(f"--cores is not given: this machine's {cores} are taken")
    return machine_for(asked.name, host or 0, cores, device, precision=subject.workload.precision)


def _within(option: str | None, limit: int | None, there: int) -> int | None:
    """A run file's limit, as it binds on this machine; an option's is what is asked about."""
    return limit if limit is None or option is not None else min(limit, there)


def _cpu(options: Options, subject: Subject, host: int | None, device: int | None) -> Machine:
    """This machine's CPU, and what the engine does on it where nothing is said."""
    from megatrain.plan.device_rates import measured_cpu

    if device is not None:
        raise InputError("device_memory limits a GPU, but the device is cpu; set host_memory")
    if options.cores not in (None, cores := usable_cores()):
        raise InputError(
            f"--cores {options.cores}: the device is cpu, and this machine's {cores} are measured; "
            "leave it out, or run this under taskset"
        )
    subject.placement = subject.placement or CPU_PLACEMENT
    subject.warnings.append("the times are rough: rates of this CPU were measured for seconds only")
    machine = measured_cpu(subject.workload.precision)
    host = _within(options.host_memory, host, machine.host_memory_bytes)
    return machine if host is None else replace(machine, host_memory_bytes=host)


def _changed(machine: Machine, host: int | None, device: int | None, cores: int | None) -> Machine:
    changes: dict[str, Any] = {}
    if host is not None:
        changes["host_memory_bytes"] = host
    if device is not None:
        changes["device_memory_bytes"] = device
    if cores is not None and cores != machine.cores:
        share = update_gbps(cores) / update_gbps(machine.cores)
        name = f"{machine.name.partition(',')[0]}, {cores} cores"
        changes |= {"name": name, "cores": cores, "update_gbps": machine.update_gbps * share}
    return replace(machine, **changes)


def _shared(machine: Machine, subject: Subject, limit: int | None) -> Machine:
    """What other processes hold of the present GPU cannot be planned with."""
    state = gpu_state(subject.gpu)
    used = 0 if state is None or state.used_bytes is None else state.used_bytes
    if limit is not None or used <= _USUAL_BYTES:
        return machine
    pids = ", ".join(str(pid) for pid, _ in (state.other_processes if state else ()))
    subject.warnings.append(
        f"other processes{f' ({pids})' if pids else ''} hold {gib(used)} of the GPU's memory; the "
        "plan leaves it to them (--device-memory plans with another amount)"
    )
    return replace(machine, device_memory_bytes=max(1, machine.device_memory_bytes - used))


def _bytes(text: str | int | None, option: str) -> int | None:
    if text is None:
        return None
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from error
    if num_bytes < 1:
        raise InputError(f"{option}: {text} is no memory at all")
    return num_bytes


def _plan(options: Options, subject: Subject, machine: Machine) -> Plan:
    ask = Ask(  # before the model is built, so that nonsense is refused at once
        machine=machine, placement=subject.placement, **vars(subject.workload)
    )
    from megatrain.forecast.op_counter import NotForeseeable
    from megatrain.model.trained import Trained
    from megatrain.source.source import open_source, structure

    source = open_source(
        subject.config,
        trust_remote_code=subject.trust_remote_code,
        attn_implementation=subject.attn_implementation,
    )
    Trained(subject.frozen, subject.train_only).choose(source.model)
    try:
        return make_plan(
            structure(source),
            ask,
            total_tokens=subject.total_tokens,
            gpus=options.gpus,
            disk_terabytes=options.disk_tbw,
            warnings=subject.warnings,
        )
    except NotForeseeable as error:
        raise InputError(
            f"{subject.name} cannot be planned: {error}; megatrain train streams all of it, "
            "and fewer tokens in a row may help"
        ) from error


def _draw(plan: Plan, name: str, picture: Path) -> None:
    told, machine = plan.forecast, plan.ask.machine
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
