"""How much of a mixture of experts computes with one token."""

from collections.abc import Sequence

from transformers import PreTrainedConfig

# How configurations name the number of a layer's experts, and of those that a token chooses.
_EVERY = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_OF_A_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    *("moe_topk", "moe_top_k", "moe_k"),
)


def share_of_a_token(config: PreTrainedConfig, shape: Sequence[int]) -> float:
    """The share of a parameter that computes with a token: the chosen of experts `[E, I, O]`."""
    text = config.get_text_config(decoder=True)
    every, chosen = (
        next((n for name in names if type(n := getattr(text, name, None)) is int), 0)
        for names in (_EVERY, _OF_A_TOKEN)
    )
    return chosen / every if chosen and len(shape) == 3 and shape[0] == every else 1.0
