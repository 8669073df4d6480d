"""From paths to planned media, and from planned media to runs of decoded frames in whole units."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import video
from encoders import Adapter, FrameSampling, MediaPlan, VideoFacts
from epd.errors import MediaLimitError
from epd.types import StageTimings, UInt8Array
from stages.timing import busy


@dataclass(frozen=True, slots=True)
class PlannedMedia:
    """A source and what it becomes. image: its units at planned size, uint8 [N, h, w, 3]; not for a video."""

    source: str | Path
    plan: MediaPlan
    image: Tensor | None = None


@dataclass(frozen=True, slots=True)
class UnitRun:
    """Units [start, stop) of one item: uint8 [N, h, w, 3], made of `num_frames` frames of its source.

    num_substituted: of those, the ones that could not be decoded and show a neighbour.
    """

    start: int
    stop: int
    frames: Tensor
    num_frames: int
    num_substituted: int = 0


def plan_media(adapter: Adapter, source: str | Path, frame_sampling: FrameSampling) -> PlannedMedia:
    """Looks at one source and plans it. Raises MediaError, and RequestError for a useless frame_sampling."""
    return plan_known(adapter, source, video.look(source), frame_sampling)


def plan_known(
    adapter: Adapter, source: str | Path, facts: video.MediaFacts, frame_sampling: FrameSampling
) -> PlannedMedia:
    """Plans a source that was looked at. Raises as `plan_media`."""
    pixels = video.load_image(source) if facts.kind == "image" else None
    try:
        if pixels is not None:
            return plan_pixels(adapter, source, pixels)
        return PlannedMedia(source, plan_video(adapter, facts, frame_sampling))
    except MediaLimitError as error:
        raise MediaLimitError(f"'{source}': {error}") from error


def plan_video(adapter: Adapter, facts: video.MediaFacts, frame_sampling: FrameSampling) -> MediaPlan:
    """Plans a video that was looked at. Raises MediaLimitError, RequestError."""
    known = VideoFacts(facts.num_frames, facts.fps, facts.height, facts.width)
    return adapter.plan_video(known, frame_sampling)


def plan_pixels(adapter: Adapter, source: str | Path, pixels: UInt8Array) -> PlannedMedia:
    """Plans a decoded image, uint8 [H, W, 3], and brings it to its planned size. Raises MediaLimitError."""
    plan = adapter.plan_image(pixels.shape[0], pixels.shape[1])
    return PlannedMedia(source, plan, adapter.resize(torch.from_numpy(pixels), plan))


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
            frames = group.frames
            yield UnitRun(start, stop, torch.from_numpy(frames.data), len(frames), frames.num_substituted)


def cut_units(plan: MediaPlan, group_tokens: int) -> Sequence[tuple[int, int]]:
    """Half-open runs of units, in order, without gaps; at least one unit each, the last perhaps short.

    An item that is joined whole is not cut.
    """
    if plan.is_joined_whole:
        return [(0, plan.num_units)]
    size = max(1, group_tokens // plan.tokens_per_unit)
    return [(start, min(start + size, plan.num_units)) for start in range(0, plan.num_units, size)]
