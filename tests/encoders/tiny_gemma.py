"""A tiny random Gemma 3, made as the checkpoints of `tests.tiny_models` are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
)

from tests import tiny_models
from tests.encoders.tiny_tiles import _template, _text_ids, byte_tokenizer

SIDE, WINDOW, IMAGE_TOKENS = 56, 24, 16
_NAMES = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_TEXT: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 12,
    "max_position_embeddings": 8192,
    "sliding_window": WINDOW,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}


def build_gemma3(folder: Path, seed: int = 0, **text: Any) -> Path:
    """Gemma 3 with its pattern of five layers with windows and one without, and images of 16 tokens.

    As published: heads that do not make up the hidden size, a scale that is not theirs, and positions of the
    layers without windows that are stretched by 8.
    text: other sizes of the language model.
    """
    tokenizer = byte_tokenizer(tuple(_NAMES.values()), _template("<start_of_image>", ""), _NAMES)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _NAMES.items()}
    config = Gemma3Config(
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
        mm_tokens_per_image=IMAGE_TOKENS,
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
    )
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=IMAGE_TOKENS,
    )
    return tiny_models._save(folder, Gemma3ForConditionalGeneration, config, processor, seed)
