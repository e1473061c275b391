"""The inner parts of an engine that tests look into, each by one function."""

from typing import Any

from megatrain import Engine


def parts_of(engine: Engine) -> Any:
    """What runs its steps: trunk, head, sink, update."""
    return engine._parts


def program_of(engine: Engine) -> Any:
    """The model's computation."""
    return engine._program


def spec_of(engine: Engine) -> Any:
    """The model's structure, with its modules."""
    return engine._spec


def store_of(engine: Engine) -> Any:
    """Tiles and their planes."""
    return engine._store


def set_steps(engine: Engine, number: int) -> None:
    """Let its next checkpoint be of another step, without taking one."""
    engine._steps = number


def host_gradients(engine: Engine) -> Any:
    """Buffers that keep each tile's gradient of the last step, with clipping."""
    return engine._parts.sink._own
