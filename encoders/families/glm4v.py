"""Adapts GLM-4.1V, 4.5V, 4.6V and GLM-OCR: a video is an image for each pair of frames, with its time behind.

<|begin_of_video|> <|begin_of_image|> pads <|end_of_image|> 0 <|begin_of_image|> pads <|end_of_image|> 1 ...
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from epd.encoders.families.qwen3_vl import Qwen3VLAdapter
from epd.encoders.families.qwen_tower import framed_inputs
from epd.encoders.families.qwen_vl import frame_size
from epd.encoders.plans import Grid, MediaPlan, VideoFacts
from epd.encoders.sampling import sample_by_rule
from epd.frame_sampling import FrameSampling
from epd.pixel_limits import CAP_FIELD, NO_CAPS, FrameCaps, PixelLimits, refuse
from epd.types import MediaKind


class Glm4vAdapter(Qwen3VLAdapter):
    """Adapts `model_type` glm4v, glm4v_moe, glm46v and glm_ocr, whose towers and words differ a little."""

    def check_pixels(self, media: Collection[tuple[MediaKind, PixelLimits]], most: int | None) -> None:
        if any(pixels.cap_pixels_per_frame is not None for _, pixels in media):
            raise refuse(CAP_FIELD, "none, the authors of this model have no such limit")
        super().check_pixels(media, most)

    def processor_caps(self) -> FrameCaps:
        return NO_CAPS

    def image_size(self, height: int, width: int, limits: tuple[int, int]) -> tuple[int, int]:
        unit = self.image_spec.frames_per_unit
        least, most = (unit * each for each in limits)
        return frame_size(unit, unit, height, width, self.image_spec.factor, least, most)

    def _own_limits(self, kind: MediaKind) -> tuple[int, int]:
        """Returns the limits of one image, which the model's file counts as a unit of frames."""
        least, most = super()._own_limits(kind)
        if kind == "video":
            return least, most
        unit = self.image_spec.frames_per_unit
        return least // unit, self.checkpoint.pixels.max_pixels or most // unit

    def sample(self, video: VideoFacts, frame_sampling: FrameSampling) -> Sequence[int]:
        return sample_by_rule(self.checkpoint.processor.video_processor, video, frame_sampling)

    def tower_inputs(self, grids: tuple[Grid, ...], device: torch.device) -> dict[str, Tensor]:
        return framed_inputs(grids, self.video_spec.merge, device)

    def frame_texts(self, plan: MediaPlan) -> tuple[list[str], int]:
        """Returns as for Qwen3-VL. A unit's time is that of its first frame, its pad that of an image."""
        first = plan.frame_indices[:: plan.frames_per_unit]
        write = self.checkpoint.processor.replace_frame_token_id
        return [write(index / plan.source_fps) for index in first], self.checkpoint.config.image_token_id
