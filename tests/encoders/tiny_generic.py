"""Tiny random checkpoints of the families that transformers' own processor and tower serve here.

Each has the structure of its published configurations, shrunk: as those of `tests.tiny_models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers as hf
from transformers import PreTrainedTokenizerFast

from tests.encoders.tiny_gemma import build_gemma4
from tests.encoders.tiny_minicpm import build_minicpmv4_6, build_minicpmv4_7
from tests.encoders.tiny_molmo import build_molmo2
from tests.encoders.tiny_tiles import _TEXT, _template, _text_ids, byte_tokenizer
from tests.tiny_models import EXPERTS, _save, build_qwen3_5, build_qwen3_vl

SIDE = 28
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "projection_dim": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 7,
}
_SIZE = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
_PINPOINTS = [[SIDE * rows, SIDE * columns] for rows in (1, 2) for columns in (1, 2)]
_GRID = {"size": {"shortest_edge": 56 * 56, "longest_edge": 84 * 84}}
_QWEN_NAMES = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}


def _named(image: str = "<image>", video: str | None = "<video>", *more: str, around: str = "X") -> Any:
    """Returns a tokenizer that knows the tokens of media, as attributes too. around: a medium in a prompt."""
    names = {"image_token": image} | ({"video_token": video} if video else {})
    template = _template(around.replace("X", image), around.replace("X", video or ""))
    return byte_tokenizer((*names.values(), *more), template, names)


def _ids(tokenizer: PreTrainedTokenizerFast, **tokens: str) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _text(tokenizer: PreTrainedTokenizerFast, model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **_TEXT, **_text_ids(tokenizer), **more}


def _mrope(tokenizer: PreTrainedTokenizerFast, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    return {**_TEXT, **_text_ids(tokenizer), "rope_parameters": {**rope, **more}}


def build_qwen2_vl(folder: Path, seed: int = 0) -> Path:
    """Qwen2-VL: M-RoPE in sections, frames in pairs."""
    tokenizer = _named(
        *_QWEN_NAMES.values(), "<|vision_start|>", "<|vision_end|>", around="<|vision_start|>X<|vision_end|>"
    )
    config = hf.Qwen2VLConfig(
        text_config=_mrope(tokenizer),
        vision_config={"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2},
        **_ids(
            tokenizer,
            image_token_id="<|image_pad|>",
            video_token_id="<|video_pad|>",
            vision_start_token_id="<|vision_start|>",
            vision_end_token_id="<|vision_end|>",
        ),
    )
    processor = hf.Qwen2VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(**_GRID),
        tokenizer=tokenizer,
        video_processor=hf.Qwen2VLVideoProcessor(**_GRID, fps=2, cap_pixels_per_frame=False),
        chat_template=tokenizer.chat_template,
    )
    return _save(folder, hf.Qwen2VLForConditionalGeneration, config, processor, seed)


def _glm(folder: Path, seed: int, prefix: str, **text: Any) -> Path:
    """GLM-4.1V and its kin: a video is an image a pair of frames, each with its time behind it.

    As published, half of each head is rotated, but of GLM-OCR.
    """
    marks = [f"<|{edge}_of_{kind}|>" for kind in ("image", "video") for edge in ("begin", "end")]
    tokenizer = _named("<|image|>", "<|video|>", *marks)
    tokenizer.chat_template = _template(f"{marks[0]}<|image|>{marks[1]}", f"{marks[2]}<|video|>{marks[3]}")
    rope = {"partial_rotary_factor": 1.0 if prefix == "GlmOcr" else 0.5}
    rope |= {} if prefix == "GlmOcr" else {"mrope_section": [2, 1, 1]}
    config = getattr(hf, f"{prefix}Config")(
        text_config={**_mrope(tokenizer, **rope), **text},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "image_size": 84,
        },
        **_ids(
            tokenizer,
            image_token_id="<|image|>",
            video_token_id="<|video|>",
            image_start_token_id=marks[0],
            image_end_token_id=marks[1],
            video_start_token_id=marks[2],
            video_end_token_id=marks[3],
        ),
    )
    parts = "Glm4v" if prefix.startswith("Glm4v") else "Glm46V"
    size = {"size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 8 * 84 * 84}}
    processor = getattr(hf, f"{parts}Processor")(
        image_processor=getattr(hf, f"{parts}ImageProcessor")(**size),
        tokenizer=tokenizer,
        video_processor=getattr(hf, f"{parts}VideoProcessor")(**size),
        chat_template=tokenizer.chat_template,
    )
    return _save(folder, getattr(hf, f"{prefix}ForConditionalGeneration"), config, processor, seed)


def build_glm4v(folder: Path, seed: int = 0) -> Path:
    return _glm(folder, seed, "Glm4v")


def build_glm46v(folder: Path, seed: int = 0) -> Path:
    return _glm(folder, seed, "Glm46V")


def build_glm4v_moe(folder: Path, seed: int = 0) -> Path:
    """GLM-4.5V: experts in all layers but the first."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    return _glm(folder, seed, "Glm4vMoe", **experts)


