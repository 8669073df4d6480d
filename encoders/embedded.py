"""Reads the files of the embedded Qwen3-VL without transformers, which takes a second of CPU to import.

What is read has the names of transformers' objects, as far as adapters, weights and engine ask for them.
Every other checkpoint is read by `epd.encoders.published`, which has the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from epd.models import embedded_model_path
from epd.types import Int64Array

_MODEL_TYPE = "qwen3_vl"
# What a generation_config.json may leave out, of what an engine reads.
_GENERATION = dict.fromkeys(
    (
        "eos_token_id",
        "max_new_tokens",
        "repetition_penalty",
        "do_sample",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "suppress_tokens",
    )
)


def is_embedded(path: Path) -> bool:
    """Reports whether this module reads a folder: an embedded one, which leaves nothing to defaults."""
    return path == embedded_model_path(path.name) and _read(path, "config.json")["model_type"] == _MODEL_TYPE


class PlainConfig(SimpleNamespace):
    """Holds a config.json; its text_config and vision_config are such objects too."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        parts = {name: cls(**fields[name]) for name in ("text_config", "vision_config")}
        return cls(**{**fields, **parts})

    def get_text_config(self) -> PlainConfig:
        text: PlainConfig = getattr(self, "text_config", self)
        return text


def read_config(path: Path) -> PlainConfig:
    """Reads a folder's config.json."""
    return PlainConfig.of(_read(path, "config.json"))


def read_generation_config(path: Path) -> Any:
    """Reads a folder's generation_config.json: the fields that an engine reads, None where there is none."""
    return SimpleNamespace(**(_GENERATION | _read(path, "generation_config.json")))


class PlainVideoProcessor(SimpleNamespace):
    """Holds the settings of a video processor, and lists the frames that it samples."""

    num_frames: int | None = None
    fps: float
    min_frames: int
    max_frames: int

    def sample_frames(
        self, video: Any, num_frames: int | None = None, fps: float | None = None
    ) -> Int64Array:
        """Returns indices spread evenly over a video, the first and the last frame among them.

        video: its SourceMetadata. fps: where num_frames is not given.
        """
        total = video.total_num_frames
        if num_frames is None:
            wanted = int(total / video.fps * (fps or self.fps))
            num_frames = min(max(wanted, self.min_frames), self.max_frames, total)
        return np.linspace(0, total - 1, num_frames).round().astype(np.int64)


class PlainTokenizer:
    """Wraps a tokenizer of `tokenizers` in the calls of transformers' that are in use here."""

    def __init__(self, path: Path) -> None:
        named = _read(path, "tokenizer_config.json")
        self.backend_tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.special_tokens_map = {name: named[name] for name in ("eos_token", "pad_token")}
        self.chat_template = (path / "chat_template.jinja").read_text(encoding="utf-8")

    @property
    def eos_token_id(self) -> int:
        return int(self.convert_tokens_to_ids(self.special_tokens_map["eos_token"]))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend_tokenizer.get_vocab())

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> dict[str, Any]:
        if isinstance(text, str):
            return {
                "input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            }
        rows = self.backend_tokenizer.encode_batch(list(text), add_special_tokens=add_special_tokens)
        return {"input_ids": [row.ids for row in rows]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: bool) -> str:
        return str(self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        return [self.backend_tokenizer.id_to_token(each) for each in token_ids]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self.backend_tokenizer.token_to_id(tokens)
        return [self.backend_tokenizer.token_to_id(each) for each in tokens]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str,
        tokenize: bool = False,
        **variables: Any,
    ) -> str:
        """Renders messages as text. chat_template: this tokenizer's own, which no client can change."""
        assert chat_template == self.chat_template
        assert not tokenize
        return str(self._template.render(messages=messages, **self.special_tokens_map, **variables))

    @cached_property
    def _template(self) -> Any:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(self.chat_template)


def read_processor(path: Path) -> Any:
    """Returns tokenizer, image_processor, video_processor and chat_template of a folder."""
    settings = _read(path, "processor_config.json")
    tokenizer = PlainTokenizer(path)
    return SimpleNamespace(
        tokenizer=tokenizer,
        image_processor=SimpleNamespace(**settings["image_processor"]),
        video_processor=PlainVideoProcessor(**settings["video_processor"]),
        chat_template=tokenizer.chat_template,
    )


def _read(path: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / name).read_text(encoding="utf-8"))
    return found
