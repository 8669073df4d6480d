"""Tiny random Gemma 3 and 4, made as the checkpoints of `tests.tiny_models` are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
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
    return _with_small_embeddings(tiny_models._save(folder, _projecting, config, processor, seed))


def _projecting(config: Gemma3Config) -> Gemma3ForConditionalGeneration:
    """A model that sees images: in a new one, what projects their features is zero."""
    model = Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.02)
    return model


def _with_small_embeddings(folder: Path) -> Path:
    """Scales the embeddings of a checkpoint's tokens down, which are its head: then layers decide answers."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (name,) = (each for each in tensors if each.endswith("embed_tokens.weight"))
    save_file({**tensors, name: 0.01 * tensors[name]}, file, metadata={"format": "pt"})
    return folder


_GEMMA4_NAMES = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
_VIDEO = "<|video|>"
_GEMMA4_AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "output_proj_dims": 32,
    "subsampling_conv_channels": [4, 4],
}
# Of the checkpoints with experts, and of those with embeddings for each layer.
GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
GEMMA4_SMALL = {
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 4,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "use_double_wide_mlp": True,
    "use_bidirectional_attention": None,
}


def build_gemma4(folder: Path, seed: int = 0, *, hears: bool = False, **text: Any) -> Path:
    """Gemma 4 with two rounds of five layers with windows and one without, whose heads are larger.

    As the large ones are published: there keys are values too, and the tokens of an image attend each other
    in layers with windows alone. Images and frames have 70 tokens at most.
    hears: with a tower for sound, as the small ones have it. text: other fields of the language model.
    """
    template = _template("<|image|>", _VIDEO)
    tokenizer = byte_tokenizer((*_GEMMA4_NAMES.values(), _VIDEO), template, _GEMMA4_NAMES)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _GEMMA4_NAMES.items()}
    large = {
        "num_hidden_layers": 12,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
        "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": len(tokenizer),
    }
    sizes = {name: _TEXT[name] for name in _TEXT.keys() - {"query_pre_attn_scalar", "rope_scaling"}}
    config = Gemma4Config(
        text_config={**sizes, "model_type": "gemma4_text", **_text_ids(tokenizer), **large, **text},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 256,
        },
        audio_config=_GEMMA4_AUDIO if hears else None,
        boi_token_id=ids["boi_token"],
        eoi_token_id=ids["eoi_token"],
        image_token_id=ids["image_token"],
        video_token_id=tokenizer.convert_tokens_to_ids(_VIDEO),
        boa_token_id=ids["boa_token"],
        eoa_token_index=ids["eoa_token"],
        audio_token_id=ids["audio_token"],
    )
    settings = {"patch_size": 4, "max_soft_tokens": 70}
    processor = Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(**settings),
        tokenizer=tokenizer,
        video_processor=Gemma4VideoProcessor(**settings),
        chat_template=tokenizer.chat_template,
        image_seq_length=70,
    )
    return _with_small_embeddings(
        tiny_models._save(folder, Gemma4ForConditionalGeneration, config, processor, seed)
    )
