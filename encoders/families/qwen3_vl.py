"""Adapts Qwen3-VL: each temporal patch of a video follows its time in words; deepstack features.

<|vision_start|> <0.2 seconds> <|vision_start|> pads <|vision_end|> <1.2 seconds> <|vision_start|> pads ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from epd.encoders.adapter import Embeddings
from epd.encoders.families.qwen_tower import TableGeometry, tabled_inputs
from epd.encoders.families.qwen_vl import QwenVLAdapter, frame_size
from epd.encoders.plans import Grid, MediaItem, MediaPlan
from epd.encoders.prompt.prompt import Expansion, VisualSpan, in_frames
from epd.pixel_limits import LEAST_SHARE, NO_CAPS, FrameCaps

# Of releases of transformers whose processor has no cap: what a later one's holds a frame to.
_MAX_FRAME_TOKENS = 768


class Qwen3VLAdapter(QwenVLAdapter):
    """Adapts `model_type` qwen3_vl and qwen3_vl_moe, which differ in the language model alone.

    And qwen3_5 and qwen3_5_moe, whose tower has no deepstack features.
    """

    video_takes_size_alone = True

    def video_size(
        self, num_frames: int, height: int, width: int, limits: tuple[int, int], caps: FrameCaps
    ) -> tuple[int, int]:
        unit, most = self.video_spec.frames_per_unit, self._max_pixels(num_frames, limits, caps)
        frames = max(num_frames, unit)
        return frame_size(frames, unit, height, width, self.video_spec.factor, limits[0], most)

    @staticmethod
    def _max_pixels(num_frames: int, limits: tuple[int, int], caps: FrameCaps) -> int:
        """Returns the limit of all frames together: that of `limits`, or what the caps leave of it."""
        if caps == NO_CAPS:
            return limits[1]
        each = max(int(caps.share(num_frames, limits[1])), int(limits[0] * LEAST_SHARE))
        return each * num_frames

    def processor_caps(self) -> FrameCaps:
        tokens = getattr(self.checkpoint.processor.video_processor, "max_video_tokens", _MAX_FRAME_TOKENS)
        return FrameCaps(int(tokens) * self.video_spec.factor**2)

    def tower_inputs(self, grids: tuple[Grid, ...], device: torch.device) -> dict[str, Tensor]:
        vision = self.checkpoint.config.vision_config
        side = int(vision.num_position_embeddings**0.5)
        return tabled_inputs(grids, TableGeometry(vision.spatial_merge_size, side), device)

    def prepare_decoder(self, decoder: nn.Module) -> None:
        """Lets the decoder add deepstack features at rows that are listed: a mask would be read back."""
        decoder._deepstack_process = _add_at_rows  # type: ignore[assignment]

    def decoder_kwargs(self, visual_rows: Tensor, embeddings: Embeddings) -> dict[str, Any]:
        if not embeddings.deepstack:
            return {}
        return {"visual_pos_masks": visual_rows, "deepstack_visual_embeds": list(embeddings.deepstack)}

    def expand(self, plan: MediaPlan) -> Expansion:
        if plan.kind == "image":
            return super().expand(plan)
        texts, pad_id = self.frame_texts(plan)
        frames = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return in_frames(frames, pad_id, plan.tokens_per_unit)

    def frame_texts(self, plan: MediaPlan) -> tuple[list[str], int]:
        """Returns the words of each unit of a video around one pad, and the pad's id.

        The time of a unit is the middle of its first and last frame's.
        """
        config, unit = self.checkpoint.config, plan.frames_per_unit
        ids = [config.vision_start_token_id, config.video_token_id, config.vision_end_token_id]
        pad = "".join(self.tokenizer.convert_ids_to_tokens(ids))
        times = [index / plan.source_fps for index in plan.frame_indices]
        times += [times[-1]] * (-len(times) % unit)
        middles = [(times[at] + times[at + unit - 1]) / 2 for at in range(0, len(times), unit)]
        return [f"<{middle:.1f} seconds>{pad}" for middle in middles], config.video_token_id

    def spans(self, item: MediaItem) -> Sequence[VisualSpan]:
        rows, columns = item.plan.grid.h // self.video_spec.merge, item.plan.grid.w // self.video_spec.merge
        return [VisualSpan(unit, 1, rows, columns) for unit in item.units]


def _add_at_rows(hidden: Tensor, rows: Tensor, features: Tensor) -> Tensor:
    """Adds features [V, C] to the rows, int64 [V], of hidden [1, T, C]."""
    added = hidden[0].index_select(0, rows) + features.to(hidden.dtype)
    return hidden.index_copy(1, rows, added[None])
