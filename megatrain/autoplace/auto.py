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
from megatrain.autoplace.search import fastest
from megatrain.base.units import gib
from megatrain.device import available_bytes
from megatrain.errors import InputError
from megatrain.forecast.cache import ForecastCache
from megatrain.forecast.op_counter import NotForeseeable
from megatrain.forecast.second_model import second_needs
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import SEQUENCE_LENGTH, TOKENS, Generation, Workload
from megatrain.loss import CROSS_ENTROPY, Loss
from megatrain.machine import present_cpu, present_machine
from megatrain.model.spec import ModelSpec
from megatrain.placement import CPU_PLACEMENT, Placement, Planned
from megatrain.source.source import EngineSetup
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
    sizes = {
        "tokens_per_step": tokens_per_step,
        "sequence_length": sequence_length,
        "micro_batch": micro_batch,
    }
    for name, value in sizes.items():
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{name} is {value!r}; it must be an integer of at least 1, or None")
    ranks, model, trained = opened.ranks, opened.model, opened.model.optimizer is not None
    ranks.agree(lambda: opened.disk_bytes)
    text = opened.source.model.config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None) or SEQUENCE_LENGTH
    workload = Workload(
        tokens_per_step or TOKENS,
        sequence_length or min(SEQUENCE_LENGTH, tokens_per_step or TOKENS, longest),
        micro_batch,
        opened.max_grad_norm is not None,
        opened.precision,
        loss=loss,
        generation=generation,
    )
    if model.rule is not None:
        workload = replace(workload, rule=model.rule)
    if ranks.size > 1:
        workload = replace(workload, sequence_ranks=opened.sequence_ranks.size)
        workload = workload.shared(ranks.shards.size, ranks.hosts)
    if isinstance(placement, Placement):
        settled = Settled(placement, micro_batch)
    elif ranks.size > 1:  # one rank looks, and all take what it finds
        chosen = ranks.agree(lambda: None if ranks.rank else _chosen(opened, workload))[0]
        assert chosen is not None
        settled = chosen
    else:
        settled = _chosen(opened, workload)
    if trained and opened.disk is not None and not settled.placement.on_disk:
        _log.info(
            "disk: nothing rests in %s; placement.disk_moments says of how many tiles moments do",
            opened.disk,
        )
    foretold = reference = None
    if trained and opened.device.kind == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        if opened.dtype == torch.bfloat16 and capability in ("NO AVX", "AVX2"):
            _log.warning(  # torch falls back to plain loops there
                "precision bf16 on a CPU with %s: products take many times as long as in fp32; "
                "take precision fp32 there",
                capability,
            )
        if tokens_per_step and sequence_length and ranks.size == 1:
            foretold = foretold_on_cpu(model.spec, settled.placement, workload)
    if generation is not None and generation.reference:
        tokens, all_ranks = workload.tokens_per_step, workload.all_ranks
        reference = second_needs(model.spec, opened.dtype, tokens, all_ranks)
    check_fits(
        opened.device,
        model,
        settled.placement,
        opened.dtype,
        opened.host_limit,
        clip=workload.clip,
        tokens=tokens_per_step and -(-tokens_per_step // ranks.size),
        foretold=foretold,
        reference=reference,
    )
    _log.log(PASSING, "taking memory, and bringing weights there...")
    return settled


def _chosen(opened: EngineSetup, workload: Workload) -> Settled:
    if opened.device.kind != "cuda":
        return Settled(CPU_PLACEMENT, workload.micro_batch)
    if opened.model.optimizer is None:
        return Settled(_to_run(opened), workload.micro_batch)
    best = _fastest(opened, workload)
    if best is None:
        placement = Placement(slots=3, head_tokens=8192, compile=can_compile())
        return Settled(placement, workload.micro_batch)
    planned = Planned(
        best.tokens_per_step,
        best.micro_batch * best.sequence_length,
        best.host_bytes,
        graphs=best.placement.save_activations > 0,
    )
    return Settled(best.placement, best.micro_batch, planned)


def _to_run(opened: EngineSetup) -> Placement:
    """The placement of a model that is only run: it rests on the device, or is streamed.

    Sampling makes each pass a token longer: compiled, every token would compile all kinds anew.
    """
    tiles = [layout for layout in opened.model.layouts if layout.kind is not TileKind.UNUSED]
    needed = sum(layout.numel for layout in tiles) * opened.dtype.itemsize
    rests = needed <= _RESIDENT * available_bytes(opened.device)
    names = tuple(layout.name for layout in tiles) if rests else ()
    return Placement(slots=3, head_tokens=8192, resident=names)


def _fastest(opened: EngineSetup, workload: Workload) -> Forecast | None:
    """The fastest forecast for this device as it is now, with the reasons in the log.

    None: nothing is known of the machine, or what the model computes cannot be foreseen.
    """
    device, ranks = opened.device, opened.ranks
    machine = present_machine(str(device.torch_device), precision=workload.precision)
    if machine is None:
        _log.info("placement: all is streamed, since this GPU is neither measured nor listed")
        return None
    machine = machine.shared(ranks.on_host, ranks.shards.link_gbps, ranks.replicas.link_gbps)
    # What the process has of its context is in neither free nor taken bytes.
    memory = available_bytes(device) + machine.device_context_bytes
    host = machine.host_memory_bytes
    machine = replace(
        machine,
        device_memory_bytes=min(memory, device.memory()["device_total_bytes"]),
        host_memory_bytes=min(host, opened.host_limit or host),
        disk_space_bytes=opened.disk_bytes,
    )
    _log.log(PASSING, "looking for the fastest way that fits...")
    forecasts, workload = ForecastCache(opened.model.spec), replace(workload, compile=can_compile())
    try:
        best = fastest(forecasts, machine, workload)
    except NotForeseeable as error:
        _log.info("placement: all is streamed, since %s", error)
        return None
    for line in _reasons(best):
        _log.info("placement: %s", line)
    return best


def foretold_on_cpu(spec: ModelSpec, placement: Placement, workload: Workload) -> Forecast | None:
    """The host memory of a step where the device is the CPU; nothing of its time.

    None: what the model computes cannot be foreseen.
    """
    workload = replace(workload, compile=placement.compile)
    rows = workload.usual_micro_batch
    try:
        return ForecastCache(spec).of(present_cpu(), placement, workload, rows)
    except NotForeseeable as error:
        _log.info("the memory of a step is not counted beforehand, since %s", error)
        return None


def _reasons(best: Forecast) -> list[str]:
    """The choices and their reasons, in two lines."""
    placement, machine = best.placement, best.machine

    def counted(number: int, what: str) -> str:
        return f"{number} {what}{'s' * (number > 1)}"

    graphs = f"{placement.save_activations} kept graphs"
    graphs += f" ({placement.save_all} of them whole)" * bool(placement.save_all)
    offloaded = placement.offload_activations
    graphs += f" and {offloaded} on the host" * bool(offloaded)
    graphs += f" in {placement.passes} passes" * (placement.passes > 1)
    tiles = ""
    if placement.keep_weights:
        tiles += f", weights of {counted(placement.keep_weights, 'tile')} stay on the device"
    if placement.chunk_tokens is not None:
        where = placement.save_attention
        kept = "attention computed twice" if where == "none" else f"attention kept on the {where}"
        tiles += f", tiles of {placement.chunk_tokens} tokens, {kept}"
    for planes in ("moments", "remainder", "weights"):
        count = getattr(placement, f"disk_{planes}")
        tiles += f", {planes} of {counted(count, 'tile')} on the disk" * bool(count)
    return [
        f"micro-batches of {counted(best.micro_batch, 'row')}, {placement.slots} slots, "
        f"{len(placement.resident)} resident tiles, {graphs}, "
        f"boundaries on the {placement.layer_inputs}{tiles}",
        f"{best.seconds:.3g} s a step expected ({best.model_tflops:.0f} model TFLOPS), "
        f"{best.critical_path[best.binds] / best.seconds:.0%} of it bound by {best.binds}; "
        f"{gib(best.device_peak_bytes)} of {gib(machine.device_memory_bytes)} on the device, "
        f"{gib(best.host_peak_bytes)} of {gib(machine.host_memory_bytes)} on the host",
    ]


def can_compile() -> bool:
    """True if Triton can build its kernels here: it is installed, and there is a C compiler."""
    compilers = (os.environ.get("CC"), "gcc", "clang")
    compiler = any(shutil.which(name) for name in compilers if name)
    return compiler and importlib.util.find_spec("triton") is not None
