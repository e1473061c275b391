"""The run file: YAML in, one validated and frozen value out.

`schema` says what may be written, `yaml_file` reads it from untrusted text, `load` puts the two
together with the overrides of the command line.
"""

from megatrain.config.load import load, validate
from megatrain.config.schema import Config, DataSection, ModelSection, nearest

__all__ = ["Config", "DataSection", "ModelSection", "load", "nearest", "validate"]
