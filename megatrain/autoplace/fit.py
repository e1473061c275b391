"""`placement="auto"`: what a device's spare memory is used for.

Where the size of a step is known, the fastest placement by forecast (autoplace/search.py). Where
it is not, or the machine or model cannot be foreseen, by rule: tiles rest on the device whose
update would keep it waiting (the embedding and the first layer, which a step begins with; with few
tokens a step as many layers as half the memory holds; everything, if that takes no more than half).
Then layers at the end of the stack keep their graphs; how many is measured in the first steps
(engine/kept_graphs.py).
"""

import importlib.util
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from megatrain.autoplace.search import Search
from megatrain.device import Device
from megatrain.forecast.forecast import Forecast
from megatrain.forecast.forecasts import Forecasts, Task
from megatrain.forecast.needs import Question
from megatrain.forecast.tally import NotForeseeable
from megatrain.machine import Machine, present_cpu, present_machine
from megatrain.model.outline import Outline
from megatrain.placement import CPU_PLACEMENT, Placement
from megatrain.tile import TileLayout
from megatrain.units import gib

_log = logging.getLogger(__name__)

# Shares of the device's memory.
_RESIDENT = 0.5  # tiles may take this much
_FIRST_RESIDENT = 0.15  # the tiles a step begins with, when the others are better streamed

_USUAL_TOKENS = 16384  # of a micro-batch

# Updates hide behind the next forward from about this many tokens on: 26 bytes a parameter at
# 145 GB/s against 2 FLOP a parameter and token at 450 TFLOPS.
_HIDING_TOKENS = 40_000

# Bytes per parameter of a resident tile: weights, remainder, moments, gradient.
_BF16_BYTES, _FP32_BYTES = 14, 16


def initial_placement(
    device: Device,
    layouts: Sequence[TileLayout],
    *,
    train: bool,
    bf16: bool,
    tokens_per_step: int | None,
) -> Placement:
    """The placement that a run starts with; without `tokens_per_step`, for large steps."""
    if device.kind != "cuda":
        return CPU_PLACEMENT
    if not can_compile():
        _log.warning("Without Triton and a C compiler layers stay eager and nothing is resident")
        return Placement(slots=3)
    total = available_bytes(device)
    size = (_BF16_BYTES if bf16 else _FP32_BYTES) if train else (2 if bf16 else 4)
    tiles = [layout for layout in layouts if layout.name != "unused"]
    needed = sum(layout.numel for layout in tiles) * size
    everything = needed <= _RESIDENT * total
    hidden = tokens_per_step is None or tokens_per_step >= _HIDING_TOKENS
    first = {"embedding", "prologue", "layer 0"}
    room = (_RESIDENT if everything or not hidden else _FIRST_RESIDENT) * total
    resident: list[str] = []
    for layout in tiles:
        room -= layout.numel * size
        if room < 0 or not (everything or not hidden or layout.name in first):
            break
        resident.append(layout.name)
    # Sampling makes each pass a token longer: compiled, every token would compile all kinds anew.
    placement = Placement(slots=3, compile=train, head_tokens=8192, resident=tuple(resident))
    _log.info("placement: on the device rest %s", ", ".join(resident) or "no tiles")
    return placement


def foreseen_placement(
    outline: Outline,
    device: Device,
    *,
    tokens_per_step: int,
    sequence_length: int,
    micro_batch: int | None,
    clip: bool,
    precision: Literal["bf16", "fp32"],
    host_limit: int | None = None,
) -> Forecast | None:
    """What `choose` finds for this device as it is now, with the reasons in the log.

    Args:
        host_limit: bytes that this process may have on the host; None: what the machine allows.

    None: nothing is known of the machine, or what the model computes cannot be foreseen.

    Raises:
        DoesNotFit: nothing fits.
    """
    machine = present_machine(str(device.torch_device), precision=precision)
    if machine is None:
        return None
    # What the process has of its context is in neither free nor taken bytes.
    there = available_bytes(device) + machine.device_context_bytes
    memory = min(there, device.memory()["device_total_bytes"])
    host = min(machine.host_memory_bytes, host_limit or machine.host_memory_bytes)
    try:
        found = choose(
            outline,
            replace(machine, device_memory_bytes=memory, host_memory_bytes=host),
            tokens_per_step=tokens_per_step,
            sequence_length=sequence_length,
            micro_batch=micro_batch,
            clip=clip,
            precision=precision,
            compile=can_compile(),
        )
    except NotForeseeable as error:
        _log.info("placement: by rule, since %s", error)
        return None
    for line in reasons(found):
        _log.info("placement: %s", line)
    return found


