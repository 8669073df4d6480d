"""Reads the shape of a model from its `config.json`: layers, experts, tower, and how it cuts media."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from epd.errors import RequestError
from epd.pixel_settings import AUTHORS
from epd.profiles.media import MediaRule
from epd.profiles.shapes import DeltaLayers, ModelShape, Transformer
from epd.types import ceil_div

Config = Mapping[str, Any]
# Patches that one attends to in a tower of windows, and in one of whole frames, about.
_IN_WINDOW, _IN_FRAME = 128, 1024
# Text around a frame of a video: `Frame12: <img></img>` beside its digits; SmolVLM2's time and marks, about.
_INTERNVL_FRAME_TEXT, _SMOLVLM_FRAME_TEXT = 6, 13
# What processors that cap frames hold a video and a frame to, where their file does not say.
_FILE_VIDEO_TOKENS, _FILE_SHARE, _FILE_FRAME_TOKENS = 128_000, 0.9, 768
_QWEN25 = MediaRule("grid", 14, min_pixels=3136, min_frame_pixels=3136, min_frames=4, sampling="units")
_QWEN3 = MediaRule(
    "grid", 16, min_pixels=65_536, max_pixels=16_777_216, max_video_tokens=12_288, min_frame_pixels=4096,
    min_frames=4, is_timed=True,
)  # fmt: skip
# What transformers takes where a Gemma 3 leaves it out, as the published files do.
_GEMMA3_TEXT = {
    "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window_pattern": 6,
    "tie_word_embeddings": True, "vocab_size": 262_208, "max_position_embeddings": 131_072,
}  # fmt: skip
# Each frame alone, with its time drawn on it; limits as transformers has them where no file says others.
_ERNIE = MediaRule(
    "grid", 14, min_pixels=56**2, max_pixels=6177 * 28**2, min_frame_pixels=299 * 28**2,
    max_frame_pixels=1196 * 28**2, min_frames=16, max_frames=180, sampling="ceil", has_frame_patches=True,
)  # fmt: skip
# Each frame by itself behind its time, as `Time 12.3s:`; patches of an image are not merged. Limits as above.
_VIDEO_LLAMA = MediaRule(
    "grid", 14, min_pixels=56**2, max_pixels=1280 * 28**2, min_frame_pixels=128 * 28**2,
    max_frame_pixels=10**9, max_video_tokens=768, frames_per_unit=1, image_merge=1, min_frames=4,
    max_frames=180, sampling="units", frame_text_tokens=9, has_least=False,
)  # fmt: skip
# Of Molmo 2: patches of a side of the pooled squares of frames, and text around a frame, its time and marks.
_FRAME_POOL, _MOLMO_FRAME_TEXT = 3, 8
_RECURRENT, _WINDOWED = "linear_attention", "sliding_attention"


def shape_of(name: str, config: Config) -> ModelShape:
    """Returns the shape of a model. Raises RequestError for a family or a field that is not known."""
    family = str(config.get("model_type"))
    if family not in _READERS:
        raise RequestError(
            f"received a model of type {family!r}; allowed are {', '.join(_READERS)}; measure others with "
            "epd profile"
        )
    try:
        return _READERS[family](name, config)
    except KeyError as error:
        raise RequestError(
            f"the configuration of {name!r} has no field {error}, which a {family} has; give its config.json"
        ) from None


def shape_in(path: Path) -> ModelShape:
    """Reads a folder of a checkpoint, or its config.json. Raises RequestError for what cannot be read.

    Beside the configuration, the processor's files say how pictures of a Qwen family are sized and sampled.
    """
    folder = path if path.is_dir() else path.parent
    config = _json(path / "config.json" if path.is_dir() else path)
    shape = shape_of(folder.resolve().name.lower(), config)
    if shape.media.kind not in ("grid", "crops"):
        return shape
    return replace(shape, media=_with_files(shape.media, folder))


def _json(file: Path) -> Config:
    """Reads an object. Raises RequestError for anything else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise RequestError(
            f"{str(file)!r} cannot be read: {reason}; give a folder with a config.json, or that file"
        ) from None
    if not isinstance(found, dict):
        raise RequestError(f"{str(file)!r} holds a {type(found).__name__}; allowed: a JSON object")
    return found


