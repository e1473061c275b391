"""The engine under trainers of other libraries."""

from megatrain.integrations.trainer import StreamedTrainer

__all__ = ["StreamedTrainer"]
