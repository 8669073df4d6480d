"""A tiny random Qwen2.5-Omni as it is published: a thinker that reads, and a talker that is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    GenerationConfig,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

from tests.encoders.tiny_tiles import byte_tokenizer
from tests.tiny_models import draw_weights

_TOKENS = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
# What the published template writes, in short.
_TEMPLATE = (
    "{% for each in messages %}{{ '<|im_start|>' + each.role + '\\n' }}{% for part in each.content %}"
    "{{ {'image': '<|vision_bos|><|IMAGE|><|vision_eos|>', 'video': '<|vision_bos|><|VIDEO|><|vision_eos|>'}"
    ".get(part.type) or part.text }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"
)
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
}
_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}
_AUDIO: dict[str, Any] = {
    "num_mel_bins": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 16,
    "output_dim": 64,
}


def thinker(seed: int = 0) -> Any:
    """The model of transformers that says what is right."""
    torch.manual_seed(seed)
    tokenizer = _tokenizer()
    named = dict(zip(_TOKENS, tokenizer.convert_tokens_to_ids(list(_TOKENS.values())), strict=True))
    config = Qwen2_5OmniThinkerConfig(
        text_config={"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, **_TEXT},
        vision_config=_VISION,
        audio_config=_AUDIO,
        image_token_index=named["image_token"],
        video_token_index=named["video_token"],
        audio_token_index=named["audio_token"],
        vision_start_token_id=named["vision_bos_token"],
        vision_end_token_id=named["vision_eos_token"],
        audio_start_token_id=named["audio_bos_token"],
        audio_end_token_id=named["audio_eos_token"],
    )
    config._attn_implementation = "sdpa"
    return draw_weights(Qwen2_5OmniThinkerForConditionalGeneration(config).eval(), seed)


def write(folder: Path, model: Any) -> Path:
    """Writes it under the names of the published files."""
    folder.mkdir()
    tokenizer = _tokenizer()
    size = {"shortest_edge": 56 * 56, "longest_edge": 84 * 84}
    Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(size=dict(size)),
        video_processor=Qwen2VLVideoProcessor(size=dict(size)),
        feature_extractor=WhisperFeatureExtractor(feature_size=16),
        tokenizer=tokenizer,
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
    settings = model.config.to_dict()
    settings["text_config"] |= _TEXT
    settings["text_config"].pop("rope_parameters", None)
    config = {"model_type": "qwen2_5_omni", "thinker_config": settings, "talker_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(folder)
    tensors = {published_name(name): tensor.contiguous() for name, tensor in model.state_dict().items()}
    talker = {"talker.model.layers.0.self_attn.q_proj.weight": torch.ones(8, 8)}
    save_file(tensors | talker, folder / "model.safetensors", {"format": "pt"})
    return folder


def published_name(name: str) -> str:
    name = name.removeprefix("model.") if not name.startswith("model.language_model.") else name
    return f"thinker.{name.replace('model.language_model.', 'model.')}"


def _tokenizer() -> Any:
    return byte_tokenizer(tuple(_TOKENS.values()), _TEMPLATE, _TOKENS)