def build_glm_ocr(folder: Path, seed: int = 0) -> Path:
    return _glm(folder, seed, "GlmOcr", head_dim=16)


def _llava(folder: Path, seed: int, prefix: str, **config: Any) -> Path:
    tokenizer = _named("<image>", None, around="X\n")
    made = getattr(hf, f"{prefix}Config")(
        text_config=_text(tokenizer, "llama"),
        vision_config=_CLIP,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        **config,
    )
    processor = hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessor(**_SIZE),
        tokenizer=tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    return _save(folder, getattr(hf, f"{prefix}ForConditionalGeneration"), made, processor, seed)


def build_llava(folder: Path, seed: int = 0) -> Path:
    """LLaVA-1.5: one square, a layer before the last."""
    return _llava(folder, seed, "Llava")


def build_vipllava(folder: Path, seed: int = 0) -> Path:
    """ViP-LLaVA: several layers of the tower side by side."""
    return _llava(folder, seed, "VipLlava", vision_feature_layers=[-2, -1, 1])


def build_llava_next(folder: Path, seed: int = 0) -> Path:
    """LLaVA-NeXT: tiles as one picture, a newline after each row."""
    tokenizer = _named("<image>", None, around="X\n")
    config = hf.LlavaNextConfig(
        text_config=_text(tokenizer, "mistral", sliding_window=None),
        vision_config=_CLIP,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=_PINPOINTS,
    )
    processor = hf.LlavaNextProcessor(
        image_processor=hf.LlavaNextImageProcessor(**_SIZE, image_grid_pinpoints=_PINPOINTS),
        tokenizer=tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    return _save(folder, hf.LlavaNextForConditionalGeneration, config, processor, seed)


def build_llava_next_video(folder: Path, seed: int = 0) -> Path:
    """LLaVA-NeXT-Video: the same, and pooled frames."""
    tokenizer = _named("<image>", "<video>", around="X\n")
    config = hf.LlavaNextVideoConfig(
        text_config=_text(tokenizer, "llama"),
        vision_config=_CLIP,
        image_grid_pinpoints=_PINPOINTS,
        **_ids(tokenizer, image_token_index="<image>", video_token_index="<video>"),
    )
    processor = hf.LlavaNextVideoProcessor(
        image_processor=hf.LlavaNextImageProcessor(**_SIZE, image_grid_pinpoints=_PINPOINTS),
        tokenizer=tokenizer,
        video_processor=hf.LlavaNextVideoVideoProcessor(**_SIZE),
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    return _save(folder, hf.LlavaNextVideoForConditionalGeneration, config, processor, seed)


def build_video_llava(folder: Path, seed: int = 1) -> Path:
    """Video-LLaVA: a tower for images and one for videos."""
    tokenizer = _named("<image>", "<video>", around="X\n")
    config = hf.VideoLlavaConfig(
        text_config=_text(tokenizer, "llama"),
        vision_config=_CLIP,
        **_ids(tokenizer, image_token_index="<image>", video_token_index="<video>"),
    )
    processor = hf.VideoLlavaProcessor(
        image_processor=hf.VideoLlavaImageProcessor(**_SIZE),
        tokenizer=tokenizer,
        video_processor=hf.VideoLlavaVideoProcessor(**_SIZE),
        patch_size=7,
        chat_template=tokenizer.chat_template,
    )
    return _save(folder, hf.VideoLlavaForConditionalGeneration, config, processor, seed, layers_decide=True)


def build_idefics3(folder: Path, seed: int = 0) -> Path:
    """Idefics3: tiles, each after its place, then the whole image."""
    names = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    rows = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
    tokenizer = byte_tokenizer((*names.values(), *rows), _template("<image>", ""), names)
    config = hf.Idefics3Config(
        text_config={**_text(tokenizer, "llama"), "pad_token_id": None},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": 7,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
    )
    processor = hf.Idefics3Processor(
        image_processor=hf.Idefics3ImageProcessor(
            size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=tokenizer.chat_template,
    )
    return _save(folder, hf.Idefics3ForConditionalGeneration, config, processor, seed)


def build_aria(folder: Path, seed: int = 0) -> Path:
    """Aria: queries ask the tower's patches, experts in the language model."""
    tokenizer = _named("<image>", None)
    config = hf.AriaConfig(
        text_config={
            **_text(tokenizer, "aria_text"),
            "moe_num_experts": 4,
            "moe_topk": 2,
            "moe_num_shared_experts": 1,
        },
        vision_config={
            "model_type": "idefics3_vision",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 980,
            "patch_size": 98,
        },
        projector_patch_to_query_dict={25: 4, 100: 8},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    processor = hf.AriaProcessor(
        image_processor=hf.AriaImageProcessor(max_image_size=490, min_image_size=98),
        tokenizer=tokenizer,
        size_conversion={490: 4, 980: 8},
        chat_template=tokenizer.chat_template,
    )
    return _save(folder, hf.AriaForConditionalGeneration, config, processor, seed)


def _cohere(
    folder: Path, seed: int, prefix: str, text: dict[str, Any], processor_settings: dict[str, Any]
) -> Path:
    """Tiles of four tokens, logits that their `generate` does not scale."""
    names = {
        "image_token": "<|IMG_PATCH|>",
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    }
    marks = ("TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 13)))
    image = "<image>" if prefix == "AyaVision" else names["image_token"]
    tokenizer = byte_tokenizer((*names.values(), "<image>", *marks), _template(image, ""), names)
    config = getattr(hf, f"{prefix}Config")(
        text_config={**_TEXT, **_text_ids(tokenizer), **text},
        vision_config={
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": 7,
        },
        alignment_intermediate_size=64,
        downsample_factor=2,
        **_ids(tokenizer, image_token_id=names["image_token"]),
    )
    tiles = {"size": {"height": SIDE, "width": SIDE}, "max_patches": 4, "crop_to_patches": True}
    images = hf.GotOcr2ImageProcessor if prefix == "AyaVision" else hf.Cohere2VisionImageProcessor
    processor = getattr(hf, f"{prefix}Processor")(
        image_processor=images(**tiles, **({} if prefix == "AyaVision" else {"patch_size": 2})),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        **processor_settings,
    )
    return _save(folder, getattr(hf, f"{prefix}ForConditionalGeneration"), config, processor, seed)


def build_cohere2_vision(folder: Path, seed: int = 0) -> Path:
    """Command A Vision: each tile ends with a token of its own; three layers in four have a window."""
    text = {"model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 24}
    return _cohere(folder, seed, "Cohere2Vision", text, {})


def build_aya_vision(folder: Path, seed: int = 0) -> Path:
    """Aya Vision of 32B: each tile begins with a token of its own, the whole image comes last; no windows."""
    sizes = {"patch_size": 7, "img_size": SIDE, "downsample_factor": 2}
    return _cohere(folder, seed, "AyaVision", {"model_type": "cohere", "use_qk_norm": True}, sizes)


def _pixtral(
    folder: Path,
    seed: int,
    model: Any,
    made: Callable[[Any, dict[str, Any]], Any],
    processor_class: Any = hf.PixtralProcessor,
) -> Path:
    names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    tokenizer = byte_tokenizer(tuple(names.values()), _template("[IMG]", ""), names)
    tower = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
        "image_size": 112,
        "patch_size": 14,
    }
    processor = processor_class(
        image_processor=hf.PixtralImageProcessor(
            size={"longest_edge": 112}, patch_size={"height": 14, "width": 14}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=tokenizer.chat_template,
    )
    is_light = processor_class is hf.LightOnOcrProcessor
    return _save(folder, model, made(tokenizer, tower), processor, seed, layers_decide=is_light)


def build_mistral3(folder: Path, seed: int = 0) -> Path:
    """Mistral Small 3.1: a row of patches ends with a token of its own."""

    def config(tokenizer: Any, tower: dict[str, Any]) -> Any:
        return hf.Mistral3Config(
            text_config=_text(tokenizer, "mistral", sliding_window=None, head_dim=16),
            vision_config=tower,
            image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
            tie_word_embeddings=False,
        )

    return _pixtral(folder, seed, hf.Mistral3ForConditionalGeneration, config)


def build_lighton_ocr(folder: Path, seed: int = 0) -> Path:
    """LightOnOCR: Pixtral's tower, and no tokens between rows."""

    def config(tokenizer: Any, tower: dict[str, Any]) -> Any:
        return hf.LightOnOcrConfig(
            text_config=_text(tokenizer, "qwen3", head_dim=16),
            vision_config=tower,
            image_token_id=tokenizer.convert_tokens_to_ids("[IMG]"),
            tie_word_embeddings=False,
        )

    return _pixtral(folder, seed, hf.LightOnOcrForConditionalGeneration, config, hf.LightOnOcrProcessor)


def build_deepseek_vl(folder: Path, seed: int = 0) -> Path:
    """DeepSeek-VL: a padded square."""
    tokenizer = _named("<image_placeholder>", None)
    config = hf.DeepseekVLConfig(
        text_config=_text(tokenizer, "llama"),
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": 7,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image_placeholder>"),
        tie_word_embeddings=False,
    )
    processor = hf.DeepseekVLProcessor(
        image_processor=hf.DeepseekVLImageProcessor(size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        num_image_tokens=16,
        chat_template=tokenizer.chat_template,
    )
    return _save(folder, hf.DeepseekVLForConditionalGeneration, config, processor, seed)


def build_hyperclovax_vision_v2(folder: Path, seed: int = 0) -> Path:
    """HyperCLOVA X: Qwen2.5-VL's tower, multiplied embeddings."""
    tokenizer = _named(*_QWEN_NAMES.values())
    config = hf.HyperCLOVAXVisionV2Config(
        text_config={**_text(tokenizer, "hyperclovax"), "head_dim": 16, "embedding_multiplier": 2.0},
        vision_config=_QWEN_TOWER,
        **_ids(tokenizer, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>"),
        tie_word_embeddings=False,
    )
    return _save(
        folder,
        hf.HyperCLOVAXVisionV2ForConditionalGeneration,
        config,
        _qwen_like(hf.HyperCLOVAXVisionV2Processor, tokenizer),
        seed,
    )


def build_exaone4_5(folder: Path, seed: int = 0) -> Path:
    """EXAONE 4.5: Qwen2.5-VL's tower with grouped queries."""
    tokenizer = _named(*_QWEN_NAMES.values())
    config = hf.Exaone4_5_Config(
        text_config={
            **_text(tokenizer, "exaone4"),
            "sliding_window": None,
            "layer_types": ["full_attention"] * 2,
        },
        vision_config={**_QWEN_TOWER, "num_key_value_heads": 1},
        **_ids(tokenizer, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>"),
    )
    return _save(
        folder,
        hf.Exaone4_5_ForConditionalGeneration,
        config,
        _qwen_like(hf.Exaone4_5_Processor, tokenizer),
        seed,
    )


_QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}


def _qwen_like(processor: Any, tokenizer: PreTrainedTokenizerFast) -> Any:
    return processor(
        image_processor=hf.Qwen2VLImageProcessor(**_GRID),
        tokenizer=tokenizer,
        video_processor=hf.Qwen2VLVideoProcessor(**_GRID, fps=2, cap_pixels_per_frame=False),
        chat_template=tokenizer.chat_template,
    )


def build_paddleocr_vl(folder: Path, seed: int = 0) -> Path:
    """PaddleOCR-VL: images of any size, M-RoPE."""
    marks = ("<|IMAGE_START|>", "<|IMAGE_END|>")
    tokenizer = _named("<|IMAGE_PLACEHOLDER|>", "<|video_pad|>", *marks, around=f"{marks[0]}X{marks[1]}")
    config = hf.PaddleOCRVLConfig(
        text_config={**_mrope(tokenizer), "head_dim": 16},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
        },
        **_ids(
            tokenizer,
            image_token_id="<|IMAGE_PLACEHOLDER|>",
            video_token_id="<|video_pad|>",
            vision_start_token_id=marks[0],
            vision_end_token_id=marks[1],
        ),
    )
    processor = hf.PaddleOCRVLProcessor(
        image_processor=hf.PaddleOCRVLImageProcessor(**_GRID),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    return _save(folder, hf.PaddleOCRVLForConditionalGeneration, config, processor, seed)


def build_qwen3_5_moe(folder: Path, seed: int = 0) -> Path:
    return build_qwen3_5(folder, seed, **EXPERTS)


def build_qwen3_vl_moe(folder: Path, seed: int = 0) -> Path:
    return build_qwen3_vl(folder, seed, **EXPERTS)


__all__ = ["BUILDERS", "build_gemma4", "build_minicpmv4_6", "build_minicpmv4_7", "build_molmo2"]
BUILDERS: Mapping[str, Callable[[Path], Path]] = {
    name.removeprefix("build_"): build
    for name, build in sorted(globals().items())
    if name.startswith("build_") and name != "build_qwen3_vl"
}
