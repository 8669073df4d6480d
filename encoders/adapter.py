"""Defines the protocol that every model family implements, and the types it uses.

A *unit* is the least run of frames that the vision tower attends within, so cutting between units changes no
number: a temporal patch (two frames) for the Qwen families. Groups are runs of whole units.

    frames         | 0  1 | 2  3 | 4  5 | 6 (6) |        the last frame is repeated to fill its unit
    unit           [  0  )[  1  )[  2  )[   3   )
    prompt   ..text[range )[range)...             one PlaceholderRange per unit; text may lie between them

Shapes: N frames, H x W pixels, P patches, D values of a patch, V visual tokens, C channels of the language
model, T prompt tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from epd.chat import ChatMessage
from epd.encoders.device import CPU
from epd.frame_sampling import FrameSampling
from epd.pixel_limits import OWN_LIMITS, PixelLimits
from epd.reduction import ReductionPolicy, TowerMerge, Window, num_survivors
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


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Holds visual tokens as the language model takes them.

    rows: [V, C], to replace the token embeddings of the placeholders, or to be added to them (Molmo 2).
    deepstack: one [V, C] for each of the first decoder layers, added to their output (Qwen3-VL); else empty.
    """

    rows: Tensor
    deepstack: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        if any(layer.shape != self.rows.shape for layer in self.deepstack):
            raise ValueError(f"deepstack features must be shaped like the rows, {tuple(self.rows.shape)}")

    def __len__(self) -> int:
        return len(self.rows)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Embeddings:
        """Applies a function to the rows and to those of each deepstack layer."""
        return Embeddings(change(self.rows), tuple(map(change, self.deepstack)))

    def cut(self, start: int, stop: int) -> Embeddings:
        """Returns visual tokens [start, stop)."""
        return self if (start, stop) == (0, len(self)) else self.mapped(lambda rows: rows[start:stop])


