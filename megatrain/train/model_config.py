"""The transformers configuration of the model a run trains, checked before anything is built."""

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase

from megatrain.config import ModelSection, nearest
from megatrain.errors import InputError, in_one_line
from megatrain.model.build import load_config
from megatrain.model.weights import resolve_model

_COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def model_config(section: ModelSection, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The configuration of `model.path`, or the one written out in `model.config`.

    Raises:
        InputError: it cannot be read, or has unknown fields or impossible values.
    """
    if section.config is not None:
        return _written_out(dict(section.config), tokenizer)
    assert section.path is not None
    folder = resolve_model(section.path)
    return load_config(folder, trust_remote_code=section.trust_remote_code)


def check_sequence_length(config: PreTrainedConfig, sequence_length: int) -> None:
    """Raises InputError when rows are longer than the positions the model has."""
    text = config.get_text_config(decoder=True)
    allowed = getattr(text, "max_position_embeddings", None)
    if isinstance(allowed, int) and sequence_length > allowed:
        raise InputError(
            f"data.sequence_length: {sequence_length} is longer than the model allows "
            f"({allowed}, its max_position_embeddings)"
        )


def _written_out(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Vocabulary size and special tokens are the tokenizer's unless `fields` says otherwise."""
    model_type = fields.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        hint = nearest(model_type, [str(name) for name in CONFIG_MAPPING])
        raise InputError(f"model.config.model_type: unknown type {model_type!r}{hint}")
    config_class = CONFIG_MAPPING[model_type]
    known = sorted({*config_class().to_dict(), *config_class.attribute_map})
    for name, value in fields.items():
        if name not in known:
            raise InputError(f"model.config.{name}: unknown field{nearest(name, known)}")
        if name in _COUNTS and not (type(value) is int and value > 0):
            raise InputError(f"model.config.{name}: should be a positive integer, got {value!r}")
    derived = {name: getattr(tokenizer, name) for name in _SPECIAL}
    derived["vocab_size"] = len(tokenizer)
    try:
        return config_class(**(derived | fields))
    except Exception as error:  # each configuration class has its own checks and error types
        reason = in_one_line(error)
        raise InputError(f"model.config: not a {model_type} configuration: {reason}") from error
