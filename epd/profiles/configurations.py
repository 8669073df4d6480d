"""Reads the shape of a model from its `config.json`: layers, experts, tower, and how it cuts media."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from epd.errors import RequestError
from epd.pixel_settings import AUTHORS
from epd.profiles.media import MediaRule
from epd.profiles.processor_files import GLM46V_FRAME_TEXT, Config, read_object, with_files
from epd.profiles.shapes import DeltaLayers, JoinedLayers, ModelShape, Transformer, WindowLayers
from epd.types import ceil_div

# Patches that one attends to in a tower of windows, and in one of whole frames, about.
_IN_WINDOW, _IN_FRAME = 128, 1024
# Text around a frame of a video: `Frame12: <img></img>` beside its digits; SmolVLM2's time and marks, about.
_INTERNVL_FRAME_TEXT, _SMOLVLM_FRAME_TEXT = 6, 13
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
# An image is counted as the two frames of a time step; `max_seconds` is the processor's `max_duration`.
_GLM = MediaRule(
    "grid", 14, min_pixels=112**2, max_pixels=15_000 * 28**2, min_frame_pixels=112**2,
    max_frame_pixels=10**9, max_video_tokens=30_000, is_timed=True, has_least=False, image_frames=2,
    sampling="pairs", max_seconds=300, frame_text_tokens=2,
)  # fmt: skip
# Frames behind their times, as `00:12`, between marks.
_GEMMA4 = MediaRule("pooled", 16, 3, tile_tokens=280, frame_tokens=70, num_frames=32, frame_text_tokens=8)
# Of Molmo 2: patches of a side of the pooled squares of frames, and text around a frame, its time and marks.
_FRAME_POOL, _MOLMO_FRAME_TEXT = 3, 8
_MINICPM = MediaRule("slices", 14, 4, video_fps=1.0, max_frames=128, sampling="seconds")
_RECURRENT, _WINDOWED = "linear_attention", "sliding_attention"
# Counts of experts; transformers 5 writes the second for the first.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Of 4 bits: columns that share a scale of 16 bits and a zero point of 8.
_GROUP, _GROUP_BYTES = 128, 3


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
    config = read_object(path / "config.json" if path.is_dir() else path)
    shape = replace(shape_of(folder.resolve().name.lower(), config), layer_bytes=_layer_bytes(config))
    if shape.media.kind not in ("grid", "crops", "pooled", "slices"):
        return shape
    return replace(shape, media=with_files(shape.media, folder))


def _layer_bytes(config: Config) -> float:
    """Counts the bytes of a weight by `quantization_config`; scales of FP8 are left out: .1 %."""
    settings = _text_config(config).get("quantization_config")
    if not settings:
        return 2.0
    is_packed = settings.get("format") == "pack-quantized"
    if not is_packed and settings.get("quant_method") not in ("awq", "gptq"):
        return 1.0
    return 0.5 + _GROUP_BYTES / max(settings.get("group_size") or _GROUP, 1)


def _text_config(config: Config) -> Config:
    """Returns the fields of the language model, which some families have at the top."""
    inner = config.get("text_config") or {}
    return {**config, **inner}


def _language(config: Config) -> Transformer:
    text = _text_config(config)
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    kv_heads, head_dim = text.get("num_key_value_heads") or heads, text.get("head_dim") or hidden // heads
    experts = next((text[each] for each in _EXPERTS if text.get(each)), 1)
    width = text["moe_intermediate_size"] if experts > 1 else text["intermediate_size"]
    is_tied = bool(config.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False))
    kinds, dense = _layer_kinds(text), text.get("first_k_dense_replace") or 0
    windowed = kinds.count(_WINDOWED)
    return Transformer(
        text["num_hidden_layers"],
        hidden,
        heads,
        kv_heads,
        head_dim,
        width,
        vocabulary=text["vocab_size"],
        num_experts=experts,
        num_active_experts=text["num_experts_per_tok"] if experts > 1 else 1,
        is_tied=is_tied,
        shared_mlp_hidden=text.get("shared_expert_intermediate_size")
        or (text.get("n_shared_experts") or 0) * width,
        num_dense=dense,
        dense_hidden=text["intermediate_size"] if dense else 0,
        has_query_gate=bool(text.get("attn_output_gate", False)),
        windowed=WindowLayers(windowed, text["sliding_window"], kv_heads, head_dim)
        if windowed
        else WindowLayers(),
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
    named = {
        "num_experts": text["moe_num_experts"],
        "num_experts_per_tok": text["moe_k"],
        "moe_intermediate_size": wide,
        "n_shared_experts": text["moe_num_shared_experts"],
        "first_k_dense_replace": text["mlp_layer_types"].count("dense"),
    }
    language = replace(_language({**config, "text_config": {**text, **named}}), media_mlp_hidden=narrow)
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


def _glm(name: str, config: Config) -> ModelShape:
    """Reads the tower of GLM-4.xV, whose layers are as wide as the language model, or that of GLM-OCR."""
    vision, language = config["vision_config"], _language(config)
    hidden, heads, merge = vision["hidden_size"], vision["num_heads"], vision["spatial_merge_size"]
    joined, merger = vision["out_hidden_size"], vision["intermediate_size"]
    mlp = joined
    if config["model_type"] == "glm_ocr":
        mlp, merger = merger, 3 * joined
    tower = Transformer(vision["depth"], hidden, heads, heads, hidden // heads, mlp, attended=_IN_FRAME)
    projector = joined * (hidden * merge**2 + joined + 3 * merger)
    rule = replace(_GLM, patch=vision["patch_size"], merge=merge)
    if config["model_type"] in ("glm46v", "glm_ocr"):
        rule = replace(rule, sampling="length", frame_text_tokens=GLM46V_FRAME_TEXT)
    return ModelShape(name, tower, language, rule, 1, projector, _context(config))


def _minicpm(name: str, config: Config) -> ModelShape:
    """Reads MiniCPM-V 4.6 and 4.7, whose tower joins windows of 2 x 2 patches, but in its mode 4x."""
    vision, language = config["vision_config"], _language(config)
    hidden, mlp, layers = vision["hidden_size"], vision["intermediate_size"], vision["num_hidden_layers"]
    patch, is_joined = _first(vision["patch_size"]), config.get("downsample_mode") != "4x"
    joined = JoinedLayers(
        layers - 1 - config.get("insert_layer_id", 6) if is_joined else 0,
        4 * hidden * (hidden + 5 * mlp),
        hidden * (4 * hidden + 5 * mlp) if is_joined else 0,
    )
    tower = replace(_tower(vision, layers, mlp, _IN_FRAME), joined=joined)
    places = (_first(vision["image_size"]) // patch) ** 2
    projector = hidden * (16 * hidden + 4 * language.hidden + places + 3 * patch**2)
    rule = replace(_MINICPM, patch=patch, merge=4 if is_joined else 2)
    return ModelShape(name, tower, language, rule, 1, projector, _context(config))


def _gemma4(name: str, config: Config) -> ModelShape:
    vision, text = config["vision_config"], config["text_config"]
    heads, channels = vision["num_attention_heads"], vision["head_dim"]
    hidden, pool = vision["hidden_size"], vision["pooling_kernel_size"]
    tower = Transformer(
        vision["num_hidden_layers"], hidden, heads, heads, channels, vision["intermediate_size"],
        attended=_IN_FRAME,
    )  # fmt: skip
    language = _gemma4_language(text)
    projector = hidden * (2 * vision["position_embedding_size"] + language.hidden)
    rule = replace(_GEMMA4, patch=vision["patch_size"], merge=pool)
    return ModelShape(name, tower, language, rule, 1, projector, _context(config))


def _gemma4_language(text: Config) -> Transformer:
    """Reads layers whose heads differ with their kind, and of which the last read keys of the others.

    Experts are beside an MLP. In the smaller models the last layers' MLP may be twice as wide.
    """
    is_joint, is_wide = bool(text.get("attention_k_eq_v")), bool(text.get("use_double_wide_mlp"))
    known = {"sliding_window_pattern": 6, "tie_word_embeddings": True, **text}
    if text.get("enable_moe_block"):
        known |= {"num_experts_per_tok": text["top_k_experts"]}
        known |= {"shared_expert_intermediate_size": text["intermediate_size"]}
    whole, num_lent = _language(known), text.get("num_kv_shared_layers") or 0
    lent = _layer_kinds(known)[whole.num_layers - num_lent :]
    return replace(
        whole,
        num_kv_heads=(is_joint and text.get("num_global_key_value_heads")) or whole.num_kv_heads,
        head_dim=text.get("global_head_dim") or 512,
        num_lent=num_lent - lent.count(_WINDOWED),
        has_value_matrix=not is_joint,
        num_dense=num_lent if is_wide else 0,
        dense_hidden=2 * whole.mlp_hidden if is_wide else 0,
        layer_inputs=text.get("hidden_size_per_layer_input") or 0,
        windowed=replace(whole.windowed, num_lent=lent.count(_WINDOWED)),
    )


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
    "gemma4": _gemma4,
    "glm4v": _glm,
    "glm4v_moe": _glm,
    "glm46v": _glm,
    "glm_ocr": _glm,
    "ernie4_5_vl_moe": _ernie,
    "minicpmv4_6": _minicpm,
    "minicpmv4_7": _minicpm,
    "molmo2": _molmo2,
    "video_llama_3": _video_llama,
}
