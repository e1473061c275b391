"""The models that people fine-tune: their published config.json as figures.

`CONFIGS` has what decides a model's structure, `PUBLISHED` the hub's id and the number of
parameters that the hub counts in its weights; a test compares the latter with the structure.
"""

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig


@dataclass(frozen=True)
class Published:
    """A model on the hub: its id, its name for people, and the parameters of its weights."""

    hub: str
    name: str
    parameters: int


PUBLISHED = {
    "smollm3-3b": Published("HuggingFaceTB/SmolLM3-3B", "SmolLM3 3B", 3_075_098_624),
    "llama-3.2-1b": Published("meta-llama/Llama-3.2-1B-Instruct", "Llama 3.2 1B", 1_235_814_400),
    "llama-3.2-3b": Published("meta-llama/Llama-3.2-3B-Instruct", "Llama 3.2 3B", 3_212_749_824),
    "llama-3.1-8b": Published("meta-llama/Llama-3.1-8B-Instruct", "Llama 3.1 8B", 8_030_261_248),
    "llama-3.3-70b": Published(
        "meta-llama/Llama-3.3-70B-Instruct", "Llama 3.3 70B", 70_553_706_496
    ),
    "qwen2.5-7b": Published("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5 7B", 7_615_616_512),
    "qwen2.5-vl-7b": Published("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL 7B", 8_292_166_656),
    "qwen3-4b": Published("Qwen/Qwen3-4B", "Qwen3 4B", 4_022_468_096),
    "qwen3-8b": Published("Qwen/Qwen3-8B", "Qwen3 8B", 8_190_735_360),
    "qwen3-14b": Published("Qwen/Qwen3-14B", "Qwen3 14B", 14_768_307_200),
    "qwen3-32b": Published("Qwen/Qwen3-32B", "Qwen3 32B", 32_762_123_264),
    "qwen3-30b-a3b": Published("Qwen/Qwen3-30B-A3B", "Qwen3 30B-A3B", 30_532_122_624),
    "gemma-3-4b": Published("google/gemma-3-4b-it", "Gemma 3 4B", 4_300_079_472),
    "gemma-3-12b": Published("google/gemma-3-12b-it", "Gemma 3 12B", 12_187_325_040),
    "gemma-3-27b": Published("google/gemma-3-27b-it", "Gemma 3 27B", 27_432_406_640),
    "mistral-7b": Published("mistralai/Mistral-7B-Instruct-v0.3", "Mistral 7B", 7_248_023_552),
    "mistral-small-24b": Published(
        "mistralai/Mistral-Small-24B-Instruct-2501", "Mistral Small 24B", 23_572_403_200
    ),
    "phi-4": Published("microsoft/phi-4", "Phi-4 14B", 14_659_507_200),
    "gpt-oss-20b": Published("openai/gpt-oss-20b", "gpt-oss 20B", 20_914_757_184),
    "gpt-oss-120b": Published("openai/gpt-oss-120b", "gpt-oss 120B", 116_829_156_672),
}

_LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA_ROPE = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN_MOE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "vocab_size": 151936,
    "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128,
    "max_position_embeddings": 131072,
}  # fmt: skip
_MISTRAL: dict[str, Any] = {
    "model_type": "mistral", "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "sliding_window": None, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
_GEMMA3: dict[str, Any] = {
    "model_type": "gemma3", "mm_tokens_per_image": 256, "image_token_index": 262144,
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
        "num_hidden_layers": 27, "num_attention_heads": 16, "patch_size": 14,
        "image_size": 896, "vision_use_head": False,
    },
}  # fmt: skip
_GEMMA3_TEXT: dict[str, Any] = {
    "sliding_window": 1024, "vocab_size": 262208, "max_position_embeddings": 131072,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "smollm3-3b": {
        "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
        "vocab_size": 128256, "rope_theta": 5e6, "max_position_embeddings": 65536,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": _LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True,
        "rope_scaling": {"factor": 32.0, **_LLAMA_ROPE},
    },
    "llama-3.2-3b": _LLAMA | {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "head_dim": 128, "tie_word_embeddings": True,
        "rope_scaling": {"factor": 32.0, **_LLAMA_ROPE},
    },
    "llama-3.1-8b": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "rope_scaling": {"factor": 8.0, **_LLAMA_ROPE},
    },
    "llama-3.3-70b": _LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "rope_scaling": {"factor": 8.0, **_LLAMA_ROPE},
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "rope_theta": 1e6, "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "qwen3-4b": _QWEN3 | {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-14b": _QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "qwen3-32b": _QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "qwen3-30b-a3b": {"model_type": "qwen3_moe", **_QWEN_MOE, "rope_theta": 1e6},
    "mistral-7b": _MISTRAL | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "vocab_size": 32768, "rope_theta": 1e6,
    },
    "mistral-small-24b": _MISTRAL | {
        "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
        "vocab_size": 131072, "rope_theta": 1e8,
    },
    "phi-4": {
        "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10,
        "vocab_size": 100352, "rope_theta": 250000.0, "max_position_embeddings": 16384,
        "original_max_position_embeddings": 16384, "sliding_window": None,
        "pad_token_id": 100349, "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "gemma-3-4b": _GEMMA3 | {
        "text_config": _GEMMA3_TEXT | {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        },
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336,
        "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096, "query_pre_attn_scalar": 256,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "attn_implementation": "eager",  # older transformers take sdpa, and leave the caps out
    },
    "gemma-3-12b": _GEMMA3 | {
        "text_config": _GEMMA3_TEXT | {
            "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        },
    },
    "gemma-3-27b": _GEMMA3 | {
        "text_config": _GEMMA3_TEXT | {
            "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
            "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
            "query_pre_attn_scalar": 168,
        },
    },
    "qwen2.5-vl-7b": {
        "model_type": "qwen2_5_vl", "image_token_id": 151655, "tie_word_embeddings": False,
        "text_config": {
            "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]
            },
        },
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "out_hidden_size": 3584,
        },
    },
    "qwen3-vl-30b-a3b": {
        "model_type": "qwen3_vl_moe", "image_token_id": 151655, "tie_word_embeddings": False,
        "text_config": {
            **_QWEN_MOE,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
            "patch_size": 16, "out_hidden_size": 2048, "deepstack_visual_indexes": [8, 16, 24],
        },
    },
}  # fmt: skip


def configuration(name: str, layers: int | None = None) -> Any:
    """The configuration of a model, of all its decoder layers or the first `layers`."""
    values = dict(CONFIGS[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    text = config.get_text_config()
    if layers is not None:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    text.use_cache = False
    return config
