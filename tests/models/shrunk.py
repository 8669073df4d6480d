"""Published checkpoints shrunk to a few layers and channels, with every flag of their configurations kept.

What stays: the ratio of heads to KV heads, the depth of Qwen's towers with their windowed and full blocks and
deepstack indexes, window and patch sizes, scale factors, norms of queries and keys, biases, experts and how
many of them a token gets, rotation and its sections, ties. Weights are random, from a fixed seed, and lie in
two files with an index under the names of the published ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GotOcr2ImageProcessor,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from tests import tiny_models
from tests.encoders import tiny_tiles
from tests.models.files import parts_in_files
from tests.models.processors import write_processor
from tests.models.published import PUBLISHED, Config
from tests.models.real_tokenizer import qwen_tokenizer

HEAD_DIM = 32
_NUM_LAYERS = 4  # as many as deepstack has, and one
_PATCH = 7  # pixels, of the towers that look at tiles
_IMAGE_TOKENS = {"internvl": "<IMG_CONTEXT>", "smolvlm": "<image>"}
_PICTURE_SIZES = ("image_size", "patch_size")
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48}


def build(checkpoint: str, folder: Path) -> Path:
    """Writes a shrunk checkpoint as its authors would have, with tiny pictures and a tokenizer of bytes."""
    published = PUBLISHED[checkpoint].config
    processor = processor_of(published)
    processor.save_pretrained(folder)
    return _built(checkpoint, folder, _shrunk(published, processor.tokenizer))


def build_with_published_files(checkpoint: str, folder: Path, tokenizer: Any = qwen_tokenizer) -> Path:
    """Writes a shrunk checkpoint that has the published processor files and a real tokenizer.

    tokenizer: `qwen_bytes` where its size does not matter
    """
    write_processor(checkpoint, folder, tokenizer)
    published, read = PUBLISHED[checkpoint].config, AutoTokenizer.from_pretrained(folder)
    config = _shrunk(published, read) | _whole_pictures(published)
    vision = config["vision_config"]
    sizes = {key: value for key, value in published["vision_config"].items() if key in _PICTURE_SIZES}
    return _built(checkpoint, folder, config | {"vision_config": vision | sizes})


def _whole_pictures(published: Config) -> Config:
    return {key: published[key] for key in ("image_seq_length", "image_grid_pinpoints") if key in published}


def _built(checkpoint: str, folder: Path, config: Config) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = _tensors(folder, config)
    if not PUBLISHED[checkpoint].has_head:
        del tensors["lm_head.weight"]
    parts = [part for name, each in tensors.items() for part in parts_in_files(checkpoint, name, each)]
    _save_in_two({name: part.contiguous().clone() for name, part in parts}, folder)
    return folder


def processor_of(published: Config) -> Any:
    """A processor of the published class for tiny pictures, with a tokenizer of bytes."""
    return _PROCESSORS[published["model_type"]](published)


def _shrunk(published: Config, tokenizer: PreTrainedTokenizerFast) -> Config:
    text = published.get("text_config", published)
    heads = 2 * text["num_attention_heads"] // text["num_key_value_heads"]
    small = {
        "hidden_size": HEAD_DIM * heads,
        "intermediate_size": 96,
        "max_position_embeddings": 8192,
        "num_attention_heads": heads,
        "num_hidden_layers": _NUM_LAYERS,
        "num_key_value_heads": 2,
        **{name: size for name, size in _EXPERTS.items() if name in text},
        **{name: tokenizer.eos_token_id for name in ("bos_token_id", "eos_token_id") if name in text},
        **({"head_dim": HEAD_DIM, "hidden_size": 64} if "qwen3" in text["model_type"] else {}),
        **({"head_dim": HEAD_DIM} if text["model_type"] == "llama" else {}),
        "pad_token_id": tokenizer.pad_token_id,
        "vocab_size": len(tokenizer),
    }
    scaling = text.get("rope_scaling") or {}
    if "mrope_section" in scaling:
        sections = [each // (128 // HEAD_DIM) for each in scaling["mrope_section"]]
        sections[0] += HEAD_DIM // 2 - sum(sections)
        small["rope_scaling"] = scaling | {"mrope_section": sections}
    vision = published["vision_config"] | _vision(published, small["hidden_size"])
    whole = {**published, **special_ids(published, tokenizer), **_other_sizes(published, tokenizer)}
    whole["vision_config"] = vision
    return whole | ({"text_config": text | small} if "text_config" in published else small)


def _vision(published: Config, hidden: int) -> Config:
    vision = published["vision_config"]
    if "depth" in vision:
        return {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": hidden}
    side: Any = _side(published)
    heads = 5 if vision["num_attention_heads"] % 2 else 2
    small = {"hidden_size": 16 * heads, "intermediate_size": 48, "num_attention_heads": heads}
    if published["model_type"] == "internvl":
        return small | {"num_hidden_layers": 3, "image_size": [side, side], "patch_size": [_PATCH, _PATCH]}
    return small | {"num_hidden_layers": 3, "image_size": side, "patch_size": _PATCH}


def _side(published: Config) -> int:
    """Pixels of a tile: twice the patches that become one token; with a rest, where the published has one."""
    if published["model_type"] == "llava_onevision":
        return 5 * _PATCH + 3
    return 2 * _PATCH * int(published.get("scale_factor") or 1 / published["downsample_ratio"])


def _pinpoints(published: Config) -> list[list[int]]:
    """The canvases of the published checkpoint, in tiles of the small side."""
    side = _side(published)
    return [[size // 384 * side for size in canvas] for canvas in published["image_grid_pinpoints"]]


def special_ids(published: Config, tokenizer: PreTrainedTokenizerFast) -> Config:
    """The fields of a configuration that name special tokens, by their numbers in another tokenizer."""
    names = {
        "image_token_id": _IMAGE_TOKENS.get(published["model_type"], "<|image_pad|>"),
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "image_token_index": "<image>",
        "video_token_index": "<video>",
    }
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items() if key in published}


def _other_sizes(published: Config, tokenizer: PreTrainedTokenizerFast) -> Config:
    """What the top of a configuration says of tokens and tiles, besides its parts."""
    sizes: Config = {"vocab_size": len(tokenizer), "image_seq_length": 4}
    if "image_grid_pinpoints" in published:
        sizes["image_grid_pinpoints"] = _pinpoints(published)
    return {key: value for key, value in sizes.items() if key in published}


def _tensors(folder: Path, config: Config) -> dict[str, Tensor]:
    """Random weights by the model's names, experts as [experts, out, in]."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    hidden = config.get("text_config", config)["hidden_size"]
    tensors = {}
    for name, tensor in tiny_models.draw_weights(model, layers_decide=True).state_dict().items():
        is_across = name.endswith("experts.gate_up_proj") and tensor.shape[1] == hidden
        is_across |= name.endswith("experts.down_proj") and tensor.shape[2] == hidden
        tensors[name] = tensor.transpose(1, 2) if is_across else tensor
    return tensors


