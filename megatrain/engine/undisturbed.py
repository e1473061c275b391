"""Contexts that keep torch's modes and random numbers of engine and caller apart."""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock

import torch

from megatrain.device import Device
from megatrain.errors import DoesNotFit, InputError

_TYPES_DIFFER = "expected scalar type|to have the same dtype|must have the same dtype|same dtype"

# Calls in several threads take turns on a device: they would draw from the same generator of torch.
_locks: defaultdict[torch.device, RLock] = defaultdict(RLock)


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Within this context new tensors are on the CPU and not of inference mode, by default."""
    on_cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with torch.inference_mode(False), on_cpu:
        yield


@contextmanager
def opening() -> Iterator[None]:
    """Within this context new tensors are as in `plain_tensors`, and no other engine is opened.

    Opening a model draws the CPU's random numbers and registers hooks that all modules call.
    """
    with _locks[torch.device("cpu")], plain_tensors():
        yield


@contextmanager
def undisturbed(device: Device, dtype: torch.dtype, *, clips: bool) -> Iterator[None]:
    """Compute without the caller's modes and random numbers; torch's errors name a remedy."""
    random = torch.random.fork_rng(devices=device.can.generators)
    autocast = torch.autocast(device.torch_device.type, enabled=False)
    try:
        with _locks[device.torch_device], random, autocast, plain_tensors():
            yield
    except torch.OutOfMemoryError as error:
        unchanged = " (no weight has been changed)" if clips else ""
        raise DoesNotFit(
            f"the device has no memory left ({str(error).split('. ')[0]}); use smaller "
            f"micro-batches, placement.layer_inputs: host, fewer resident tiles or slots{unchanged}"
        ) from error
    except TypeError as error:
        if "float64" not in str(error):
            raise
        raise InputError(
            f"this needs float64, which {device.kind} lacks ({error}); take device cpu"
        ) from error
    except RuntimeError as error:
        if "device meta" in str(error) or "use_reentrant" in str(error):
            raise InputError(
                "a layer's code keeps its weights after its call, as torch.utils.checkpoint does "
                "(leave it out), or uses weights for this batch that plain short rows do not use"
            ) from error
        if dtype != torch.bfloat16 or not re.search(_TYPES_DIFFER, str(error)):
            raise
        raise InputError(
            f"the model's own code does not compute in bf16 ({str(error).splitlines()[0]}); "
            "set precision to fp32"
        ) from error
