"""Writes a checkpoint of InternVL in its authors' layout: other names, and one matrix of an attention."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_NAMES = (
    (r"^model\.vision_tower\.embeddings\.cls_token$", "vision_model.embeddings.class_embedding"),
    (r"^model\.vision_tower\.embeddings\.position_embeddings$", "vision_model.embeddings.position_embedding"),
    (
        r"^model\.vision_tower\.embeddings\.patch_embeddings\.projection",
        "vision_model.embeddings.patch_embedding",
    ),
    (r"^model\.vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.attention\.(?=[qkv]_)", ".attn."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.lambda_([12])$", r".ls\1"),
    (r"^model\.multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"^model\.multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"^model\.multi_modal_projector\.linear_2\.", "mlp1.3."),
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
)
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write(theirs: Path, folder: Path, **changes: Any) -> Path:
    """theirs: the same checkpoint in transformers' layout. changes: of the configuration."""
    folder.mkdir()
    config = json.loads((theirs / "config.json").read_text(encoding="utf-8"))
    vision, text = config["vision_config"], config["text_config"]
    image = json.loads((theirs / "processor_config.json").read_text(encoding="utf-8"))["image_processor"]
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
            "layer_norm_eps", "norm_type")  # fmt: skip
    tower = {name: vision[name] for name in same} | {
        "architectures": ["InternVisionModel"], "model_type": "intern_vit_6b",
        "image_size": vision["image_size"][0], "patch_size": vision["patch_size"][0],
        "qkv_bias": vision["attention_bias"], "qk_normalization": vision["use_qk_norm"],
    }  # fmt: skip
    written = {
        "architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "template": "internvl2_5",
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "downsample_ratio": config["downsample_ratio"], "dynamic_image_size": True, "use_thumbnail": True,
        "force_image_size": vision["image_size"][0], "ps_version": "v2", "select_layer": -1,
        "min_dynamic_patch": image["min_patches"], "max_dynamic_patch": image["max_patches"],
        "llm_config": text, "vision_config": tower,
    } | changes  # fmt: skip
    (folder / "config.json").write_text(json.dumps(written), encoding="utf-8")
    for name in _TOKENIZER:
        (folder / name).write_bytes((theirs / name).read_bytes())
    _write_weights(theirs, folder)
    return folder


def _write_weights(theirs: Path, folder: Path) -> None:
    tensors = {}
    for stored, tensor in load_file(theirs / "model.safetensors").items():
        name = stored
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor
    for query in [name for name in tensors if ".attn.q_proj." in name]:
        parts = [tensors.pop(query.replace(".q_proj.", f".{each}_proj.")) for each in "qkv"]
        tensors[query.replace(".q_proj.", ".qkv.")] = torch.cat(parts)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
