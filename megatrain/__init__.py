"""MegaTrain: full-precision training of large language models on one GPU, from host memory."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatrain.errors import DoesNotFit, InputError, MegatrainError, RunFailed
from megatrain.placement import Placement

if TYPE_CHECKING:
    from megatrain.api import Engine, StepResult
    from megatrain.optim import SGD, AdamW, Lion, Muon
    from megatrain.train.loop import run

__all__ = [
    "SGD", "AdamW", "DoesNotFit", "Engine", "InputError", "Lion", "MegatrainError", "Muon",
    "Placement", "RunFailed", "StepResult", "__version__", "run",
]  # fmt: skip

# With expandable segments, freed memory serves tensors of other sizes: a step needs less. CUDA
# reads either name when it starts; a user's choice stays.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
if "WORLD_SIZE" in os.environ:  # streams that share one of CUDA's 8 connections delay each other
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

__version__ = "0.1.0"  # the build reads it from here


_PLACES = {"Engine": "api", "StepResult": "api", "run": "train.loop"}  # the others are in optim


def __getattr__(name: str) -> Any:
    # Imports of torch and transformers take seconds; a command that prints help needs neither.
    if name in __all__:
        return getattr(import_module(f"megatrain.{_PLACES.get(name, 'optim')}"), name)
    if name == "Adafactor":
        from megatrain.optim import NO_ADAFACTOR

        raise ImportError(NO_ADAFACTOR)
    raise AttributeError(f"module 'megatrain' has no attribute {name!r}")