def _with_files(rule: MediaRule, folder: Path) -> MediaRule:
    """Returns the rule with what the processor's files of a folder say, those for videos last."""
    image, video = _settings(folder)
    if rule.kind == "crops":
        return replace(
            rule,
            max_tiles=int(image.get("max_crops") or rule.max_tiles),
            overlap=sum(image.get("overlap_margins") or (rule.overlap,)),
            max_frames=int(video.get("num_frames") or rule.max_frames),
            video_fps=float(video.get("max_fps") or rule.video_fps),
        )
    least, most = _sizes(image, (rule.min_pixels, rule.max_pixels))
    frame_least, frame_most = _sizes(video, (rule.min_frame_pixels, rule.max_frame_pixels))
    rule = replace(
        rule,
        min_pixels=least,
        max_pixels=most,
        min_frame_pixels=frame_least if rule.is_timed or rule.has_frame_patches else least,
        video_fps=float(video.get("fps") or rule.video_fps),
        min_frames=int(video.get("min_frames") or rule.min_frames),
        max_frames=int(video.get("max_frames") or rule.max_frames),
        num_frames=video.get("num_frames") or rule.num_frames,
    )
    if rule.has_frame_patches:
        return replace(rule, max_frame_pixels=frame_most)
    if rule.image_merge is not None:
        most = _sizes(video, (0, 768 * 28**2))[1]
        return replace(
            rule, min_frame_pixels=frame_least, max_video_tokens=most // (rule.patch * rule.merge) ** 2
        )
    return _of_all_frames(rule, video) if rule.is_timed else _of_each_frame(rule, video)


def _settings(folder: Path) -> tuple[Config, Config]:
    """Returns what the processor's files of a folder say of images, and of videos."""
    whole, images, videos = (
        _json(folder / name) if (folder / name).exists() else {}
        for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
    )
    image = {**images, **whole.get("image_processor", {})}
    return image, {**images, **videos, **whole.get("video_processor", {})}


def _of_each_frame(rule: MediaRule, video: Config) -> MediaRule:
    """Returns the rule of Qwen2.5-VL, whose file limits each frame, and may cap it or leave the caps out."""
    _, most = _sizes(video, (0, rule.max_pixels))
    if "cap_pixels_per_frame" not in video:
        return replace(rule, max_frame_pixels=min(most, rule.max_frame_pixels))
    tokens = int(video.get("max_video_tokens", _FILE_VIDEO_TOKENS) * _FILE_SHARE)
    is_capped = video["cap_pixels_per_frame"]
    return replace(rule, max_frame_pixels=most, max_video_tokens=tokens if is_capped else None)


def _of_all_frames(rule: MediaRule, video: Config) -> MediaRule:
    """Returns the rule of Qwen3-VL, whose file limits all frames together, and may cap each."""
    side = rule.patch * rule.merge
    _, most = _sizes(video, (0, 0))
    if most:
        rule = replace(rule, max_video_tokens=most // (side**2 * rule.frames_per_unit))
    if "cap_pixels_per_frame" not in video:
        return rule
    tokens = video.get("max_video_tokens", _FILE_FRAME_TOKENS)
    return replace(rule, max_frame_pixels=tokens * side**2 if video["cap_pixels_per_frame"] else most)


def _sizes(processor: Config, default: tuple[int, int]) -> tuple[int, int]:
    """Returns the least and the most pixels that a processor's file names."""
    size = processor.get("size") or {}
    least = size.get("shortest_edge") or processor.get("min_pixels") or default[0]
    return int(least), int(size.get("longest_edge") or processor.get("max_pixels") or default[1])


def _text_config(config: Config) -> Config:
    """Returns the fields of the language model, which some families have at the top."""
    inner = config.get("text_config") or {}
    return {**config, **inner}


def _language(config: Config) -> Transformer:
    text = _text_config(config)
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    experts = text.get("num_experts") or 1
    is_tied = bool(config.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False))
    kinds = _layer_kinds(text)
    num_windowed = kinds.count(_WINDOWED)
    return Transformer(
        text["num_hidden_layers"],
        hidden,
        heads,
        text.get("num_key_value_heads") or heads,
        text.get("head_dim") or hidden // heads,
        text["moe_intermediate_size"] if experts > 1 else text["intermediate_size"],
        vocabulary=text["vocab_size"],
        num_experts=experts,
        num_active_experts=text["num_experts_per_tok"] if experts > 1 else 1,
        is_tied=is_tied,
        shared_mlp_hidden=text.get("shared_expert_intermediate_size") or 0,
        has_query_gate=bool(text.get("attn_output_gate", False)),
        num_windowed=num_windowed,
        window=text["sliding_window"] if num_windowed else 0,
        delta=_delta_layers(text, kinds.count(_RECURRENT)),
    )


def _layer_kinds(text: Config) -> list[str]:
    """Returns the kind of each layer, as listed or by its number; nothing where all attend all tokens."""
    for every, other in (("full_attention_interval", _RECURRENT), ("sliding_window_pattern", _WINDOWED)):
        if text.get(every) and not text.get("layer_types"):
            layers = range(1, text["num_hidden_layers"] + 1)
            return ["full_attention" if layer % text[every] == 0 else other for layer in layers]
    return list(text.get("layer_types") or ())


