"""Describes media and prompts before a frame is decoded: units, times, tokens and their places.

A *unit* is the least run of frames that the vision tower attends within, so cutting between units changes no
number: a temporal patch (two frames) for the Qwen families. Groups are runs of whole units.

    frames         | 0  1 | 2  3 | 4  5 | 6 (6) |        the last frame is repeated to fill its unit
    unit           [  0  )[  1  )[  2  )[   3   )
    prompt   ..text[range )[range)...             one PlaceholderRange per unit; text may lie between them

V: visual tokens, T: tokens of a prompt.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from epd.reduction import ReductionPolicy, Window, num_survivors
from epd.types import BoolArray, Int64Array, MediaKind, PlaceholderRange, Usage


@dataclass(frozen=True, slots=True)
class Grid:
    """Counts the patches of one image or video in time, height and width."""

    t: int
    h: int
    w: int

    def __post_init__(self) -> None:
        if min(self.t, self.h, self.w) < 1:
            raise ValueError(f"a grid needs at least one patch each way, got {self}")

    @property
    def num_patches(self) -> int:
        return self.t * self.h * self.w

    @property
    def num_tiles(self) -> int:
        """Counts the tiles of a unit. Words may lie between their tokens."""
        return 1

    def cut(self, num_units: int) -> Self:
        """Returns the grid of `num_units` units of this item."""
        return replace(self, t=num_units)


@dataclass(frozen=True, slots=True)
class AudioSpec:
    """Says what sound a model takes. rate: samples per second, max_samples: of one clip."""

    rate: int
    max_samples: int


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """Describes a video for planning.

    fps: mean frames per second
    height, width: pixels, upright
    is_frame_list: whether its frames were sampled before: all of them are used, see `ListedTimes`
    """

    num_frames: int
    fps: float
    height: int
    width: int
    is_frame_list: bool = False


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """Describes the units and tokens of one image, video or clip of sound before any frame is decoded.

    size: (height, width) of the frames to decode, pixels. An image is decoded whole and resized to it.
    times_s: middle of each wanted frame's time on screen, seconds; of a clip, where it starts; empty for an
        image.
    frame_indices: the same frames as the Hugging Face processor numbers them; empty for an image.
    source_fps: frames per second of the source, 0 for an image.
    unit_span_s: seconds of video in one unit, 0 for an image.
    drawn_size: (height, width) that frames are resized to once their times are drawn on them; None where none
        are drawn.
    kept: of each unit which of its tokens are in the prompt, a byte of 0 or 1 each; empty for all of them.
    """

    kind: MediaKind
    size: tuple[int, int]
    grid: Grid
    frames_per_unit: int
    tokens_per_unit: int
    times_s: tuple[float, ...] = ()
    frame_indices: tuple[int, ...] = ()
    source_fps: float = 0.0
    unit_span_s: float = 0.0
    drawn_size: tuple[int, int] | None = None
    kept: tuple[bytes, ...] = ()

    @property
    def num_units(self) -> int:
        return self.grid.t

    @property
    def resized(self) -> tuple[int, int]:
        """Returns (height, width) of a frame, or of an image before it is cut into units, pixels."""
        return self.drawn_size or self.size

    @property
    def drawn_times_s(self) -> tuple[float, ...]:
        """Returns the times that are drawn on the frames, seconds; empty where none are."""
        indices = () if self.drawn_size is None else self.frame_indices
        return tuple(index / self.source_fps for index in indices)

    @property
    def num_frames(self) -> int:
        """Counts the frames to decode: those wanted of a video, one for an image or a clip."""
        return len(self.times_s) if self.kind == "video" else 1

    @property
    def num_tokens(self) -> int:
        """Counts the visual tokens in the prompt."""
        return sum(self.unit_lengths) if self.kept else self.num_units * self.tokens_per_unit

    @property
    def unit_lengths(self) -> tuple[int, ...]:
        """Returns the tokens of each unit that are in the prompt."""
        return tuple(map(sum, self.kept)) or (self.tokens_per_unit,) * self.num_units

    @property
    def span_s(self) -> float:
        """Returns the seconds of video that the units stand for, 0 for an image or a clip."""
        return self.num_units * self.unit_span_s if self.kind == "video" else 0.0

    @property
    def line(self) -> str:
        """Returns frames, size and tokens, for people."""
        height, width = self.resized
        what = f"{self.num_frames} frames of {width}x{height} pixels" if self.kind == "video" else self.kind
        what = f"an image of {width}x{height} pixels" if self.kind == "image" else what
        return f"{what}: {self.num_tokens:,} tokens"

    def frame_range(self, start: int, stop: int) -> range:
        """Returns the frames or tiles of units [start, stop); the last unit of a video may be short."""
        last = len(self.times_s) if self.kind == "video" else self.num_units
        return range(start * self.frames_per_unit, min(stop * self.frames_per_unit, last))

    def times_of(self, start: int, stop: int) -> tuple[float, ...]:
        """Returns the times of the frames of units [start, stop), in seconds; empty for an image."""
        frames = self.frame_range(start, stop)
        return self.times_s[frames.start : frames.stop]

    def part(self, start: int, stop: int) -> Self:
        """Returns a plan of units [start, stop) alone, sufficient to decode and encode them."""
        frames = self.frame_range(start, stop)
        return replace(
            self,
            grid=self.grid.cut(stop - start),
            times_s=self.times_of(start, stop),
            frame_indices=self.frame_indices[frames.start : frames.stop],
            kept=self.kept[start:stop],
        )

    @property
    def is_joined_whole(self) -> bool:
        """Reports whether the tokens are known only from all units together: see `Adapter.join`."""
        return False

    @property
    def is_reducible(self) -> bool:
        """Reports whether fewer tokens may be kept: a unit has one run of them, known without the others."""
        return not self.is_joined_whole and self.grid.num_tiles == 1


@dataclass(frozen=True, slots=True)
class MediaItem:
    """Places one image, video or clip of sound in a prompt: its units, in order.

    units: a range for each, or for each of its tiles; of an item that is joined whole, one for each run of
        its tokens; one for each window if only some of the tokens are kept.
    windows: of a reduced item, else empty.
    """

    plan: MediaPlan
    units: tuple[PlaceholderRange, ...]
    windows: tuple[Window, ...] = ()

    def __post_init__(self) -> None:
        if self.plan.is_joined_whole:
            self._check_runs()
            return
        needed = len(self.windows) or self.plan.num_units * self._num_tiles
        if len(self.units) != needed:
            raise ValueError(f"{needed} units need as many ranges, got {len(self.units)}")

    @property
    def _num_tiles(self) -> int:
        return self.plan.grid.num_tiles

    def _check_runs(self) -> None:
        if self.num_tokens != self.plan.num_tokens:
            raise ValueError(
                f"{self.plan.num_tokens} tokens joined whole need as many, got {self.num_tokens}"
            )

    @property
    def num_tokens(self) -> int:
        """Counts the visual tokens in the prompt."""
        return sum(unit.length for unit in self.units)

    def unit_run(self, index: int) -> tuple[int, int]:
        """Returns the units [start, stop) whose tokens are in range `index`."""
        if self.windows:
            return self.windows[index].start, self.windows[index].stop
        unit = index // self._num_tiles
        return (0, self.plan.num_units) if self.plan.is_joined_whole else (unit, unit + 1)

    def range_of(self, unit: int) -> PlaceholderRange:
        """Returns the range of a unit's tokens, and of words between them. Other units may share it."""
        if self.windows:
            return self.units[bisect_right(self.windows, unit, key=lambda window: window.start) - 1]
        tiles = self.units[unit * self._num_tiles : (unit + 1) * self._num_tiles]
        runs = self.units if self.plan.is_joined_whole else tiles
        return PlaceholderRange(runs[0].offset, runs[-1].stop - runs[0].offset)

    def token_indices(self, start: int, stop: int) -> Int64Array:
        """Returns the prompt positions of the visual tokens of units or windows [start, stop): int64 [V].

        For an item that is joined whole, returns all. For a window that is reduced in prefill, returns those
        of all its tokens, which are placed at its start.
        """
        start, stop = (each * self._num_tiles for each in (start, stop))
        if self.plan.is_joined_whole:
            start, stop = 0, len(self.units)
        units, windows = self.units[start:stop], self.windows[start:stop]
        if windows and windows[0].is_in_prefill:
            return np.repeat([unit.offset for unit in units], [window.num_tokens for window in windows])
        return np.concatenate([np.arange(unit.offset, unit.stop) for unit in units])


