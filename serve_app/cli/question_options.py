"""The options of a question, which `epd ask`, `epd chat` and `epd batch` share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from epd.batch.lines import LineDefaults
from epd.engine_config import EngineConfig
from epd.serve_app.cli.options import (
    AnswerSeed,
    ComputeShare,
    End,
    Fps,
    Frames,
    MaxTokens,
    MaxVisualTokens,
    Reduction,
    Retention,
    Schema,
    Start,
    Temperature,
    check_numbers,
    reduction_policy,
    response_format,
    visual_budget,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionOptions:
    """Holds all that is asked for beside the question. Every field is a flag. Raises RequestError."""

    fps: Fps = None
    frames: Frames = None
    max_tokens: MaxTokens = None
    retention: Retention = None
    reduction: Reduction = None
    compute_share: ComputeShare = None
    max_visual_tokens: MaxVisualTokens = None
    start: Start = 0.0
    end: End = None
    temperature: Temperature = None
    seed: AnswerSeed = None
    schema: Schema = None

    def __post_init__(self) -> None:
        check_numbers(self.fps, self.frames, self.max_tokens)
        reduction_policy(self.reduction, self.retention, self.compute_share)
        visual_budget(self.max_visual_tokens, self.retention)

    @classmethod
    def parted(cls, options: Mapping[str, Any]) -> tuple[Self, EngineConfig]:
        """Returns these of a command's options, and what the engine gets of them. Raises RequestError."""
        own = {each.name for each in fields(cls)}
        asked = cls(**{name: value for name, value in options.items() if name in own})
        return asked, EngineConfig.checked({name: options[name] for name in options.keys() - own})

    @property
    def sampling(self) -> dict[str, Any]:
        """Returns how answers are made, as the bodies of requests have it."""
        fields_of_body = {
            "temperature": self.temperature,
            "seed": self.seed,
            "response_format": response_format(self.schema),
        }
        return {name: value for name, value in fields_of_body.items() if value is not None}

    def for_lines(self, folder: str | Path, **more: Any) -> LineDefaults:
        """Returns them for lines of a batch that leave them out. folder: where relative paths begin."""
        names = ("fps", "max_tokens", "retention", "reduction", "compute_share", "max_visual_tokens")
        return LineDefaults(
            folder,
            num_frames=self.frames,
            start_s=self.start or None,
            end_s=self.end,
            sampling=self.sampling,
            **{name: getattr(self, name) for name in names},
            **more,
        )

    @property
    def given(self) -> dict[str, Any]:
        """Returns the options as `request_fields` takes them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return values | {"response_format": response_format(values.pop("schema"))}