def _delta_layers(text: Config, num_layers: int) -> DeltaLayers | None:
    if not num_layers:
        return None
    return DeltaLayers(
        num_layers,
        text["linear_num_key_heads"],
        text["linear_num_value_heads"],
        text["linear_key_head_dim"],
        text["linear_value_head_dim"],
        text["linear_conv_kernel_dim"],
    )


def _context(config: Config) -> int:
    return int(_text_config(config).get("max_position_embeddings", 32_768))


def _limited(rule: MediaRule, family: str) -> MediaRule:
    authors, side = AUTHORS[family], rule.patch * rule.merge
    if authors.frame_tokens is not None:
        rule = replace(rule, max_frame_pixels=authors.frame_tokens * side**2)
    if authors.video_tokens is not None:
        rule = replace(rule, max_video_tokens=authors.video_tokens)
    return rule if authors.max_frames is None else replace(rule, max_frames=authors.max_frames)


def _qwen(name: str, config: Config) -> ModelShape:
    vision, language = config["vision_config"], _language(config)
    has_windows = config["model_type"] == "qwen2_5_vl"
    hidden, heads = vision["hidden_size"], vision["num_heads"]
    tower = Transformer(
        vision["depth"], hidden, heads, heads, hidden // heads, vision["intermediate_size"],
        mlp_matrices=3 if has_windows else 2, attended=_IN_WINDOW if has_windows else _IN_FRAME,
        is_in_place=True,
    )  # fmt: skip
    merge, num_mergers = vision["spatial_merge_size"], 1 + len(vision.get("deepstack_visual_indexes", ()))
    wide = hidden * merge**2
    rule = replace(
        _QWEN25 if "qwen2" in config["model_type"] else _QWEN3, patch=vision["patch_size"], merge=merge
    )
    return ModelShape(
        name,
        tower,
        language,
        _limited(rule, config["model_type"]),
        num_mergers,
        num_mergers * wide * (wide + language.hidden),
        _context(config),
    )


def _video_llama(name: str, config: Config) -> ModelShape:
    vision, language = config["vision_config"], _language(config)
    tower = _tower(vision, vision["num_hidden_layers"], vision["intermediate_size"], _IN_FRAME)
    projector = language.hidden * (vision["hidden_size"] + language.hidden)
    rule = replace(_VIDEO_LLAMA, patch=vision["patch_size"])
    return ModelShape(name, tower, language, rule, 1, projector, _context(config))


def _qwen2(name: str, config: Config) -> ModelShape:
    """Reads Qwen2-VL, whose `hidden_size` of the tower is that of the language model."""
    vision = config["vision_config"]
    hidden = vision["embed_dim"]
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * vision["mlp_ratio"]}
    return _qwen(name, {**config, "vision_config": {**vision, **sizes}})


