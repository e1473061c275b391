"""The run file: YAML in, one validated and frozen value out."""

from megatrain.config.learning import RolloutSection, TrainingSection, step_loss
from megatrain.config.load import load, overridden, validate
from megatrain.config.schema import CheckpointSection, Config, DataSection, ModelSection
from megatrain.config.section import nearest
