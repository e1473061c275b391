"""The table of names in `taken.yaml`, which says how each is used."""

from pathlib import Path

from megatrain.base.json_yaml import read_yaml
from megatrain.base.shipped import shipped

_TABLE = read_yaml(Path(__file__).with_name("taken.yaml"))


def _names(kind: str, use: str) -> frozenset[str]:
    return frozenset(_TABLE[kind][use].split())


def _refused(kind: str) -> dict[str, str]:
    losses, refused = str(shipped("docs/losses.md")), _TABLE[kind]["refused"]
    return {name: why.replace("docs/losses.md", losses) for name, why in refused.items()}


CLASSES = {"Trainer", "_BaseTrainer", "SFTTrainer", "DPOTrainer", "RewardTrainer"}

# Methods and class attributes that a class may override.
HEEDED_METHODS, NO_MEANING_METHODS = _names("methods", "heeded"), _names("methods", "no_meaning")
REFUSED_METHODS = dict.fromkeys(_names("methods", "replaced"), "") | _refused("methods")

# Attributes of a trainer.
HEEDED_ATTRIBUTES = _names("attributes", "heeded")
NO_MEANING_ATTRIBUTES = _names("attributes", "no_meaning")
FIXED_ATTRIBUTES = _names("attributes", "fixed")

# Arguments of `TrainingArguments`, `SFTConfig`, `DPOConfig` and `RewardConfig`.
HEEDED_ARGUMENTS = _names("arguments", "heeded")
NO_MEANING_ARGUMENTS = _names("arguments", "no_meaning")
FIXED_ARGUMENTS, REFUSED_ARGUMENTS = _names("arguments", "fixed"), _refused("arguments")

# Constructor options of a trainer, beside the model.
HEEDED_OPTIONS, REFUSED_OPTIONS = _names("options", "heeded"), _refused("options")