def usual_micro_batch(sequence_length: int) -> int:
    """Rows taken together where neither the user nor a forecast says how many.

    Enough to keep a large GPU busy, few enough for the activations of one layer on a small one.
    """
    return max(1, _USUAL_TOKENS // sequence_length)


def foretold_on_cpu(
    device: Device,
    asked: Question,
    placement: Placement,
    sequence_length: int | None,
    micro_batch: int | None,
) -> Forecast | None:
    """What a step takes of the host's memory where the device is the CPU; nothing of its time.

    None: on another device, for inference, where the step's size is not known, or what the model
    computes cannot be foreseen.
    """
    if device.kind != "cpu" or asked.optimizer is None:
        return None
    if asked.tokens is None or sequence_length is None:
        return None
    precision: Literal["bf16", "fp32"] = "bf16" if asked.dtype == torch.bfloat16 else "fp32"
    clip = asked.max_grad_norm is not None
    task = Task(asked.tokens, sequence_length, micro_batch, clip, precision, placement.compile)
    rows = min(task.rows, micro_batch or usual_micro_batch(sequence_length))
    try:
        return Forecasts(asked.outline).of(present_cpu(), placement, task, rows)
    except NotForeseeable as error:
        _log.info("the memory of a step is not counted beforehand, since %s", error)
        return None


def reasons(found: Forecast) -> list[str]:
    """What was chosen and why, in two lines."""
    placement, machine = found.placement, found.machine
    resident = len(placement.resident)
    rows = f"{found.micro_batch} row{'s' * (found.micro_batch > 1)}"
    offloaded = placement.offload_layers
    graphs = f"{placement.keep_layers} kept graphs" + f" and {offloaded} on the host" * bool(
        offloaded
    )
    tiles = ""
    if placement.tile_tokens is not None:
        where = placement.keep_attention
        kept = "attention computed twice" if where == "none" else f"attention kept on the {where}"
        tiles = f", tiles of {placement.tile_tokens} tokens, {kept}"
    if placement.split_bytes is not None:
        tiles += f", layers and head in portions of at most {gib(placement.split_bytes)}"
    return [
        f"micro-batches of {rows}, {placement.slots} slots, {resident} resident tiles, "
        f"{graphs}, boundaries on the {placement.boundaries}{tiles}",
        f"{found.seconds:.3g} s a step expected ({found.model_tflops:.0f} model TFLOPS), "
        f"{found.binds} is busy {found.bounds[found.binds] / found.seconds:.0%} of it; "
        f"{gib(found.device_peak_bytes)} of {gib(machine.device_memory_bytes)} on the device, "
        f"{gib(found.host_peak_bytes)} of {gib(machine.host_memory_bytes)} on the host",
    ]


def available_bytes(device: Device) -> int:
    """Device memory that is this process's or nobody's."""
    memory = device.memory()
    return memory["device_free_bytes"] + memory["device_bytes"]


def can_compile() -> bool:
    """Whether Triton can build its kernels here: it is installed, and there is a C compiler."""
    compilers = (os.environ.get("CC"), "gcc", "clang")
    found = any(shutil.which(name) for name in compilers if name)
    return found and importlib.util.find_spec("triton") is not None


def choose(
    outline: Outline,
    machine: Machine,
    *,
    tokens_per_step: int,
    sequence_length: int,
    micro_batch: int | None = None,
    clip: bool = True,
    precision: Literal["bf16", "fp32"] = "bf16",
    compile: bool = True,
    forecasts: Forecasts | None = None,
) -> Forecast:
    """The fastest placement (and rows of a micro-batch, if None) that fits the machine's memory.

    Args:
        machine: `device_memory_bytes` and `host_memory_bytes` are the budgets.
        forecasts: of the same outline, to be used again.

    Raises:
        DoesNotFit: nothing fits; names the least memory that would do.
        NotForeseeable: what the model computes depends on its values.
    """
    task = Task(tokens_per_step, sequence_length, micro_batch, clip, precision, compile)
    return Search(forecasts or Forecasts(outline), machine, task).best()
