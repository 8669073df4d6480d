"""Defines the data passed from one stage of the pipeline to the next, checked at construction.

A *group* is a run of consecutive sampled frames that is decoded, encoded and prefilled together:

    wanted times   |  0   1   2   3 |  4   5   6   7 |  8   9 |
    group          [      0        )[      1         )[  2    )     half-open, in order, no gaps
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

UInt8Array = NDArray[np.uint8]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]

MediaKind = Literal["image", "video", "audio"]
_Ints = TypeVar("_Ints", int, NDArray[np.signedinteger[Any]])


class RequestStatus(StrEnum):
    """Gives the state of a request in vLLM's words; vLLM's running state is split by stage.

    WAITING --placed--> PREFILLING --first token of every choice--> DECODING --> FINISHED_*
    """

    WAITING = "waiting"  # no worker has accepted it
    PREFILLING = "prefilling"  # media are encoded, and the prompt is computed
    DECODING = "decoding"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH = "finished_length"  # a choice was cut off at its longest
    FINISHED_ABORTED = "finished_aborted"  # taken from its workers, or lost with one
    FINISHED_ERROR = "finished_error"

    @property
    def is_running(self) -> bool:
        return self in (RequestStatus.PREFILLING, RequestStatus.DECODING)

    @property
    def is_finished(self) -> bool:
        return self.name.startswith("FINISHED_")


@dataclass(frozen=True, slots=True)
class Frames:
    """Holds decoded frames at target size, in the requested order.

    data: uint8 [N, H, W, 3], RGB, upright.
    pts_s: float64 [N], the true presentation time of each frame, seconds from the start of the video.
    substituted_times_s: wanted times whose frame could not be decoded; they show the nearest that could.
    """

    data: UInt8Array
    pts_s: Float64Array
    substituted_times_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.data.dtype != np.uint8 or self.data.ndim != 4 or self.data.shape[3] != 3:
            raise ValueError(f"frames must be uint8 [N, H, W, 3], got {self.data.dtype} {self.data.shape}")
        if self.pts_s.shape != (len(self.data),):
            raise ValueError(f"{len(self.data)} frames need as many times, got shape {self.pts_s.shape}")

    def __len__(self) -> int:
        return len(self.data)

    @property
    def num_substituted(self) -> int:
        return len(self.substituted_times_s)


@dataclass(frozen=True, slots=True)
class FrameGroup:
    """Holds one group of a video: the wanted frames [start, start + len(frames))."""

    index: int
    start: int
    frames: Frames

    @property
    def stop(self) -> int:
        return self.start + len(self.frames)


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """Marks prompt positions [offset, offset + length) that hold visual tokens, or those of sound."""

    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise ValueError(f"a placeholder range needs offset >= 0 and length >= 1, got {self}")

    @property
    def stop(self) -> int:
        return self.offset + self.length


@dataclass(slots=True)
class StageTimings:
    """Counts seconds spent on each stage for one request, in the order of the pipeline.

    Video is decoded by other threads while earlier groups are encoded and prefilled: `decode_video_s` is only
    the wait for it. Where stages run side by side, they may add up to more than `total_s`.
    """

    probe_s: float = 0.0
    decode_video_s: float = 0.0
    preprocess_s: float = 0.0
    encode_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0

    def __add__(self, other: StageTimings) -> StageTimings:
        return StageTimings(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


Tier = Literal["memory", "disk", "objects", "left"]
ReuseKind = Literal["embeddings", "kv"]
REUSE_KINDS: tuple[ReuseKind, ...] = get_args(ReuseKind)


@dataclass(frozen=True, slots=True)
class Reuse:
    """Says what a request found instead of having it computed.

    tier: where it was: in a worker, in files of a machine, or in an object store. What is kept and was left
        there was computed again, since that was quicker.
    num: embeddings, or prompt tokens with keys and values.
    num_bytes: that were read for it; 0 in memory, and of what was left.
    """

    kind: ReuseKind
    tier: Tier
    num: int
    num_bytes: int = 0


def totals(reused: Iterable[Reuse]) -> tuple[Reuse, ...]:
    """Adds up what was found of the same kind in the same tier."""
    found: dict[tuple[str, str], Reuse] = {}
    for each in reused:
        key = (each.kind, each.tier)
        if (before := found.get(key)) is not None:
            each = replace(each, num=before.num + each.num, num_bytes=before.num_bytes + each.num_bytes)
        found[key] = each
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts the frames and tokens of one request.

    visual_tokens: in the prompt.
    visual_tokens_before: those without reduction.
    num_substituted_frames: of num_frames, those that could not be decoded and show a neighbour.
    num_unseen_frames: of animated pictures that were taken as images, all but the first of each.
    num_unread_frames: of num_frames, those that were not read, since what they become was found.
    reused: what was found; empty where nothing is kept on disk, and num_unread_frames is 0.
    video_s: seconds of video that the frames stand for.
    """

    num_frames: int
    visual_tokens: int
    prompt_tokens: int
    completion_tokens: int
    visual_tokens_before: int = 0
    num_substituted_frames: int = 0
    num_unseen_frames: int = 0
    num_unread_frames: int = 0
    reused: tuple[Reuse, ...] = ()
    video_s: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        """Counts both."""
        return Usage(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __post_init__(self) -> None:
        if not self.visual_tokens_before:
            object.__setattr__(self, "visual_tokens_before", self.visual_tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds the end of a request: the text, the tokens it was made of, and its cost."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    ttft_s: float
    timings: StageTimings
    usage: Usage


def ceil_div(amount: _Ints, size: int) -> _Ints:
    """Returns how many pieces of `size` hold `amount`: the quotient, rounded up."""
    return -(-amount // size)


def content_hash(path: str | Path | int) -> str:
    """Returns the `mm_hash` of a file: BLAKE2b of all its bytes, 32 hexadecimal digits.

    path: or a descriptor, which stays open and is read from where it is.
    """
    with open(path, "rb", closefd=not isinstance(path, int)) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """An image, video or clip of sound before it is decoded.

    height, width: pixels; of a video upright, of an image as stored; 0 of sound.
    num_frames, fps: best known; 0 for an image. Of sound its samples and their rate as stored.
    is_frame_list: whether the frames were sampled by the client, so that the request says when they were.
    num_pictures: frames of an animated picture, which is a video and can be taken as an image, too; else 0.
    """

    kind: MediaKind
    height: int
    width: int
    num_frames: int = 0
    fps: float = 0.0
    is_frame_list: bool = False
    num_pictures: int = 0

    def taken_as(self, kind: MediaKind | None) -> MediaFacts:
        """Returns the facts of an animated picture as an image, of which only the first frame is seen.

        kind: as what it is taken; any other medium, and any other kind, changes nothing.
        """
        is_still = kind == "image" and self.num_pictures > 0
        return replace(self, kind="image", num_frames=0, fps=0.0) if is_still else self

    @property
    def num_unseen(self) -> int:
        """Returns how many frames are not seen of an animated picture that is taken as an image."""
        return self.num_pictures - 1 if self.kind == "image" and self.num_pictures else 0
