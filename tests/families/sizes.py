"""Data of the tiny models: small sizes by field name, and what single families need besides."""

from pathlib import Path
from typing import Any

import yaml
from transformers import MusicgenDecoderConfig, MusicgenMelodyDecoderConfig

VOCAB, POSITIONS, HEADS = 128, 64, 4
MIN_LAYERS, MAX_LAYERS = 3, 6
# Text of the tests is drawn from ids 10 to VOCAB - 11, so that it never holds a special token.
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DATA = yaml.safe_load(Path(__file__).with_name("sizes.yaml").read_text(encoding="utf-8"))
LAYER_COUNTS: list[str] = _DATA["layer counts"]
SIZES: dict[str, int] = {name: size for size, names in _DATA["sizes"].items() for name in names}
OVERRIDES: dict[str, dict[str, Any]] = _DATA["overrides"]
TOWERS: dict[str, dict[str, Any]] = _DATA["towers"]
# (family, changes) by name.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = _DATA["variants"]
# Families whose causal-LM class takes another configuration than the one the mapping names.
CONFIG_CLASS = {"musicgen": MusicgenDecoderConfig, "musicgen_melody": MusicgenMelodyDecoderConfig}
# Switches that make an encoder's decoder variant a causal language model.
CHOICES: dict[str, Any] = {"is_decoder": True, "causal": True}
# Arguments without which a configuration class has no default instance.
CONSTRUCTOR: dict[str, dict[str, Any]] = {"gemma4_assistant": OVERRIDES["gemma4_assistant"]}
