"""Samples the frames of a video by the Hugging Face processor's own rule, made total."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import transformers

from encoders.adapter import FrameSampling, VideoFacts
from epd.control.request_budget import check_num_frames
from epd.errors import RequestError

# For checkpoints whose processor names no rate: what the Qwen-VL model cards sample at.
DEFAULT_FPS = 2.0
# Above the rate of any video, so that a higher one changes nothing; with it products stay finite.
MAX_FPS = 1e9
# Of a frame: the rounding of times in seconds, so that a part that begins with a frame has that frame.
_ROUNDING = 1e-6


def part_of(video: VideoFacts, frame_sampling: FrameSampling) -> tuple[int, VideoFacts]:
    """Returns (index of the first frame, facts) of the frames that begin within the wanted part.

    A processor receives only these, as if they were a video of their own; its frames are then numbered and
    timed within the whole video:

        start_s = 0.25, end_s = 0.6, 10 fps    | 0 | 1 | 2 [ 3 | 4 | 5 ) 6 | 7 |

    Raises RequestError when there are none, and as `check_sampling`.
    """
    check_sampling(frame_sampling)
    end_s = video.num_frames / video.fps if frame_sampling.end_s is None else frame_sampling.end_s
    first, stop = _first_frame_from(frame_sampling.start_s, video), _first_frame_from(end_s, video)
    if first >= stop:
        raise RequestError(
            f"received the part [{frame_sampling.start_s:g}, {end_s:g}) s, in which no frame begins; "
            f"allowed: parts of [0, {video.num_frames / video.fps:g}) s, a frame every "
            f"{1 / video.fps:.3g} s; change start_s or end_s"
        )
    return first, replace(video, num_frames=stop - first)


def _first_frame_from(time_s: float, video: VideoFacts) -> int:
    """Returns the first frame that begins at a time or later; `num_frames` for a time past the end."""
    index = time_s * video.fps - _ROUNDING  # of a time that a client chose: it may be infinite
    return video.num_frames if index >= video.num_frames else math.ceil(index)


def check_wanted(frame_sampling: FrameSampling, num_frames: float) -> None:
    """Raises RequestBudgetError where more frames are wanted than the request may have of this video."""
    if frame_sampling.max_frames is not None:
        check_num_frames(num_frames, frame_sampling.max_frames)


def sample_indices(processor: Any, video: VideoFacts, frame_sampling: FrameSampling) -> tuple[int, ...]:
    """Returns the indices of the wanted source frames, ascending, at least one.

    `processor` is a transformers video processor: its `fps`, `num_frames`, `min_frames` and `max_frames` hold
    where `frame_sampling`, which `part_of` has checked, says nothing. When more frames are wanted than there
    are, all are taken, in whole units.
    Raises RequestBudgetError for more than `frame_sampling.max_frames`.
    """
    unit = int(processor.temporal_patch_size)
    if video.num_frames <= unit:
        return tuple(range(video.num_frames))
    arguments = _arguments(processor, video, frame_sampling, unit)
    check_wanted(frame_sampling, _num_wanted(processor, video, arguments))
    indices = processor.sample_frames(source_metadata(video), **arguments)
    return tuple(int(index) for index in indices)


def check_sampling(frame_sampling: FrameSampling) -> None:
    """Raises RequestError for a rate or number that is not positive, for both at once, and an empty part."""
    if frame_sampling.fps is not None and frame_sampling.num_frames is not None:
        raise RequestError(
            f"got fps={frame_sampling.fps} and num_frames={frame_sampling.num_frames}; give one of the two"
        )
    if frame_sampling.fps is not None and not 0 < frame_sampling.fps < float("inf"):
        raise RequestError(f"fps must be a positive number of frames per second, got {frame_sampling.fps}")
    if frame_sampling.num_frames is not None and frame_sampling.num_frames < 1:
        raise RequestError(f"num_frames must be at least 1, got {frame_sampling.num_frames}")
    start_s, end_s = frame_sampling.start_s, frame_sampling.end_s
    if not 0 <= start_s < (math.inf if end_s is None else end_s):
        end = "its end" if end_s is None else f"{end_s:g} s"
        raise RequestError(
            f"received the part from {start_s:g} to {end} of a video; allowed: 0 <= start_s < end_s, in "
            "seconds from its start; change start_s or end_s"
        )


def _arguments(
    processor: Any, video: VideoFacts, frame_sampling: FrameSampling, unit: int
) -> dict[str, float | int]:
    num_frames = frame_sampling.num_frames or (processor.num_frames if frame_sampling.fps is None else None)
    if num_frames is None:
        return {"fps": min(frame_sampling.fps or processor.fps or DEFAULT_FPS, MAX_FPS)}
    most = video.num_frames // unit * unit
    return {"num_frames": min(max(num_frames, unit), most)}


def _num_wanted(processor: Any, video: VideoFacts, arguments: Mapping[str, float | int]) -> float:
    """Estimates how many frames `sample_frames` would list for these arguments, or somewhat more."""
    if "num_frames" in arguments:
        return arguments["num_frames"]
    at_rate = max(video.num_frames / video.fps * arguments["fps"], float(processor.min_frames))
    return min(at_rate, float(processor.max_frames), video.num_frames)


def source_metadata(video: VideoFacts) -> Any:
    """Describes a video to transformers' processors before any of its frames is decoded."""
    duration_s = video.num_frames / video.fps
    return transformers.video_utils.VideoMetadata(
        total_num_frames=video.num_frames, fps=video.fps, duration=duration_s
    )
