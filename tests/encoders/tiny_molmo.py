"""A tiny random Molmo 2 with the structure of the published one, and the sizes of that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers as hf

from tests.encoders.tiny_tiles import _TEXT, _text_ids, byte_tokenizer
from tests.models.published import Published
from tests.tiny_models import _save

SIDE, PATCH = 56, 7
_NAMES = {"image_token": "<|image|>", "video_token": "<|video|>"}
_MARKS = {
    "image_patch_id": "<im_patch>",
    "image_start_token_id": "<im_start>",
    "low_res_image_start_token_id": "<low_res_im_start>",
    "image_end_token_id": "<im_end>",
    "frame_start_token_id": "<frame_start>",
    "frame_end_token_id": "<frame_end>",
}
_MORE = ("<im_col>", "<im_low>")
# As published: media before all turns, images first, with numbers where there are several.
_TEMPLATE = """\
{%- set of = namespace(images=0, videos=0) -%}
{%- for message in messages if message['content'] is not string -%}
{%- for part in message['content'] if part['type'] == 'image' -%}
{%- set of.images = of.images + 1 -%}
{%- endfor -%}
{%- for part in message['content'] if part['type'] == 'video' -%}
{%- set of.videos = of.videos + 1 -%}
{%- endfor -%}
{%- endfor -%}
{%- for at in range(of.images) -%}
{%- if of.images > 1 -%}Image {{ at + 1 }}{%- endif -%}<|image|>
{%- endfor -%}
{%- for _ in range(of.videos) -%}<|video|>{%- endfor -%}
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
# Their config.json: two layers of the tower that no weights are published of, and its older names.
PUBLISHED: Mapping[str, Published] = {
    "Molmo2-4B": Published(
        {
            "model_type": "molmo2",
            "adapter_config": {
                "head_dim": 72,
                "hidden_act": "silu",
                "hidden_size": 1152,
                "intermediate_size": 9728,
                "model_type": "molmo2",
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "text_hidden_size": 2560,
                "vit_layers": [-3, -9],
            },
            "text_config": {
                "additional_vocab_size": 128,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 2560,
                "intermediate_size": 9728,
                "layer_norm_eps": 1e-06,
                "max_position_embeddings": 36864,
                "model_type": "molmo2_text",
                "norm_after": False,
                "num_attention_heads": 32,
                "num_hidden_layers": 36,
                "num_key_value_heads": 8,
                "qk_norm_type": "qwen3",
                "qkv_bias": False,
                "rope_scaling": None,
                "rope_scaling_layers": None,
                "rope_theta": 5000000.0,
                "vocab_size": 151936,
            },
            "tie_word_embeddings": False,
            "vit_config": {
                "head_dim": 72,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": 1152,
                "image_default_input_size": [378, 378],
                "image_num_pos": 729,
                "image_patch_size": 14,
                "intermediate_size": 4304,
                "layer_norm_eps": 1e-06,
                "model_type": "molmo2",
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "num_key_value_heads": 16,
            },
        },
        kv_bytes_per_token=2 * 36 * 8 * 128 * 2,
        context_tokens=36_864,
        num_parameters=4_850_869_200,
    ),
}


def build_molmo2(folder: Path, seed: int = 0, **text: Any) -> Path:
    """Molmo 2: crops that overlap, pooled across crops, frames of fewer tokens; tokens of media that only
    the embedding knows, and norms of queries and keys by head.

    As published: features of two layers of the tower.
    text: other fields of the language model.
    """
    special = (*_NAMES.values(), *_MARKS.values(), *_MORE)
    tokenizer = byte_tokenizer(special, _TEMPLATE, _NAMES)
    sizes = {"vocab_size": len(tokenizer) - len(special), "additional_vocab_size": len(special)}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    config = hf.Molmo2Config(
        text_config={**_TEXT, **_text_ids(tokenizer), **sizes, "head_dim": 16, **rope, **text},
        vision_config={**_TOWER, "intermediate_size": 48, "num_hidden_layers": 4}
        | {"image_size": [SIDE, SIDE], "patch_size": PATCH},
        adapter_config={**_TOWER, "intermediate_size": 48, "text_hidden_size": 64}
        | {"vision_feature_layer": [2, 1]},
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in _MARKS.items()},
    )
    size = {"size": {"height": SIDE, "width": SIDE}, "patch_size": PATCH}
    processor = hf.Molmo2Processor(
        image_processor=hf.Molmo2ImageProcessor(**size, max_crops=4, overlap_margins=[1, 1]),
        tokenizer=tokenizer,
        video_processor=hf.Molmo2VideoProcessor(**size),
        chat_template=tokenizer.chat_template,
        use_single_crop_col_tokens=False,
    )
    return _save(folder, hf.Molmo2ForConditionalGeneration, config, processor, seed)
