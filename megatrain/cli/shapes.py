"""Model shapes for benchmarks and plans: the Qwen2.5 family, from its published config.json files.

https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json and its siblings. 120b is no published
model: it is the 72B's heads, vocabulary and ratios with 10240 wide layers, as many as make 120
billion parameters, the largest dense size that the MegaTrain paper (arXiv 2604.05091) names.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen2Config


@dataclass(frozen=True)
class Shape:
    """The numbers that differ between the sizes."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool


SHAPES = {
    "toy": Shape(256, 704, 4, 4, 2, 4096, tied=True),  # no published model: for a quick look
    "0.5b": Shape(896, 4864, 24, 14, 2, 151936, tied=True),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 151936, tied=True),
    "3b": Shape(2048, 11008, 36, 16, 2, 151936, tied=True),
    "7b": Shape(3584, 18944, 28, 28, 4, 152064, tied=False),
    "14b": Shape(5120, 13824, 48, 40, 8, 152064, tied=False),
    "32b": Shape(5120, 27648, 64, 40, 8, 152064, tied=False),
    "72b": Shape(8192, 29568, 80, 64, 8, 152064, tied=False),
    "120b": Shape(10240, 36864, 86, 80, 8, 152064, tied=False),
}

MAX_TOKENS = 32768  # in a row of Qwen2.5


def qwen2_config(name: str, tokens: int = 0, layers: int | None = None) -> "Qwen2Config":
    """The transformers configuration of a shape in `SHAPES`.

    Args:
        tokens: length of the longest row, if it is beyond Qwen2.5's positions.
        layers: number of layers instead of the shape's.
    """
    from transformers import Qwen2Config

    shape = SHAPES[name]
    return Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers if layers is None else layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max(tokens, MAX_TOKENS),
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=shape.tied,
        dtype="bfloat16",
    )
