"""Adapts ERNIE 4.5 VL: its experts are chosen by the kind of a token, and frames have their times drawn on.

frame 0 "time: 00:00:00.00" | frame 1 | frame 2 ...     drawn at full size, resized, encoded one by one
[       one token of 2 x 2 patches       )[ ...         a token is made of two frames
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from epd.encoders.adapter import Embeddings, PatchRun, TowerMerger
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.device import CPU, to_device
from epd.encoders.families.interfaces import FEATURES
from epd.encoders.families.qwen_vl import QwenVLAdapter, image_size
from epd.encoders.patches import patchify, resize_image
from epd.encoders.plans import Grid, MediaPlan, VideoFacts
from epd.encoders.prompt.prompt import enclosing_ids
from epd.encoders.sampling import sample_by_rule
from epd.errors import UnsupportedModelError
from epd.frame_sampling import FrameSampling
from epd.pixel_limits import CAP_FIELD, NO_CAPS, OWN_LIMITS, FrameCaps, PixelLimits, refuse
from epd.reduction import TowerMerge
from epd.types import MediaKind


class Ernie4_5VLAdapter(QwenVLAdapter):
    """Adapts `model_type` ernie4_5_vl_moe."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._frame_spec = replace(self.video_spec, frames_per_unit=1)
        config = checkpoint.config
        marks = [*enclosing_ids(config, "image"), *enclosing_ids(config, "video")]
        self._media_ids = torch.tensor([config.image_token_id, config.video_token_id, *marks])

    def check_pixels(self, media: Collection[tuple[MediaKind, PixelLimits]], most: int | None) -> None:
        if any(pixels.cap_pixels_per_frame is not None for _, pixels in media):
            raise refuse(CAP_FIELD, "none, the authors of this model have no such limit")
        super().check_pixels(media, most)

    def video_size(
        self,
        num_frames: int,  # noqa: ARG002
        height: int,
        width: int,
        limits: tuple[int, int],
        caps: FrameCaps,  # noqa: ARG002
    ) -> tuple[int, int]:
        return image_size(height, width, self.video_spec.factor, *limits)

    def processor_caps(self) -> FrameCaps:
        return NO_CAPS

    def sample(self, video: VideoFacts, frame_sampling: FrameSampling) -> Sequence[int]:
        return sample_by_rule(self.checkpoint.processor.video_processor, video, frame_sampling)

    def plan_video(
        self, video: VideoFacts, frame_sampling: FrameSampling, pixels: PixelLimits = OWN_LIMITS
    ) -> MediaPlan:
        plan = super().plan_video(video, frame_sampling, pixels)
        if not self.checkpoint.processor.video_processor.draw_on_frames:
            return plan
        return replace(plan, size=(video.height, video.width), drawn_size=plan.size)

    def preprocess(self, frames: Tensor, plan: MediaPlan, device: torch.device = CPU) -> Tensor:
        if plan.kind == "image":
            return super().preprocess(frames, plan, device)
        frames = self._drawn(frames, plan)
        missing = -len(frames) % plan.frames_per_unit
        filled = torch.cat([frames, *[frames[-1:]] * missing])
        return patchify(to_device(filled, device), self._frame_spec)

    def _drawn(self, frames: Tensor, plan: MediaPlan) -> Tensor:
        """Draws its time on each frame, uint8 [N, H, W, 3], and resizes it: uint8 [N, h, w, 3]."""
        if plan.drawn_size is None:
            return frames
        processor = self.checkpoint.processor.video_processor
        drawn = [
            processor._render_image_with_timestamp(frame.permute(2, 0, 1), processor._convert_timestamp(at_s))
            for frame, at_s in zip(frames, plan.drawn_times_s, strict=True)
        ]
        resample = self.video_spec.resample
        return torch.cat([resize_image(each.permute(1, 2, 0), plan.drawn_size, resample) for each in drawn])

    def vision_tower(self, model: nn.Module) -> nn.Module:
        return model.get_submodule("model")

    def tower_merger(self, tower: nn.Module, merge: TowerMerge) -> TowerMerger:  # noqa: ARG002
        raise UnsupportedModelError(
            "received tower_share for an ernie4_5_vl_moe model, whose tower joins pairs of frames behind its "
            "layers; allowed: families without; leave tower_share out"
        )

    def tower_inputs(self, grids: tuple[Grid, ...], device: torch.device) -> dict[str, Tensor]:
        sizes = [(grid.t, grid.h, grid.w) for grid in grids]
        return {"grid_thw": torch.tensor(sizes, dtype=torch.int64, device=device)}

    def encode_batch(self, tower: nn.Module, runs: Sequence[PatchRun]) -> list[Embeddings]:
        kind = runs[0].kind
        patches = torch.cat([run.values for run in runs]).to(next(tower.parameters()).dtype)
        grids = self.tower_inputs(tuple(run.grid for run in runs), patches.device)["grid_thw"]
        if kind == "video":
            grids[:, 0] *= self.video_spec.frames_per_unit
        output = getattr(tower, FEATURES[kind])(patches, grids, return_dict=True)
        return [Embeddings(rows) for rows in output.pooler_output]

    def prompt_kwargs(self, prompt_ids: Tensor) -> dict[str, Any]:
        is_media = torch.isin(prompt_ids, to_device(self._media_ids, prompt_ids.device))
        return {"moe_mm_token_type_ids": is_media.int()[None]}
