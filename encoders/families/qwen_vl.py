"""Implements the Qwen-VL families' common sampling, smart resize, temporal patches, M-RoPE and tower call.

Sizes are multiples of a factor, within limits of pixels.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from epd.chat import ChatMessage
from epd.encoders.adapter import BaseAdapter, Embeddings, PatchRun, TowerMerger
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.device import CPU, to_device
from epd.encoders.families.qwen_tower import prepare_tower
from epd.encoders.patches import patch_spec, patchify, resize_image
from epd.encoders.plans import Grid, MediaItem, MediaPlan, PromptPlan, VideoFacts
from epd.encoders.prompt.prompt import (
    LAYOUTS,
    Expansion,
    PositionLayout,
    VisualSpan,
    lay_out,
    mrope_positions,
)
from epd.encoders.reduction.tower_merging import RunMerger
from epd.encoders.sampling import sample_indices, select_frames
from epd.errors import MediaLimitError, ModelError
from epd.frame_sampling import FrameSampling
from epd.pixel_limits import CAP_FIELD, NO_CAPS, OWN_LIMITS, FrameCaps, PixelLimits, check_ceiling, refuse
from epd.pixel_settings import authors_limits
from epd.reduction import TowerMerge
from epd.types import MediaKind, PlaceholderRange

_MOST_ASPECT = 200


def image_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Returns (height, width) of an image, or of a frame that is sized alone, pixels.

    Raises ValueError for an impossible shape.
    """
    return _fitted(1, 1, (height, width), factor, (min_pixels, max_pixels))


