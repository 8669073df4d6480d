"""Tiny random checkpoints of families that look at tiles or single frames, made as `tests.tiny_models`.

SmolVLM's processor class wants the package num2words; where it is not installed, `number_in_words` stands in
for it in the reference, and a test of its own says what it spells.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
    VideoLlama3Config,
    VideoLlama3ForConditionalGeneration,
    VideoLlama3ImageProcessor,
    VideoLlama3Processor,
    VideoLlama3VideoProcessor,
)
from transformers.models.smolvlm import processing_smolvlm

from epd.encoders.families.smolvlm import number_in_words
from tests import tiny_models

SIDE = 28  # pixels of a tile's edge
_PATCH = 7
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": _PATCH,
}
_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% for part in message['content'] -%}
{%- if part['type'] == 'image' -%}IMAGE
{%- elif part['type'] == 'video' -%}VIDEO
{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""

if processing_smolvlm.num2words is None:
    processing_smolvlm.num2words = number_in_words


def build_llava_onevision(folder: Path, seed: int = 0) -> Path:
    """LLaVA-OneVision: canvases of up to nine tiles, shrunk to what two tiles hold."""
    tokenizer = byte_tokenizer(("<image>", "<video>"), _template("<image>", "<video>\n"))
    pinpoints = [[SIDE * rows, SIDE * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
    config = LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **_TEXT, **_text_ids(tokenizer)},
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **_VISION},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=pinpoints,
        vision_aspect_ratio="anyres_max_4",
    )
    size = {"height": SIDE, "width": SIDE}
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pinpoints),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=(SIDE // _PATCH) ** 2,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
        vision_aspect_ratio="anyres_max_4",
    )
    return tiny_models._save(folder, LlavaOnevisionForConditionalGeneration, config, processor, seed)


def build_internvl(folder: Path, seed: int = 0) -> Path:
    """InternVL: up to six tiles and the overview, four tokens each."""
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = byte_tokenizer(tuple(names.values()), _template("<IMG_CONTEXT>\n", "<video>\n"), names)
    config = InternVLConfig(
        text_config={"model_type": "qwen2", **_TEXT, **_text_ids(tokenizer)},
        vision_config={**_VISION, "image_size": [SIDE, SIDE], "patch_size": [_PATCH, _PATCH]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    size = {"height": SIDE, "width": SIDE}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=6),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=tokenizer.chat_template,
    )
    return tiny_models._save(folder, InternVLForConditionalGeneration, config, processor, seed)


def build_smolvlm(folder: Path, seed: int = 0) -> Path:
    """SmolVLM: images to three tiles wide or high and the overview, four tokens each; tied embeddings."""
    names = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    rows = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
    tokenizer = byte_tokenizer((*names.values(), *rows), _template("<image>", "<video>"), names)
    config = SmolVLMConfig(
        text_config={"model_type": "llama", **_TEXT, **_text_ids(tokenizer), "pad_token_id": None},
        vision_config=_VISION,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=True,
    )
    tile = {"longest_edge": SIDE}
    whole = {"longest_edge": 3 * SIDE}
    processor = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(size=whole, max_image_size=tile),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(size=whole, max_image_size=tile, fps=1, num_frames=64),
        image_seq_len=4,
        chat_template=tokenizer.chat_template,
    )
    return tiny_models._save(folder, SmolVLMForConditionalGeneration, config, processor, seed)


def build_video_llama_3(folder: Path, seed: int = 1, *, use_token_compression: bool = False) -> Path:
    """VideoLLaMA3: images and frames of any size, patches of an image by themselves, times of frames."""
    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    tokenizer = byte_tokenizer(tuple(names.values()), _template(*names.values()), names)
    config = VideoLlama3Config(
        text_config={"model_type": "qwen2", **_TEXT, **_text_ids(tokenizer)},
        vision_config={**_VISION, "patch_size": 14},
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
    )
    processor = VideoLlama3Processor(
        image_processor=VideoLlama3ImageProcessor(size={"shortest_edge": 56**2, "longest_edge": 84**2}),
        tokenizer=tokenizer,
        video_processor=VideoLlama3VideoProcessor(
            size={"shortest_edge": 56**2, "longest_edge": 8 * 84**2},
            use_token_compression=use_token_compression,
        ),
        chat_template=tokenizer.chat_template,
    )
    return tiny_models._save(folder, VideoLlama3ForConditionalGeneration, config, processor, seed)


BUILDERS: dict[str, Callable[[Path], Path]] = {
    **tiny_models.BUILDERS,
    "qwen3_5": tiny_models.build_qwen3_5,
    "llava_onevision": build_llava_onevision,
    "internvl": build_internvl,
    "smolvlm": build_smolvlm,
    "video_llama_3": build_video_llama_3,
}


def _template(image: str, video: str) -> str:
    return _TEMPLATE.replace("IMAGE", image).replace("VIDEO", video)


def byte_tokenizer(
    special: tuple[str, ...], template: str, names: dict[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the family's special tokens, which it also has as attributes, with ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=names or {},
        chat_template=template,
    )


def _text_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
