"""Uses transformers for checkpoints: reads their files, creates their models.

`epd.encoders.checkpoint.published` imports this module when it is needed: that takes a second of CPU, and the
embedded model does without.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.initialization import no_init_weights
from transformers.vision_utils import get_vision_window_index

from epd.encoders import internvl_chat, qwen_omni
from epd.errors import ModelError

__all__ = [
    "AttentionInterface",
    "create_model",
    "get_vision_window_index",
    "read_config",
    "read_generation_config",
    "read_processor",
    "reference_class",
    "renaming",
]

logger = logging.getLogger(__name__)
_MODELS: Any = transformers.AutoModelForMultimodalLM


def read_config(path: Path) -> Any:
    """Reads a folder's config.json, but not of parts that hear: they get nothing to hear.

    Raises OSError, and what transformers does.
    """
    if internvl_chat.is_authors_layout(path):
        return transformers.InternVLConfig.from_dict(internvl_chat.settings_of(path))
    if qwen_omni.is_authors_layout(path):
        return transformers.Qwen2_5_VLConfig.from_dict(qwen_omni.settings_of(path))
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    if config.model_type == "gemma4":
        config.audio_config = None
    return config


def read_generation_config(path: Path) -> Any:
    """Reads a folder's generation_config.json; where it has none, what its config.json says of generation."""
    try:
        return transformers.GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:
        return transformers.GenerationConfig.from_model_config(internvl_chat.read_json(path / "config.json"))


def read_processor(path: Path) -> Any:
    """Reads a folder's processor. Raises as `read_config`, and as `with_processor_files`."""
    with with_processor_files(path, read_config) as folder:
        try:
            processor = transformers.AutoProcessor.from_pretrained(folder, local_files_only=True)
        except ImportError:  # the processor class wants a package; its parts do not
            return _processor_parts(folder)
    if type(processor).__name__ == qwen_omni.PROCESSOR:
        processor.video_processor.size = dict(qwen_omni.VIDEO_SIZE)
    return processor


@dataclass(frozen=True, slots=True)
class ProcessorParts:
    """Replaces a processor whose class cannot be created here (SmolVLM's needs num2words)."""

    tokenizer: Any
    image_processor: Any
    video_processor: Any
    chat_template: str | dict[str, str] | None  # None: then it is the tokenizer's


def _processor_parts(path: Path) -> ProcessorParts:
    settings, _ = transformers.ProcessorMixin.get_processor_dict(path, local_files_only=True)
    return ProcessorParts(
        transformers.AutoTokenizer.from_pretrained(path, local_files_only=True),
        transformers.AutoImageProcessor.from_pretrained(path, local_files_only=True),
        transformers.AutoVideoProcessor.from_pretrained(path, local_files_only=True),
        settings.get("chat_template"),
    )


def create_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """Creates the model of a configuration, with sdpa attention. Its weights are not initialised."""
    with no_init_weights():
        model: nn.Module = _MODELS.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model


def reference_class(path: Path) -> Any:
    """Returns transformers' class of a folder's whole model; of a thinker for one with other parts."""
    is_omni = qwen_omni.is_authors_layout(path)
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration if is_omni else _MODELS


def renaming(model: Any, known: Mapping[str, Tensor]) -> Callable[[str], str]:
    """Returns the map from names of stored tensors to those that transformers gives them.

    known: the model's tensors
    """
    renames = [each for each in get_model_conversion_mapping(model) if not isinstance(each, WeightConverter)]

    def renamed(stored: str) -> str:
        name: str = rename_source_key(stored, renames, [], model.base_model_prefix, dict(known))[0]
        return name

    return renamed


_IMAGES, _VIDEOS, _BOTH = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
_CLIP: dict[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF: dict[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
Settings = Mapping[str, Any]


def _qwen2(processor: str) -> Mapping[str, Settings]:
    sizes = {"patch_size": 14, "min_pixels": 3136, "max_pixels": 12_845_056}
    return {_IMAGES: _CLIP | sizes | _qwen("Qwen2VLImageProcessor", processor)}


def _qwen3() -> Mapping[str, Settings]:
    image = {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
    video = {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 25_165_824}}
    names = _qwen("Qwen2VLImageProcessorFast", "Qwen3VLProcessor")
    kind = {"video_processor_type": "Qwen3VLVideoProcessor"}
    return {_IMAGES: _HALF | image | names, _VIDEOS: _HALF | video | names | kind}


def _qwen(image_processor: str, processor: str) -> dict[str, Any]:
    return {
        "image_processor_type": image_processor,
        "processor_class": processor,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }


# By `model_type`, the files of the processor, which are the same in all sizes of a family.
PUBLISHED: Mapping[str, Mapping[str, Settings]] = {
    "qwen2_vl": _qwen2("Qwen2VLProcessor"),
    "qwen2_5_vl": _qwen2("Qwen2_5_VLProcessor"),
    "qwen3_vl": _qwen3(),
    "qwen3_vl_moe": _qwen3(),
}


@contextmanager
def with_processor_files(path: Path, read_config: Callable[[Path], Any]) -> Iterator[Path]:
    """Provides the model folder `path`, or one like it that has what it lacks to size images.

    Trainers often save weights, configuration and tokenizer, and leave out how images are sized.

    read_config: called if something lacks.
    Raises ModelError where nothing is known for the family, or its patches have another size.
    """
    if internvl_chat.is_authors_layout(path):
        with _replaced(path, internvl_chat.processor_files(path)) as folder:
            yield folder
        return
    if _has_settings(path):
        yield path
        return
    config = read_config(path)
    files = _published(path, config)
    logger.warning(
        "'%s' has no %s: the settings that %s was published with are used",
        path.name,
        _IMAGES,
        config.model_type,
    )
    with _replaced(path, {name: json.dumps(content) for name, content in files.items()}) as folder:
        yield folder


@contextmanager
def _replaced(path: Path, files: Mapping[str, str]) -> Iterator[Path]:
    """Provides a folder like `path` with these files in place of its own."""
    with tempfile.TemporaryDirectory() as folder:
        for file in path.iterdir():
            if file.name not in files:
                Path(folder, file.name).symlink_to(file.resolve())
        for name, content in files.items():
            Path(folder, name).write_text(content, encoding="utf-8")
        yield Path(folder)


def _has_settings(path: Path) -> bool:
    if (path / _IMAGES).is_file() or not (path / _BOTH).is_file():
        return (path / _IMAGES).is_file()
    both = json.loads((path / _BOTH).read_text(encoding="utf-8"))
    return not {"image_processor", "feature_extractor"}.isdisjoint(both)


def _published(path: Path, config: Any) -> Mapping[str, Settings]:
    files = PUBLISHED.get(config.model_type)
    if files is None or files[_IMAGES]["patch_size"] != config.vision_config.patch_size:
        raise ModelError(
            f"the model at '{path}' has no {_IMAGES}, which says how images are sized; copy it, and "
            f"{_VIDEOS} if there is one, from the model that it was trained from"
        )
    return files
