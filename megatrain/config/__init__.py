"""The run file: YAML in, one validated and frozen value out.

`schema` says what may be written; `load` reads it from untrusted text and puts it together with the
overrides of the command line.
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