def frame_size(
    num_frames: int, unit: int, height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Returns (height, width) of each of some frames, pixels. The limits are of all of them together.

    num_frames: at least the frames of a unit. Raises ValueError for an impossible shape.
    """
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    whole = round(num_frames / unit) * unit
    return _fitted(num_frames, whole, (height, width), factor, (min_pixels, max_pixels))


def _fitted(
    num_frames: int, num_whole: int, size: tuple[int, int], factor: int, limits: tuple[int, int]
) -> tuple[int, int]:
    """Rounds the size, or scales it into the limits. num_whole: frames in whole units, which are counted."""
    height, width = size
    aspect = max(size) / min(size)
    if aspect > _MOST_ASPECT:
        raise ValueError(f"absolute aspect ratio must be smaller than {_MOST_ASPECT}, got {aspect}")
    rows, columns = round(height / factor), round(width / factor)
    num_pixels, (least, most) = num_whole * rows * columns * factor**2, limits
    if num_pixels > most:
        scale = math.sqrt(num_frames * height * width / most)
        rows, columns = (max(1, math.floor(side / scale / factor)) for side in size)
    elif num_pixels < least:
        scale = math.sqrt(least / (num_frames * height * width))
        rows, columns = (math.ceil(side * scale / factor) for side in size)
    return rows * factor, columns * factor


class ResizedMedia(BaseAdapter):
    """Holds images and frames, which have any size, to limits: a request's, the user's, the authors'.

    video_takes_size_alone: whether the processor of videos knows no min_pixels and max_pixels.
    """

    video_takes_size_alone = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.image_spec = patch_spec(checkpoint.processor.image_processor)
        self.video_spec = patch_spec(checkpoint.processor.video_processor)

    @abstractmethod
    def processor_caps(self) -> FrameCaps:
        """Returns what the processor's own `cap_pixels_per_frame` holds frames to."""

    def image_size(self, height: int, width: int, limits: tuple[int, int]) -> tuple[int, int]:
        """Returns (height, width) that an image is resized to, pixels. limits: as for `video_size`.

        Raises ValueError for an impossible shape.
        """
        return image_size(height, width, self.image_spec.factor, *limits)

    def _own_limits(self, kind: MediaKind) -> tuple[int, int]:
        """Returns the limits of the model's file, or the user's in their place."""
        processor, settings = self.checkpoint.processor, self.checkpoint.pixels
        size = (processor.image_processor if kind == "image" else processor.video_processor).size
        most = settings.max_pixels if kind == "image" else self._most_of_frame
        return int(size["shortest_edge"]), most or int(size["longest_edge"])

    @property
    def _most_of_frame(self) -> int | None:
        """Returns the user's limit of a frame where the processor's `size` is that of one."""
        return None if self.video_takes_size_alone else self.checkpoint.pixels.video_max_pixels

    def _caps(self, pixels: PixelLimits) -> FrameCaps:
        """Returns what frames are held to besides: by the user, else by the file or the authors."""
        settings, caps = self.checkpoint.pixels, self._default_caps(pixels)
        has_size = pixels.max_pixels or pixels.size or settings.video_max_pixels
        frame: float = caps.frame_pixels
        if self.video_takes_size_alone:
            frame = settings.video_max_pixels or frame
        elif has_size:  # takes the place of the frame's limit
            frame = math.inf
        tokens = settings.video_max_tokens
        return FrameCaps(frame, caps.video_pixels if tokens is None else tokens * self._token_pixels)

    def _default_caps(self, pixels: PixelLimits) -> FrameCaps:
        settings = self.checkpoint.pixels
        of_file = getattr(self.checkpoint.processor.video_processor, "cap_pixels_per_frame", None)
        said = (pixels.cap_pixels_per_frame, settings.cap_pixels_per_frame, of_file)
        if not next((each for each in said if each is not None), not settings.bare_processor):
            return NO_CAPS
        if of_file or settings.bare_processor:
            return self.processor_caps()
        authors = authors_limits(self.checkpoint.config.model_type)
        return FrameCaps(
            (authors.frame_tokens or math.inf) * self.video_spec.factor**2,
            (authors.video_tokens or math.inf) * self._token_pixels,
        )

    @property
    def _token_pixels(self) -> int:
        """Returns the pixels of all frames of a unit that become one visual token."""
        return self.video_spec.factor**2 * self.video_spec.frames_per_unit

    def _limits(self, kind: MediaKind, pixels: PixelLimits) -> tuple[int, int]:
        """Returns the least and the most pixels of an item, as the processor takes them from `pixels`."""
        if kind == "video" and self.video_takes_size_alone:
            pixels = PixelLimits(size=pixels.size)
        return pixels.within(self._own_limits(kind))

    def check_pixels(self, media: Collection[tuple[MediaKind, PixelLimits]], most: int | None) -> None:
        has_image = any(kind == "image" for kind, _ in media)
        has_video = any(kind == "video" for kind, _ in media)
        for kind, pixels in media:
            pixels.check()
            if pixels.cap_pixels_per_frame is not None and not has_video:
                raise refuse(CAP_FIELD, "with videos")
            for name, value in pixels.named.items():
                if kind == "image" or ".size." in name or not self.video_takes_size_alone:
                    check_ceiling(name, value, max(self._own_limits(kind)[1], most or 0))
                elif not has_image:
                    raise refuse(name, "with images; of videos only size, the pixels of all frames together")


class QwenVLAdapter(ResizedMedia):
    """Implements `Adapter`; a family defines the size of frames, and where it has words between them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises ModelError for an unknown layout of positions."""
        super().__init__(checkpoint)
        self._positions = _layout_of(checkpoint)

    @abstractmethod
    def video_size(
        self, num_frames: int, height: int, width: int, limits: tuple[int, int], caps: FrameCaps
    ) -> tuple[int, int]:
        """Returns (height, width) of each of `num_frames` decoded frames, pixels.

        limits: least and most pixels, as the processor's `size` has them.
        Raises ValueError for an impossible shape.
        """

    def sample(self, video: VideoFacts, frame_sampling: FrameSampling) -> Sequence[int]:
        """Returns the indices of the wanted frames of a part of a video. Raises RequestError."""
        return sample_indices(self.checkpoint.processor.video_processor, video, frame_sampling)

    def expand(self, plan: MediaPlan) -> Expansion:
        """Returns the ids that replace the item's pad token: without text between its units."""
        config, each = self.checkpoint.config, plan.tokens_per_unit
        pad = config.image_token_id if plan.kind == "image" else config.video_token_id
        units = tuple(PlaceholderRange(unit * each, each) for unit in range(plan.num_units))
        return Expansion(np.full(plan.num_tokens, pad, dtype=np.int64), units)

    def spans(self, item: MediaItem) -> Sequence[VisualSpan]:
        """Returns the item's visual tokens as runs without text in between: as one, a position a unit."""
        grid, merge = item.plan.grid, self.video_spec.merge
        whole = PlaceholderRange(item.units[0].offset, item.plan.num_tokens)
        return [VisualSpan(whole, grid.t, grid.h // merge, grid.w // merge)]

    @abstractmethod
    def tower_inputs(self, grids: tuple[Grid, ...], device: torch.device) -> dict[str, Tensor]:
        """Returns what a tower on `device` takes of the grids besides the patches."""

    def plan_image(self, height: int, width: int, pixels: PixelLimits = OWN_LIMITS) -> MediaPlan:
        try:
            size = self.image_size(height, width, self._limits("image", pixels))
        except ValueError as error:
            raise _limit_error("an image", height, width, error) from error
        spec = self.image_spec
        grid = spec.grid(1, *size)
        return MediaPlan("image", size, grid, spec.frames_per_unit, spec.tokens_per_unit(grid))

    def plan_video(
        self, video: VideoFacts, frame_sampling: FrameSampling, pixels: PixelLimits = OWN_LIMITS
    ) -> MediaPlan:
        frames = select_frames(video, frame_sampling, lambda part: self.sample(part, frame_sampling))
        try:
            limits, caps = self._limits("video", pixels), self._caps(pixels)
            num_sized = max(len(frames.indices), frame_sampling.sized_among or 0)
            size = self.video_size(num_sized, video.height, video.width, limits, caps)
        except ValueError as error:
            raise _limit_error("a video", video.height, video.width, error) from error
        spec = self.video_spec
        grid = spec.grid(len(frames.indices), *size)
        return MediaPlan(
            kind="video",
            size=size,
            grid=grid,
            frames_per_unit=spec.frames_per_unit,
            tokens_per_unit=spec.tokens_per_unit(grid),
            times_s=frames.times_s,
            frame_indices=frames.indices,
            source_fps=frames.fps,
            unit_span_s=spec.frames_per_unit / frames.sampled_fps,
        )

    def plan_chat(self, media: Sequence[MediaPlan], messages: Sequence[ChatMessage]) -> PromptPlan:
        token_ids, items = lay_out(self.checkpoint, media, messages, self.expand)
        spans = [span for item in items for span in self.spans(item)]
        positions, next_position = mrope_positions(len(token_ids), spans, self._positions)
        return PromptPlan(token_ids, positions, next_position, items)

    def resize(self, image: Tensor, plan: MediaPlan) -> Tensor:
        return resize_image(image, plan.size, self.image_spec.resample)

    def preprocess(self, frames: Tensor, plan: MediaPlan, device: torch.device = CPU) -> Tensor:
        return patchify(
            to_device(frames, device), self.image_spec if plan.kind == "image" else self.video_spec
        )

    def vision_tower(self, model: nn.Module) -> nn.Module:
        return prepare_tower(model.get_submodule("model.visual"))

    def tower_merger(self, tower: nn.Module, merge: TowerMerge) -> TowerMerger:
        parts: Any = tower
        mergers = [parts.merger, *getattr(parts, "deepstack_merger_list", ())]
        return RunMerger(parts.blocks, mergers, self.video_spec.merge, merge, self.cell_order)

    def cell_order(self, grid: Grid) -> Tensor:
        """Returns the raster place of each token of a unit, in the order of the tower's rows: int64 [S]."""
        return torch.arange(grid.cut(1).num_patches // self.video_spec.merge**2)

    def encode_batch(self, tower: nn.Module, runs: Sequence[PatchRun]) -> list[Embeddings]:
        dtype = next(tower.parameters()).dtype
        patches = torch.cat([run.values for run in runs]).to(dtype)
        inputs = self.tower_inputs(tuple(run.grid for run in runs), patches.device)
        output = tower(patches, **inputs, return_dict=True)
        counts = [run.grid.num_patches // self.video_spec.merge**2 for run in runs]
        rows = torch.split(output.pooler_output, counts)
        layers = [torch.split(layer, counts) for layer in getattr(output, "deepstack_features", None) or ()]
        return [Embeddings(rows[i], tuple(layer[i] for layer in layers)) for i in range(len(runs))]


def _layout_of(checkpoint: Checkpoint) -> PositionLayout:
    """Returns the layout of training: `position_layout` of config.json, or the authors' layout."""
    named = getattr(checkpoint.config, "position_layout", "authors")
    if named not in LAYOUTS:
        raise ModelError(
            f"received position_layout {named!r} in the config.json of '{checkpoint.path}'; allowed: "
            f"{', '.join(LAYOUTS)}; name the one that it was trained with, or none"
        )
    return named


def _limit_error(what: str, height: int, width: int, error: ValueError) -> MediaLimitError:
    return MediaLimitError(
        f"{what} of {width}x{height} pixels does not suit the model: {error}; crop it first"
    )
