"""Says how many pixels images and frames get: the limits of the models' authors, and a user's settings.

    a user's setting    before    the model's file    before    its authors' limits    before    transformers'

Where a file leaves the frames of a video without a limit, transformers makes them as large as the context
has room for. The authors' own tools do not, and neither does this project, unless `bare_processor` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from epd.errors import RequestError
from epd.records import BaseModel, ConfigDict, ErrorDetails, Field, ValidationError


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """Limits a video as a model's authors do.

    frame_tokens: visual tokens of one frame as an image, which limit its pixels; None for no such limit
    video_tokens: of all frames together, which limits the pixels of each; None as above
    max_frames: sampled of a video whose length would give more; None for those of the model's file
    source: of the figures
    """

    source: str
    frame_tokens: int | None = None
    video_tokens: int | None = None
    max_frames: int | None = None


# qwen-vl-utils 0.0.14, vision_process.py: VIDEO_MAX_TOKEN_NUM; before, VIDEO_MAX_PIXELS of 768 * 28 * 28.
_QWEN_FRAME_TOKENS = 768
# Evaluation in the technical report of Qwen2.5-VL, which its authors also advise as `total_pixels`, and which
# qwen-vl-utils had as VIDEO_TOTAL_PIXELS up to 0.0.8; 768 frames have room at 64 tokens a pair of frames.
_QWEN2_5_VIDEO_TOKENS = 24_576
_QWEN3 = VideoLimits("qwen-vl-utils 0.0.14; all frames together by the model's file", _QWEN_FRAME_TOKENS)

AUTHORS: Mapping[str, VideoLimits] = {
    "qwen2_vl": VideoLimits("qwen-vl-utils 0.0.14 and 0.0.8", _QWEN_FRAME_TOKENS, _QWEN2_5_VIDEO_TOKENS),
    "qwen2_5_vl": VideoLimits(
        "qwen-vl-utils 0.0.14; technical report of Qwen2.5-VL", _QWEN_FRAME_TOKENS, _QWEN2_5_VIDEO_TOKENS
    ),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "internvl": VideoLimits("evaluation of InternVL2.5 and later: 16 to 64 frames", max_frames=64),
    "llava_onevision": VideoLimits("evaluation of LLaVA-OneVision: 32 frames", max_frames=32),
    "smolvlm": VideoLimits("the model's file: 64 frames, 1 a second"),
}
_NO_LIMITS = VideoLimits("nobody")
# Who adapts a family: this project where it has an adapter, else transformers; one of the two alone.
ModelImpl = Literal["auto", "native", "transformers"]
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most"}
# Of the families whose frames have no size of their own.
_RESIZED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")

# Of these those whose authors have no limits besides: a limit of an image, and one of a frame.
_BY_TRANSFORMERS = (
    *("ernie4_5_vl_moe", "exaone4_5", "gemma4", "glm46v", "glm4v", "glm4v_moe", "glm_ocr"),
    *("hyperclovax_vision_v2", "paddleocr_vl", "video_llama_3"),
)


def authors_limits(model_type: str) -> VideoLimits:
    """Returns what the authors of a family limit videos to; no limits for a family that is not in AUTHORS."""
    return AUTHORS.get(model_type, _NO_LIMITS)


class PixelSettings(BaseModel):
    """Says what a user wants of images and frames, and who computes them.

    Every field is an option of commands and a key of YAML.
    Processes that plan for one model share one record; a request may differ by its `mm_processor_kwargs`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    max_pixels: int | None = Field(
        default=None, ge=1, description="Pixels of an image at most; by default as the model's file has it."
    )
    video_max_pixels: int | None = Field(
        default=None,
        ge=1,
        description="Pixels of a frame of a video at most; by default the limit of the model's authors.",
    )
    video_max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Visual tokens of one video at most: frames get smaller, or fewer where their size is "
        "fixed; by default the limit of the model's authors.",
    )
    cap_pixels_per_frame: bool | None = Field(
        default=None,
        description="Hold the frames of a video to the authors' limits, or leave them out; by default they "
        "are held unless the model's file says otherwise.",
    )
    bare_processor: bool = Field(
        default=False,
        description="Size and sample exactly as transformers' processor of the model does, without the "
        "authors' limits.",
    )
    model_impl: ModelImpl = Field(
        default="auto",
        description="What computes the model's family: native is this project's adapter and decoder, "
        "transformers its own processor, tower and layers; auto takes native where there is one.",
    )

    @property
    def pixels(self) -> PixelSettings:
        """Returns these fields alone, of a record that has more."""
        return PixelSettings(**{name: getattr(self, name) for name in PIXEL_FIELDS})

    @property
    def given(self) -> Mapping[str, Any]:
        """Returns what is not left to its default, by name."""
        fields = type(self).model_fields.items()
        return {name: value for name, each in fields if (value := getattr(self, name)) != each.default}

    @property
    def text(self) -> str:
        """Returns what is given, for people; empty for nothing."""
        return ", ".join(f"{name}={value}" for name, value in self.given.items())

    @classmethod
    def checked(cls, values: Mapping[str, object]) -> Self:
        """Returns the record of a command's options. Raises RequestError for a value that is not allowed."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise RequestError(_refusal(error.errors(include_url=False)[0])) from None

    def check_family(self, model_type: str) -> None:
        """Raises RequestError for a limit that changes nothing for a family."""
        sizes = () if model_type in (*_RESIZED, *_BY_TRANSFORMERS) else ("max_pixels", "video_max_pixels")
        names = sizes if model_type in _RESIZED else (*sizes, "cap_pixels_per_frame")
        for name in (*names, *(() if model_type in AUTHORS else ("video_max_tokens",))):
            if name in self.given:
                raise RequestError(
                    f"received {name} for a {model_type} model, whose pictures have a fixed size; allowed: "
                    f"with {', '.join(_RESIZED)}; leave {option(name)} out"
                )

    def line(self, model_type: str) -> str:
        """Returns what videos of a family are held to and who says so, for people."""
        authors = AUTHORS.get(model_type)
        if authors is None:
            return "no limits of pixels"
        if self.bare_processor:
            parts = ["as transformers' processor has it"]
        elif self.cap_pixels_per_frame is False:
            parts = ["without the authors' limits"]
        else:
            parts = [*_shown(authors), f"by {authors.source}"]
        return f"limits of a video: {', '.join(parts)}" + (f"; given {self.text}" if self.given else "")


PIXEL_FIELDS = tuple(PixelSettings.model_fields)
AUTHORS_LIMITS = PixelSettings()
BARE_PROCESSOR = PixelSettings(bare_processor=True)


def option(name: str) -> str:
    """Returns the option of a field."""
    return f"--{name.replace('_', '-')}"


def _refusal(error: ErrorDetails) -> str:
    """Returns the line that says which value was refused, and what is allowed."""
    if error["type"] == "refused":
        return error["msg"]
    bounds = [f"{_BOUNDS[key]} {value}" for key, value in error.get("ctx", {}).items() if key in _BOUNDS]
    allowed = bounds[0] if bounds else error["msg"]
    name = option(str(error["loc"][0]))
    return f"received {name} {error['input']}; allowed: {allowed}; change it or leave it out"


def _shown(limits: VideoLimits) -> list[str]:
    figures = {
        "tokens a frame": limits.frame_tokens,
        "tokens together": limits.video_tokens,
        "frames": limits.max_frames,
    }
    return [f"at most {value:,} {what}" for what, value in figures.items() if value is not None]
