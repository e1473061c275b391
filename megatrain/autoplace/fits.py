"""Whether a model fits, asked before anything is allocated.

Asked of what lives as long as an engine (forecast/needs.py), the driver's context and the process:
what is refused is what not even a step of a few tokens would fit. What many tokens take is for
forecast/simulate.py, and a step that runs out of memory ends in one line, too.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatrain.base.units import GIB, MIB, align, gib, parse_bytes, size
from megatrain.device import Device
from megatrain.errors import DoesNotFit, InputError
from megatrain.forecast.needs import Needs, needs_of
from megatrain.forecast.simulate import Forecast
from megatrain.machine import mapping_bytes
from megatrain.model.program import ModelProgram
from megatrain.placement import Placement
from megatrain.source.source import Model
from megatrain.telemetry.host import host_available_bytes, host_limit_bytes, process_bytes

# Resident memory of a process with a GPU beside planes and buffers, compiling included: 3.6 to
# 4.2 GB (benchmarks/results/step-*.json).
_GPU_PROCESS_BYTES = 3_600_000_000


def smallest(placement: Placement) -> Placement:
    """The choices that take the least device memory, the model computed as `placement` does."""
    return replace(
        placement,
        slots=1,
        prefetch=None,
        gradient_lanes=1,
        keep_rows=False,
        save_activations=0,
        save_all=0,
        passes=1,
        offload_activations=0,
        save_attention="none",
        layer_inputs="host",
        layer_input_lanes=1,
        resident=(),
        keep_weights=0,
    )


def check_fits(
    device: Device,
    model: Model,
    placement: Placement,
    dtype: torch.dtype,
    host_memory: int | None,
    *,
    clip: bool,
    tokens: int | None = None,
    foretold: Forecast | None = None,
    reference: Needs | None = None,
) -> None:
    """Refuse what cannot fit.

    Args:
        tokens: of a step, if they are known.
        foretold: a whole step where the device is the CPU, all of which is in host memory.
        reference: of a second model that is run beside it.

    Raises:
        DoesNotFit: names what is missing and the least that would do.
    """
    program = ModelProgram(model.spec, torch.device("cpu"), dtype)
    needs_in = partial(needs_of, model, program, clip=clip, tokens=tokens)
    needs = needs_in(placement)
    more = reference or Needs()
    needs.device["reference model"] += sum(more.device.values())
    needs.host["reference model"] += sum(more.host.values())
    memory = device.memory()
    has_memory = device.kind == "cuda"
    if has_memory:
        mapping = mapping_bytes(sum(needs.host.values()))
        allowed = memory["device_free_bytes"] + memory["device_bytes"] - mapping
        context = memory["device_context_bytes"] + mapping
        if sum(needs.device.values()) > allowed:
            frugal_bytes = sum((needs_in(smallest(placement)).device + more.device).values())
            least = align(frugal_bytes + context, GIB // 10)
            raise DoesNotFit(
                _refusal("device", needs.device, context, allowed + context)
                + f"; the least for this model, with a few tokens a step, is {gib(least)} "
                "(slots: 1, gradient_lanes: 1, keep_rows: false, layer_inputs: host, resident: [])"
            )
    planes = needs.host if has_memory else needs.host + needs.device
    grows = max(0, _GPU_PROCESS_BYTES - process_bytes()) if has_memory else 0
    if foretold is not None:
        planes, grows = foretold.host_growth
    if sum(planes.values()) + grows > host_available_bytes(host_memory):
        planes["the process itself"] += process_bytes() + grows
        raise DoesNotFit(_host_refusal(planes, host_memory, has_memory, foretold is not None))


def _host_refusal(
    needs: Counter[str], host_memory: int | None, has_gpu: bool, whole_step: bool
) -> str:
    available, process, machine = (
        host_available_bytes(host_memory), process_bytes(), host_limit_bytes()
    )  # fmt: skip
    limit = machine if host_memory is None else min(machine, host_memory)
    binds = limit - process < available + MIB  # and not what other programs have left
    allowed = limit if binds else available + process
    total, lasting = sum(needs.values()), sum(needs[name] for name in _LASTING)
    whatever = lasting + needs["the process itself"]  # however small the micro-batches are
    remedies = [
        *(["raise host_memory"] if binds and limit == host_memory and total <= machine else []),
        *(["take smaller micro-batches"] if whole_step and whatever <= allowed else []),
        *(["keep fewer bits (states: int8)"] if needs["moments"] > total - allowed else []),
        *(["train an adapter (LoRA)"] if needs["moments"] and lasting > allowed else []),
        "train a smaller model",
        *(["let tiles rest on the GPU"] if has_gpu else []),
    ]
    return _refusal("host", needs, 0, allowed) + "; " + ", or ".join(remedies)


_LASTING = ("weights", "remainder", "moments", "gradients")


def _refusal(place: str, needs: Counter[str], rest: int, allowed: int) -> str:
    total = sum(needs.values()) + rest
    parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in needs.most_common(4))
    return (
        f"{place} memory: at least {size(total)} are needed ({parts}), but {size(allowed)} are "
        f"allowed, {size(total - allowed)} too few"
    )


def limits(device_memory: Any, host_memory: Any) -> tuple[int | None, int | None]:
    """Both limits in bytes, given as the user writes them. Raises InputError."""
    return parse_limit("device_memory", device_memory), parse_limit("host_memory", host_memory)


def parse_limit(name: str, value: Any) -> int | None:
    """A limit in bytes, given as the user writes it; None for none. Raises InputError."""
    if value is None:
        return None
    try:
        parsed = parse_bytes(value) if isinstance(value, (str, int)) else -1
    except ValueError as error:
        raise InputError(f"{name} is {error}") from error
    if parsed <= 0 or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; write it like 10GiB, or a number of bytes")
    return parsed
