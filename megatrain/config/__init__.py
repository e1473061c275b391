"""The run file: YAML in, one validated and frozen value out.

`schema` says what may be written, with `learning` for what decides how a model learns; `load` reads
it from untrusted text and puts it together with the overrides of the command line.
"""

from megatrain.config.learning import RolloutSection, TrainingSection, step_loss
from megatrain.config.load import load, overridden, validate
from megatrain.config.schema import CheckpointSection, Config, DataSection, ModelSection
from megatrain.config.section import nearest
