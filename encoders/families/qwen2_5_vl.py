"""Adapts Qwen2-VL and Qwen2.5-VL: one run of visual tokens per item; M-RoPE of the later knows time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from epd.encoders.device import CPU
from epd.encoders.families.qwen_tower import WindowGeometry, framed_inputs, windowed_inputs
from epd.encoders.families.qwen_vl import QwenVLAdapter, image_size
from epd.encoders.plans import Grid, MediaItem
from epd.encoders.prompt.prompt import VisualSpan
from epd.pixel_limits import LEAST_SHARE, NO_CAPS, FrameCaps

# Of releases of transformers whose processor has no cap: what a later one's holds a video to.
_MAX_VIDEO_TOKENS = 128_000


class Qwen2VLAdapter(QwenVLAdapter):
    """Adapts `model_type` qwen2_vl, whose tower attends whole frames."""

    def video_size(
        self, num_frames: int, height: int, width: int, limits: tuple[int, int], caps: FrameCaps
    ) -> tuple[int, int]:
        most = self._max_pixels(num_frames, limits, caps)
        return image_size(height, width, self.video_spec.factor, limits[0], most)

    @staticmethod
    def _max_pixels(num_frames: int, limits: tuple[int, int], caps: FrameCaps) -> int:
        """Returns a frame's limit: that of `limits`, or its share of the caps, if there are any."""
        if caps == NO_CAPS:
            return limits[1]
        return max(int(min(limits[1], caps.share(num_frames))), int(limits[0] * LEAST_SHARE))

    def processor_caps(self) -> FrameCaps:
        tokens = getattr(self.checkpoint.processor.video_processor, "max_video_tokens", _MAX_VIDEO_TOKENS)
        budget = int(tokens * self.video_spec.factor**2 * 0.9)
        return FrameCaps(video_pixels=budget * self.video_spec.frames_per_unit)

    def tower_inputs(self, grids: tuple[Grid, ...], device: torch.device) -> dict[str, Tensor]:
        return framed_inputs(grids, self.video_spec.merge, device)


class Qwen2_5VLAdapter(Qwen2VLAdapter):
    """Adapts `model_type` qwen2_5_vl."""

    def tower_inputs(self, grids: tuple[Grid, ...], device: torch.device) -> dict[str, Tensor]:
        vision = self.checkpoint.config.vision_config
        geometry = WindowGeometry(vision.spatial_merge_size, vision.window_size, vision.patch_size)
        return windowed_inputs(grids, geometry, device)

    def cell_order(self, grid: Grid) -> Tensor:
        # Windows come one after the other, each of rows of tokens; units as ever.
        return self.tower_inputs((grid.cut(1),), CPU)["window_index"]

    def spans(self, item: MediaItem) -> Sequence[VisualSpan]:
        (span,) = super().spans(item)
        if item.plan.kind == "image":
            return [span]
        # Some releases of transformers cut the seconds to whole numbers, and so lose time at most sampling
        # rates. Not repeated here: positions, and so answers, do not depend on the release.
        per_second = float(self.checkpoint.config.vision_config.tokens_per_second)
        return [replace(span, frame_span_s=item.plan.unit_span_s, positions_per_second=per_second)]
