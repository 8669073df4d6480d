"""Computes the size of media in a model: patches for the vision tower, tokens for the language model.

image 4032x3024, MiniCPM-V      9 slices + 1 overview = 10 tiles of 1024 patches and 64 tokens
image 1280x720, Qwen2.5-VL      a grid of 14 pixel patches, four of which make a token

All arithmetic is in integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from epd.encode.sharding import FIRST_GROUP_TOKENS, cut_units, units_of
from epd.errors import RequestError
from epd.types import ceil_div
from epd.workload.requests import AudioClip, Resolution, VideoSpec


@dataclass(frozen=True, slots=True)
class MediaWork:
    """Describes the work of one image, or one group of a video. num_frames: to be decoded for it."""

    num_patches: int
    num_tokens: int
    num_frames: int = 1


@dataclass(frozen=True, slots=True)
class MediaRule:
    """Defines how a family cuts media.

    kind grid: patches of `patch` pixels over the whole frame, `merge` x `merge` of them a token, the frame
        scaled to at most max_pixels; a video takes `frames_per_unit` frames for one time step
    kind tiles: up to max_tiles tiles of tile_patches patches and tile_tokens tokens each, of `patch` pixels
        side, and an overview; a video frame is one tile
    kind clips: of a model that hears; a clip is padded to tile_patches positions of its tower, and becomes
        tokens_per_s tokens for each second
    max_frame_pixels, max_video_tokens: of a video's frames, each and all together
    video_fps, max_frames: how videos are sampled
    group_frames: frames that travel together
    group_tokens: visual tokens that do, in their place, as the server cuts groups; None for group_frames
    """

    kind: Literal["grid", "tiles", "clips"]
    patch: int
    merge: int = 2
    max_pixels: int = 12_845_056
    max_frame_pixels: int = 602_112
    max_video_tokens: int | None = None
    frames_per_unit: int = 2
    tile_patches: int = 1024
    tile_tokens: int = 64
    max_tiles: int = 9
    video_fps: float = 2.0
    max_frames: int = 768
    group_frames: int = 8
    group_tokens: int | None = None
    tokens_per_s: float = 25.0

    @property
    def values_per_patch(self) -> int:
        """Counts the values that enter the tower for one patch."""
        return 3 * self.patch**2 * (self.frames_per_unit if self.kind == "grid" else 1)

    def image(self, size: Resolution) -> MediaWork:
        self._check_sees("an image")
        if self.kind == "tiles":
            return self._tiles(size)
        patches = self._grid_patches(size, self.max_pixels)
        return MediaWork(patches, patches // self.merge**2)

    def video(self, spec: VideoSpec) -> tuple[MediaWork, ...]:
        """Returns the groups of a video, in order."""
        self._check_sees("a video")
        num_frames = self.num_sampled(spec)
        pixels = self._frame_pixels(num_frames)
        cuts = cut_units(num_frames, *self._frames_of_groups(spec.size, pixels))
        return tuple(self._group(spec.size, stop - start, pixels) for start, stop in cuts)

    def _frame_pixels(self, num_frames: int) -> int:
        """Returns the pixels of each of so many frames at most."""
        if self.max_video_tokens is None:
            return self.max_frame_pixels
        side, units = self.patch * self.merge, ceil_div(num_frames, self.frames_per_unit)
        return min(self.max_frame_pixels, self.max_video_tokens * side**2 // units)

    def _frames_of_groups(self, size: Resolution, pixels: int) -> tuple[int, int]:
        """Returns the frames of a whole group, and of the first one."""
        if self.group_tokens is None:
            return self.group_frames, self.group_frames
        frames = self.frames_per_unit if self.kind == "grid" else 1
        tokens = self._group(size, frames, pixels).num_tokens
        whole, first = (units_of(each, tokens) * frames for each in (self.group_tokens, FIRST_GROUP_TOKENS))
        return whole, first

    def audio(self, clip: AudioClip) -> MediaWork:
        if self.kind != "clips":
            raise RequestError("received audio for the profile of a model that sees; take one that hears")
        return MediaWork(self.tile_patches, max(1, round(clip.duration_s * self.tokens_per_s)))

    def _check_sees(self, received: str) -> None:
        if self.kind == "clips":
            raise RequestError(
                f"received {received} for the profile of a model that hears; allowed: audio and text; take "
                "the profile of a model that sees"
            )

    def num_sampled(self, spec: VideoSpec) -> int:
        return max(1, min(math.ceil(spec.duration_s * self.video_fps), self.max_frames, spec.num_frames))

    def _tiles(self, size: Resolution) -> MediaWork:
        """Counts tiles: the image's pixels over those of a tile, and one for the whole image."""
        area = size.width * size.height / self.patch**2 / self.tile_patches
        wanted = min(self.max_tiles, max(1, math.ceil(area)))
        num_tiles = wanted + (wanted > 1)
        return MediaWork(num_tiles * self.tile_patches, num_tiles * self.tile_tokens)

    def _grid_patches(self, size: Resolution, max_pixels: int) -> int:
        side = self.patch * self.merge
        scale = min(1.0, math.sqrt(max_pixels / (size.width * size.height)))
        wide, high = (max(1, int(length * scale / side)) for length in (size.width, size.height))
        return wide * high * self.merge**2

    def _group(self, size: Resolution, num_frames: int, pixels: int) -> MediaWork:
        if self.kind == "tiles":
            return MediaWork(num_frames * self.tile_patches, num_frames * self.tile_tokens, num_frames)
        units = ceil_div(num_frames, self.frames_per_unit)
        patches = units * self._grid_patches(size, pixels)
        return MediaWork(patches, patches // self.merge**2, num_frames)