def _tower(vision: Config, layers: int, mlp: int, patches: int) -> Transformer:
    hidden, heads = vision["hidden_size"], vision["num_attention_heads"]
    return Transformer(layers, hidden, heads, heads, hidden // heads, mlp, mlp_matrices=2, attended=patches)


def _internvl(name: str, config: Config) -> ModelShape:
    """Reads the names of transformers, or those of the authors' layout."""
    config = {**config, "text_config": config.get("text_config") or config["llm_config"]}
    vision, language = config["vision_config"], _language(config)
    side = _first(vision["image_size"]) // _first(vision["patch_size"])
    tower = _tower(vision, vision["num_hidden_layers"], vision["intermediate_size"], side**2 + 1)
    shrunk = round(1 / config.get("downsample_ratio", 0.5))
    rule = MediaRule(
        "canvas", _first(vision["patch_size"]), tile_patches=side**2, tile_tokens=(side // shrunk) ** 2,
        max_tiles=12, frame_text_tokens=_INTERNVL_FRAME_TEXT,
    )  # fmt: skip
    projector = language.hidden * (vision["hidden_size"] * shrunk**2 + language.hidden)
    return ModelShape(name, tower, language, _limited(rule, "internvl"), 1, projector, _context(config))


def _llava(name: str, config: Config) -> ModelShape:
    vision, language = config["vision_config"], _language(config)
    side = vision["image_size"] // vision["patch_size"]
    tower = _tower(vision, vision["num_hidden_layers"], vision["intermediate_size"], side**2)
    rule = MediaRule(
        "tiles", vision["patch_size"], tile_patches=side**2, tile_tokens=side**2,
        frame_tokens=(-(-side // 2)) ** 2, end_tokens=1,
    )  # fmt: skip
    projector = language.hidden * (vision["hidden_size"] + language.hidden)
    return ModelShape(
        name, tower, language, _limited(rule, "llava_onevision"), 1, projector, _context(config)
    )


def _smolvlm(name: str, config: Config) -> ModelShape:
    vision, language = config["vision_config"], _language(config)
    side, shrunk = vision["image_size"] // vision["patch_size"], config["scale_factor"]
    layers, mlp = vision.get("num_hidden_layers", 12), vision.get("intermediate_size", 3072)
    rule = MediaRule(
        "tiles", vision["patch_size"], tile_patches=side**2, tile_tokens=(side // shrunk) ** 2,
        max_tiles=16, video_fps=1.0, sampling="round", frame_text_tokens=_SMOLVLM_FRAME_TEXT, max_frames=64,
    )  # fmt: skip
    projector = language.hidden * vision["hidden_size"] * shrunk**2
    tower = _tower(vision, layers, mlp, side**2)
    return ModelShape(name, tower, language, rule, 1, projector, _context(config))


def _gemma3(name: str, config: Config) -> ModelShape:
    config = {**config, "text_config": {**_GEMMA3_TEXT, **config["text_config"]}}
    vision, language = config["vision_config"], _language(config)
    side, tokens = vision["image_size"] // vision["patch_size"], config.get("mm_tokens_per_image", 256)
    tower = _tower(vision, vision["num_hidden_layers"], vision["intermediate_size"], side**2)
    rule = MediaRule(
        "tiles", vision["patch_size"], tile_patches=side**2, tile_tokens=tokens, max_tiles=1, has_videos=False
    )
    return ModelShape(
        name, tower, language, rule, 1, vision["hidden_size"] * language.hidden, _context(config)
    )


def _ernie(name: str, config: Config) -> ModelShape:
    """Its experts are chosen by the kind of a token; the widths are those of text's, and of media's."""
    text = _text_config(config)
    wide, narrow = text["moe_intermediate_size"]
    named = {"num_experts": text["moe_num_experts"], "num_experts_per_tok": text["moe_k"]}
    named |= {"moe_intermediate_size": wide}
    named["shared_expert_intermediate_size"] = text["moe_num_shared_experts"] * wide
    language = replace(
        _language({**config, "text_config": {**text, **named}}),
        media_mlp_hidden=narrow,
        num_dense=text["mlp_layer_types"].count("dense"),
        dense_hidden=text["intermediate_size"],
    )
    vision = config["vision_config"]
    hidden, heads, merge = vision["hidden_size"], vision["num_heads"], vision["spatial_merge_size"]
    tower = Transformer(
        vision["depth"], hidden, heads, heads, hidden // heads, vision["intermediate_size"], mlp_matrices=2,
        attended=_IN_FRAME,
    )  # fmt: skip
    square = (hidden * merge**2) ** 2  # of the joined channels: two matrices of a frame's, three of a pair's
    projector = 5 * square + hidden * merge**2 * language.hidden
    rule = replace(_ERNIE, patch=vision["patch_size"], merge=merge)
    return ModelShape(name, tower, language, rule, 1, projector, _context(config), is_shared=False)


def _molmo2(name: str, config: Config) -> ModelShape:
    """Reads the names of transformers and the authors', whose files lack layers behind the last one read."""
    vision = config.get("vision_config") or {}
    ours = config["adapter_config"]
    read = ours.get("vision_feature_layer") or ours["vit_layers"]
    layers = vision.get("num_hidden_layers", 0)
    if not vision:
        vision = config["vit_config"]
        layers = 1 + max(layer % vision["num_hidden_layers"] for layer in read)
    language, patch = _language(config), vision.get("patch_size") or vision["image_patch_size"]
    side = _first(vision.get("image_size") or vision["image_default_input_size"]) // patch
    rule = MediaRule(
        "crops", patch, tile_patches=side**2, tile_tokens=ceil_div(side, 2) ** 2, max_tiles=8, overlap=8,
        frame_tokens=ceil_div(side, _FRAME_POOL) ** 2, frame_text_tokens=_MOLMO_FRAME_TEXT, max_frames=64,
        sampling="capped", is_whole=True,
    )  # fmt: skip
    pooled, channels = len(read) * vision["hidden_size"], ours["num_attention_heads"] * ours["head_dim"]
    projector = channels * (3 * pooled + ours["hidden_size"])
    projector += ours["intermediate_size"] * (2 * ours["hidden_size"] + language.hidden)
    tower = _tower(vision, layers, vision["intermediate_size"], side**2)
    return ModelShape(name, tower, language, rule, 1, projector, _context(config), is_shared=False)


def _first(value: Any) -> int:
    """Returns the first of a pair of sides, or the one that stands for both."""
    return int(value[0] if isinstance(value, list | tuple) else value)


_READERS = {
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "internvl": _internvl,
    "internvl_chat": _internvl,
    "llava_onevision": _llava,
    "smolvlm": _smolvlm,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "gemma3": _gemma3,
    "ernie4_5_vl_moe": _ernie,
    "molmo2": _molmo2,
    "video_llama_3": _video_llama,
}
