"""The run file: YAML in, one validated and frozen value out.

`schema` says what may be written, `yaml_file` reads it from untrusted text, `load` puts the two
together with the overrides of the command line.
"""

from megatrain.config.load import load, validate
from megatrain.config.schema import (
    CheckpointSection,
    Config,
    DataSection,
    ModelSection,
    TrainingSection,
    nearest,
)

__all__ = [
    "CheckpointSection",
    "Config",
    "DataSection",
    "ModelSection",
    "TrainingSection",
    "load",
    "nearest",
    "validate",
]
