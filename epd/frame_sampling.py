"""Says which frames of a video a request wants."""

from __future__ import annotations

import math
from dataclasses import dataclass

from epd.errors import RequestError


@dataclass(frozen=True, slots=True)
class ListedTimes:
    """Says when the frames of a list were on screen, as `transformers` and vLLM describe a sampled video.

    fps: of the video that the frames come from, per second
    frames_indices: of each frame in that video; None if they are all its frames, in order
    total_num_frames: of that video; None if there are no more than those listed
    duration_s: of that video, None for its frames at its rate
    """

    fps: float = 1.0
    frames_indices: tuple[int, ...] | None = None
    total_num_frames: int | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """Selects frames of a video; with neither rate nor number, those that the processor would take.

    start_s, end_s: only of the part [start_s, end_s) of the video, None for its end.
    max_frames: a video of which more are wanted is refused before they are listed; None for any number.
    takes_all: every frame of the part, whatever the processor would take
    listed: of lists of frames, of which `num_frames` are the first ones and no other field counts.
    sized_among: frames have the size that they would have among so many, where limits are of all together;
        None for those that are taken
    """

    fps: float | None = None
    num_frames: int | None = None
    start_s: float = 0.0
    end_s: float | None = None
    max_frames: int | None = None
    takes_all: bool = False
    listed: ListedTimes | None = None
    sized_among: int | None = None


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
