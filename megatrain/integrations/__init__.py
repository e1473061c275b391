"""Trainers of other libraries that train with an engine."""

from megatrain.integrations.trainer import StreamedTrainer

__all__ = ["StreamedTrainer"]
