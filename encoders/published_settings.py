"""Replaces processor files that a folder lacks by those that its family was published with.

Trainers often save weights, configuration and tokenizer, and leave out how images are sized. The files of the
Qwen families are the same in all their sizes.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from epd.encoders import internvl_chat
from epd.errors import ModelError

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


# By `model_type`, the files of the processor.
PUBLISHED: Mapping[str, Mapping[str, Settings]] = {
    "qwen2_vl": _qwen2("Qwen2VLProcessor"),
    "qwen2_5_vl": _qwen2("Qwen2_5_VLProcessor"),
    "qwen3_vl": _qwen3(),
    "qwen3_vl_moe": _qwen3(),
}
logger = logging.getLogger(__name__)


@contextmanager
def with_processor_files(path: Path, read_config: Callable[[Path], Any]) -> Iterator[Path]:
    """Provides the model folder `path`, or one like it that has what it lacks to size images.

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
