"""Reads the thinker of Qwen2.5-Omni, which answers in words, as a checkpoint of Qwen2.5-VL.

    Omni    thinker.visual.blocks.0.attn.q [C, C] | .k | .v     thinker.model.layers.0 ...    talker ...
    VL      visual.blocks.0.attn.qkv [3 C, C]                   model.layers.0 ...            left out

Both compute the same from the same weights, at the same positions. Sound and speech are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epd.encoders.internvl_chat import read_json

AUTHORS, OURS, PROCESSOR = "qwen2_5_omni", "qwen2_5_vl", "Qwen2_5OmniProcessor"
# Pixels of a frame, which transformers' processor gives its part for videos with each call.
VIDEO_SIZE: Mapping[str, int] = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
_TOKENS = {"image_token_id": 151_655, "video_token_id": 151_656}
_ENCLOSING = {"vision_start_token_id": 151_652, "vision_end_token_id": 151_653}


def is_authors_layout(path: Path) -> bool:
    """Reports whether a folder's config.json is one of Qwen2.5-Omni."""
    return read_json(path / "config.json").get("model_type") == AUTHORS


def settings_of(path: Path) -> dict[str, Any]:
    """Returns the configuration of a folder as Qwen2.5-VL has it. Raises KeyError for one without a part."""
    config = read_json(path / "config.json")
    thinker = config["thinker_config"]
    text = {name: value for name, value in thinker["text_config"].items() if name != "model_type"}
    tower = {name: value for name, value in thinker["vision_config"].items() if name != "model_type"}
    tower["tokens_per_second"] = thinker.get("position_id_per_seconds", 25)
    settings = {
        "model_type": OURS,
        "text_config": text,
        "vision_config": tower,
        "tie_word_embeddings": bool(thinker.get("tie_word_embeddings", False)),
    }
    settings |= {name: thinker.get(name.replace("_id", "_index"), own) for name, own in _TOKENS.items()}
    settings |= {name: thinker.get(name, own) for name, own in _ENCLOSING.items()}
    quantization = config.get("quantization_config")
    return settings | ({"quantization_config": quantization} if quantization else {})
