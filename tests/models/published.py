"""Configurations of published checkpoints, written down as their config.json has them.

Left out is what says nothing about the model: `architectures`, versions of transformers, names of folders.
Qwen2.5-VL has the fields of its language model at the top, and `rope_scaling` of type "mrope"; Qwen3-VL has a
`text_config`, and `rope_scaling` with `rope_type`; the others have the configuration of another family's
language model inside of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Published:
    """One checkpoint.

    config: what its config.json says.
    kv_bytes_per_token: in bfloat16: 2 x layers x KV heads x head size x 2 bytes.
    num_parameters: of all tensors in its files; None where no page says so to the last digit.
    context_tokens: of the language model.
    has_head: whether the files hold a head of its own; else it is tied to the embedding of tokens.
    """

    config: Config
    kv_bytes_per_token: int
    context_tokens: int
    num_parameters: int | None = None
    has_head: bool = True


# Qwen2.5-VL


def _qwen2_5_vl(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> Config:
    vision = {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "model_type": "qwen2_5_vl",
        "num_heads": 16,
        "out_hidden_size": hidden,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
    } | more.pop("vision", {})
    return {
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "image_token_id": 151655,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": 128000,
        "max_window_layers": layers,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "video_token_id": 151656,
        "vision_config": vision,
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
        "vision_token_id": 151654,
        "vocab_size": 152064,
    } | more


_LARGE_TOWER = {"vision": {"intermediate_size": 3456}}

# Qwen3-VL

_QWEN3_VL_TOWER = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 4304,
    "model_type": "qwen3_vl",
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN3_VL_SMALL_TOWER = _QWEN3_VL_TOWER | {
    "deepstack_visual_indexes": [5, 11, 17],
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
}


def _qwen3_vl(
    text: Config, tower: Config = _QWEN3_VL_TOWER, *, tied: bool = False, family: str = "qwen3_vl"
) -> Config:
    return {
        "image_token_id": 151655,
        "model_type": family,
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 262144,
            "model_type": f"{family}_text",
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
            "rope_theta": 5000000,
            "use_cache": True,
            "vocab_size": 151936,
        }
        | ({"tie_word_embeddings": True} if tied else {})
        | text,
        "tie_word_embeddings": tied,
        "video_token_id": 151656,
        "vision_config": tower | {"model_type": family, "out_hidden_size": text["hidden_size"]},
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }


_EXPERTS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def _qwen3_vl_moe(text: Config) -> Config:
    return _qwen3_vl(_EXPERTS | text, family="qwen3_vl_moe")


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> Config:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


# InternVL

_INTERN_VIT_300M = {
    "attention_bias": True,
    "attention_dropout": 0.0,
    "dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 1024,
    "image_size": [448, 448],
    "initializer_factor": 0.1,
    "initializer_range": 1e-10,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-06,
    "layer_scale_init_value": 0.1,
    "model_type": "internvl_vision",
    "norm_type": "layer_norm",
    "num_attention_heads": 16,
    "num_channels": 3,
    "num_hidden_layers": 24,
    "patch_size": [14, 14],
    "projection_dropout": 0.0,
    "torch_dtype": "bfloat16",
    "use_absolute_position_embeddings": True,
    "use_mask_token": False,
    "use_mean_pooling": True,
    "use_qk_norm": False,
}
_INTERN_VIT_6B = _INTERN_VIT_300M | {
    "attention_bias": False,
    "hidden_size": 3200,
    "intermediate_size": 12800,
    "norm_type": "rms_norm",
    "num_attention_heads": 25,
    "num_hidden_layers": 45,
    "use_qk_norm": True,
}


def _internvl(text: Config, image_token_id: int, tower: Config = _INTERN_VIT_300M) -> Config:
    return {
        "downsample_ratio": 0.5,
        "image_seq_length": 256,
        "image_token_id": image_token_id,
        "model_type": "internvl",
        "projector_hidden_act": "gelu",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": tower,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }


def _internvl3(sizes: Config, tower: Config = _INTERN_VIT_300M) -> Config:
    text = {
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 32768,
        "max_window_layers": 70,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151674,
    }
    return _internvl(text | sizes, 151667, tower)


def _internvl3_5(sizes: Config, tower: Config = _INTERN_VIT_300M) -> Config:
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    return _internvl(text | sizes, 151671, tower)


def _internvl3_5_moe(sizes: Config, tower: Config = _INTERN_VIT_300M) -> Config:
    experts = {"model_type": "qwen3_moe", "router_aux_loss_coef": 0.001, "output_router_logits": False}
    return _internvl3_5(experts | _EXPERTS | sizes, tower)


# LLaVA-OneVision


def _llava_onevision(sizes: Config, *, tied: bool = False) -> Config:
    steps = (384, 768, 1152, 1536, 1920, 2304)
    return {
        "ignore_index": -100,
        "image_grid_pinpoints": [[height, width] for height in steps for width in steps],
        "image_token_index": 151646,
        "model_type": "llava_onevision",
        "projector_hidden_act": "gelu",
        "text_config": {
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "max_window_layers": 24,
            "model_type": "qwen2",
            "rope_theta": 1000000.0,
            "tie_word_embeddings": tied,
            "torch_dtype": "bfloat16",
            "vocab_size": 152000,
        }
        | sizes,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_image_newline_parameter": True,
        "video_token_index": 151647,
        "vision_aspect_ratio": "anyres_max_9",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 384,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 26,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }


# SmolVLM2


def _smolvlm2(text: Config, vision: Config, scale_factor: int) -> Config:
    return {
        "image_token_id": 49190,
        "model_type": "smolvlm",
        "pad_token_id": 128002,
        "scale_factor": scale_factor,
        "text_config": {
            "head_dim": 64,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "model_type": "llama",
            "neftune_noise_alpha": 0.0,
            "pad_token_id": 2,
            "pixel_shuffle_factor": scale_factor,
            "qk_layer_norms": False,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_theta": 100000,
            "torch_dtype": "bfloat16",
            "use_resampler": False,
            "vocab_size": 49280,
        }
        | text,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": False,
        "use_reentrant_checkpointing": False,
        "vision_config": {
            "hidden_size": 768,
            "image_size": 512,
            "max_image_size": {"longest_edge": 512},
            "model_type": "smolvlm_vision",
            "num_attention_heads": 12,
            "patch_size": 16,
            "size": {"longest_edge": 2048},
            "tie_word_embeddings": False,
            "use_base_siglip": False,
        }
        | vision,
        "vocab_size": 49280,
    }


_SO400M = {
    "hidden_size": 1152,
    "image_size": 384,
    "intermediate_size": 4304,
    "max_image_size": {"longest_edge": 384},
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "size": {"longest_edge": 1536},
}

_QWEN2_5, _QWEN3, _INTERN3, _INTERN3_5, _LLAVA, _SMOL = 128_000, 262_144, 32_768, 40_960, 32_768, 8_192

PUBLISHED: Mapping[str, Published] = {
    "Qwen2.5-VL-3B": Published(
        _qwen2_5_vl(2048, 11008, 36, 16, 2, tie_word_embeddings=True, vocab_size=151936),
        36_864,
        _QWEN2_5,
        3_754_622_976,
        has_head=False,
    ),
    "Qwen2.5-VL-7B": Published(_qwen2_5_vl(3584, 18944, 28, 28, 4), 57_344, _QWEN2_5, 8_292_166_656),
    "Qwen2.5-VL-32B": Published(_qwen2_5_vl(5120, 27648, 64, 40, 8, **_LARGE_TOWER), 262_144, _QWEN2_5),
    "Qwen2.5-VL-72B": Published(_qwen2_5_vl(8192, 29568, 80, 64, 8, **_LARGE_TOWER), 327_680, _QWEN2_5),
    "Qwen3-VL-2B": Published(
        _qwen3_vl(_sizes(2048, 6144, 28, 16, 8), _QWEN3_VL_SMALL_TOWER, tied=True),
        114_688,
        _QWEN3,
        2_127_532_032,
        has_head=False,
    ),
    "Qwen3-VL-4B": Published(
        _qwen3_vl(_sizes(2560, 9728, 36, 32, 8), _QWEN3_VL_SMALL_TOWER, tied=True),
        147_456,
        _QWEN3,
        4_437_815_808,
        has_head=False,
    ),
    "Qwen3-VL-8B": Published(_qwen3_vl(_sizes(4096, 12288, 36, 32, 8)), 147_456, _QWEN3, 8_767_123_696),
    "Qwen3-VL-32B": Published(_qwen3_vl(_sizes(5120, 25600, 64, 64, 8)), 262_144, _QWEN3),
    "Qwen3-VL-30B-A3B": Published(
        _qwen3_vl_moe(_sizes(2048, 6144, 48, 32, 4) | {"moe_intermediate_size": 768}),
        98_304,
        _QWEN3,
        31_070_754_032,
    ),
    "Qwen3-VL-235B-A22B": Published(
        _qwen3_vl_moe(_sizes(4096, 12288, 94, 64, 4) | {"moe_intermediate_size": 1536}), 192_512, _QWEN3
    ),
    "InternVL3-1B": Published(_internvl3(_sizes(896, 4864, 24, 14, 2)), 12_288, _INTERN3),
    "InternVL3-2B": Published(_internvl3(_sizes(1536, 8960, 28, 12, 2)), 28_672, _INTERN3),
    "InternVL3-8B": Published(_internvl3(_sizes(3584, 18944, 28, 28, 4)), 57_344, _INTERN3),
    "InternVL3-14B": Published(_internvl3(_sizes(5120, 13824, 48, 40, 8)), 196_608, _INTERN3),
    "InternVL3-38B": Published(_internvl3(_sizes(5120, 27648, 64, 40, 8), _INTERN_VIT_6B), 262_144, _INTERN3),
    "InternVL3-78B": Published(_internvl3(_sizes(8192, 29568, 80, 64, 8), _INTERN_VIT_6B), 327_680, _INTERN3),
    "InternVL3.5-1B": Published(_internvl3_5(_sizes(1024, 3072, 28, 16, 8)), 114_688, _INTERN3_5),
    "InternVL3.5-2B": Published(_internvl3_5(_sizes(2048, 6144, 28, 16, 8)), 114_688, _INTERN3_5),
    "InternVL3.5-4B": Published(_internvl3_5(_sizes(2560, 9728, 36, 32, 8)), 147_456, _INTERN3_5),
    "InternVL3.5-8B": Published(_internvl3_5(_sizes(4096, 12288, 36, 32, 8)), 147_456, _INTERN3_5),
    "InternVL3.5-14B": Published(_internvl3_5(_sizes(5120, 17408, 40, 40, 8)), 163_840, _INTERN3_5),
    "InternVL3.5-38B": Published(
        _internvl3_5(_sizes(5120, 25600, 64, 64, 8), _INTERN_VIT_6B), 262_144, _INTERN3_5
    ),
    "InternVL3.5-30B-A3B": Published(
        _internvl3_5_moe(_sizes(2048, 6144, 48, 32, 4) | {"moe_intermediate_size": 768}), 98_304, _INTERN3_5
    ),
    "InternVL3.5-241B-A28B": Published(
        _internvl3_5_moe(_sizes(4096, 12288, 94, 64, 4) | {"moe_intermediate_size": 1536}, _INTERN_VIT_6B),
        192_512,
        _INTERN3_5,
    ),
    "LLaVA-OneVision-0.5B": Published(
        _llava_onevision(_sizes(896, 4864, 24, 14, 2), tied=True), 12_288, _LLAVA, has_head=False
    ),
    "LLaVA-OneVision-7B": Published(_llava_onevision(_sizes(3584, 18944, 28, 28, 4)), 57_344, _LLAVA),
    "LLaVA-OneVision-72B": Published(_llava_onevision(_sizes(8192, 29568, 80, 64, 8)), 327_680, _LLAVA),
    "SmolVLM2-256M": Published(_smolvlm2(_sizes(576, 1536, 30, 9, 3), {}, 4), 23_040, _SMOL),
    "SmolVLM2-500M": Published(_smolvlm2(_sizes(960, 2560, 32, 15, 5), {}, 4), 40_960, _SMOL),
    "SmolVLM2-2.2B": Published(
        _smolvlm2(_sizes(2048, 8192, 24, 32, 32) | {"rope_theta": 130000}, _SO400M, 3),
        196_608,
        _SMOL,
    ),
}


# Families whose processors' files are not written down here.


def _qwen2_vl(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Config:
    vision = {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": hidden,
        "in_chans": 3,
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    }
    return {
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 32768,
        "model_type": "qwen2_vl",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vision_config": vision,
        "vocab_size": 152064,
    } | more


QWEN2_VL: Mapping[str, Published] = {
    "Qwen2-VL-2B": Published(
        _qwen2_vl(1536, 8960, 28, 12, 2, vocab_size=151936, tie_word_embeddings=True),
        28_672,
        32_768,
        has_head=False,
    ),
    "Qwen2-VL-7B": Published(_qwen2_vl(3584, 18944, 28, 28, 4), 57_344, 32_768),
    "Qwen2-VL-72B": Published(_qwen2_vl(8192, 29568, 80, 64, 8), 327_680, 32_768),
}

_GLM_ROPE = {
    "mrope_section": [8, 12, 12],
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "rope_type": "default",
}
_GLM_TOWER = {
    "depth": 24,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "image_size": 336,
    "intermediate_size": 13696,
    "model_type": "glm4v_vision",
    "num_heads": 12,
    "out_hidden_size": 4096,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
GLM: Mapping[str, Published] = {
    "GLM-4.1V-9B": Published(
        {
            "model_type": "glm4v",
            "text_config": {
                "hidden_act": "silu",
                "hidden_size": 4096,
                "intermediate_size": 13696,
                "max_position_embeddings": 65536,
                "model_type": "glm4v_text",
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 2,
                "rms_norm_eps": 1e-05,
                "rope_parameters": _GLM_ROPE,
                "vocab_size": 151552,
            },
            "tie_word_embeddings": False,
            "vision_config": _GLM_TOWER,
        },
        40_960,
        65_536,
    ),
    "GLM-4.5V-106B-A12B": Published(
        {
            "model_type": "glm4v_moe",
            "text_config": {
                "attention_bias": True,
                "first_k_dense_replace": 1,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 4096,
                "intermediate_size": 10944,
                "max_position_embeddings": 65536,
                "model_type": "glm4v_moe_text",
                "moe_intermediate_size": 1408,
                "n_group": 1,
                "n_routed_experts": 128,
                "n_shared_experts": 1,
                "norm_topk_prob": True,
                "num_attention_heads": 96,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 46,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05,
                "rope_parameters": _GLM_ROPE,
                "routed_scaling_factor": 1.0,
                "topk_group": 1,
                "vocab_size": 151552,
            },
            "tie_word_embeddings": False,
            "vision_config": _GLM_TOWER | {"intermediate_size": 10944, "model_type": "glm4v_moe_vision"},
        },
        188_416,
        65_536,
    ),
}


def _video_llama_3(sizes: Config, vocabulary: int, *, tied: bool) -> Config:
    return {
        "image_token_id": 151655,
        "model_type": "video_llama_3",
        "text_config": {
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "model_type": "qwen2",
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": tied,
            "vocab_size": vocabulary,
        }
        | sizes,
        "tie_word_embeddings": tied,
        "video_token_id": 151656,
        "vision_config": {
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "layer_norm_eps": 1e-06,
            "model_type": "video_llama_3_vision",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
        },
    }


VIDEO_LLAMA: Mapping[str, Published] = {
    "VideoLLaMA3-2B": Published(
        _video_llama_3(_sizes(1536, 8960, 28, 12, 2), 151936, tied=True), 28_672, 32_768, has_head=False
    ),
    "VideoLLaMA3-7B": Published(
        _video_llama_3(_sizes(3584, 18944, 28, 28, 4), 152064, tied=False), 57_344, 32_768
    ),
}
