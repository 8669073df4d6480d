"""Adapts Qwen2.5-VL: one run of visual tokens per item; M-RoPE encodes the time between its frames."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epd.encoders.adapter import Grid, MediaItem
from epd.encoders.device import CPU
from epd.encoders.families.qwen_sizes import image_size
from epd.encoders.families.qwen_tower import WindowGeometry, windowed_inputs
from epd.encoders.families.qwen_vl import QwenVLAdapter
from epd.encoders.prompt.mrope import VisualSpan
from epd.pixel_limits import LEAST_SHARE, NO_CAPS, FrameCaps
from epd.types import PlaceholderRange

# Of releases of transformers whose processor has no cap: what a later one's holds a video to.
_MAX_VIDEO_TOKENS = 128_000


class Qwen2_5VLAdapter(QwenVLAdapter):
    """Adapts `model_type` qwen2_5_vl."""

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
        vision = self.checkpoint.config.vision_config
        geometry = WindowGeometry(vision.spatial_merge_size, vision.window_size, vision.patch_size)
        return windowed_inputs(grids, geometry, device)

    def cell_order(self, grid: Grid) -> Tensor:
        # Windows come one after the other, each of rows of tokens; units as ever.
        return self.tower_inputs((grid.cut(1),), CPU)["window_index"]

    def spans(self, item: MediaItem) -> Sequence[VisualSpan]:
        plan, merge = item.plan, self.video_spec.merge
        whole = PlaceholderRange(item.units[0].offset, plan.num_tokens)
        rows, columns = plan.grid.h // merge, plan.grid.w // merge
        if plan.kind == "image":
            return [VisualSpan(whole, plan.grid.t, rows, columns)]
        # Some releases of transformers cut the seconds to whole numbers, and so lose time at most sampling
        # rates. Not repeated here: positions, and so answers, do not depend on the release.
        per_second = float(self.checkpoint.config.vision_config.tokens_per_second)
        return [VisualSpan(whole, plan.grid.t, rows, columns, plan.unit_span_s, per_second)]