@dataclass(frozen=True, slots=True)
class PromptReduction:
    """Names the `policy` that decides, once the tokens are there, which of them are kept.

    positions: of each item the M-RoPE or plain positions of all its visual tokens, int64 [rows, V]; kept
    tokens keep theirs. Empty for an item that is not reduced.
    """

    policy: ReductionPolicy
    positions: tuple[Int64Array, ...]


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Describes a whole prompt in canonical order [system][media][question].

    token_ids: int64 [T], placeholders included.
    positions: int64 [3, T], M-RoPE rows time, height, width, where text repeats in all three; else [1, T].
    next_position: the position of the first generated token; each further token is one later.
    media: items in order of appearance.
    reduction: when only some of the visual tokens are kept; then their positions are known only with them,
        and are here those of the first ones.
    both_ways: bool [T], tokens that attend each other wherever they are (Molmo 2); None without any.
    """

    token_ids: Int64Array
    positions: Int64Array
    next_position: int
    media: tuple[MediaItem, ...]
    reduction: PromptReduction | None = None
    both_ways: BoolArray | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def both_ways_range(self) -> range:
        """Returns the tokens from the first to the last that attend each other: nothing cuts these."""
        places = np.empty(0) if self.both_ways is None else np.flatnonzero(self.both_ways)
        return range(int(places[0]), int(places[-1]) + 1) if len(places) else range(0)

    @property
    def prefix_length(self) -> int:
        """Returns the length of the part independent of the question: up to the last visual token."""
        return max(self.media[-1].units[-1].stop, self.both_ways_range.stop) if self.media else 0

    @property
    def num_visual_tokens(self) -> int:
        return sum(item.num_tokens for item in self.media)

    @property
    def reduction_key(self) -> str:
        """Returns `ReductionPolicy.key`."""
        return self.reduction.policy.key if self.reduction else ""

    @property
    def tower_shares(self) -> tuple[float | None, ...]:
        """Returns `ReductionPolicy.tower_share` of each item that is reduced."""
        share = self.reduction.policy.tower_share if self.reduction else None
        return tuple(share if item.windows else None for item in self.media)

    @property
    def num_visual_tokens_before(self) -> int:
        """Counts the visual tokens that there would be without reduction."""
        return sum(item.plan.num_tokens for item in self.media)

    @property
    def num_dropped(self) -> int:
        """Counts the visual tokens that leave the cache once the question is computed, which chooses them."""
        if self.reduction is None or not self.reduction.policy.is_by_question or not self.media:
            return 0
        wanted = self.reduction.policy.retention * self.num_visual_tokens_before
        return self.num_visual_tokens - num_survivors(self.num_visual_tokens, wanted)

    def usage(self, num_completion_tokens: int) -> Usage:
        """Counts the frames and tokens that an answer to the prompt has used."""
        return Usage(
            num_frames=sum(item.plan.num_frames for item in self.media),
            visual_tokens=self.num_visual_tokens,
            prompt_tokens=len(self),
            completion_tokens=num_completion_tokens,
            visual_tokens_before=self.num_visual_tokens_before,
            video_s=sum(item.plan.span_s for item in self.media),
        )
