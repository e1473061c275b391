"""`placement="auto"`: the fastest placement by forecast (autoplace/search.py), and whether it fits.

Where the machine or the model cannot be foreseen, everything is streamed and nothing kept.
"""

import importlib.util
import logging
import os
import shutil
from dataclasses import dataclass, replace
from typing import Literal

import torch

from megatrain.autoplace.fits import check_fits
from megatrain.autoplace.spill import fastest
from megatrain.base.units import gib
from megatrain.device import available_bytes
from megatrain.errors import InputError
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.op_counter import NotForeseeable
from megatrain.forecast.second_model import second_needs
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import SEQUENCE_LENGTH, TOKENS, Generation, Workload
from megatrain.loss import CROSS_ENTROPY, Loss
from megatrain.machine import Machine, present_cpu, present_machine
from megatrain.model.spec import ModelSpec
from megatrain.placement import CPU_PLACEMENT, Placement, Planned
from megatrain.source.engine_setup import EngineSetup
from megatrain.telemetry.log import PASSING
from megatrain.tile import TileKind

_log = logging.getLogger(__name__)

# Of the device's memory: so much may a model take that is only run, to rest there as a whole.
_RESIDENT = 0.5


@dataclass(frozen=True)
class Settled:
    """A placement, and what it was chosen for.

    Attributes:
        micro_batch: rows that micro-batches should have; None: nobody knows.
        planned: None: nothing was foreseen.
    """

    placement: Placement
    micro_batch: int | None
    planned: Planned | None = None


