"""Data of the tiny models: small sizes by field name, and what single families need besides."""

from typing import Any

from transformers import MusicgenDecoderConfig, MusicgenMelodyDecoderConfig

VOCAB = 128
MIN_LAYERS = 3
MAX_LAYERS = 6

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE = 32, 4, 2, 8, 64
POSITIONS, WINDOW, CHUNK = 64, 6, 4
EXPERTS, TOP_K = 4, 2

# Text of the tests is drawn from ids 10 to VOCAB - 11, so that it never holds a special token.
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

LAYER_COUNTS = [
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "num_blocks",
    "depth",
]


def _each(names: str, size: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), size)


SIZES: dict[str, int] = {
    **_each("vocab_size decoder_vocab_size vocab_size_per_layer_input audio_vocab_size", VOCAB),
    **_each("hidden_size n_embd d_model embedding_dim embedding_size emb_dim dim_model", HIDDEN),
    **_each("word_embed_proj_dim input_size lru_width attention_hidden_size", HIDDEN),
    **_each("input_embedding_size output_embedding_size", HIDDEN),
    **_each("intermediate_size ffn_dim d_inner dff dim_ff n_inner decoder_ffn_dim", WIDE),
    **_each("encoder_ffn_dim ffn_hidden_size feed_forward_size intermediate_size_mlp", WIDE),
    **_each("dense_intermediate_size", WIDE),
    **_each("moe_intermediate_size expert_ffn_hidden_size shared_intermediate_size", 16),
    **_each("shared_expert_intermediate_size shared_experts_intermediate_size", 16),
    **_each("moe_shared_expert_intermediate_size prefix_dense_intermediate_size", 16),
    **_each("num_attention_heads n_head n_heads attention_heads decoder_attention_heads", HEADS),
    **_each("encoder_attention_heads num_decoder_attention_heads num_heads", HEADS),
    **_each("num_encoder_attention_heads swa_num_attention_heads num_query_groups", HEADS),
    **_each("num_key_value_heads num_kv_heads swa_num_key_value_heads", KV_HEADS),
    **_each("head_dim d_head dim_head attention_head_size swa_head_dim attention_head_dim", 8),
    **_each("kv_channels v_head_dim qk_nope_head_dim", HEAD_DIM),
    **_each("qk_head_dim global_head_dim", 16),
    **_each("qk_rope_head_dim rotary_dim", 4),
    **_each("q_lora_rank kv_lora_rank o_lora_rank adapter_rank gated_norm_rank", 16),
    **_each("index_n_heads indexer_n_heads", 2),
    **_each("index_head_dim indexer_head_dim", HEAD_DIM),
    **_each("index_topk index_topk_blocks index_block_size", CHUNK),
    **_each("max_position_embeddings n_positions n_ctx max_seq_len context_length", POSITIONS),
    **_each("max_target_positions max_source_positions model_max_length", POSITIONS),
    **_each("original_max_position_embeddings", POSITIONS // 2),
    **_each("sliding_window sliding_window_size window_size attention_window_size", WINDOW),
    **_each("local_attention keep_window_size local_attention_window_len", WINDOW),
    **_each("attention_chunk_size chunk_size mamba_chunk_size block_size", CHUNK),
    **_each("num_experts num_local_experts n_routed_experts moe_num_experts", EXPERTS),
    **_each("num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts", TOP_K),
    **_each("n_group num_expert_group", 2),
    **_each("topk_group", 1),
    **_each("moe_latent_size", 16),
    **_each("first_k_dense_replace num_dense_layers moe_layer_start_index", 1),
    **_each("state_size ssm_state_size mamba_d_state", 8),
    **_each("mamba_num_heads mamba_n_heads", HEADS),
    **_each("mamba_d_head mamba_head_dim mamba_headdim", 16),
    **_each("mamba_d_ssm", 64),
    **_each("n_groups mamba_n_groups mamba_ngroups", 2),
    **_each("time_step_rank mamba_dt_rank", 4),
    **_each("linear_num_heads linear_num_key_heads", 2),
    **_each("linear_num_value_heads", 4),
    **_each("linear_head_dim linear_key_head_dim linear_value_head_dim", HEAD_DIM),
    **_each("hidden_size_per_layer_input laurel_rank router_hidden_size d_rel", 8),
    **_each("type_vocab_size", 2),
    **_each("lsh_attn_chunk_length local_attn_chunk_length", CHUNK),
    **_each("image_size", 16),
    **_each("patch_size", 4),
    **_each("out_hidden_size text_hidden_size output_dim projection_dim", HIDDEN),
    **_each("adapter_in_dim adapter_out_dim adapter_input_size projector_hidden_size", HIDDEN),
    **_each("audio_hidden_size vision_hidden_size image_text_hidden_size hidden_dim", HIDDEN),
    **_each("encoder_hidden_size projection_hidden_size image_token_embed_dim", HIDDEN),
    **_each("projection_intermediate_size alignment_intermediate_size mlp_dim", WIDE),
    **_each("projection_hidden_dim share_expert_dim", WIDE),
    **_each("num_position_embeddings num_patches", 64),
    **_each("num_mel_bins n_mel_bins feature_size downsample_hidden_size", 16),
    **_each("latent_query_num image_seq_length num_image_tokens num_query_tokens", 4),
}

_NO_LAYER_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}

