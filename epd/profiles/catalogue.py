"""Lists the models that profiles are computed for: published checkpoints, and those of published figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from epd.errors import RequestError
from epd.profiles.configurations import shape_in, shape_of
from epd.profiles.media import MediaRule
from epd.profiles.shapes import ModelShape, Transformer

# Of a language model, in the order of _NAMES; an MLP that is narrower than the model is one of its experts.
_Sizes = tuple[int, int, int, int, int]
_NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8}

_QWEN2_TOWER = {
    "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "patch_size": 14,
    "spatial_merge_size": 2,
}  # fmt: skip
_QWEN25_TOWER = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
    "spatial_merge_size": 2,
}  # fmt: skip
_QWEN3_TOWER = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "spatial_merge_size": 2, "deepstack_visual_indexes": (8, 16, 24),
}  # fmt: skip
_QWEN3_SMALL = {**_QWEN3_TOWER, "depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
_QWEN35_SMALL = {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12}
_VIT_300M = {
    "hidden_size": 1024, "image_size": 448, "intermediate_size": 4096, "num_attention_heads": 16,
    "num_hidden_layers": 24, "patch_size": 14,
}  # fmt: skip
_VIT_6B = {
    **_VIT_300M, "hidden_size": 3200, "intermediate_size": 12800, "num_attention_heads": 25,
    "num_hidden_layers": 45,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "num_attention_heads": 16,
    "num_hidden_layers": 26, "patch_size": 14,
}  # fmt: skip
_GEMMA3_TOWER = {**_SIGLIP, "image_size": 896, "num_hidden_layers": 27}
_SMOL_TOWER = {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16}

_QWEN2_SIZES: Mapping[str, _Sizes] = {
    "2b": (1536, 8960, 28, 12, 2),
    "7b": (3584, 18944, 28, 28, 4),
    "72b": (8192, 29568, 80, 64, 8),
}
_QWEN25_SIZES: Mapping[str, _Sizes] = {
    "3b": (2048, 11008, 36, 16, 2),
    "7b": (3584, 18944, 28, 28, 4),
    "32b": (5120, 27648, 64, 40, 8),
    "72b": (8192, 29568, 80, 64, 8),
}
_QWEN3_SIZES: Mapping[str, _Sizes] = {
    "2b": (2048, 6144, 28, 16, 8),
    "4b": (2560, 9728, 36, 32, 8),
    "8b": (4096, 12288, 36, 32, 8),
    "32b": (5120, 25600, 64, 64, 8),
    "30b-a3b": (2048, 768, 48, 32, 4),
    "235b-a22b": (4096, 1536, 94, 64, 4),
}
_QWEN35_TEXT = {
    "head_dim": 256, "attn_output_gate": True, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128,
}  # fmt: skip
_QWEN35_EXPERTS = {"num_experts": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512}
# The last is heads of values of the recurrent layers.
_QWEN35_SIZES: Mapping[str, tuple[_Sizes, int]] = {
    "0.8b": ((1024, 3584, 24, 8, 2), 16),
    "9b": ((4096, 12288, 32, 16, 4), 32),
    "27b": ((5120, 17408, 64, 24, 4), 48),
    "35b-a3b": ((2048, 512, 40, 16, 2), 32),
}
_GEMMA3_SIZES: Mapping[str, tuple[_Sizes, int]] = {
    "4b": ((2560, 10240, 34, 8, 4), 256),
    "12b": ((3840, 15360, 48, 16, 8), 256),
    "27b": ((5376, 21504, 62, 32, 16), 128),
}
_INTERNVL3_SIZES: Mapping[str, _Sizes] = {
    "1b": (896, 4864, 24, 14, 2),
    "2b": (1536, 8960, 28, 12, 2),
    "8b": (3584, 18944, 28, 28, 4),
    "14b": (5120, 13824, 48, 40, 8),
    "38b": (5120, 27648, 64, 40, 8),
    "78b": (8192, 29568, 80, 64, 8),
}
_INTERNVL35_SIZES: Mapping[str, _Sizes] = {
    "1b": (1024, 3072, 28, 16, 8),
    "2b": (2048, 6144, 28, 16, 8),
    "4b": (2560, 9728, 36, 32, 8),
    "8b": (4096, 12288, 36, 32, 8),
    "14b": (5120, 17408, 40, 40, 8),
    "38b": (5120, 25600, 64, 64, 8),
    "30b-a3b": (2048, 768, 48, 32, 4),
    "241b-a28b": (4096, 1536, 94, 64, 4),
}
_ERNIE_TEXT = {
    "moe_intermediate_size": (1536, 512), "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2,
    "mlp_layer_types": ("dense", *["sparse"] * 27), "tie_word_embeddings": True,
}  # fmt: skip
_ERNIE_TOWER = {**_QWEN25_TOWER, "intermediate_size": 5120}
_MOLMO_TOWER = {**_SIGLIP, "image_size": 378, "num_hidden_layers": 25}
_MOLMO_ADAPTER = {
    "head_dim": 72, "hidden_size": 1152, "intermediate_size": 9728, "num_attention_heads": 16,
    "vision_feature_layer": (24, 18),
}  # fmt: skip
_GLM_TOWER = {
    "depth": 24, "hidden_size": 1536, "intermediate_size": 13696, "num_heads": 12, "out_hidden_size": 4096,
    "patch_size": 14, "spatial_merge_size": 2,
}  # fmt: skip
_GLM_EXPERTS = {
    "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_routed_experts": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 8,
}  # fmt: skip
_MINICPM_TOWER = {**_SIGLIP, "image_size": 980, "num_hidden_layers": 27}
_VIDEO_LLAMA_TOWER = {**_SIGLIP, "num_hidden_layers": 27}
_GEMMA4_SMALL_TOWER = {
    "head_dim": 64, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
    "num_hidden_layers": 16, "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10_240,
}  # fmt: skip
_GEMMA4_TOWER = {
    **_GEMMA4_SMALL_TOWER, "head_dim": 72, "hidden_size": 1152, "intermediate_size": 4304,
    "num_attention_heads": 16, "num_hidden_layers": 27,
}  # fmt: skip
# Layers behind each other of which the last has no window; those that read keys of others, or heads of keys
# of layers without a window.
_GEMMA4_SIZES: Mapping[str, tuple[_Sizes, int, dict[str, Any]]] = {
    "e2b": ((1536, 6144, 35, 8, 1), 5, {"num_kv_shared_layers": 20, "use_double_wide_mlp": True}),
    "e4b": ((2560, 10240, 42, 8, 2), 6, {"num_kv_shared_layers": 18}),
    "26b-a4b": (
        (2816, 2112, 30, 16, 8),
        6,
        {"num_global_key_value_heads": 2, "moe_intermediate_size": 704, "enable_moe_block": True}
        | {"num_experts": 128, "top_k_experts": 8},
    ),
    "31b": ((5376, 21504, 60, 32, 16), 6, {"num_global_key_value_heads": 4}),
}
_LARGE_TOWERS = ("38b", "78b", "241b-a28b")
_LLAVA_SIZES: Mapping[str, _Sizes] = {
    "0.5b": (896, 4864, 24, 14, 2),
    "7b": (3584, 18944, 28, 28, 4),
    "72b": (8192, 29568, 80, 64, 8),
}
_SMOL_SIZES: Mapping[str, _Sizes] = {
    "256m": (576, 1536, 30, 9, 3),
    "500m": (960, 2560, 32, 15, 5),
    "2.2b": (2048, 8192, 24, 32, 32),
}


def _text(sizes: _Sizes, vocabulary: int, context: int, *, head_dim: int | None = None) -> dict[str, Any]:
    has_experts = sizes[1] < sizes[0]
    fields: dict[str, Any] = dict(zip(_NAMES, sizes, strict=True))
    fields |= {"vocab_size": vocabulary, "max_position_embeddings": context, "head_dim": head_dim}
    return fields | ({**_EXPERTS, "moe_intermediate_size": sizes[1]} if has_experts else {})


def _published() -> Iterator[ModelShape]:
    """Yields the checkpoints of docs/models.md."""
    for size, sizes in _QWEN2_SIZES.items():
        config = _text(sizes, 151936 if size == "2b" else 152064, 32_768)
        config |= {
            "model_type": "qwen2_vl",
            "vision_config": _QWEN2_TOWER,
            "tie_word_embeddings": size == "2b",
        }
        yield shape_of(f"qwen2-vl-{size}", config)
    for size, sizes in _QWEN25_SIZES.items():
        config = _text(sizes, 151936 if size == "3b" else 152064, 128_000)
        tower: Mapping[str, Any] = (
            _QWEN25_TOWER if size in ("3b", "7b") else {**_QWEN25_TOWER, "intermediate_size": 3456}
        )
        config |= {"model_type": "qwen2_5_vl", "vision_config": tower, "tie_word_embeddings": size == "3b"}
        yield shape_of(f"qwen2.5-vl-{size}", config)
    for size, sizes in _QWEN3_SIZES.items():
        is_small = size in ("2b", "4b")
        tower = _QWEN3_SMALL if is_small else _QWEN3_TOWER
        text = _text(sizes, 151936, 262_144, head_dim=128)
        config = {"model_type": "qwen3_vl", "vision_config": tower, "text_config": text}
        yield shape_of(f"qwen3-vl-{size}", config | {"tie_word_embeddings": is_small})
    for size, (sizes, num_value_heads) in _QWEN35_SIZES.items():
        is_small, has_experts = size == "0.8b", sizes[1] < sizes[0]
        tower = _QWEN3_SMALL if is_small else _QWEN3_TOWER
        tower = {**tower, "deepstack_visual_indexes": ()} | (_QWEN35_SMALL if is_small else {})
        text = _text(sizes, 248_320, 262_144) | _QWEN35_TEXT | {"linear_num_value_heads": num_value_heads}
        text |= _QWEN35_EXPERTS if has_experts else {}
        config = {"model_type": "qwen3_5", "vision_config": tower, "text_config": text}
        yield shape_of(f"qwen3.5-{size}", config | {"tie_word_embeddings": is_small})
    text = _text(_QWEN35_SIZES["0.8b"][0], 248_094, 262_144) | _QWEN35_TEXT | {"linear_num_value_heads": 16}
    config = {"model_type": "minicpmv4_6", "vision_config": _MINICPM_TOWER, "text_config": text}
    yield shape_of("minicpm-v-4.6", config | {"tie_word_embeddings": True})
    for size, (sizes, channels) in _GEMMA3_SIZES.items():
        text = _text(sizes, 262_208, 131_072, head_dim=channels) | {"sliding_window": 1024}
        config = {"model_type": "gemma3", "vision_config": _GEMMA3_TOWER, "text_config": text}
        yield shape_of(f"gemma-3-{size}", config)
    for prefix, table, vocabulary, context, head_dim in (
        ("internvl3", _INTERNVL3_SIZES, 151674, 32_768, None),
        ("internvl3.5", _INTERNVL35_SIZES, 151936, 40_960, 128),
    ):
        for size, sizes in table.items():
            tower = _VIT_6B if size in _LARGE_TOWERS else _VIT_300M
            text = _text(sizes, vocabulary, context, head_dim=head_dim)
            config = {"model_type": "internvl", "vision_config": tower, "text_config": text}
            yield shape_of(f"{prefix}-{size}", config)
    for size, sizes in _LLAVA_SIZES.items():
        text = _text(sizes, 152000, 32_768) | {"tie_word_embeddings": size == "0.5b"}
        config = {"model_type": "llava_onevision", "vision_config": _SIGLIP, "text_config": text}
        yield shape_of(f"llava-onevision-{size}", config)
    for size, sizes in _SMOL_SIZES.items():
        is_large = size == "2.2b"
        tower = {**_SIGLIP, "num_hidden_layers": 27} if is_large else _SMOL_TOWER
        config = {"model_type": "smolvlm", "scale_factor": 3 if is_large else 4, "vision_config": tower}
        yield shape_of(f"smolvlm2-{size}", config | {"text_config": _text(sizes, 49280, 8192, head_dim=64)})
    text = _text((2560, 12288, 28, 20, 4), 103_424, 131_072) | _ERNIE_TEXT
    config = {"model_type": "ernie4_5_vl_moe", "vision_config": _ERNIE_TOWER, "text_config": text}
    yield shape_of("ernie-4.5-vl-28b-a3b", config)
    text = _text((2560, 9728, 36, 32, 8), 151_936, 36_864, head_dim=128)
    config = {"model_type": "molmo2", "vision_config": _MOLMO_TOWER, "adapter_config": _MOLMO_ADAPTER}
    yield shape_of("molmo2-4b", config | {"text_config": text})
    text = _text((4096, 13696, 40, 32, 2), 151_552, 65_536)
    config = {"model_type": "glm4v", "vision_config": _GLM_TOWER, "text_config": text}
    yield shape_of("glm-4.1v-9b", config)
    text = _text((4096, 10944, 46, 96, 8), 151_552, 65_536, head_dim=128) | _GLM_EXPERTS
    config = {"model_type": "glm4v_moe", "vision_config": {**_GLM_TOWER, "intermediate_size": 10944}}
    yield shape_of("glm-4.5v-106b-a12b", config | {"text_config": text})
    for size in ("2b", "7b"):
        text = _text(_QWEN2_SIZES[size], 151_936 if size == "2b" else 152_064, 32_768)
        config = {"model_type": "video_llama_3", "vision_config": _VIDEO_LLAMA_TOWER, "text_config": text}
        yield shape_of(f"videollama3-{size}", config | {"tie_word_embeddings": size == "2b"})
    for size, (sizes, every, more) in _GEMMA4_SIZES.items():
        is_small = size in ("e2b", "e4b")
        text = dict(zip(_NAMES, sizes, strict=True)) | {"head_dim": 256, "vocab_size": 262_144}
        text |= {"sliding_window_pattern": every, "attention_k_eq_v": not is_small, **more}
        text |= {"sliding_window": 512 if is_small else 1024, "hidden_size_per_layer_input": 256 * is_small}
        text["max_position_embeddings"] = 131_072 if is_small else 262_144
        tower = _GEMMA4_SMALL_TOWER if is_small else _GEMMA4_TOWER
        yield shape_of(
            f"gemma-4-{size}", {"model_type": "gemma4", "vision_config": tower, "text_config": text}
        )


# Models of published figures, which nothing here serves.
_SIGLIP_400M = Transformer(27, 1152, 16, 16, 72, 4304, mlp_matrices=2, attended=1024)
_INTERNVIT_300M = Transformer(24, 1024, 16, 16, 64, 4096, mlp_matrices=2, attended=1025)
_INTERNVIT_6B = Transformer(45, 3200, 25, 25, 128, 12800, mlp_matrices=2, attended=1025)
_WHISPER_SMALL = Transformer(12, 768, 12, 12, 64, 3072, mlp_matrices=2, attended=1500)
_QWEN2_7B = Transformer(28, 3584, 28, 4, 128, 18944, vocabulary=152064)
_LLAMA3_8B = Transformer(32, 4096, 32, 8, 128, 14336, vocabulary=128256)
_INTERNLM_8B = Transformer(32, 4096, 32, 8, 128, 14336, vocabulary=92553)
_INTERNLM_20B = Transformer(48, 6144, 48, 8, 128, 16384, vocabulary=92553)
_MINICPM_MEDIA = MediaRule("tiles", 14, tile_tokens=64, max_tiles=9)
_INTERNVL2_MEDIA = MediaRule("tiles", 14, tile_tokens=256, max_tiles=12)
# A clip of sound is a tile: 30 s of it, eight positions of the encoder in a token.
_ULTRAVOX_MEDIA = MediaRule("tiles", 1, tile_patches=1500, tile_tokens=188, max_tiles=1)

MODELS: Mapping[str, ModelShape] = {
    model.name: model
    for model in (
        ModelShape("minicpm-v-2.6", _SIGLIP_400M, _QWEN2_7B, _MINICPM_MEDIA),
        ModelShape("internvl2-8b", _INTERNVIT_300M, _INTERNLM_8B, _INTERNVL2_MEDIA),
        ModelShape("internvl2-26b", _INTERNVIT_6B, _INTERNLM_20B, _INTERNVL2_MEDIA),
        ModelShape("ultravox-v0.3", _WHISPER_SMALL, _LLAMA3_8B, _ULTRAVOX_MEDIA),
        *_published(),
    )
}


def model_named(name: str) -> ModelShape:
    """Returns a model by name, or of a folder or config.json. Raises RequestError for anything else.

    A name may be longer than the catalogue's: Qwen/Qwen2.5-VL-7B-Instruct is qwen2.5-vl-7b. One that ends in
    -fp8 has layers of 8 bits.
    """
    if Path(name).exists():
        return shape_in(Path(name))
    wanted = name.rpartition("/")[2].lower()
    found = next((MODELS[each] for each in sorted(MODELS, key=len, reverse=True) if _is(wanted, each)), None)
    if found is None:
        raise RequestError(
            f"model is {name!r}; known are {', '.join(MODELS)}, a folder with a config.json, or that file; "
            "measure others with epd profile"
        )
    return replace(found, layer_bytes=1.0) if wanted.endswith("-fp8") else found


def _is(wanted: str, known: str) -> bool:
    """Returns whether a name says the known one, and at most `-instruct` and the like behind it."""
    return wanted == known or (wanted.startswith(f"{known}-") and not wanted[len(known) + 1].isdigit())