def _save_in_two(tensors: Mapping[str, Tensor], folder: Path) -> None:
    names = sorted(tensors)
    parts = {f"model-0000{number + 1}-of-00002.safetensors": names[number::2] for number in range(2)}
    for file, its_names in parts.items():
        save_file({name: tensors[name] for name in its_names}, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, its_names in parts.items() for name in its_names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _qwen2_5_vl(_published: Config) -> Any:
    size = {"shortest_edge": 56 * 56, "longest_edge": 168 * 168}
    tokenizer = tiny_models.byte_level_tokenizer()
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=dict(size)),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=dict(size), fps=2, cap_pixels_per_frame=False),
        chat_template=tiny_models.CHAT_TEMPLATE,
    )


def _qwen3_vl(_published: Config) -> Any:
    tokenizer = tiny_models.byte_level_tokenizer()
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            patch_size=16,
            size={"shortest_edge": 64 * 64, "longest_edge": 96 * 96},
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        ),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(
            size={"shortest_edge": 2 * 64 * 64, "longest_edge": 8 * 96 * 96}, cap_pixels_per_frame=False
        ),
        chat_template=tiny_models.CHAT_TEMPLATE,
    )


def _internvl(published: Config) -> Any:
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    template = tiny_tiles._template("<IMG_CONTEXT>\n", "<video>\n")
    tokenizer = tiny_tiles.byte_tokenizer(tuple(names.values()), template, names)
    size = {"height": _side(published), "width": _side(published)}
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=6),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=template,
    )


def _llava_onevision(published: Config) -> Any:
    template = tiny_tiles._template("<image>", "<video>\n")
    tokenizer = tiny_tiles.byte_tokenizer(("<image>", "<video>"), template)
    side, patches = _side(published), _side(published) // _PATCH
    size = {"height": side, "width": side}
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=_pinpoints(published)),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=patches**2,
        vision_feature_select_strategy="full",
        chat_template=template,
        vision_aspect_ratio=published["vision_aspect_ratio"],
    )


def _smolvlm(published: Config) -> Any:
    names = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    rows = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
    template = tiny_tiles._template("<image>", "<video>")
    tokenizer = tiny_tiles.byte_tokenizer((*names.values(), *rows), template, names)
    tile, whole = {"longest_edge": _side(published)}, {"longest_edge": 3 * _side(published)}
    return SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(size=whole, max_image_size=tile),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(size=whole, max_image_size=tile, fps=1, num_frames=64),
        image_seq_len=4,
        chat_template=template,
    )


_PROCESSORS: Mapping[str, Callable[[Config], Any]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "internvl": _internvl,
    "llava_onevision": _llava_onevision,
    "smolvlm": _smolvlm,
}