def settle(
    opened: EngineSetup,
    placement: Placement | Literal["auto"],
    tokens_per_step: int | None,
    sequence_length: int | None,
    micro_batch: int | None,
    loss: Loss = CROSS_ENTROPY,
    generation: Generation | None = None,
) -> Settled:
    """The placement of an engine to come, given or chosen; what is None is as `Workload` says.

    Raises:
        InputError: a size is not a number of 1 or more; on any rank, there is no such disk.
        DoesNotFit: nothing does, or what was given does not.
    """
    sizes = ("tokens_per_step", "sequence_length", "micro_batch")
    for name, value in zip(sizes, (tokens_per_step, sequence_length, micro_batch), strict=True):
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{name} is {value!r}; it must be an integer of at least 1, or None")
    opened.ranks.agree(lambda: opened.disk_bytes)
    length = sequence_length or min(SEQUENCE_LENGTH, tokens_per_step or TOKENS, _longest(opened))
    clip = opened.max_grad_norm is not None
    size = tokens_per_step or TOKENS, length, micro_batch
    workload = Workload(*size, clip, opened.precision, loss=loss, generation=generation)
    if opened.model.rule is not None:
        workload = replace(workload, rule=opened.model.rule)
    if opened.ranks.size > 1:
        workload = replace(workload, sequence_ranks=opened.sequence_ranks.size)
        workload = workload.shared(opened.ranks.shards.size, opened.ranks.hosts)
    settled = (
        Settled(placement, micro_batch)
        if isinstance(placement, Placement)
        else _chosen(opened, workload)
    )
    known = tokens_per_step is not None and sequence_length is not None
    trained = opened.model.optimizer is not None
    if trained and opened.disk is not None and not settled.placement.on_disk:
        _log.info(
            "disk: nothing rests in %s; placement.disk_moments says of how many tiles moments do",
            opened.disk,
        )
    if trained and opened.device.kind == "cpu" and opened.dtype == torch.bfloat16:
        _tell_pace()
    told = None
    if known and trained and opened.device.kind == "cpu" and opened.ranks.size == 1:
        told = foretold_on_cpu(opened.model.spec, settled.placement, workload)
    reference = None
    if generation is not None and generation.reference:
        size_of_rank = workload.tokens_per_step, workload.all_ranks
        reference = second_needs(opened.model.spec, opened.dtype, *size_of_rank)
    check_fits(
        opened.device,
        opened.model,
        settled.placement,
        opened.dtype,
        opened.host_limit,
        clip=clip,
        tokens=tokens_per_step and -(-tokens_per_step // opened.ranks.size),
        foretold=told,
        reference=reference,
    )
    _log.log(PASSING, "taking memory, and bringing weights there...")
    return settled


def _tell_pace() -> None:
    """Warn of bf16 on a CPU without instructions for it: torch falls back to plain loops there."""
    has = torch.backends.cpu.get_cpu_capability()
    if has in ("NO AVX", "AVX2"):
        _log.warning(
            "precision bf16 on a CPU with %s: products take many times as long as in fp32; "
            "take precision fp32 there",
            has,
        )


def _longest(opened: EngineSetup) -> int:
    """Tokens of the longest row that the model is made for."""
    text = opened.source.model.config.get_text_config(decoder=True)
    return getattr(text, "max_position_embeddings", None) or SEQUENCE_LENGTH


def _chosen(opened: EngineSetup, workload: Workload) -> Settled:
    ranks = opened.ranks
    if ranks.size > 1:  # what one finds, all take
        found = ranks.agree(lambda: None if ranks.rank else _for_rank(opened, workload))[0]
        assert found is not None
        return found
    return _for_rank(opened, workload)


def _for_rank(opened: EngineSetup, workload: Workload) -> Settled:
    if opened.device.kind != "cuda":
        return Settled(CPU_PLACEMENT, workload.micro_batch)
    if opened.model.optimizer is None:
        return Settled(_to_run(opened), workload.micro_batch)
    found = _foreseen(opened, workload)
    if found is None:
        placement = Placement(slots=3, head_tokens=8192, compile=can_compile())
        return Settled(placement, workload.micro_batch)
    rows = found.micro_batch
    size, graphs = rows * found.sequence_length, found.placement.save_activations > 0
    planned = Planned(found.tokens_per_step, size, found.host_bytes, graphs)
    return Settled(found.placement, rows, planned)


def _to_run(opened: EngineSetup) -> Placement:
    """The placement of a model that is only run: it rests on the device, or is streamed.

    Sampling makes each pass a token longer: compiled, every token would compile all kinds anew.
    """
    tiles = [layout for layout in opened.model.layouts if layout.kind is not TileKind.UNUSED]
    needed = sum(layout.numel for layout in tiles) * opened.dtype.itemsize
    rests = needed <= _RESIDENT * available_bytes(opened.device)
    names = tuple(layout.name for layout in tiles) if rests else ()
    return Placement(slots=3, head_tokens=8192, resident=names)


def _foreseen(opened: EngineSetup, workload: Workload) -> Forecast | None:
    """What `choose` finds for this device as it is now, with the reasons in the log.

    None: nothing is known of the machine, or what the model computes cannot be foreseen.
    """
    device = opened.device
    machine = present_machine(str(device.torch_device), precision=workload.precision)
    if machine is None:
        _log.info("placement: all is streamed, since this GPU is neither measured nor listed")
        return None
    ranks = opened.ranks
    links = ranks.shards.link_gbps, ranks.replicas.link_gbps
    machine = machine.shared(ranks.on_host, *links)
    # What the process has of its context is in neither free nor taken bytes.
    there = available_bytes(device) + machine.device_context_bytes
    memory = min(there, device.memory()["device_total_bytes"])
    host = min(machine.host_memory_bytes, opened.host_limit or machine.host_memory_bytes)
    _log.log(PASSING, "looking for the fastest way that fits...")
    try:
        found = choose(
            opened.model.spec,
            replace(
                machine,
                device_memory_bytes=memory,
                host_memory_bytes=host,
                disk_space_bytes=opened.disk_bytes,
            ),
            replace(workload, compile=can_compile()),
        )
    except NotForeseeable as error:
        _log.info("placement: all is streamed, since %s", error)
        return None
    for line in reasons(found):
        _log.info("placement: %s", line)
    return found


def foretold_on_cpu(spec: ModelSpec, placement: Placement, workload: Workload) -> Forecast | None:
    """What a step takes of the host's memory where the device is the CPU; nothing of its time.

    None: what the model computes cannot be foreseen.
    """
    workload = replace(workload, compile=placement.compile)
    rows = workload.usual_micro_batch
    try:
        return ForecastCache(spec).of(present_cpu(), placement, workload, rows)
    except NotForeseeable as error:
        _log.info("the memory of a step is not counted beforehand, since %s", error)
        return None


def reasons(found: Forecast) -> list[str]:
    """What was chosen and why, in two lines."""
    placement, machine = found.placement, found.machine
    resident = len(placement.resident)
    rows = f"{found.micro_batch} row{'s' * (found.micro_batch > 1)}"
    offloaded = placement.offload_activations
    graphs = f"{placement.save_activations} kept graphs"
    graphs += f" ({placement.save_all} of them whole)" * bool(placement.save_all)
    graphs += f" and {offloaded} on the host" * bool(offloaded)
    graphs += f" in {placement.passes} passes" * (placement.passes > 1)
    count = placement.keep_weights
    tiles = f", weights of {count} tile{'s' * (count > 1)} stay on the device" * bool(count)
    if placement.chunk_tokens is not None:
        where = placement.save_attention
        kept = "attention computed twice" if where == "none" else f"attention kept on the {where}"
        tiles += f", tiles of {placement.chunk_tokens} tokens, {kept}"
    if placement.max_stream_bytes is not None:
        tiles += f", the head in slices of at most {gib(placement.max_stream_bytes)}"
    for planes in ("moments", "remainder", "weights"):
        count = getattr(placement, f"disk_{planes}")
        tiles += f", {planes} of {count} tile{'s' * (count > 1)} on the disk" * bool(count)
    return [
        f"micro-batches of {rows}, {placement.slots} slots, {resident} resident tiles, "
        f"{graphs}, boundaries on the {placement.layer_inputs}{tiles}",
        f"{found.seconds:.3g} s a step expected ({found.model_tflops:.0f} model TFLOPS), "
        f"{found.critical_path[found.binds] / found.seconds:.0%} of it bound by {found.binds}; "
        f"{gib(found.device_peak_bytes)} of {gib(machine.device_memory_bytes)} on the device, "
        f"{gib(found.host_peak_bytes)} of {gib(machine.host_memory_bytes)} on the host",
    ]


def can_compile() -> bool:
    """Whether Triton can build its kernels here: it is installed, and there is a C compiler."""
    compilers = (os.environ.get("CC"), "gcc", "clang")
    found = any(shutil.which(name) for name in compilers if name)
    return found and importlib.util.find_spec("triton") is not None


def choose(
    spec: ModelSpec, machine: Machine, workload: Workload, *, forecasts: ForecastCache | None = None
) -> Forecast:
    """The fastest placement (and rows of a micro-batch, if None) that fits the machine's memory.

    Args:
        machine: `device_memory_bytes`, `host_memory_bytes`, `disk_space_bytes` are the budgets.
        forecasts: of the same spec, to be used again.

    Raises:
        DoesNotFit: nothing fits; names the least memory that would do.
        NotForeseeable: what the model computes depends on its values.
    """
    return fastest(forecasts or ForecastCache(spec), machine, workload)
