"""The engine: one training step over streamed tiles (`step.py` is the file to read first)."""

from megatrain.engine.engine import Engine, StepResult

__all__ = ["Engine", "StepResult"]
