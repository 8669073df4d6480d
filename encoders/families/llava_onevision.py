"""Adapts LLaVA-OneVision: an image is itself as a tile, then a canvas of tiles; a video is a square a frame.

The tiles' embeddings are laid out as one picture, its padding is cut off, it is shrunk if it is large, and
every row of it ends with the model's newline. So an image's tokens are known from all its tiles together:

    tile 0 | canvas row 0, newline | canvas row 1, newline | ...     rows cross the tiles side by side

A video's frames are pooled to a quarter, and one newline ends the video. Encoders add the newline to every
unit as its last row, and `join` keeps those that are wanted: so a receiver needs no weight of the encoder's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.image_utils import ChannelDimension

from epd.encoders.adapter import Embeddings
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.families.tiles import TileAdapter, TilePlan, check_last_layer, cut_tiles, tile_spec
from epd.encoders.plans import MediaPlan, VideoFacts
from epd.encoders.prompt.text_layout import ItemText, Markers
from epd.errors import UnsupportedModelError
from epd.frame_sampling import FrameSampling
from epd.pixel_limits import OWN_LIMITS, PixelLimits
from epd.types import MediaKind

# A canvas this much larger, each way, than the tiles it may fill is shrunk.
_SHRINK_ABOVE = 1.1


@dataclass(frozen=True, slots=True)
class LlavaPlan(TilePlan):
    """Adds joined_tokens, the number of rows that `join` gives for all units."""

    joined_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.joined_tokens

    @property
    def is_joined_whole(self) -> bool:
        return self.kind == "image"


@dataclass(frozen=True, slots=True)
class _Canvas:
    """Describes a picture of embeddings: rows and columns, those without padding, and the final size."""

    rows: slice
    columns: slice
    height: int
    width: int

    @property
    def num_tokens(self) -> int:
        """Counts the tokens, with a newline after each row."""
        return self.height * (self.width + 1)


class LlavaOnevisionAdapter(TileAdapter):
    """Adapts `model_type` llava_onevision. Every image is tiled, as the processor does for a flat list."""

    has_low_detail = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        config, processor = checkpoint.config, checkpoint.processor
        _check_supported(config)
        self.image_spec = tile_spec(processor.image_processor, int(processor.image_processor.size["height"]))
        self.video_spec = tile_spec(processor.video_processor, int(processor.video_processor.size["height"]))
        self.patches_per_side = int(config.vision_config.image_size) // int(config.vision_config.patch_size)
        self._pooled_side = math.ceil(self.patches_per_side / 2)
        self.tokens_per_tile = self.patches_per_side**2 + 1
        self.tokens_per_frame = self._pooled_side**2 + 1
        self._max_tiles = int(str(config.vision_aspect_ratio).removeprefix("anyres_max_"))
        names: dict[MediaKind, str] = {"image": processor.image_token, "video": processor.video_token}
        self.markers = Markers(names, names, "{marker}\n")

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        side = self.image_spec.side
        best = select_best_resolution((height, width), self._pinpoints)
        return int(best[0]) // side, int(best[1]) // side

    def num_tiles(self, rows: int, columns: int) -> int:
        return rows * columns + 1

    @property
    def _pinpoints(self) -> list[list[int]]:
        pinpoints: list[list[int]] = self.checkpoint.processor.image_processor.image_grid_pinpoints
        return pinpoints

    def plan_image(self, height: int, width: int, pixels: PixelLimits = OWN_LIMITS) -> LlavaPlan:
        plan = super().plan_image(height, width, pixels)
        return _llava_plan(plan, self.patches_per_side**2 + self._picture(plan).num_tokens)

    def plan_video(
        self, video: VideoFacts, frame_sampling: FrameSampling, pixels: PixelLimits = OWN_LIMITS
    ) -> LlavaPlan:
        plan = super().plan_video(video, frame_sampling, pixels)
        return _llava_plan(plan, plan.num_units * self._pooled_side**2 + 1)

    def _picture(self, plan: TilePlan) -> _Canvas:
        """Returns the part of the canvas that shows the image, and the size it is resized to."""
        side = self.patches_per_side
        rows, columns = _unpadded(plan.rows * side, plan.columns * side, *plan.source_size)
        height, width = rows.stop - rows.start, columns.stop - columns.start
        ratio = math.sqrt(height * width / (self._max_tiles * side**2))
        if ratio > _SHRINK_ABOVE:
            height, width = int(height // ratio), int(width // ratio)
        return _Canvas(rows, columns, height, width)

    def tiles(self, image: Tensor, rows: int, columns: int) -> Tensor:
        """Cuts the overview, then the tiles of the image resized into its canvas, centred on black."""
        spec, side = self.image_spec, self.image_spec.side
        target = (rows * side, columns * side)
        height, width = get_patch_output_size(image[0], target, input_data_format=ChannelDimension.LAST)
        top, left = (target[0] - height) // 2, (target[1] - width) // 2
        canvas = torch.zeros(1, *target, 3, dtype=torch.uint8)
        canvas[:, top : top + height, left : left + width] = spec.resize(image, height, width)
        return torch.cat([spec.resize(image, side, side), cut_tiles(canvas, side)])

    def item_text(self, plan: TilePlan) -> ItemText:
        pad = self.markers.pads[plan.kind]
        if plan.is_joined_whole:
            return ItemText(pad, (plan.num_tokens,))
        each = self._pooled_side**2
        return ItemText(pad * plan.num_units, (each,) * (plan.num_units - 1) + (each + 1,))

    def tower_layers(self, tower: Any) -> Sequence[nn.Module]:
        check_last_layer(tower.config)
        layers: Sequence[nn.Module] = tower.vision_tower.encoder.layers
        return layers

    def encode_tiles(self, tower: Any, pixels: Tensor, kind: MediaKind) -> Tensor:
        layer = tower.config.vision_feature_layer
        hidden = tower.vision_tower(pixels, output_hidden_states=True, return_dict=True).hidden_states[layer]
        rows: Tensor = tower.multi_modal_projector(hidden)
        if kind == "video":
            side = self.patches_per_side
            pictures = rows.reshape(len(rows), side, side, -1)
            rows = _interpolated(pictures, self._pooled_side, self._pooled_side).flatten(1, 2)
        newline = tower.image_newline.expand(len(rows), 1, -1)
        return torch.cat([rows, newline.to(rows.dtype)], dim=1)

    def join(self, embeddings: Embeddings, plan: MediaPlan, start: int, stop: int) -> Embeddings:
        units = embeddings.rows.reshape(stop - start, plan.tokens_per_unit, -1)
        rows, newline = units[:, :-1], units[0, -1]
        if plan.kind == "image" and isinstance(plan, TilePlan):
            return Embeddings(torch.cat([rows[0], self._joined_canvas(rows[1:], newline, plan)]))
        end = [newline[None]] if stop == plan.num_units else []
        return Embeddings(torch.cat([rows.flatten(0, 1), *end]))

    def _joined_canvas(self, tiles: Tensor, newline: Tensor, plan: TilePlan) -> Tensor:
        """Joins tiles [rows * columns, tokens, C] to a picture [V, C], each row ended by the newline [C]."""
        side = self.patches_per_side
        picture = self._picture(plan)
        canvas = tiles.reshape(plan.rows, plan.columns, side, side, -1).transpose(1, 2)
        canvas = canvas.reshape(plan.rows * side, plan.columns * side, -1)[picture.rows, picture.columns]
        if canvas.shape[:2] != (picture.height, picture.width):
            canvas = _interpolated(canvas[None], picture.height, picture.width)[0]
        ends = newline.expand(picture.height, 1, -1)
        return torch.cat([canvas, ends], dim=1).flatten(0, 1)


def _check_supported(config: Any) -> None:
    strategy, layer = config.vision_feature_select_strategy, config.vision_feature_layer
    aspect = str(config.vision_aspect_ratio)
    if strategy != "full" or not isinstance(layer, int) or not aspect.startswith("anyres_max_"):
        raise UnsupportedModelError(
            f"a model with vision_feature_select_strategy={strategy}, vision_feature_layer={layer} and "
            f"vision_aspect_ratio={aspect} is not supported; it must be 'full', one layer and anyres_max_N"
        )


def _llava_plan(plan: TilePlan, joined_tokens: int) -> LlavaPlan:
    values = {field.name: getattr(plan, field.name) for field in fields(TilePlan)}
    return LlavaPlan(**values, joined_tokens=joined_tokens)


def _unpadded(rows: int, columns: int, height: int, width: int) -> tuple[slice, slice]:
    """Returns the rows and columns of a canvas that a centred image of `height` x `width` pixels fills."""
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        padding = (rows - kept) // 2
        return slice(padding, rows - padding), slice(0, columns)
    kept = int(round(width * (rows / height), 7))
    padding = (columns - kept) // 2
    return slice(0, rows), slice(padding, columns - padding)


def _interpolated(pictures: Tensor, height: int, width: int) -> Tensor:
    """Resizes [N, H, W, C] to [N, height, width, C], bilinearly."""
    channels_first = pictures.permute(0, 3, 1, 2).contiguous()
    return nn.functional.interpolate(channels_first, (height, width), mode="bilinear").permute(0, 2, 3, 1)
