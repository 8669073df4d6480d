"""Adapts SmolVLM: an image is its tiles, each after its place, then itself; a video is a square a frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.smolvlm.processing_smolvlm import (
    DEFAULT_CHAT_TEMPLATE,
    DEFAULT_MEDIA_OUTTRO,
    DEFAULT_VIDEO_INTRO,
    FRAME_TIMESTAMP_MESSAGE,
)

from epd.encoders.checkpoint import Checkpoint
from epd.encoders.device import CPU
from epd.encoders.families.tiles import TileAdapter, TilePlan, cut_tiles, tile_spec
from epd.encoders.plans import MediaPlan, VideoFacts
from epd.encoders.prompt.text_layout import ItemText, Markers
from epd.encoders.sampling import DEFAULT_FPS, MAX_FPS, check_wanted, source_metadata
from epd.frame_sampling import FrameSampling
from epd.types import MediaKind

_SMALL = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_MAX_SIDE = 4096  # pixels; the processors resize to no more


def number_in_words(number: int) -> str:
    """Spells 0 to 999,999: `one hundred and two`, `one thousand and one`, `two thousand, one hundred`.

    Raises ValueError beyond.
    """
    if not 0 <= number < 1_000_000:
        raise ValueError(f"only 0 to 999999 can be spelled, got {number}")
    if number < 1000:
        return _below_thousand(number)
    thousands, rest = divmod(number, 1000)
    words = f"{_below_thousand(thousands)} thousand"
    if rest == 0:
        return words
    return f"{words}{' and ' if rest < 100 else ', '}{_below_thousand(rest)}"


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if hundreds == 0:
        return _below_hundred(rest)
    words = f"{_SMALL[hundreds]} hundred"
    return f"{words} and {_below_hundred(rest)}" if rest else words


def _below_hundred(number: int) -> str:
    if number < 20:
        return _SMALL[number]
    tens, ones = divmod(number, 10)
    return f"{_TENS[tens - 2]}-{_SMALL[ones]}" if ones else _TENS[tens - 2]


class SmolVLMAdapter(TileAdapter):
    """Adapts `model_type` smolvlm."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        processor, config = checkpoint.processor, checkpoint.config
        self.image_spec = tile_spec(
            processor.image_processor, int(processor.image_processor.max_image_size["longest_edge"])
        )
        self.video_spec = tile_spec(
            processor.video_processor, int(processor.video_processor.max_image_size["longest_edge"])
        )
        self.patches_per_side = self.image_spec.side // int(config.vision_config.patch_size)
        self.tokens_per_tile = (self.patches_per_side // int(config.scale_factor)) ** 2
        self.tokens_per_frame = self.tokens_per_tile
        tokenizer = checkpoint.tokenizer
        self._pad = getattr(tokenizer, "image_token", "<image>")
        self._fake = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
        self._global = getattr(tokenizer, "global_image_token", "<global-img>")
        video = getattr(tokenizer, "video_token", "<video>")
        self.markers = Markers({"image": self._pad, "video": video}, {"image": self._pad, "video": self._pad})

    def chat_template(self, media: Sequence[MediaPlan]) -> str:
        """Returns the checkpoint's template; with a video, the processor's own default replaces it."""
        has_video = any(plan.kind == "video" for plan in media)
        return DEFAULT_CHAT_TEMPLATE if has_video else self.checkpoint.chat_template

    def frame_indices(
        self, processor: Any, video: VideoFacts, frame_sampling: FrameSampling
    ) -> tuple[int, ...]:
        """Applies the processor's rule: a rate and a cap; long videos lose their first and last second."""
        most = frame_sampling.num_frames or processor.num_frames or video.num_frames
        most = int(min(most, self.most_frames(frame_sampling)))
        rate = min(frame_sampling.fps or processor.fps or DEFAULT_FPS, MAX_FPS)
        check_wanted(frame_sampling, min(most, video.num_frames / video.fps * rate))
        indices = processor.sample_frames(source_metadata(video), num_frames=most, fps=rate)
        return tuple(int(index) for index in indices)

    def video_size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the source size: the processor resizes frames twice, and so do we."""
        return height, width

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        if not self.checkpoint.processor.image_processor.do_image_splitting:
            return 1, 1
        height, width = _resized(height, width, self.checkpoint.processor.image_processor.size)
        return self._tiled(height, width)

    def _tiled(self, height: int, width: int) -> tuple[int, int]:
        """Returns whole tiles along the longer side, and as many along the other as keep the shape."""
        side = self.image_spec.side
        aspect = width / height
        if width >= height:
            columns = math.ceil(width / side)
            return math.ceil(int(columns * side / aspect) / side), columns
        rows = math.ceil(height / side)
        return rows, math.ceil(int(rows * side * aspect) / side)

    def tiles(self, image: Tensor, rows: int, columns: int) -> Tensor:
        spec, side = self.image_spec, self.image_spec.side
        size = self.checkpoint.processor.image_processor.size
        image = spec.resize(image, *_resized(image.shape[1], image.shape[2], size))
        canvas = spec.resize(image, rows * side, columns * side)
        if rows * columns == 1:
            return canvas
        return torch.cat([cut_tiles(canvas, side), spec.resize(canvas, side, side)])

    def preprocess(self, frames: Tensor, plan: MediaPlan, device: torch.device = CPU) -> Tensor:
        if plan.kind == "video":
            spec, size = self.video_spec, self.checkpoint.processor.video_processor.size
            # On the host: a GPU's resizing rounds otherwise than the processor's.
            frames = spec.resize(frames, *_resized(frames.shape[1], frames.shape[2], size))
            frames = spec.resize(frames, spec.side, spec.side)
        return super().preprocess(frames, plan, device)

    def item_text(self, plan: TilePlan) -> ItemText:
        text = self._image_text(plan) if plan.kind == "image" else self._video_text(plan)
        return ItemText(text, (plan.tokens_per_unit,) * plan.num_units)

    def _image_text(self, plan: TilePlan) -> str:
        overview = f"{self._fake}{self._global}{self._pad}{self._fake}"
        if plan.num_units == 1:
            return overview
        rows = (self._row_text(row, plan.columns) for row in range(plan.rows))
        return f"{''.join(rows)}\n{overview}"

    def _row_text(self, row: int, num_columns: int) -> str:
        names = (f"<row_{row + 1}_col_{column + 1}>" for column in range(num_columns))
        return "".join(f"{self._fake}{name}{self._pad}" for name in names) + "\n"

    def _video_text(self, plan: TilePlan) -> str:
        """Writes every frame after its time; the length of the video is given in whole seconds."""
        words = number_in_words(plan.num_units)
        intro = DEFAULT_VIDEO_INTRO.format(
            frame_count=words, video_duration=str(timedelta(seconds=int(plan.source_duration_s)))
        )
        frames = "".join(self._frame_text(index / plan.source_fps) for index in plan.frame_indices)
        return f"{intro}{frames}{DEFAULT_MEDIA_OUTTRO}"

    def _frame_text(self, time_s: float) -> str:
        stamp = FRAME_TIMESTAMP_MESSAGE.format(timestamp=f"{int(time_s // 60):02d}:{int(time_s % 60):02d}")
        return f"{stamp}{self._fake}{self._global}{self._pad}{self._fake}"

    def tower_layers(self, tower: Any) -> Sequence[nn.Module]:
        layers: Sequence[nn.Module] = tower.vision_model.encoder.layers
        return layers

    def encode_tiles(self, tower: Any, pixels: Tensor, kind: MediaKind) -> Tensor:  # noqa: ARG002
        per_side = self.patches_per_side
        mask = torch.ones(len(pixels), per_side, per_side, dtype=torch.bool, device=pixels.device)
        hidden = tower.vision_model(pixel_values=pixels, patch_attention_mask=mask, return_dict=True)
        rows: Tensor = tower.connector(hidden.last_hidden_state)
        return rows


def _resized(height: int, width: int, size: Any) -> tuple[int, int]:
    """Applies both processors' first resizing: the longer side to `longest_edge`, the other even."""
    longest = min(int(size["longest_edge"]), _MAX_SIDE)
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        height += height % 2
    else:
        height, width = longest, int(longest * aspect)
        width += width % 2
    return max(height, 1), max(width, 1)
