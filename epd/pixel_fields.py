"""Describes the settings of pixels as options of commands and keys of YAML, checked by pydantic."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from epd.pixel_settings import PIXEL_FIELDS, PixelSettings


class PixelFields(BaseModel):
    """Has the fields of `PixelSettings`, each with its help; stages take that record, without pydantic."""

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

    @property
    def pixels(self) -> PixelSettings:
        """Returns these fields alone, of a record that has more."""
        return PixelSettings(**{name: getattr(self, name) for name in PIXEL_FIELDS})
