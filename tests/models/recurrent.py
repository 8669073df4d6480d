"""Configurations of Qwen3.5, and of MiniCPM-V with its language model, as their config.json has them.

As far as they say something about the model. They are apart from `tests/models/published.py`: their processor
files are not written down there.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.models.published import Config, Published, _sizes

_TOWER = {
    "deepstack_visual_indexes": [],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_SMALL_TOWER = _TOWER | {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12}
_EXPERTS = {
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 512,
}


def _qwen3_5(
    text: Config, num_value_heads: int, tower: Config = _TOWER, *, tied: bool = False, family: str = "qwen3_5"
) -> Config:
    """num_value_heads: of the layers with a recurrent state, which have 16 heads of keys."""
    kinds = [
        "full_attention" if number % 4 == 3 else "linear_attention"
        for number in range(text["num_hidden_layers"])
    ]
    return {
        "image_token_id": 248056,
        "model_type": family,
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "layer_types": kinds,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": num_value_heads,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "model_type": f"{family}_text",
            "mtp_num_hidden_layers": 1,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "tie_word_embeddings": tied,
            "use_cache": True,
            "vocab_size": 248320,
        }
        | text,
        "tie_word_embeddings": tied,
        "video_token_id": 248057,
        "vision_config": tower | {"model_type": family, "out_hidden_size": text["hidden_size"]},
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


def _state_bytes(num_layers: int, num_value_heads: int) -> int:
    """In bfloat16 three inputs of the convolution, and in float32 a matrix for each head of values."""
    channels = (2 * 16 + num_value_heads) * 128
    return num_layers * (3 * channels * 2 + num_value_heads * 128 * 128 * 4)


RECURRENT: Mapping[str, Published] = {
    "Qwen3.5-0.8B": Published(
        _qwen3_5(_sizes(1024, 3584, 24, 8, 2), 16, _SMALL_TOWER, tied=True), 12_288, 262_144, has_head=False
    ),
    "Qwen3.5-9B": Published(_qwen3_5(_sizes(4096, 12288, 32, 16, 4), 32), 32_768, 262_144),
    "Qwen3.5-27B": Published(_qwen3_5(_sizes(5120, 17408, 64, 24, 4), 48), 65_536, 262_144),
    "Qwen3.5-35B-A3B": Published(
        _qwen3_5(_EXPERTS | _sizes(2048, 512, 40, 16, 2), 32, family="qwen3_5_moe"), 20_480, 262_144
    ),
}
_PLAIN_ROPE = {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}
# Qwen3.5-0.8B's language model behind SigLIP's tower, whose patches are joined after the seventh layer.
MINICPM: Mapping[str, Published] = {
    "MiniCPM-V-4.6": Published(
        {
            "downsample_mode": "16x",
            "image_size": 1120,
            "image_token_id": 248056,
            "insert_layer_id": 6,
            "model_type": "minicpmv4_6",
            "patch_size": 14,
            "text_config": RECURRENT["Qwen3.5-0.8B"].config["text_config"]
            | {
                "rope_parameters": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 10000000,
                    "rope_type": "default",
                }
            }
            | {"vocab_size": 248094},
            "tie_word_embeddings": True,
            "video_token_id": 248057,
            "vision_config": {
                "hidden_size": 1152,
                "image_size": 980,
                "insert_layer_id": 6,
                "intermediate_size": 4304,
                "model_type": "minicpmv4_6_vision",
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
            },
        },
        12_288,
        262_144,
        has_head=False,
    )
}
# Bytes of a sequence's recurrent state: 18, 24, 48 and 30 layers.
STATE_BYTES: Mapping[str, int] = {
    "Qwen3.5-0.8B": _state_bytes(18, 16),
    "Qwen3.5-9B": _state_bytes(24, 32),
    "Qwen3.5-27B": _state_bytes(48, 48),
    "Qwen3.5-35B-A3B": _state_bytes(30, 32),
    "MiniCPM-V-4.6": _state_bytes(18, 16),
}
