"""Writes a checkpoint that hears: Qwen2-Audio, about as large as shapes-vl, with its tokens, random weights.

Clips of at most `WINDOW_S` seconds become 400 positions of a tower with shapes-vl's width, depth and heads,
about as many as an image of 280 x 280 pixels has patches, and 25 tokens a second. Answers are random words,
and no special token is among them, so that each is as long as it may be and every token has a text.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from epd.models import embedded_model_path
from tests.tiny_audio import SOUND_TOKENS, TEMPLATE, qwen2_audio_config

WINDOW_S = 8
_MELS = 40
_TEXT = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
}
_TOWER = {
    "d_model": 128,
    "encoder_layers": 4,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 576,
    "num_mel_bins": _MELS,
}


def write_hearing_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Writes the checkpoint, 19 MB, and returns its folder."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path(), local_files_only=True)
    tokenizer.add_special_tokens(
        {"extra_special_tokens": list(SOUND_TOKENS)}, replace_extra_special_tokens=False
    )
    config = qwen2_audio_config(tokenizer, _TEXT, _TOWER, WINDOW_S)
    torch.manual_seed(seed)
    model = Qwen2AudioForConditionalGeneration(config).eval()
    with torch.no_grad():
        for token in tokenizer.all_special_ids:
            model.lm_head.weight[token] = 0  # a logit of 0 is the largest of no random ones
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**ids, do_sample=False)
    model.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=_MELS, chunk_length=WINDOW_S)
    Qwen2AudioProcessor(extractor, tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
    return folder
