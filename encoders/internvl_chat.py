"""Reads InternVL in its authors' layout, `internvl_chat`, as the layout of transformers, `internvl`.

    authors         vision_model.encoder.layers.0.attn.qkv [3 C, C]    mlp1.1
    transformers    vision_tower.encoder.layer.0.attention.q_proj ...  multi_modal_projector.linear_1

Both are published for most sizes, with the same weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epd.errors import ModelError, UnsupportedModelError

AUTHORS, OURS = "internvl_chat", "internvl"
_CONTEXT = "<IMG_CONTEXT>"
# Attributes of the tokenizer by which transformers' processor knows its tokens.
_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": _CONTEXT,
    "video_token": "<video>",
}
_IMAGENET: Mapping[str, Any] = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
# Turns as the language models were trained with; media stand where they are in a message.
_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}<IMG_CONTEXT>
{% elif part['type'] == 'video' -%}<video>
{% elif part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
_RENAMES = (
    (re.compile(r"^vision_model\.embeddings\.class_embedding$"), "vision_tower.embeddings.cls_token"),
    (
        re.compile(r"^vision_model\.embeddings\.position_embedding$"),
        "vision_tower.embeddings.position_embeddings",
    ),
    (
        re.compile(r"^vision_model\.embeddings\.patch_embedding\."),
        "vision_tower.embeddings.patch_embeddings.projection.",
    ),
    (re.compile(r"^vision_model\.encoder\.layers\."), "vision_tower.encoder.layer."),
    (re.compile(r"^mlp1\.0\."), "multi_modal_projector.layer_norm."),
    (re.compile(r"^mlp1\.1\."), "multi_modal_projector.linear_1."),
    (re.compile(r"^mlp1\.3\."), "multi_modal_projector.linear_2."),
)
_IN_LAYER = (
    (re.compile(r"\.attn\.proj\."), ".attention.projection_layer."),
    (re.compile(r"\.attn\.(?=[qk]_norm\.)"), ".attention."),
    (re.compile(r"\.norm1\."), ".layernorm_before."),
    (re.compile(r"\.norm2\."), ".layernorm_after."),
    (re.compile(r"\.ls([12])$"), r".lambda_\1"),
)


def is_authors_layout(path: Path) -> bool:
    """Reports whether a folder's config.json is one of InternVL's authors."""
    return read_json(path / "config.json").get("model_type") == AUTHORS


def names_of_parts(stored: str) -> tuple[str, ...]:
    """Returns transformers' names of a stored tensor: three for queries, keys, values, thirds of its rows."""
    name = stored
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    if not name.startswith("vision_tower.encoder."):
        return (name,)
    for pattern, replacement in _IN_LAYER:
        name = pattern.sub(replacement, name)
    start, mark, kind = name.partition(".attn.qkv.")
    return tuple(f"{start}.attention.{each}_proj.{kind}" for each in "qkv") if mark else (name,)


def settings_of(path: Path) -> dict[str, Any]:
    """Returns the configuration of a folder as transformers has it.

    Raises UnsupportedModelError for what transformers' model does not compute.
    """
    config = read_json(path / "config.json")
    vision, text = config["vision_config"], config["llm_config"]
    side = config.get("force_image_size") or vision["image_size"]
    for name, value, allowed in (
        ("ps_version", config.get("ps_version", "v1"), "v2"),
        ("select_layer", config.get("select_layer", -1), -1),
        ("force_image_size", side, vision["image_size"]),
    ):
        if value != allowed:
            raise _unsupported(path, f"{name} {value!r}", repr(allowed))
    if text.get("model_type") not in ("qwen2", "qwen3", "qwen3_moe", "llama"):
        raise _unsupported(
            path, f"the language model {text.get('model_type')!r}", "qwen2, qwen3, qwen3_moe, llama"
        )
    ratio = config.get("downsample_ratio", 0.5)
    kept = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
        "layer_norm_eps", "norm_type", "num_channels",
    )  # fmt: skip
    tower = {name: vision[name] for name in kept if name in vision}
    sizes = {"image_size": [side, side], "patch_size": [vision["patch_size"]] * 2}
    biased = {
        "attention_bias": vision.get("qkv_bias", True),
        "use_qk_norm": vision.get("qk_normalization", True),
    }
    return {
        "model_type": OURS,
        "text_config": text,
        "vision_config": tower | sizes | biased,
        "image_token_id": _context_id(path),
        "image_seq_length": int((side // vision["patch_size"] * ratio) ** 2),
        "downsample_ratio": ratio,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
    } | ({"quantization_config": config["quantization_config"]} if config.get("quantization_config") else {})


def processor_files(path: Path) -> dict[str, str]:
    """Returns the processor's files as transformers wants them, by their names."""
    config, settings = read_json(path / "config.json"), settings_of(path)
    side = settings["vision_config"]["image_size"][0]
    sized = {**_IMAGENET, "size": {"height": side, "width": side}, "resample": 3}
    image = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "crop_to_patches": True,
        "min_patches": config.get("min_dynamic_patch", 1),
        "max_patches": config.get("max_dynamic_patch", 12),
    }
    tokenizer = read_json(path / "tokenizer_config.json")
    tokenizer.pop("chat_template", None)
    files = {
        "preprocessor_config.json": sized | image,
        "video_preprocessor_config.json": sized | {"video_processor_type": "InternVLVideoProcessor"},
        "processor_config.json": {
            "processor_class": "InternVLProcessor",
            "image_seq_length": settings["image_seq_length"],
        },
        "tokenizer_config.json": tokenizer | {"extra_special_tokens": _TOKENS},
        "config.json": settings,
    }
    return {name: json.dumps(content) for name, content in files.items()} | {"chat_template.jinja": _TEMPLATE}


def _context_id(path: Path) -> int:
    """Returns the token that stands for an embedding. Raises ModelError where no file names it."""
    for name in ("tokenizer.json", "added_tokens.json", "tokenizer_config.json"):
        found = read_json(path / name)
        entries = found.get("added_tokens") or ()
        named = {each["content"]: each["id"] for each in entries} | (
            found if name == "added_tokens.json" else {}
        )
        decoder = found.get("added_tokens_decoder") or {}
        named |= {each["content"]: int(number) for number, each in decoder.items()}
        if _CONTEXT in named:
            return int(named[_CONTEXT])
    raise ModelError(f"the tokenizer at '{path}' has no {_CONTEXT}; get its files again")


def read_json(file: Path) -> dict[str, Any]:
    """Reads an object; an empty one where there is no file. Raises ModelError for a broken file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read '{file}': {' '.join(str(error).split())}") from error
    return content if isinstance(content, dict) else {}


def _unsupported(path: Path, what: str, allowed: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"'{path}' is an '{AUTHORS}' model with {what}; allowed: {allowed}; use the checkpoint of this name "
        "that ends in -hf, if there is one"
    )
