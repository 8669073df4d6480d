"""Which frames of a video a model sees: the Hugging Face processor's own rule, made total."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from encoders.adapter import Sampling, VideoFacts
from epd.errors import RequestError

# For checkpoints whose processor names no rate: what the Qwen-VL model cards sample at.
DEFAULT_FPS = 2.0
# Of a frame: the rounding of times in seconds, so that a part that begins with a frame has that frame.
_ROUNDING = 1e-6


def part_of(video: VideoFacts, sampling: Sampling) -> tuple[int, VideoFacts]:
    """(index of the first frame, facts) of the frames that begin within the part that is wanted.

    A processor is told of these alone, as if they were a video of their own; what it chooses has numbers and
    times of the whole one:

        start_s = 0.25, end_s = 0.6, 10 fps    | 0 | 1 | 2 [ 3 | 4 | 5 ) 6 | 7 |

    Raises RequestError when there are none, and as `check_sampling`.
    """
    check_sampling(sampling)
    first = math.ceil(sampling.start_s * video.fps - _ROUNDING)
    end_s = video.num_frames / video.fps if sampling.end_s is None else sampling.end_s
    stop = min(video.num_frames, math.ceil(end_s * video.fps - _ROUNDING))
    if first >= stop:
        raise RequestError(
            f"received the part [{sampling.start_s:g}, {end_s:g}) s, in which no frame begins; allowed: "
            f"parts of [0, {video.num_frames / video.fps:g}) s, a frame every {1 / video.fps:.3g} s; "
            "mend start_s, end_s"
        )
    return first, replace(video, num_frames=stop - first)


def sample_indices(processor: Any, video: VideoFacts, sampling: Sampling) -> tuple[int, ...]:
    """Indices of the wanted source frames, ascending, at least one.

    `processor` is a transformers video processor: its `fps`, `num_frames`, `min_frames` and `max_frames` hold
    where `sampling`, which `part_of` has checked, says nothing. More frames than there are cannot be had:
    then all of them, in whole units.
    """
    unit = int(processor.temporal_patch_size)
    if video.num_frames <= unit:
        return tuple(range(video.num_frames))
    indices = processor.sample_frames(source_metadata(video), **_arguments(processor, video, sampling, unit))
    return tuple(int(index) for index in indices)


def check_sampling(sampling: Sampling) -> None:
    """Raises RequestError for a rate or number that is not positive, for both at once, and an empty part."""
    if sampling.fps is not None and sampling.num_frames is not None:
        raise RequestError(
            f"got fps={sampling.fps} and num_frames={sampling.num_frames}; give one of the two"
        )
    if sampling.fps is not None and not 0 < sampling.fps < float("inf"):
        raise RequestError(f"fps must be a positive number of frames per second, got {sampling.fps}")
    if sampling.num_frames is not None and sampling.num_frames < 1:
        raise RequestError(f"num_frames must be at least 1, got {sampling.num_frames}")
    start_s, end_s = sampling.start_s, sampling.end_s
    if not 0 <= start_s < (math.inf if end_s is None else end_s):
        end = "its end" if end_s is None else f"{end_s:g} s"
        raise RequestError(
            f"received the part from {start_s:g} to {end} of a video; allowed: 0 <= start_s < end_s, in "
            "seconds from its start; mend start_s, end_s"
        )


def _arguments(processor: Any, video: VideoFacts, sampling: Sampling, unit: int) -> dict[str, float | int]:
    num_frames = sampling.num_frames or (processor.num_frames if sampling.fps is None else None)
    if num_frames is None:
        return {"fps": sampling.fps or processor.fps or DEFAULT_FPS}
    most = video.num_frames // unit * unit
    return {"num_frames": min(max(num_frames, unit), most)}


def source_metadata(video: VideoFacts) -> Any:
    """What transformers' processors are told of a video before a frame of it is decoded."""
    from transformers.video_utils import VideoMetadata

    duration_s = video.num_frames / video.fps
    return VideoMetadata(total_num_frames=video.num_frames, fps=video.fps, duration=duration_s)
