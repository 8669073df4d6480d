"""Tiny random checkpoints of MiniCPM-V, shrunk, with the structure of the published configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers as hf

from tests.encoders.tiny_tiles import _TEXT, _template, _text_ids, byte_tokenizer
from tests.tiny_models import _DELTA, _PARTIAL_ROPE, _save

_PATCH = 7
# As tokenizers of MiniCPM-V name their tokens.
_MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}


def _minicpm(
    folder: Path, seed: int, version: str, *marks: str, cuts_frames: bool = False, mode: str = "16x"
) -> Path:
    """MiniCPM-V: an overview and slices, each image with its number; Qwen3.5's language model.

    marks: tokens that the configuration names. mode: how many patches are a token, 16 or 4.
    cuts_frames: whether frames have slices too. The authors advise against it, and the files allow it.
    """
    tokenizer = byte_tokenizer(tuple(_MARKS.values()), _template("<|image_pad|>", "<|video_pad|>"), _MARKS)
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_token_id") for name in marks}
    ids |= {"newline_id": tokenizer.convert_tokens_to_ids("Ċ")} if marks else {}
    config = getattr(hf, f"MiniCPMV{version}Config")(
        text_config={
            "model_type": "qwen3_5_text",
            **_TEXT,
            **_DELTA,
            "num_hidden_layers": 4,
            **_text_ids(tokenizer),
            "rope_parameters": {**_PARTIAL_ROPE},
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 8 * _PATCH,
            "patch_size": _PATCH,
        },
        insert_layer_id=1,
        downsample_mode=mode,
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
        **ids,
    )
    size = {
        "patch_size": _PATCH,
        "scale_resolution": 11 * _PATCH,
        "max_slice_nums": 4,
        "downsample_mode": mode,
    }
    processor = getattr(hf, f"MiniCPMV{version}Processor")(
        image_processor=hf.MiniCPMV4_6ImageProcessor(**size),
        video_processor=hf.MiniCPMV4_6VideoProcessor(**size, slice_mode=cuts_frames),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    return _save(folder, getattr(hf, f"MiniCPMV{version}ForConditionalGeneration"), config, processor, seed)


def build_minicpmv4_6(folder: Path, seed: int = 0, **options: Any) -> Path:
    """MiniCPM-V 4.6: positions count tokens."""
    return _minicpm(folder, seed, "4_6", **options)


def build_minicpmv4_7(folder: Path, seed: int = 0, **options: Any) -> Path:
    """MiniCPM-V 4.7: an image is a canvas of positions, which its slices share."""
    marks = "image_start", "image_end", "slice_start", "slice_end"
    return _minicpm(folder, seed, "4_7", *marks, **options)
