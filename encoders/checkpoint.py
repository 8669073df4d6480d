"""Opens a checkpoint folder without its weights: configuration, processor and tokenizer."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from epd.encoders import embedded, internvl_chat, qwen_omni
from epd.encoders.quantization import read_quantization
from epd.errors import ModelError
from epd.models.folder import check_folder
from epd.pixel_settings import AUTHORS_LIMITS, PixelSettings

_DEFAULT, _TOOL_USE = "default", "tool_use"
# Layouts that are read as those of another `model_type`.
_READ_AS = {internvl_chat.AUTHORS: internvl_chat.OURS, qwen_omni.AUTHORS: qwen_omni.OURS}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Holds a model folder in Hugging Face layout; `config` and `processor` are transformers' own objects.

    Of the embedded model they are plain ones with the same names, see `epd.encoders.embedded`.

    pixels: what a user wants of images and frames besides
    """

    path: Path
    config: Any
    processor: Any
    pixels: PixelSettings = AUTHORS_LIMITS

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    @property
    def chat_template(self) -> str:
        """Returns the template of a conversation without tools. Raises ModelError if there is none."""
        templates = self._templates(self.processor) or self._templates(self.tokenizer)
        if _DEFAULT in templates:
            return templates[_DEFAULT]
        if templates:
            named = ", ".join(sorted(templates))
            raise ModelError(
                f"the model at '{self.path}' has the chat templates {named} and none is the default; "
                "name one chat_template.jinja"
            )
        raise ModelError(f"the model at '{self.path}' has no chat template; add a chat_template.jinja")

    @property
    def tool_template(self) -> str:
        """Returns the template of a conversation with tools.

        It is the one that transformers takes: a tokenizer's named `tool_use`, else the default. A processor's
        default that lists no tools gives way to its `tool_use`, too: transformers would drop the tools.
        """
        own = self._templates(self.processor)
        if own and knows_definitions(self.chat_template):
            return self.chat_template
        return (own or self._templates(self.tokenizer)).get(_TOOL_USE, self.chat_template)

    @staticmethod
    def _templates(owner: Any) -> dict[str, str]:
        found = owner.chat_template
        if isinstance(found, list):  # as old files name several
            found = {each["name"]: each["template"] for each in found}
        return found if isinstance(found, dict) else {_DEFAULT: found} if found else {}


def read_model_type(path: Path) -> str:
    """Reads `model_type` of the folder's config.json.

    Raises as `check_folder`, and ModelError if it is broken.
    """
    check_folder(path)
    config_path = path / "config.json"
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"cannot read '{config_path}': {_one_line(error)}") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str):
        raise ModelError(f"'{config_path}' names no model_type; it should be a transformers configuration")
    return _READ_AS.get(model_type, model_type)


def read_config(path: Path) -> Any:
    """Reads a folder's transformers configuration. The caller may change what it gets.

    A worker's adapter, weights and engine each ask for it: a file that did not change is parsed once.
    Raises OSError, and what transformers does.
    """
    file = (path / "config.json").stat()
    return copy.deepcopy(_parsed_config(path, file.st_ino, file.st_mtime_ns, file.st_size))


@lru_cache(maxsize=8)
def _parsed_config(path: Path, *_version: int) -> Any:
    return _reader(path).read_config(path)


def read_generation_config(path: Path) -> Any:
    """Reads a folder's generation_config.json; where it has none, what its config.json says of generation."""
    return _reader(path).read_generation_config(path)


def published() -> Any:
    """Returns the module `epd.encoders.published`, which imports transformers."""
    return import_module("epd.encoders.published")


def _reader(path: Path) -> Any:
    """Returns the module that reads a folder's files."""
    return embedded if embedded.is_embedded(path) else published()


def open_checkpoint(path: Path, pixels: PixelSettings = AUTHORS_LIMITS) -> Checkpoint:
    """Reads configuration and processor from local files only.

    Raises ModelError when they do not load, UnsupportedModelError for weights that are quantised as nothing
    here computes.
    """
    read_quantization(path)
    try:
        config, processor = read_config(path), _reader(path).read_processor(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the model at '{path}' does not load: {_one_line(error)}") from error
    return Checkpoint(path, config, processor, pixels)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def knows_definitions(template: str) -> bool:
    """Reports whether a chat template lists the tools that may be called."""
    return re.search(r"\btools\b", template) is not None
