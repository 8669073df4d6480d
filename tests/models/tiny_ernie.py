"""A tiny random ERNIE 4.5 VL with the layers of the published one: in its files experts lie in one list."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import ImageFont
from transformers import (
    Ernie4_5_VLMoeConfig,
    Ernie4_5_VLMoeForConditionalGeneration,
    Ernie4_5_VLMoeImageProcessor,
    Ernie4_5_VLMoeProcessor,
    Ernie4_5_VLMoeVideoProcessor,
)

from tests import tiny_models
from tests.encoders.tiny_tiles import _template, _text_ids, byte_tokenizer
from tests.models.published import Published

NUM_EXPERTS = 4
_NAMES = {
    "image_token": "<|IMAGE_PLACEHOLDER|>",
    "image_start_token": "<|IMAGE_START|>",
    "image_end_token": "<|IMAGE_END|>",
    "video_token": "<|VIDEO_PLACEHOLDER|>",
    "video_start_token": "<|VIDEO_START|>",
    "video_end_token": "<|VIDEO_END|>",
}
# As published: a dense layer before those with experts, smaller experts for media, shared ones for all
# tokens, frequencies dealt to height, width and time, and a head that is the embedding of tokens.
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "moe_num_experts": NUM_EXPERTS,
    "moe_k": 2,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": [48, 16],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0, "mrope_section": [3, 3, 2]},
}
# In full size, as config.json has it; the files of its processor are not written down here.
_FULL_TEXT: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "mlp_layer_types": ["dense", *["sparse"] * 27],
    "model_type": "ernie4_5_vl_moe_text",
    "moe_intermediate_size": [1536, 512],
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"mrope_section": [22, 22, 20], "rope_theta": 500000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "use_bias": False,
    "vocab_size": 103424,
}
_FULL_TOWER = {
    "depth": 32,
    "hidden_act": "quick_gelu",
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_merge_size": 2,
}
PUBLISHED: Mapping[str, Published] = {
    "ERNIE-4.5-VL-28B-A3B": Published(
        {
            "model_type": "ernie4_5_vl_moe",
            "text_config": _FULL_TEXT,
            "tie_word_embeddings": True,
            "vision_config": _FULL_TOWER | {"model_type": "ernie4_5_vl_moe_vision"},
        },
        kv_bytes_per_token=2 * 28 * 4 * 128 * 2,
        context_tokens=131_072,
        has_head=False,
    ),
}
_SIZE = {"shortest_edge": 84 * 84, "longest_edge": 112 * 112}


def build(folder: Path, seed: int = 0, **of_videos: Any) -> Path:
    """Writes it as transformers does. of_videos: settings of their processor."""
    image, video = (
        f"Picture: <|{kind}_START|><|{kind}_PLACEHOLDER|><|{kind}_END|>" for kind in ("IMAGE", "VIDEO")
    )
    tokenizer = byte_tokenizer(tuple(_NAMES.values()), _template(image, video), _NAMES)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in _NAMES.items()}
    config = Ernie4_5_VLMoeConfig(
        text_config={**_TEXT, **_text_ids(tokenizer)},
        vision_config={"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2},
        tie_word_embeddings=True,
        **ids,
    )
    folder.mkdir()
    font = folder / "Roboto-Regular.ttf"
    font.write_bytes(ImageFont.load_default(size=10).font_bytes)  # type: ignore[union-attr]
    settings = {"size": dict(_SIZE), "fps": 2, "min_frames": 2, "font": str(font), **of_videos}
    processor = Ernie4_5_VLMoeProcessor(
        image_processor=Ernie4_5_VLMoeImageProcessor(size=dict(_SIZE)),
        tokenizer=tokenizer,
        video_processor=Ernie4_5_VLMoeVideoProcessor(**settings),
        chat_template=tokenizer.chat_template,
    )
    return tiny_models._save(folder, _biased, config, processor, seed)


def _biased(config: Ernie4_5_VLMoeConfig) -> Any:
    """A model whose routers prefer some experts, as those of trained ones do."""
    model = Ernie4_5_VLMoeForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("e_score_correction_bias"):
                parameter.copy_(torch.rand_like(parameter) / 20)
    return model