# Families whose causal-LM class takes another configuration than the one the mapping names.
CONFIG_CLASS = {"musicgen": MusicgenDecoderConfig, "musicgen_melody": MusicgenMelodyDecoderConfig}

# Switches that make an encoder's decoder variant a causal language model.
CHOICES: dict[str, Any] = {"is_decoder": True, "causal": True}

# Arguments without which a configuration class has no default instance.
CONSTRUCTOR: dict[str, dict[str, Any]] = {"gemma4_assistant": {"text_config": _NO_LAYER_INPUTS}}

_DOTS3_SLIDING = {
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": HEADS,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 12,
    "swa_v_head_dim": HEAD_DIM,
}
_QWEN4 = {
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
    "ple_embed_dim": HIDDEN,
    "ngram_vocab_size_base": 100,
    "heads_per_ngram": 2,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "eos_token_id": 2,
}
_GEMMA3N = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
    "intermediate_size": [WIDE] * 4,
}

# Where the general rule is not enough: shapes that must agree with each other, required choices
# for which the class has no default, and switches without which a part would not be shown.
OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 64,
        "patching_threshold": 0.0,
        "patcher_config": {"vocab_size": 260},
        "encoder_config": {"vocab_size": 260, "hidden_size_global": HIDDEN},
        "decoder_config": {"vocab_size": 260, "hidden_size_global": HIDDEN},
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "cpmant": {"init_std": 0.02},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": TOP_K, "first_k_dense_replace": 1},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
    },
    "dots1": {
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": TOP_K,
        "first_k_dense_replace": 1,
    },
    "dots3_note": {
        "text_config": _DOTS3_SLIDING,
        "vision_config": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    },
    "dots3_note_text": _DOTS3_SLIDING,
    "falcon_h1": {"mamba_d_head": 16},
    "gemma3n_text": _GEMMA3N,
    "gemma4": {"text_config": {"global_head_dim": 16}},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified": {"text_config": {"global_head_dim": 16}},
    "gemma4_unified_text": {"global_head_dim": 16},
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "full"]},
    "gpt_neo": {
        "num_layers": 4,
        "attention_types": [[["global", "local"], 2]],
        "attention_layers": ["global", "local"] * 2,
    },
    "gemma4_assistant": {"text_config": _NO_LAYER_INPUTS},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "moe_topk": TOP_K, "num_experts": EXPERTS},
    "inkling2_text": {"n_layers_per_attn_res_block": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"head_dim": 4, "zero_expert_num": 2},
    "mamba2": {"head_dim": 16},
    "minicpm3": {"dim_model_base": HIDDEN // 2},
    "ministral": {"head_dim": HEAD_DIM},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "nemotron": {"head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "axial_pos_embds": False,
        "local_attn_chunk_length": POSITIONS,
        "lsh_attn_chunk_length": POSITIONS,
    },
    "roc_bert": {
        "shape_vocab_size": VOCAB,
        "shape_embed_dim": 8,
        "pronunciation_vocab_size": VOCAB,
        "pronunciation_embed_dim": 8,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention"] * 2 + ["hybrid", "linear_attention"] * 2,
    },
}

_MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
}
_TWO_LEVELS = {"vision_config": {"deepstack_visual_indexes": [0, 1]}, "text_config": _MROPE}
_WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1]}
_PINPOINTS = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
_SQUARES = {"image_size": [16, 16], "patch_size": [4, 4]}
_CODES = {
    "base_channels": 32,
    "channel_multiplier": [1, 2],
    "num_res_blocks": 1,
    "num_embeddings": 16,
    "embed_dim": 8,
    "latent_channels": 8,
}
_GEMMA4 = {
    "text_config": {"global_head_dim": 16},
    "vision_config": {"position_embedding_size": 16, "pooling_kernel_size": 2},
}
_SAM = {"output_channels": 8, "mlp_dim": WIDE, "global_attn_indexes": [1]}
_MINICPM = {
    "image_token_id": VOCAB - 1,
    "video_token_id": VOCAB - 2,
    "insert_layer_id": 1,
    "vision_config": {"insert_layer_id": 1},
    "text_config": _MROPE,
}

# What multimodal models need besides: sizes of towers that agree, where the class has no default.
TOWERS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "chameleon": {
        "vq_config": _CODES | {"resolution": 16},
        "vocabulary_map": {"<image>": VOCAB - 1}
        | {f"IMGIMG{c}Z": 10 + i for i, c in enumerate("ABCDEFGH")},
    },
    "cohere_compass": {
        "text_config": OVERRIDES["cohere_compass_text"],
        "vision_config": {"deepstack_visual_indexes": [0, 1]},
    },
    "cosmos3_edge": {"text_config": _MROPE},
    "cosmos3_omni": _TWO_LEVELS,
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_experts_per_tok": TOP_K,
        },
        "vision_config": {"sam_config": _SAM | {"downsample_channels": [16, 32]}},
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": _SAM},
    "diffusion_gemma": {"text_config": {"num_experts": EXPERTS, "top_k_experts": TOP_K}},
    "emu3": {
        "vq_config": _CODES,
        "vocabulary_map": {"<image>": VOCAB - 1, "<|extra_200|>": VOCAB - 2}
        | {f"<|visual token {i:06}|>": 10 + i for i in range(16)},
    },
    "unlimited_ocr": {"vision_config": {"sam_config": _SAM | {"downsample_channels": [16, 32]}}},
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [16, 16],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            },
        }
    },
    "exaone4_5": {"text_config": {"model_type": "exaone4"}, "vision_config": _WINDOWS},
    "glmasr": {"audio_config": {"intermediate_size": 4 * HIDDEN}},
    "muse_glimmer": {"out_hidden_size": 4 * HIDDEN},
    "muse_spark": {
        "out_hidden_size": 4 * HIDDEN,
        "text_config": {"moe_hidden_size": HIDDEN},
        "audio_config": {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4},
    },
    "florence2": {"vision_config": {"embed_dim": [8, 16, 32, 64]}},
    "gemma4": _GEMMA4,
    "gemma4_unified": {
        "vision_config": {
            "model_patch_size": 12,
            "mm_embed_dim": HIDDEN,
            "mm_posemb_size": 16,
            "output_proj_dims": HIDDEN,
        }
    },
    "glm46v": {"text_config": _MROPE},
    "glm4v": {"text_config": _MROPE},
    "glm4v_moe": {"text_config": _MROPE | {"head_dim": 16}},
    "glm_ocr": {"text_config": _MROPE},
    "glmga": {"text_config": _MROPE},
    "hyperclovax_vision_v2": {"vision_config": _WINDOWS},
    "paddleocr_vl": {"text_config": _MROPE},
    "phi4_multimodal": {"vision_config": {"crop_size": 16}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": HIDDEN // 4}},
    "gemma3": {"mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "glm5_next": {"text_config": {"index_kpool": 2}},
    "got_ocr2": {"vision_config": _SAM},
    "pp_chart2table": {"vision_config": _SAM},
    "granite_docling": {"vision_config": {"deepstack_visual_indexes": [0, 1], "scale_factor": 2}},
    "granite4_vision": {
        "vision_config": {"hidden_size": 2 * HIDDEN},
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "downsample_rate": "1/2",
        **_PINPOINTS,
    },
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "hunyuan_vl": {
        "text_config": {"head_dim": HEAD_DIM},
        "vision_config": {
            "max_image_size": 32,
            "min_image_size": 16,
            "img_max_token_num": 64,
            "max_vit_seq_len": 64,
        },
    },
    "idefics2": {
        "perceiver_config": {
            "resampler_n_latents": 4,
            "resampler_n_heads": HEADS,
            "resampler_head_dim": HEAD_DIM,
        }
    },
    "idefics": {"vision_config": {"embed_dim": HIDDEN}},
    "kosmos-2": {"text_config": {"embed_dim": HIDDEN}},
    "kosmos-2.5": {"text_config": {"embed_dim": HIDDEN}},
    "inkling2": {"text_config": {"n_layers_per_attn_res_block": 2}},
    "internvl": {"vision_config": _SQUARES},
    "qianfan_ocr": {"vision_config": _SQUARES},
    "janus": {"vq_config": _CODES},
    "llama4": {
        "vision_config": {
            "intermediate_size": 4 * HIDDEN,
            "vision_output_dim": HIDDEN,
            "projector_input_dim": HIDDEN,
            "projector_output_dim": HIDDEN,
        }
    },
    "llava_next": _PINPOINTS,
    "llava_next_video": _PINPOINTS,
    "llava_onevision": _PINPOINTS,
    "minicpm_ocr": _MINICPM,
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": _MINICPM,
    "mistral_large4": {"text_config": {"kv_source_layers": [0, 1, 2, 3, 4, 5]}},
    "mllama": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {
            "intermediate_layers_indices": [0, 1],
            "num_global_layers": 2,
            "vision_output_dim": 3 * HIDDEN,
        },
    },
    "molmo2": {
        "adapter_config": {"vision_feature_layer": [2, 1]},
        "vision_config": {"image_size": [16, 16], "num_position_embeddings": 16},
    },
    "nemotron_h_omni": {
        "vision_config": {
            "video_temporal_patch_size": 2,
            "patch_dim": 48,
            "video_patch_dim": 96,
            "max_img_size": 32,
        },
        "image_token_id": VOCAB - 1,
        "video_token_id": VOCAB - 2,
        "vision_hidden_size": HIDDEN,
    },
    "qwen2_vl": {"text_config": _MROPE, "vision_config": {"embed_dim": HIDDEN}},
    "qwen2_5_vl": {"text_config": _MROPE, "vision_config": _WINDOWS},
    "qwen2_5_omni_thinker": {
        "text_config": _MROPE,
        "vision_config": _WINDOWS,
        "audio_config": {"n_window": 8},
    },
    "qwen3_omni_moe_thinker": {
        **_TWO_LEVELS,
        "audio_config": {"n_window": 8, "n_window_infer": 32},
    },
    "qwen3_asr": {"audio_config": {"n_window": 50, "n_window_infer": 200}},
    "granite_speech": {"window_size": 4, "downsample_rate": 2},
    "granite_speech_plus": {"window_size": 4, "downsample_rate": 2},
    "qwen3_vl": _TWO_LEVELS,
    "qwen3_vl_moe": _TWO_LEVELS,
    "voxtral": {
        "audio_token_id": VOCAB - 1,
        "audio_config": {"intermediate_size": 4 * HIDDEN},
        "text_config": {"head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS},
    },
    "voxtral_realtime": {"audio_config": {"intermediate_size": 4 * HIDDEN}},
}

_GEMMA4_SHARING = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

# (family, changes) by name: what released checkpoints switch on and the default leaves off.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4 keys and values shared between layers": ("gemma4_text", _GEMMA4_SHARING),
    "gemma4 unified keys and values shared": ("gemma4_unified_text", _GEMMA4_SHARING),
    "gemma4 mixture of experts": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": EXPERTS,
            "top_k_experts": TOP_K,
            "moe_intermediate_size": 16,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2 sliding window": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "mistral full attention": ("mistral", {"sliding_window": None}),
    "big_bird full attention": ("big_bird", {"attention_type": "original_full"}),
    "opt with layers left out": ("opt", {"layerdrop": 0.1}),
    "zamba2 with several hybrid layers": (
        "zamba2",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "num_mem_blocks": 1,
        },
    ),
    "bert as an encoder": ("bert", {"is_decoder": False}),
}
