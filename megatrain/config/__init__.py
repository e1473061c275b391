"""Run files: YAML, read into one validated and frozen value."""

from megatrain.config.learning import RolloutSection, TrainingSection, step_loss
from megatrain.config.load import load, validate
from megatrain.config.schema import CheckpointSection, Config, DataSection, ModelSection
from megatrain.config.section import nearest
