"""Configurations of published models, for counting their parameters; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers


def qwen2_5_vl_7b() -> Any:
    """Qwen2.5-VL-7B-Instruct."""
    return transformers.Qwen2_5_VLConfig(
        text_config={
            **_qwen2_7b(152_064),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        vision_config={
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
        },
    )


def qwen3_vl_8b() -> Any:
    """Qwen3-VL-8B-Instruct."""
    return transformers.Qwen3VLConfig(
        text_config={
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        },
        vision_config={"out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]},
    )


def llava_onevision_7b() -> Any:
    """llava-onevision-qwen2-7b-ov."""
    return transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **_qwen2_7b(152_000)},
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 26,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
            "vision_use_head": False,
        },
    )


def internvl3_8b() -> Any:
    """InternVL3-8B."""
    return transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **_qwen2_7b(151_674)}, tie_word_embeddings=False
    )


def smolvlm2_2b() -> Any:
    """SmolVLM2-2.2B-Instruct."""
    return transformers.SmolVLMConfig(
        text_config={
            "model_type": "llama",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 49_280,
            "pad_token_id": None,
        },
        vision_config={
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        },
        image_token_id=49_190,
        scale_factor=3,
    )


def _qwen2_7b(vocab_size: int) -> dict[str, Any]:
    return {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
    }


PUBLISHED: dict[str, Callable[[], Any]] = {
    "Qwen2.5-VL-7B": qwen2_5_vl_7b,
    "Qwen3-VL-8B": qwen3_vl_8b,
    "LLaVA-OneVision-7B": llava_onevision_7b,
    "InternVL3-8B": internvl3_8b,
    "SmolVLM2-2.2B": smolvlm2_2b,
}
