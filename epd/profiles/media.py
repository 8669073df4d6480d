"""Computes the size of media in a model: patches for the vision tower, tokens for the language model.

image 4032x3024, MiniCPM-V      9 slices + 1 overview = 10 tiles of 1024 patches and 64 tokens
image 1280x720, Qwen2.5-VL      a grid of 14 pixel patches, four of which make a token

All arithmetic is in integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from epd.encode.sharding import FIRST_GROUP_TOKENS, cut_units, units_of
from epd.errors import RequestError
from epd.pixel_limits import LEAST_SHARE
from epd.types import ceil_div
from epd.workload.requests import AudioClip, Resolution, VideoSpec

# More frames than any video has.
_ANY_FRAMES = 10**9
# Of `<12.3 seconds>` and the marks around a time step's visual tokens, without the digits before the point.
_TIME_TOKENS = 7
# Of GLM-4.6V: frames a second of a video up to so many seconds, and the most.
_RATES, _MOST_SECONDS, _MOST_BY_LENGTH = ((30, 6), (300, 2), (math.inf, 1)), 2400, 640


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
        scaled to min_pixels to max_pixels; a video takes `frames_per_unit` frames for one time step
    kind tiles: up to max_tiles tiles of tile_patches patches and tile_tokens tokens each, of `patch` pixels
        side, and an overview; a video frame is one tile, of frame_tokens tokens where these are fewer
    kind canvas: the same, in the rows and columns whose shape is closest to the image's
    kind crops: tiles that repeat `overlap` patches of each other, and always an overview; `merge` x `merge`
        patches of each become a token
    kind pooled: patches of a frame that is scaled to tile_tokens, or frame_tokens in a video, of `merge` x
        `merge` patches at most
    kind slices: an overview, and up to max_tiles slices (max_frame_tiles in a video) of the picture made
        larger, each of about tile_patches patches, `merge` x `merge` of them a token
    kind clips: of a model that hears; a clip is padded to tile_patches positions of its tower, and becomes
        tokens_per_s tokens for each second
    image_merge: of images, where it is another than of frames; image_frames: that one counts as in its limits
    min_frame_pixels, max_frame_pixels, max_video_tokens: of a video's frames, each and all together
    has_least: whether the last leaves a frame its least pixels
    is_timed: the limits of pixels are of all frames together, and a text before each time step says its time
    frame_text_tokens: of the text around each frame; end_tokens: behind the last frame of a video
    video_fps, min_frames, max_frames, max_seconds, sampling: how many frames are sampled, see `num_sampled`
    num_frames: wanted of each video, None for those of its rate
    has_videos: whether the family takes them
    has_frame_patches: the tower takes the frames of a time step one by one
    is_whole: prefill begins when all media of a request are there
    group_frames: frames that travel together
    group_tokens: visual tokens that do, in their place, as the server cuts groups; None for group_frames
    """

    kind: Literal["grid", "tiles", "canvas", "crops", "pooled", "slices", "clips"]
    patch: int
    merge: int = 2
    max_pixels: int = 12_845_056
    max_frame_pixels: int = 602_112
    max_video_tokens: int | None = None
    frames_per_unit: int = 2
    tile_patches: int = 1024
    tile_tokens: int = 64
    max_tiles: int = 9
    max_frame_tiles: int = 9
    video_fps: float = 2.0
    max_frames: int = 768
    group_frames: int = 8
    group_tokens: int | None = None
    tokens_per_s: float = 25.0
    min_pixels: int = 0
    min_frame_pixels: int = 0
    is_timed: bool = False
    frame_tokens: int | None = None
    frame_text_tokens: int = 0
    end_tokens: int = 0
    min_frames: int = 1
    sampling: Literal["floor", "units", "round", "ceil", "capped", "pairs", "length", "seconds"] = "floor"
    num_frames: int | None = None
    has_videos: bool = True
    has_frame_patches: bool = False
    is_whole: bool = False
    overlap: int = 0
    image_merge: int | None = None
    image_frames: int = 1
    max_seconds: float | None = None
    has_least: bool = True

    @property
    def values_per_patch(self) -> int:
        """Counts the values that enter the tower for one patch."""
        is_joined = self.kind == "grid" and not self.has_frame_patches
        return 3 * self.patch**2 * (self.frames_per_unit if is_joined else 1)

    def asked(self, fps: float | None, num_frames: int | None) -> MediaRule:
        """Returns the rule for requests that name a rate or a number of frames; None for the model's own.

        Raises RequestError for a rate where the server refuses it.
        """
        if fps is None and num_frames is None:
            return self
        if fps is not None and self.sampling == "seconds":
            raise RequestError(
                f"received fps {fps:g}; allowed: the model's own, one frame a second; leave it out, or give "
                "a number of frames"
            )
        is_free = self.kind != "grid" and self.sampling != "round"  # their limit is of the model's own rate
        most = _ANY_FRAMES if is_free else self.max_frames
        return replace(self, video_fps=fps or self.video_fps, num_frames=num_frames, max_frames=most)

    def image(self, size: Resolution) -> MediaWork:
        self._check_sees("an image")
        if self.kind == "pooled":
            return self._pooled(size, self.tile_tokens)
        if self.kind == "slices":
            return self._sliced(size, self.max_tiles)
        if self.kind != "grid":
            return self._crops(size) if self.kind == "crops" else self._tiles(size)
        rule = replace(self, merge=self.image_merge or self.merge)
        patches = rule._grid_patches(size, self.min_pixels, self.max_pixels, self.image_frames)
        return MediaWork(patches, patches // rule.merge**2)

    def video(self, spec: VideoSpec, num_frames: int | None = None) -> tuple[MediaWork, ...]:
        """Returns the groups of a video, in order.

        num_frames: fewer than are sampled by the rule, in the size that those would have; None for all
        """
        self._check_sees("a video")
        if not self.has_videos:
            raise RequestError(
                "received a video for the profile of a model without them; allowed: images and text; take "
                "the profile of another model"
            )
        num_sized = self.num_sampled(spec)
        taken = self._whole(num_frames or num_sized, num_sized)
        unit = self.frames_per_unit if self.kind == "grid" else 1
        per_unit = self._unit(spec.size, num_sized)
        cuts = cut_units(ceil_div(taken, unit), *self._units_of_groups(per_unit.num_tokens, unit))
        works = [
            _times(per_unit, stop - start, min(stop * unit, taken) - start * unit) for start, stop in cuts
        ]
        works[-1] = replace(works[-1], num_tokens=works[-1].num_tokens + self.end_tokens)
        return tuple(works)

    def text_tokens(self, spec: VideoSpec, num_frames: int | None = None) -> int:
        """Returns the tokens of the text that the prompt has between a video's frames."""
        taken = self._whole(num_frames or self.num_sampled(spec), self.num_sampled(spec))
        if self.kind == "slices":  # marks around each, and rows of slices in lines
            rows, columns = self._slices(spec.size, self.max_frame_tiles)
            return taken * (2 * (1 + rows * columns) + max(0, rows - 1))
        if self.frame_text_tokens or not self.is_timed:
            named = range(1, taken + 1) if self.kind == "canvas" else ()  # its frames have numbers
            return taken * self.frame_text_tokens + sum(len(str(number)) for number in named)
        return sum(_TIME_TOKENS + len(f"{time_s:.1f}") - 2 for time_s in self._unit_times_s(spec, taken))

    def _unit_times_s(self, spec: VideoSpec, num_frames: int) -> list[float]:
        """Returns the middle of the first and the last frame of each time step."""
        indices = np.linspace(0, spec.num_frames - 1, num_frames).round()
        last = indices[np.minimum(np.arange(0, num_frames, self.frames_per_unit) + 1, num_frames - 1)]
        return [float(time_s) for time_s in (indices[:: self.frames_per_unit] + last) / 2 / spec.fps]

    def _unit(self, size: Resolution, num_frames: int) -> MediaWork:
        """Returns a time step of one of so many frames, or a frame where it is a tile."""
        if self.kind == "pooled":
            return self._pooled(size, self.frame_tokens or self.tile_tokens)
        if self.kind == "slices":
            return self._sliced(size, self.max_frame_tiles)
        if self.kind != "grid":
            return MediaWork(self.tile_patches, self.frame_tokens or self.tile_tokens)
        most, count = self._frame_pixels(num_frames), 1
        if self.is_timed:
            most = most * num_frames if self.has_least else self._video_pixels
            count = max(num_frames, self.frames_per_unit)
        patches = self._grid_patches(size, self.min_frame_pixels, most, count)
        num_grids = self.frames_per_unit if self.has_frame_patches else 1
        return MediaWork(num_grids * patches, patches // self.merge**2, self.frames_per_unit)

    def _frame_pixels(self, num_frames: int) -> int:
        """Returns the pixels of each of so many frames at most; a cap leaves some more than the least."""
        most: float = self.max_frame_pixels
        if self.max_video_tokens is not None:
            most = min(most, self._video_pixels / num_frames)
        return max(int(most), int(self.min_frame_pixels * LEAST_SHARE) if self.has_least else 0)

    @property
    def _video_pixels(self) -> int:
        """Returns the pixels of all frames together at most, where there is a limit."""
        return (self.max_video_tokens or 0) * (self.patch * self.merge) ** 2 * self.frames_per_unit

    def _units_of_groups(self, tokens_per_unit: int, unit: int) -> tuple[int, int]:
        """Returns the time steps of a whole group, and of the first one."""
        if self.group_tokens is None:
            return (max(1, self.group_frames // unit),) * 2
        whole, first = (units_of(each, tokens_per_unit) for each in (self.group_tokens, FIRST_GROUP_TOKENS))
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
        """Returns the frames that are sampled of a video, at least one, as its family's processor counts.

        floor: of the rate, rounded down; units: in whole time steps; round: rounded to the nearest; ceil: up
        capped: as floor, which no wanted number is above
        pairs: as floor, but of max_seconds, and length: by the video's length; the last may stand twice
        seconds: one a second, of a longer video as many as there may be
        """
        if self.sampling == "seconds":
            seconds, most = spec.num_frames / spec.fps, self.num_frames or self.max_frames
            return min(int(seconds / 0.1), most) if seconds > most else math.ceil(seconds)
        if self.sampling in ("pairs", "length"):
            number = self._num_by_length(spec) if self.sampling == "length" else self._num_of_seconds(spec)
            return number + number % 2
        is_in_steps = self.kind == "grid" and self.sampling != "ceil"
        total, unit = spec.num_frames, self.frames_per_unit if is_in_steps else 1
        if total <= unit:
            return total
        if self.num_frames is not None:
            return self._num_wanted(spec, self.num_frames, unit)
        at_rate = total / spec.fps * self.video_fps
        if self.sampling == "units":
            at_rate = min(max(at_rate, self.min_frames), min(self.max_frames, total) // unit * unit)
            return int(at_rate // unit * unit)
        return min(max(self._counted(at_rate), self.min_frames), self.max_frames, total)

    def _num_of_seconds(self, spec: VideoSpec) -> int:
        rate, seconds = min(self.video_fps, spec.fps), spec.num_frames / spec.fps
        seconds = min(seconds, self.max_seconds or seconds)
        return max(1, min(int(seconds * rate), spec.num_frames))

    def _num_by_length(self, spec: VideoSpec) -> int:
        """Counts frames taken at the ticks of a rate, which are spread anew where these are too few."""
        seconds = spec.num_frames / spec.fps
        rate = next(each for most_s, each in _RATES if seconds <= most_s)
        wanted, num_ticks = min(int(min(seconds, _MOST_SECONDS) * rate), _MOST_BY_LENGTH), int(seconds) * rate
        if wanted > spec.num_frames:
            return spec.num_frames
        last = max(num_ticks - 1, math.ceil((num_ticks - 1) / rate * spec.fps), 0)
        return wanted if num_ticks >= wanted else min(wanted, last + 1)

    def _counted(self, at_rate: float) -> int:
        if self.sampling == "ceil":
            return math.ceil(at_rate)
        return round(at_rate) if self.sampling == "round" else int(at_rate)

    def _num_wanted(self, spec: VideoSpec, wanted: int, unit: int) -> int:
        most = spec.num_frames // unit * unit
        if self.sampling in ("round", "capped"):  # no more than its rate has
            most = min(most, max(1, self._counted(spec.num_frames / spec.fps * self.video_fps)))
        return self._whole(min(max(wanted, unit), most), most)

    def _whole(self, num_frames: int, most: int) -> int:
        """Returns a number of frames in whole time steps, where the family has them so."""
        if self.sampling != "units" or num_frames == most:
            return num_frames
        unit = self.frames_per_unit
        return min(max(round(num_frames / unit), 1) * unit, most)

    def _pooled(self, size: Resolution, most: int) -> MediaWork:
        """Counts the tokens of a picture that is scaled to as many as there may be, whole ones of a side."""
        side = self.patch * self.merge
        scale = math.sqrt(most * side**2 / (size.width * size.height))
        wide, high = (math.floor(scale * length / side) for length in (size.width, size.height))
        lengths = size.width, size.height
        tokens = wide * high or min(max(lengths) // min(lengths), most)
        return MediaWork(tokens * self.merge**2, tokens)

    def _sliced(self, size: Resolution, most: int) -> MediaWork:
        """Counts the patches of an overview, and of slices."""
        rows, columns = self._slices(size, most)
        patches = self._fitted(size.height, size.width, is_grown=not rows)
        if rows:
            high, wide = max(1, round(size.height / rows)), max(1, round(size.width / columns))
            patches += rows * columns * self._fitted(high, wide, is_grown=True)
        return MediaWork(patches, patches // self.merge**2)

    def _slices(self, size: Resolution, most: int) -> tuple[int, int]:
        """Returns the rows and columns closest in shape, and 0 for a picture that is not cut."""
        area = self.tile_patches * self.patch**2
        wanted = min(math.ceil(size.width * size.height / area), most)
        if wanted <= 1:
            return 0, 0
        counts = [each for each in (wanted - 1, wanted, wanted + 1) if 1 < each <= most]
        grids = [
            (rows, count // rows) for count in counts for rows in range(1, count + 1) if count % rows == 0
        ]
        shape = math.log(size.width / size.height)
        return min(grids, key=lambda grid: (abs(shape - math.log(grid[1] / grid[0])), -grid[0]))

    def _fitted(self, height: int, width: int, *, is_grown: bool) -> int:
        """Returns the patches of a picture in its shape, of about a tile's area, or less if not grown."""
        area, shape, side = self.tile_patches * self.patch**2, width / height, self.patch * self.merge
        if is_grown or height * width > area:
            height = int(math.sqrt(area) / math.sqrt(shape))
            width = int(height * shape)
        return max(1, round(height / side)) * max(1, round(width / side)) * self.merge**2

    def _tiles(self, size: Resolution) -> MediaWork:
        """Counts tiles: those of the image, and one for the whole image, unless it is the only one."""
        wanted = self._canvas(size) if self.kind == "canvas" else self._tiles_of_area(size)
        num_tiles = wanted + (wanted > 1)
        return MediaWork(num_tiles * self.tile_patches, num_tiles * self.tile_tokens)

    def _crops(self, size: Resolution) -> MediaWork:
        """Counts the crops of the least canvas that is not smaller than the image, or of the largest one."""
        window = math.isqrt(self.tile_patches) - self.overlap
        sides = range(1, self.max_tiles + 1)
        canvases = sorted(
            (high * wide, high, wide) for high in sides for wide in sides if high * wide <= self.max_tiles
        )
        lengths = [(side / self.patch - self.overlap or 1e-9) for side in (size.height, size.width)]
        scales = [min(high / lengths[0], wide / lengths[1]) * window for _, high, wide in canvases]
        fits = [scale for scale in scales if scale >= 1]
        count, *grown = canvases[scales.index(min(fits) if fits else max(scales))]
        high, wide = (ceil_div(each * window + self.overlap, self.merge) for each in grown)
        return MediaWork((1 + count) * self.tile_patches, self.tile_tokens + high * wide)

    def _tiles_of_area(self, size: Resolution) -> int:
        """Returns the image's pixels over those of a tile."""
        area = size.width * size.height / self.patch**2 / self.tile_patches
        return min(self.max_tiles, max(1, math.ceil(area)))

    def _canvas(self, size: Resolution) -> int:
        """Returns the tiles of the canvas closest in shape; of equals, the largest not twice too large."""
        shape, area = size.width / size.height, size.width * size.height / self.patch**2 / self.tile_patches
        sides = range(1, self.max_tiles + 1)
        canvases = [(w, h) for w in sides for h in sides if w * h <= self.max_tiles]
        least = min(abs(shape - w / h) for w, h in canvases)
        counts = sorted(w * h for w, h in canvases if abs(shape - w / h) == least)
        return max((count for count in counts if area > count / 2), default=counts[0])

    def _grid_patches(self, size: Resolution, least: int, most: int, num_frames: int = 1) -> int:
        """Returns the patches of a frame whose sides are rounded to whole tokens.

        least, most: pixels of so many frames together
        """
        side = self.patch * self.merge
        short = side / min(size.width, size.height)
        grown = short if short > 1 and self.is_timed else 1.0
        lengths = [int(length * grown) if grown > 1 else length for length in (size.width, size.height)]
        counted = round(num_frames / 2) * 2 if num_frames > 1 else 1
        wide, high = (round(length / side) for length in lengths)
        area = num_frames * lengths[0] * lengths[1]
        if counted * wide * high * side**2 > most:
            scale = math.sqrt(area / most)
            wide, high = (max(1, math.floor(length / scale / side)) for length in lengths)
        elif counted * wide * high * side**2 < least:
            scale = math.sqrt(least / area)
            wide, high = (math.ceil(length * scale / side) for length in lengths)
        return max(1, wide) * max(1, high) * self.merge**2


def _times(unit: MediaWork, num_units: int, num_frames: int) -> MediaWork:
    """Returns a run of equal time steps. num_frames: those of them that are there."""
    return MediaWork(unit.num_patches * num_units, unit.num_tokens * num_units, num_frames)
