"""Names of tensors as the published files have them, and how a model's own names become those.

What is written here is what stands in the files, by release that wrote them; the product's renames in
`encoders/names.py` go the other way and are held against it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from tests.models.published import PUBLISHED

# From the model's names to those of the files: the first pattern that fits.
_BEFORE_5 = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
)
_RENAMES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "Qwen2.5-VL": ((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual.")),
    "Qwen3-VL": (),
    "InternVL3-": (*_BEFORE_5, (r"^model\.(?=vision_tower\.|multi_modal_projector\.)", "")),
    "InternVL3.5-": (),
    "LLaVA-OneVision": (
        *_BEFORE_5,
        (r"^model\.vision_tower\.(vision_model\.)?", "vision_tower.vision_model."),
        (r"^model\.(?=image_newline|multi_modal_projector\.)", ""),
    ),
    "SmolVLM2": (),
}
# Some of the names in the index of each family's files.
IN_FILES: Mapping[str, tuple[str, ...]] = {
    "Qwen2.5-VL": (
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.27.mlp.gate_proj.weight",
        "model.norm.weight",
        "visual.blocks.31.attn.qkv.weight",
        "visual.merger.mlp.2.bias",
        "visual.patch_embed.proj.weight",
    ),
    "Qwen3-VL": (
        "model.language_model.embed_tokens.weight",
        "model.language_model.layers.0.self_attn.q_norm.weight",
        "model.visual.blocks.23.mlp.linear_fc1.weight",
        "model.visual.deepstack_merger_list.2.linear_fc2.bias",
        "model.visual.merger.norm.weight",
        "model.visual.pos_embed.weight",
    ),
    "InternVL3-": (
        "language_model.lm_head.weight",
        "language_model.model.layers.0.self_attn.k_proj.bias",
        "multi_modal_projector.layer_norm.weight",
        "vision_tower.embeddings.cls_token",
        "vision_tower.encoder.layer.23.attention.projection_layer.weight",
        "vision_tower.encoder.layer.0.lambda_1",
    ),
    "InternVL3.5-": (
        "lm_head.weight",
        "model.language_model.layers.0.self_attn.k_norm.weight",
        "model.multi_modal_projector.linear_2.bias",
        "model.vision_tower.encoder.layer.0.attention.q_proj.weight",
    ),
    "LLaVA-OneVision": (
        "image_newline",
        "language_model.model.layers.23.mlp.down_proj.weight",
        "multi_modal_projector.linear_1.weight",
        "vision_tower.vision_model.embeddings.position_embedding.weight",
        "vision_tower.vision_model.encoder.layers.25.self_attn.out_proj.bias",
        "vision_tower.vision_model.post_layernorm.weight",
    ),
    "SmolVLM2": (
        "lm_head.weight",
        "model.connector.modality_projection.proj.weight",
        "model.text_model.layers.23.mlp.up_proj.weight",
        "model.vision_model.encoder.layers.11.self_attn.k_proj.weight",
    ),
}
# Experts in the files: all of a layer in one tensor, [experts, in, out], or each by itself, [out, in].
EXPERTS_IN_FILES: Mapping[str, tuple[str, ...]] = {
    "Qwen3-VL": (
        "model.language_model.layers.47.mlp.gate.weight",
        "model.language_model.layers.47.mlp.experts.gate_up_proj",
        "model.language_model.layers.47.mlp.experts.down_proj",
    ),
    "InternVL3.5-": (
        "model.language_model.layers.47.mlp.gate.weight",
        "model.language_model.layers.47.mlp.experts.0.gate_proj.weight",
        "model.language_model.layers.47.mlp.experts.127.up_proj.weight",
        "model.language_model.layers.47.mlp.experts.127.down_proj.weight",
    ),
}


def name_in_files(checkpoint: str, name: str) -> str:
    """The name in the files of a published checkpoint of the model's tensor `name`."""
    for pattern, replacement in _family(_RENAMES, checkpoint):
        renamed = re.sub(pattern, replacement, name)
        if renamed != name:
            return renamed
    return name


def parts_in_files(checkpoint: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What lies in the files for the model's tensor `name`, by its names there.

    tensor: as modules of transformers 5 have it, experts as [experts, out, in].
    """
    named = name_in_files(checkpoint, name)
    if ".experts." not in name:
        yield named, tensor
    elif checkpoint.startswith("Qwen3-VL"):
        yield named, tensor.transpose(1, 2)
    else:
        yield from _single_experts(named, tensor)


def _single_experts(named: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    start, kind = named.rsplit(".", 1)
    for number, expert in enumerate(tensor):
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
            yield f"{start}.{number}.{part}.weight", rows


def known_names(checkpoint: str) -> Iterable[str]:
    """Names that must be in the files of a published checkpoint."""
    config = PUBLISHED[checkpoint].config
    has_experts = "num_experts" in config.get("text_config", config)
    return (
        *_family(IN_FILES, checkpoint),
        *(_family(EXPERTS_IN_FILES, checkpoint) if has_experts else ()),
    )


def _family(table: Mapping[str, tuple[Any, ...]], checkpoint: str) -> tuple[Any, ...]:
    return next(value for start, value in table.items() if checkpoint.startswith(start))
