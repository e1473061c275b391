"""Sizes of a model, from its configuration."""

from collections.abc import Sequence

from transformers import PreTrainedConfig

import megatrain.compat.model_folders  # noqa: F401
from megatrain.errors import InputError

_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUMBERS_CHOSEN = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    *("moe_topk", "moe_top_k", "moe_k"),
)
# Models like RoBERTa, whose first token has the position after the padding token's id.
_AFTER_PADDING = (
    *("camembert", "data2vec-text", "ibert", "lilt", "longformer", "luke", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)


def share_of_a_token(config: PreTrainedConfig, shape: Sequence[int]) -> float:
    """The share of a parameter with which one token computes: of experts `[E, I, O]` the chosen."""
    num_chosen, num_experts = experts_of_a_token(config)
    is_of_experts = num_chosen and len(shape) == 3 and shape[0] == num_experts
    return num_chosen / num_experts if is_of_experts else 1.0


def experts_of_a_token(config: PreTrainedConfig) -> tuple[int, int]:
    """The number of experts that a token chooses in a layer, and of all experts; 0: none."""
    text = config.get_text_config(decoder=True)
    num_chosen, num_experts = (
        next((n for name in names if type(n := getattr(text, name, None)) is int), 0)
        for names in (_NUMBERS_CHOSEN, _NUMBERS_OF_EXPERTS)
    )
    return num_chosen, num_experts


def most_positions(config: PreTrainedConfig) -> int | None:
    """The number of positions that the model has; None: any number."""
    text = config.get_text_config(decoder=True)
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    return next((n for n in limits if isinstance(n, int) and n > 0), None)


def most_tokens(config: PreTrainedConfig) -> int | None:
    """The most tokens of a row that the model has positions for; None: any number."""
    most, text = most_positions(config), config.get_text_config(decoder=True)
    if most is None or text.model_type not in _AFTER_PADDING:
        return most
    return most - 1 - (text.pad_token_id or 0)


def check_sequence_length(config: PreTrainedConfig, sequence_length: int) -> None:
    """Raises InputError: rows are longer than the model has positions."""
    allowed = most_tokens(config)
    if allowed is not None and sequence_length > allowed:
        raise InputError(
            f"data.sequence_length: {sequence_length} is longer than the model allows "
            f"({allowed}, its max_position_embeddings): set it to {allowed} or less"
        )
