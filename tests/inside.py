"""The inner parts of an engine that tests look into, each by one function."""

from functools import partial
from operator import attrgetter
from typing import Any

import torch

from megatrain import Engine

parts_of = attrgetter("_parts")  # what runs its steps: trunk, head, sink, update
program_of = attrgetter("_program")  # the model's computation
spec_of = attrgetter("_spec")  # the model's structure, with its modules
store_of = attrgetter("_store")  # tiles and their planes


def set_steps(engine: Engine, number: int) -> None:
    """Let its next checkpoint be of another step, without taking one."""
    engine._steps = number


def host_gradients(engine: Engine) -> Any:
    """Buffers that keep each tile's gradient of the last step, with clipping."""
    return engine._parts.sink._own


def sized(patch: Any, module: Any, **sizes: Any) -> None:
    """Set sizes of a module (pieces, limits) for a test: tiny models have nothing as large."""
    for name, size in sizes.items():
        patch.setattr(module, name, size)


def answering(patch: Any, module: Any, **answers: Any) -> None:
    """Let functions of a module say for a test what another machine would."""
    for name, answer in answers.items():
        patch.setattr(module, name, lambda *_, answer=answer, **__: answer)


def compiled_by(patch: Any, backend: Any) -> None:
    """Let torch.compile take a backend."""
    patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
