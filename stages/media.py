"""From paths to planned media, and from planned media to runs of decoded frames in whole units."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import video
from encoders import Adapter, MediaPlan, Sampling, VideoFacts
from epd.errors import MediaLimitError, UnsupportedMediaError
from epd.types import StageTimings
from stages.timing import busy


@dataclass(frozen=True, slots=True)
class PlannedMedia:
    """A source and what it becomes. image: its units at planned size, uint8 [N, h, w, 3]; not for a video."""

    source: str | Path
    plan: MediaPlan
    image: Tensor | None = None


@dataclass(frozen=True, slots=True)
class UnitRun:
    """Units [start, stop) of one item: uint8 [N, h, w, 3], made of `num_frames` frames of its source."""

    start: int
    stop: int
    frames: Tensor
    num_frames: int


def plan_media(adapter: Adapter, source: str | Path, sampling: Sampling) -> PlannedMedia:
    """Probes one source and plans it. Raises MediaError, and RequestError for a useless sampling."""
    try:
        return _planned(adapter, source, sampling)
    except MediaLimitError as error:
        raise MediaLimitError(f"'{source}': {error}") from error


def _planned(adapter: Adapter, source: str | Path, sampling: Sampling) -> PlannedMedia:
    if video.media_kind(source) == "image":
        pixels = torch.from_numpy(video.load_image(source))
        plan = adapter.plan_image(pixels.shape[0], pixels.shape[1])
        return PlannedMedia(source, plan, adapter.resize(pixels, plan))
    info = video.probe(source)
    if info.num_frames < 1 or info.fps <= 0:
        raise UnsupportedMediaError(
            f"'{source}' tells neither its length nor its frame rate "
            f"({info.num_frames} frames at {info.fps} per second); write it into a new container first"
        )
    facts = VideoFacts(info.num_frames, info.fps, info.height, info.width)
    return PlannedMedia(source, adapter.plan_video(facts, sampling))


def unit_runs(
    media: PlannedMedia, group_tokens: int, timings: StageTimings
) -> Generator[UnitRun, None, None]:
    """Decoded frames, group by group in order; each group has about `group_tokens` visual tokens.

    Frames of a video are decoded by threads of the stream while the consumer works on earlier groups. To stop
    them early, close the generator.
    """
    plan = media.plan
    if media.image is not None:
        yield UnitRun(0, plan.num_units, media.image, 1)
        return
    cuts = cut_units(plan, group_tokens)
    sizes = [
        min(stop * plan.frames_per_unit, plan.num_frames) - start * plan.frames_per_unit
        for start, stop in cuts
    ]
    with busy(timings, "decode_video_s"):
        stream = video.stream(media.source, plan.times_s, plan.size, group_sizes=sizes)
    with stream as groups:
        for start, stop in cuts:
            with busy(timings, "decode_video_s"):
                group = next(groups)
            yield UnitRun(start, stop, torch.from_numpy(group.frames.data), len(group.frames))


def cut_units(plan: MediaPlan, group_tokens: int) -> Sequence[tuple[int, int]]:
    """Half-open runs of units, in order, without gaps; at least one unit each, the last perhaps short.

    An item that is joined whole is not cut.
    """
    if plan.is_joined_whole:
        return [(0, plan.num_units)]
    size = max(1, group_tokens // plan.tokens_per_unit)
    return [(start, min(start + size, plan.num_units)) for start in range(0, plan.num_units, size)]
