"""Configurations of Gemma 4 as their config.json has them, as far as they say something about the model.

They are apart from `tests/models/published.py`: their processor files are not written down there.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.models.published import Config, Published, _sizes

# Of the smaller models, which hear too.
_AUDIO = {
    "attention_chunk_size": 12,
    "hidden_size": 1024,
    "model_type": "gemma4_audio",
    "num_attention_heads": 8,
    "num_hidden_layers": 12,
    "output_proj_dims": 1536,
}
_SMALL_TOWER = {
    "head_dim": 64,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 16,
    "num_key_value_heads": 12,
    "use_clipped_linears": True,
}
_TOWER = {
    "head_dim": 72,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "standardize": True,
}
_SMALL = {"attention_k_eq_v": False, "hidden_size_per_layer_input": 256, "max_position_embeddings": 131072}
_SMALL |= {"num_global_key_value_heads": None, "sliding_window": 512, "use_bidirectional_attention": None}
_LARGE = {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "max_position_embeddings": 262144}
_LARGE |= {"num_kv_shared_layers": 0, "sliding_window": 1024, "use_bidirectional_attention": "vision"}
_EXPERTS = {"enable_moe_block": True, "moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8}


def _gemma4(text: Config, tower: Config, every: int = 6) -> Config:
    """every: as many layers, the last of which has no window."""
    number = text["num_hidden_layers"]
    return {
        "audio_config": None if tower is _TOWER else _AUDIO,
        "model_type": "gemma4",
        "text_config": {
            "attention_bias": False,
            "enable_moe_block": False,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": [
                "sliding_attention" if at % every else "full_attention" for at in range(1, number + 1)
            ],
            "model_type": "gemma4_text",
            "num_experts": None,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "tie_word_embeddings": True,
            "use_double_wide_mlp": False,
            "vocab_size": 262144,
            "vocab_size_per_layer_input": 262144,
        }
        | text,
        "tie_word_embeddings": True,
        "vision_config": {
            "model_type": "gemma4_vision",
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "position_embedding_size": 10240,
            "rms_norm_eps": 1e-06,
        }
        | tower,
    }


# Keys and values of a token in the layers without a window: layers x 2 x heads x 512 x 2 bytes.
WINDOWED: Mapping[str, Published] = {
    "Gemma-4-E2B": Published(
        _gemma4(
            _SMALL | _sizes(1536, 6144, 35, 8, 1) | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True},
            _SMALL_TOWER,
            every=5,
        ),
        3 * 2048,
        131_072,
        has_head=False,
    ),
    "Gemma-4-E4B": Published(
        _gemma4(_SMALL | _sizes(2560, 10240, 42, 8, 2) | {"num_kv_shared_layers": 18}, _SMALL_TOWER),
        4 * 4096,
        131_072,
        has_head=False,
    ),
    "Gemma-4-26B-A4B": Published(
        _gemma4(
            _LARGE | _sizes(2816, 2112, 30, 16, 8) | {"num_global_key_value_heads": 2} | _EXPERTS, _TOWER
        ),
        5 * 4096,
        262_144,
        has_head=False,
    ),
    "Gemma-4-31B": Published(
        _gemma4(_LARGE | _sizes(5376, 21504, 60, 32, 16) | {"num_global_key_value_heads": 4}, _TOWER),
        10 * 8192,
        262_144,
        has_head=False,
    ),
}
# Bytes of a sequence's full windows: window x layers x 2 x heads x 256 x 2 bytes.
WINDOW_BYTES: Mapping[str, int] = {
    "Gemma-4-E2B": 512 * 12 * 1024,
    "Gemma-4-E4B": 512 * 20 * 2048,
    "Gemma-4-26B-A4B": 1024 * 25 * 8192,
    "Gemma-4-31B": 1024 * 50 * 16384,
}
