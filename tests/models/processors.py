"""Files of processors and chat templates of published checkpoints, as their folders have them.

Written down as facts: every setting that changes sizes, samples or values. Left out are settings that
say what the classes do by default (`do_resize`, `rescale_factor`, ...).

    family            files of the processor                       says of videos
    Qwen2.5-VL        preprocessor_config                          nothing: transformers takes that of images
    Qwen3-VL          preprocessor_config, video_preprocessor_config   all frames together
    InternVL          preprocessor_config, processor_config        nothing but the tile's size
    LLaVA-OneVision   preprocessor_config, processor_config        nothing
    SmolVLM2          preprocessor_config, processor_config        `video_sampling`: 64 frames, 1 a second

Templates are written anew, with the behaviour of the published ones: what they put around media and turns,
the default system message, and the order of media and text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.encoders.tiny_tiles import byte_tokenizer
from tests.models.published import PUBLISHED, Config
from tests.models.real_tokenizer import qwen_tokenizer
from training.checkpoint import SPECIAL_TOKENS

_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_STEPS = (384, 768, 1152, 1536, 1920, 2304)


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """One checkpoint's.

    files: by name, JSON.
    template: of the chat.
    tokens: special tokens beside those of the Qwen tokenizer, and the attributes that name some of them.
    """

    files: Mapping[str, Config]
    template: str
    tokens: tuple[str, ...] = ()
    names: Mapping[str, str] | None = None


def _qwen2_5_vl() -> ProcessorFiles:
    image = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "max_pixels": 12_845_056,
        "merge_size": 2,
        "min_pixels": 3136,
        "patch_size": 14,
        "processor_class": "Qwen2_5_VLProcessor",
        "temporal_patch_size": 2,
    }
    return ProcessorFiles(
        {"preprocessor_config.json": image | _CLIP}, QWEN_TEMPLATE.replace("SYSTEM", _SYSTEM)
    )


def _qwen3_vl() -> ProcessorFiles:
    both = {
        "merge_size": 2,
        "patch_size": 16,
        "processor_class": "Qwen3VLProcessor",
        "temporal_patch_size": 2,
    } | _HALF
    image = both | {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    }
    video = both | {
        "size": {"longest_edge": 25_165_824, "shortest_edge": 4096},
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    files = {"preprocessor_config.json": image, "video_preprocessor_config.json": video}
    return ProcessorFiles(files, QWEN_TEMPLATE.replace("SYSTEM", ""))


def _internvl() -> ProcessorFiles:
    image = {
        "crop_size": None,
        "crop_to_patches": False,
        "do_center_crop": None,
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "max_patches": 12,
        "min_patches": 1,
        "processor_class": "InternVLProcessor",
        "resample": 3,
        "size": {"height": 448, "width": 448},
    } | _IMAGENET
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    files = {
        "preprocessor_config.json": image,
        "processor_config.json": {"image_seq_length": 256, "processor_class": "InternVLProcessor"},
    }
    return ProcessorFiles(files, _template("<IMG_CONTEXT>\n", "<video>\n"), tuple(names.values()), names)


def _llava_onevision() -> ProcessorFiles:
    image = {
        "do_pad": True,
        "image_grid_pinpoints": [[height, width] for height in _STEPS for width in _STEPS],
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "processor_class": "LlavaOnevisionProcessor",
        "resample": 3,
        "size": {"height": 384, "width": 384},
    } | _HALF
    processor = {
        "image_token": "<image>",
        "num_image_tokens": 729,
        "processor_class": "LlavaOnevisionProcessor",
        "video_token": "<video>",
        "vision_feature_select_strategy": "full",
    }
    files = {"preprocessor_config.json": image, "processor_config.json": processor}
    return ProcessorFiles(files, _template("<image>", "<video>", "\n"), ("<image>", "<video>"))


def _smolvlm2(tile: int, whole: int, image_seq_len: int) -> ProcessorFiles:
    image = {
        "do_image_splitting": True,
        "do_pad": True,
        "image_processor_type": "SmolVLMImageProcessor",
        "max_image_size": {"longest_edge": tile},
        "processor_class": "SmolVLMProcessor",
        "resample": 1,
        "size": {"longest_edge": whole},
        "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": tile}},
    } | _HALF
    names = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    rows = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
    files = {
        "preprocessor_config.json": image,
        "processor_config.json": {"image_seq_len": image_seq_len, "processor_class": "SmolVLMProcessor"},
    }
    return ProcessorFiles(files, _SMOLVLM_TEMPLATE, (*names.values(), *rows), names)


_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
# A picture is named between its marks; `add_vision_id` counts them.
QWEN_TEMPLATE = """\
{%- set ns = namespace(images=0, videos=0) -%}
{%- if messages and messages[0]['role'] != 'system' -%}SYSTEM{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part -%}
{%- set ns.images = ns.images + 1 -%}
{%- if add_vision_id is defined and add_vision_id -%}{{ 'Picture ' ~ ns.images ~ ': ' }}{%- endif -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'video' or 'video' in part -%}
{%- set ns.videos = ns.videos + 1 -%}
{%- if add_vision_id is defined and add_vision_id -%}{{ 'Video ' ~ ns.videos ~ ': ' }}{%- endif -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def _template(image: str, video: str, after: str = "") -> str:
    """ChatML whose media come before the text of their message."""
    return (
        "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
        "{%- for part in message['content'] if part['type'] == 'image' -%}{{ '"
        + image.replace("\n", "\\n")
        + "' }}{%- endfor -%}"
        "{%- for part in message['content'] if part['type'] == 'video' -%}{{ '"
        + video.replace("\n", "\\n")
        + "' }}{%- endfor -%}"
        "{%- for part in message['content'] if part['type'] == 'text' -%}{{ '"
        + after.replace("\n", "\\n")
        + "' + part['text'] }}{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
    )


# The first part decides whether the role is followed by a space: no space before a picture.
_SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'video' %}{{ '<video>' }}"
    "{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