def concatenated(parts: Sequence[Embeddings]) -> Embeddings:
    """Concatenates embeddings in order; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    layers = zip(*(part.deepstack for part in parts), strict=True)
    return Embeddings(torch.cat([part.rows for part in parts]), tuple(torch.cat(layer) for layer in layers))


@dataclass(frozen=True, slots=True)
class PatchRun:
    """Holds whole units of one item, ready for the vision tower.

    kind: of the item.
    values: what `Adapter.preprocess` made of their frames.
    grid: of these units alone.
    """

    kind: MediaKind
    values: Tensor
    grid: Grid


class TowerMerger(Protocol):
    """Merges neighbours that look alike inside of a vision tower: `epd.encoders.reduction.tower_merging`."""

    def during(self, runs: Sequence[PatchRun]) -> AbstractContextManager[None]:
        """Merges in the calls of the tower inside of the context, which are of these runs; one at a time."""
        ...


class Adapter(Protocol):
    """Adapts one model family. Holds no weights, so that planning needs no model."""

    @property
    def tokenizer(self) -> Any:
        """Returns the checkpoint's `PreTrainedTokenizer`."""
        ...

    @property
    def limits_line(self) -> str:
        """Returns what media are held to, and by whom, for people."""
        ...

    def check_pixels(self, media: Collection[tuple[MediaKind, PixelLimits]], most: int | None) -> None:
        """Raises RequestError for limits that are too high, or that change nothing for any of the media.

        media: all of a request. most: pixels that may be asked for above the processor's own limit.
        """
        ...

    def plan_image(self, height: int, width: int, pixels: PixelLimits = OWN_LIMITS) -> MediaPlan:
        """Plans an image of `height` x `width` pixels. Raises MediaLimitError for an impossible shape."""
        ...

    def plan_video(
        self, video: VideoFacts, frame_sampling: FrameSampling, pixels: PixelLimits = OWN_LIMITS
    ) -> MediaPlan:
        """Plans a video. Raises RequestError for an invalid sampling, MediaLimitError as above."""
        ...

    @property
    def compresses(self) -> bool:
        """Reports whether the pixels of a video decide which of its tokens are kept: see `compressed`."""
        ...

    def compressed(self, plan: MediaPlan, parts: Iterable[Tensor]) -> MediaPlan:
        """Returns the plan of a video with the tokens that are kept.

        parts: all frames of planned size, in order, uint8 [N, h, w, 3] each; only one part is held at a time.
        """
        ...

    @property
    def audio(self) -> AudioSpec:
        """Returns what sound the model takes. Raises UnsupportedMediaError for a model that hears nothing."""
        ...

    def plan_audio(self, num_samples: int, start_s: float = 0.0) -> MediaPlan:
        """Plans a clip of so many samples at the model's rate. start_s: where it starts in its medium.

        Raises MediaLimitError for one that is too short, UnsupportedMediaError as `audio`.
        """
        ...

    def plan_prompt(self, media: Sequence[MediaPlan], question: str) -> PromptPlan:
        """Lays out one question after the media. Raises RequestError for an unusable question."""
        ...

    def plan_chat(self, media: Sequence[MediaPlan], messages: Sequence[ChatMessage]) -> PromptPlan:
        """Lays out a conversation by the checkpoint's own chat template.

        media: of the places in the messages, in order. Raises RequestError for messages that cannot be used.
        """
        ...

    def resize(self, image: Tensor, plan: MediaPlan) -> Tensor:
        """Brings an image, uint8 [H, W, 3], to the planned size, uint8 [1, h, w, 3]."""
        ...

    def preprocess(self, frames: Tensor, plan: MediaPlan, device: torch.device = CPU) -> Tensor:
        """Turns frames of planned size, uint8 [N, h, w, 3] on the host, into patches, float32 [P, D].

        Of a clip of sound, `frames` are the bytes of its float32 samples, uint8 [1, B].

        Only the last run of a video may have a number of frames that does not fill its last unit.
        device: of the patches; frames go there as bytes, and become patches there.
        """
        ...

    def vision_tower(self, model: nn.Module) -> nn.Module:
        """Returns the part of the whole model that `encode_batch` needs."""
        ...

    def encode_batch(self, tower: nn.Module, runs: Sequence[PatchRun]) -> list[Embeddings]:
        """Encodes runs of one kind and one grid height and width, of any items, in one call of the tower."""
        ...

    def join(self, embeddings: Embeddings, plan: MediaPlan, start: int, stop: int) -> Embeddings:
        """Converts the encoded units [start, stop) to the rows at their places in the prompt.

        Most families return them unchanged. An item that is joined whole can be joined only from all its
        units.
        """
        ...

    def tower_merger(self, tower: nn.Module, merge: TowerMerge) -> TowerMerger:
        """Returns what merges neighbours inside of the tower.

        Raises UnsupportedModelError for a tower where it cannot, RequestError for a layer that it lacks.
        """
        ...

    def prepare_decoder(self, decoder: nn.Module) -> None:
        """Changes the family's decoder, where needed, to take what `decoder_kwargs` returns."""
        ...

    def decoder_kwargs(self, visual_rows: Tensor, embeddings: Embeddings) -> dict[str, Any]:
        """Returns the arguments that the prepared decoder takes besides embeddings and positions.

        visual_rows: int64 [V], the rows of the pass that those of `embeddings` belong to; on its device.
        """
        ...

    def prompt_kwargs(self, prompt_ids: Tensor) -> dict[str, Any]:
        """Returns the arguments that the decoder takes for tokens of prompts.

        prompt_ids: int64 [T], of all tokens of a pass, -1 for those of answers; on its device.
        """
        ...


def place(
    token_embeddings: Tensor, visual_rows: Tensor, embeddings: Embeddings, *, adds: bool = False
) -> Tensor:
    """Puts the rows of `embeddings` at `visual_rows`, int64 [V], of token embeddings: [1, T, C].

    adds: adds them to what is there.
    """
    rows = embeddings.rows.to(token_embeddings.dtype)
    if adds:
        return token_embeddings.index_add(1, visual_rows, rows[None])
    return token_embeddings.index_copy(1, visual_rows, rows[None])
