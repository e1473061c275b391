"""`placement="auto"`: chooses the fastest placement by forecast (autoplace/search.py) that fits.

Where no forecast of the machine or the model is possible, all weights are streamed and nothing is
kept on the device.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from megatrain.autoplace.search import fastest
from megatrain.base.units import MIB, gib, parse_bytes, size
from megatrain.device import available_bytes
from megatrain.errors import DoesNotFit, InputError, explained
from megatrain.forecast.cache import ForecastCache, Needs, needs_of, second_needs
from megatrain.forecast.op_counter import NotForeseeable
from megatrain.forecast.simulate import Forecast
from megatrain.forecast.workload import SEQUENCE_LENGTH, TOKENS, Generation, MediaRow, Workload
from megatrain.loss import CROSS_ENTROPY, Loss
from megatrain.machine import mapping_bytes, present_machine
from megatrain.model.sizes import most_tokens
from megatrain.placement import CPU_PLACEMENT, Placement, Planned
from megatrain.source.source import EngineSetup
from megatrain.telemetry.console import PASSING
from megatrain.telemetry.host import host_available_bytes, host_limit_bytes, process_bytes

_log = logging.getLogger(__name__)

# A model that is only run rests on the device if it takes no more than this share of its memory.
_RESIDENT = 0.5


@dataclass(frozen=True)
class Settled:
    """A placement, the rows of its micro-batches, and the step that it was chosen for, if any."""

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
    media: Mapping[str, torch.Tensor] | None = None,
) -> Settled:
    """The placement of an engine that is being opened: `placement`, or the one that `auto` chooses.

    A size that is None has the default of `Workload`.

    Raises InputError: a size is not a whole number above 0, or a rank lacks the disk's folder;
    DoesNotFit: no placement fits, or the given one does not.
    """
    sizes = {"tokens_per_step": tokens_per_step, "sequence_length": sequence_length}
    for name, value in {**sizes, "micro_batch": micro_batch}.items():
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{name} is {value!r}; it must be an integer of at least 1, or None")
    ranks, model, is_trained = opened.ranks, opened.model, opened.model.optimizer is not None
    ranks.agree(lambda: opened.disk_bytes)
    longest = most_tokens(opened.source.model.config) or SEQUENCE_LENGTH
    workload = Workload(
        tokens_per_step=tokens_per_step or TOKENS,
        sequence_length=sequence_length or min(SEQUENCE_LENGTH, tokens_per_step or TOKENS, longest),
        micro_batch=micro_batch,
        clip=opened.max_grad_norm is not None,
        precision=opened.precision,
        loss=loss,
        generation=generation,
        media=None if media is None else MediaRow(media),
    )
    if model.rule is not None:
        workload = replace(workload, rule=model.rule)
    if ranks.size > 1:
        workload = replace(workload, sequence_ranks=opened.sequence_ranks.size)
        workload = workload.shared(ranks.shards.size, ranks.hosts)
    if isinstance(placement, Placement):
        settled = Settled(placement, micro_batch)
    else:
        settled = ranks.from_first(lambda: _chosen(opened, workload))
    if not (settled.placement.slots or opened.device.can.reads_in_place):
        raise InputError(
            "placement.slots is 0, but this device does not read host memory; take 1 or more"
        )
    if settled.placement.compile and not opened.device.can.compiles:
        raise InputError(
            "placement.compile is true, but this device has no torch.compile (a GPU needs gcc and "
            "triton); set it to false"
        )
    if is_trained and opened.disk is not None and not settled.placement.on_disk:
        _log.info(
            "disk: nothing rests in %s; placement.disk_moments: how many tiles keep moments there",
            opened.disk,
        )
    if is_trained and opened.dtype in opened.device.can.slow_dtypes:
        _log.warning(
            "this CPU has no bf16 instructions, so products are many times slower; take fp32"
        )
    reference = None
    if generation is not None and generation.reference:
        tokens = workload.tokens_per_step
        reference = second_needs(model.spec, opened.precision, tokens, workload.all_ranks)
    tokens_of_rank = tokens_per_step and -(-tokens_per_step // ranks.size)
    check_fits(opened, settled.placement, tokens_of_rank, reference)
    _log.log(PASSING, "taking memory, and bringing weights there...")
    return settled


def _chosen(opened: EngineSetup, workload: Workload) -> Settled:
    if not opened.device.can.overlaps:
        return Settled(CPU_PLACEMENT, workload.micro_batch)
    if opened.model.optimizer is None:
        # A model that is only run rests on the device, or is streamed. It is not compiled: each
        # pass of sampling is a token longer, and would compile every kind of layer again.
        tiles = [layout for layout in opened.model.layouts if layout.kind.in_every_step]
        num_bytes = sum(layout.numel for layout in tiles) * opened.dtype.itemsize
        is_resident = num_bytes <= _RESIDENT * available_bytes(opened.device)
        names = tuple(layout.name for layout in tiles) if is_resident else ()
        return Settled(Placement(slots=3, head_tokens=8192, resident=names), workload.micro_batch)
    best = _fastest(opened, workload)
    if best is None:
        streamed = Placement(slots=3, head_tokens=8192, compile=opened.device.can.compiles)
        return Settled(streamed, workload.micro_batch)
    micro_tokens, has_media = best.micro_batch * best.sequence_length, workload.media is not None
    planned = Planned(best.tokens_per_step, micro_tokens, has_media)
    return Settled(best.placement, best.micro_batch, planned)


def _fastest(opened: EngineSetup, workload: Workload) -> Forecast | None:
    """The fastest forecast for this device as it is now; None: none is possible."""
    device, ranks = opened.device, opened.ranks
    machine = present_machine(str(device.torch_device), precision=workload.precision)
    if machine is None:
        _log.info("placement: all is streamed, since this GPU is neither measured nor listed")
        return None
    machine = machine.shared(ranks.on_host, ranks.shards.link_gbps, ranks.replicas.link_gbps)
    # Available bytes exclude the driver's context, which the process has and forecasts count.
    device_bytes = available_bytes(device) + machine.device_context_bytes
    host_bytes = machine.host_memory_bytes
    if machine.one_memory:
        device_bytes -= host_bytes
    machine = replace(
        machine,
        device_memory_bytes=min(device_bytes, device.memory()["device_total_bytes"]),
        host_memory_bytes=min(host_bytes, opened.host_limit or host_bytes),
        disk_space_bytes=opened.disk_bytes,
    )
    _log.log(PASSING, "looking for the fastest way that fits...")
    workload = replace(workload, compile=device.can.compiles)
    forecasts = ForecastCache(opened.model.spec)
    try:
        best = fastest(forecasts, machine, workload)
    except NotForeseeable as error:
        _log.info("placement: all is streamed, since %s", error)
        return None
    for line in _reasons(best):
        _log.info("placement: %s", line)
    return best


def _reasons(best: Forecast) -> list[str]:
    """Lines for the log: the chosen placement, and its expected seconds and memory."""
    placement, machine = best.placement, best.machine
    choices = {name: v for name, v in vars(placement).items() if v != getattr(Placement(), name)}
    resident = {"resident tiles": len(choices.pop("resident", ()))}
    text = ", ".join(f"{name}: {value}" for name, value in (choices | resident).items())
    return [
        f"micro-batches of {best.micro_batch} rows, {text}",
        f"{best.seconds:.3g} s a step expected ({best.model_tflops:.0f} model TFLOPS), "
        f"{best.critical_path[best.binds] / best.seconds:.0%} of it bound by {best.binds}; "
        f"{gib(best.device_peak_bytes)} of {gib(machine.device_memory_bytes)} on the device, "
        f"{gib(best.host_peak_bytes)} of {gib(machine.host_memory_bytes)} on the host",
    ]


# Resident memory of a process with a GPU beside planes and buffers, compiling included: 3.6 to
# 4.2 GB (benchmarks/results/step-*.json).
_GPU_PROCESS_BYTES = 3_600_000_000


def check_fits(
    opened: EngineSetup,
    placement: Placement,
    tokens: int | None = None,
    reference: Needs | None = None,
) -> None:
    """Raise DoesNotFit, with the missing bytes and remedies, if an engine's memory cannot fit.

    Args:
        tokens: of a step, if they are known.
        reference: needs of a second model, such as DPO's reference.
    """
    device, host_memory, clip = opened.device, opened.host_limit, opened.max_grad_norm is not None
    needs = needs_of(opened.model, placement, clip=clip, tokens=tokens)
    if reference is not None:
        needs.device["reference model"] = sum(reference.device.values())
        needs.host["reference model"] = sum(reference.host.values())
    memory, has_memory = device.memory(), device.can.counts_memory
    if has_memory:
        mapping = mapping_bytes(sum(needs.host.values()))
        allowed = memory["device_free_bytes"] + memory["device_bytes"] - mapping
        context = memory["device_context_bytes"] + mapping  # the driver's share
        if sum(needs.device.values()) > allowed:
            raise DoesNotFit(
                f"{_refusal('device', needs.device, context, allowed + context)}; take placement: "
                "auto, or what needs least (slots: 1, gradient_lanes: 1, keep_rows: false, "
                "layer_inputs: host, resident: [])"
            )
    planes = needs.host + needs.device if device.can.shares_host_memory else needs.host
    growth_bytes = max(0, _GPU_PROCESS_BYTES - process_bytes()) if has_memory else 0
    if sum(planes.values()) + growth_bytes > host_available_bytes(host_memory):
        planes["the process itself"] += process_bytes() + growth_bytes
        raise DoesNotFit(_host_refusal(planes, host_memory, has_memory))


def _host_refusal(needs: Counter[str], host_memory: int | None, has_gpu: bool) -> str:
    """The message for too little host memory, with remedies."""
    available, process = host_available_bytes(host_memory), process_bytes()
    machine = host_limit_bytes()
    limit = machine if host_memory is None else min(machine, host_memory)
    limit_binds = limit - process < available + MIB  # else other programs take the memory
    allowed = limit if limit_binds else available + process
    total = sum(needs.values())
    raising_helps = limit_binds and limit == host_memory and total <= machine
    remedies = ["raise host_memory"] if raising_helps else []
    if needs["boundaries"] >= total - allowed:
        remedies += ["take fewer tokens a step (batch_size)"]
    elif needs["moments"]:
        remedies += ["keep fewer bits (states: int8)", "train an adapter (LoRA)"]
    remedies += ["take a smaller model", *(["let tiles rest on the GPU"] if has_gpu else [])]
    return _refusal("host", needs, more_bytes=0, allowed=allowed) + "; " + ", or ".join(remedies)


def _refusal(place: str, needs: Counter[str], more_bytes: int, allowed: int) -> str:
    """The message for too little memory; `more_bytes`: needed beside `needs`."""
    total = sum(needs.values()) + more_bytes
    parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in needs.most_common(4))
    return (
        f"{place} memory: at least {size(total)} are needed ({parts}), but {size(allowed)} are "
        f"allowed, {size(total - allowed)} too few"
    )


def parse_limit(name: str, value: Any) -> int | None:
    """A limit in bytes, as the user writes it; None for none. Raises InputError."""
    with explained(name, of=ValueError):
        return None if value is None else parse_bytes(value)