_SMALL_TILES, _LARGE_TILES = _smolvlm2(512, 2048, 64), _smolvlm2(384, 1536, 81)
_BY_FAMILY: Mapping[str, ProcessorFiles] = {
    "qwen2_5_vl": _qwen2_5_vl(),
    "qwen3_vl": _qwen3_vl(),
    "qwen3_vl_moe": _qwen3_vl(),
    "internvl": _internvl(),
    "llava_onevision": _llava_onevision(),
}
PROCESSORS: Mapping[str, ProcessorFiles] = {
    name: _BY_FAMILY.get(
        published.config["model_type"], _LARGE_TILES if name == "SmolVLM2-2.2B" else _SMALL_TILES
    )
    for name, published in PUBLISHED.items()
}


def qwen_bytes(more: tuple[str, ...], names: Mapping[str, str] | None) -> Any:
    """The special tokens of `qwen_tokenizer`, and bytes: read in no time, where only media are planned."""
    return byte_tokenizer((*SPECIAL_TOKENS, *more), "", dict(names or {}))


_Make = Callable[[tuple[str, ...], Mapping[str, str] | None], Any]


@cache
def _tokenizer_files(
    make: _Make, tokens: tuple[str, ...], names: tuple[tuple[str, str], ...]
) -> dict[str, bytes]:
    """The content of a tokenizer's files by name: writing one of 150,000 tokens takes 2 s of CPU."""
    with TemporaryDirectory() as folder:
        make(tokens, dict(names) or None).save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def write_processor(name: str, folder: Path, tokenizer: _Make = qwen_tokenizer) -> Path:
    """Writes the processor files of a checkpoint, its template, and a tokenizer with its special tokens."""
    published = PROCESSORS[name]
    names = tuple((published.names or {}).items())
    for file, content in _tokenizer_files(tokenizer, published.tokens, names).items():
        (folder / file).write_bytes(content)
    for file, content in published.files.items():
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(published.template, encoding="utf-8")
    return folder
