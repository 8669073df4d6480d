"""Chooses which times of a video to decode. Arithmetic only; nothing is opened.

Frames are counted as the models' own processors count them, and a chosen frame is requested by the middle of
its time on screen, so that no rounding in a container can move it to a neighbour:

    frame      |    0    |    1    |    2    |    3    |        interval 1 / fps, half-open
    asked at        ^                   ^                       (index + 0.5) / fps
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from epd.errors import MediaLimitError, RequestError
from epd.types import Float64Array
from epd.video.containers.info import VideoInfo

Spacing = Literal["stride", "endpoints"]
MAX_TIMES = 1_000_000


def sample_times(
    info: VideoInfo,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    times_s: Sequence[float] | None = None,
    start_s: float = 0.0,
    end_s: float | None = None,
    min_frames: int = 1,
    max_frames: int | None = None,
    multiple_of: int = 1,
    spacing: Spacing = "stride",
) -> Float64Array:
    """Returns the times to decode, float64 [N], seconds from the start of the video, within [start_s, end_s).

    Give exactly one of `fps`, `num_frames` and `times_s`.
    min_frames, max_frames: bounds on the number sampled by `fps`.
    multiple_of: the model's temporal patch size.
    spacing: "stride" picks the frames of the Qwen2-VL and Qwen2.5-VL video processors, "endpoints" (first and
        last frame included) those of Qwen3-VL.

    Raises RequestError for options that make no sense, MediaLimitError for more than MAX_TIMES times.
    """
    _check_options(fps, num_frames, times_s, multiple_of)
    end_s = _resolve_end(info, start_s, end_s)
    if times_s is not None:
        return _given_times(times_s, start_s, end_s)
    first, total = _frame_range(info, start_s, end_s)
    count = _count(info, total, fps, num_frames, (min_frames, max_frames), multiple_of, spacing)
    if count > MAX_TIMES:
        raise MediaLimitError(
            f"{count} frames would be sampled; allowed {MAX_TIMES}; lower fps or set max_frames"
        )
    return (first + _indices(total, count, spacing) + 0.5) / info.fps


def _check_options(
    fps: float | None, num_frames: int | None, times_s: Sequence[float] | None, multiple_of: int
) -> None:
    given = [
        name
        for name, value in (("fps", fps), ("num_frames", num_frames), ("times_s", times_s))
        if value is not None
    ]
    if len(given) != 1:
        raise RequestError(
            f"received {given or 'none'} of fps, num_frames and times_s; allowed exactly one; drop the rest"
        )
    if fps is not None and not (math.isfinite(fps) and fps > 0):
        raise RequestError(f"received fps={fps}; allowed finite rates above 0; try fps=1")
    if num_frames is not None and num_frames < 1:
        raise RequestError(f"received num_frames={num_frames}; allowed 1 or more; try num_frames=16")
    if multiple_of < 1:
        raise RequestError(
            f"received multiple_of={multiple_of}; allowed 1 or more; use the temporal patch size"
        )


def _resolve_end(info: VideoInfo, start_s: float, end_s: float | None) -> float:
    end_s = info.duration_s if end_s is None else min(end_s, info.duration_s) if info.duration_s else end_s
    if not (math.isfinite(start_s) and math.isfinite(end_s) and start_s >= 0):
        raise RequestError(
            f"received the span [{start_s}, {end_s}) s; allowed finite times from 0 on; "
            "change start_s or end_s"
        )
    if start_s >= end_s > 0:
        raise RequestError(
            f"received the span [{start_s}, {end_s}) s, which is empty; allowed start_s < end_s"
        )
    return end_s


def _given_times(times_s: Sequence[float], start_s: float, end_s: float) -> Float64Array:
    times = np.asarray(times_s, dtype=np.float64)
    if times.ndim != 1 or not np.isfinite(times).all():
        raise RequestError(
            f"received times of shape {times.shape}; allowed a flat list of finite seconds; change times_s"
        )
    return times[(times >= start_s) & (times < end_s)] if end_s > 0 else times


def _frame_range(info: VideoInfo, start_s: float, end_s: float) -> tuple[int, int]:
    """Returns (first, count) of the frames whose time on screen begins within [start_s, end_s)."""
    if info.fps <= 0 or info.num_frames <= 0:
        raise RequestError(
            f"the video gives neither rate nor length (fps={info.fps}, {info.num_frames} frames); "
            "allowed: times_s; give the times to decode"
        )
    first = math.ceil(start_s * info.fps - 1e-6)
    stop = info.num_frames if end_s >= info.duration_s else math.ceil(end_s * info.fps - 1e-6)
    first = min(first, info.num_frames - 1)
    return first, max(1, min(stop, info.num_frames) - first)


def _count(
    info: VideoInfo,
    total: int,
    fps: float | None,
    num_frames: int | None,
    bounds: tuple[int, int | None],
    multiple_of: int,
    spacing: Spacing,
) -> int:
    """Returns how many of `total` frames to take, rounded as the processors round."""
    low, high = bounds[0], total if bounds[1] is None else min(bounds[1], total)
    if num_frames is not None:
        return max(1, min(round(num_frames / multiple_of) * multiple_of, total))
    assert fps is not None
    wanted = total / info.fps * fps
    if spacing == "endpoints":
        return max(1, min(max(int(wanted), low), high))
    wanted = min(max(wanted, low), high // multiple_of * multiple_of)
    return max(1, math.floor(wanted / multiple_of) * multiple_of)


def _indices(total: int, count: int, spacing: Spacing) -> Float64Array:
    """Returns frame numbers, float64 [count], in `torch.arange`'s single precision, as the processors do."""
    if spacing == "endpoints":
        return np.linspace(0, total - 1, count).round()
    import torch  # takes seconds to import, and few need it

    strided: Float64Array = torch.arange(0, total, total / count).int().numpy().astype(np.float64)
    return strided
