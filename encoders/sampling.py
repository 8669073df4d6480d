"""Samples the frames of a video by the Hugging Face processor's own rule, made total."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from epd.control.request_budget import check_num_frames
from epd.encoders.plans import VideoFacts
from epd.errors import RequestError
from epd.frame_sampling import FrameSampling, ListedTimes, check_sampling

# For checkpoints whose processor names no rate: what the Qwen-VL model cards sample at.
DEFAULT_FPS = 2.0
# Above the rate of any video, so that a higher one changes nothing; with it products stay finite.
MAX_FPS = 1e9
# Of a frame: the rounding of times in seconds, so that a part that begins with a frame has that frame.
_ROUNDING = 1e-6
# Of listed frames: the times of any video that is decoded here lie within.
MAX_LISTED_FPS = 1e6
MAX_LISTED_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class SelectedFrames:
    """The frames of a video that the model sees.

    times_s: at which they are decoded, the middle of each one's time on screen
    indices: as transformers' processors number them; divided by `fps`, their times in the prompt
    num_source_frames: of the part of the video that they are spread over
    duration_s: of the whole video
    """

    times_s: tuple[float, ...]
    indices: tuple[int, ...]
    fps: float
    num_source_frames: int
    duration_s: float

    @property
    def sampled_fps(self) -> float:
        """Returns how many of them there are in a second of the video."""
        return len(self.indices) / self.num_source_frames * self.fps


def select_frames(
    video: VideoFacts, frame_sampling: FrameSampling, rule: Callable[[VideoFacts], Sequence[int]]
) -> SelectedFrames:
    """Returns the wanted frames. rule: gives indices of the frames of a part. Raises RequestError."""
    if video.is_frame_list:
        return _listed(video, frame_sampling)
    first, part = part_of(video, frame_sampling)
    if frame_sampling.takes_all:
        check_wanted(frame_sampling, part.num_frames)
    chosen = range(part.num_frames) if frame_sampling.takes_all else rule(part)
    indices = tuple(first + index for index in chosen)
    return SelectedFrames(
        tuple((index + 0.5) / video.fps for index in indices),
        indices,
        video.fps,
        part.num_frames,
        video.num_frames / video.fps,
    )


def _listed(video: VideoFacts, frame_sampling: FrameSampling) -> SelectedFrames:
    """Takes the frames of a list as they are, at the times that the client names."""
    times = frame_sampling.listed or ListedTimes()
    number = min(frame_sampling.num_frames or video.num_frames, video.num_frames)
    check_wanted(frame_sampling, number)
    indices = tuple(range(number)) if times.frames_indices is None else times.frames_indices
    total = number if times.total_num_frames is None else times.total_num_frames
    _check_listed(times, indices, number, total)
    return SelectedFrames(
        tuple((place + 0.5) / video.fps for place in range(number)),
        indices,
        times.fps,
        total,
        total / times.fps if times.duration_s is None else times.duration_s,
    )


def _check_listed(times: ListedTimes, indices: Sequence[int], number: int, total: int) -> None:
    if len(indices) != number:
        raise RequestError(
            f"received {len(indices)} frames_indices for {number} frames; allowed: as many; send {number}"
        )
    if total < number:
        raise RequestError(
            f"received total_num_frames {total} for {number} frames; allowed: as many or more; raise it"
        )
    if not 0 < times.fps <= MAX_LISTED_FPS:
        raise RequestError(
            f"received fps {times.fps} of a list; allowed: above 0, at most {MAX_LISTED_FPS:g}; change it"
        )
    last_s = max(total / times.fps, max(indices) / times.fps, times.duration_s or 0.0)
    if not (last_s <= MAX_LISTED_S and min(indices) >= 0):
        raise RequestError(
            f"received frames of a video of {last_s:g} s, the first at index {min(indices)}; allowed: "
            f"indices from 0 on, {MAX_LISTED_S:g} s; change fps, frames_indices, total_num_frames or duration"
        )


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


def sample_by_rule(processor: Any, video: VideoFacts, frame_sampling: FrameSampling) -> tuple[int, ...]:
    """Returns the indices of frames by a transformers video processor's own `sample_frames`, ascending.

    Where a file names no rate, two frames a second. Raises RequestError for what the rule refuses, and
    RequestBudgetError for more than `frame_sampling.max_frames`.
    """
    fps, num_frames = frame_sampling.fps, frame_sampling.num_frames
    most: float
    given: dict[str, Any]
    known = inspect.signature(processor.sample_frames).parameters
    if "max_num_frames" in known:
        # A frame a second, and fewer of a long video, as MiniCPM-V has it.
        if fps is not None:
            raise RequestError(
                f"received fps {fps:g}; allowed: the model's own, one frame a second; leave it out, or give "
                "a number of frames"
            )
        given = {"max_num_frames": num_frames or processor.max_num_frames, "stack_frames": 1}
        most = min(given["max_num_frames"], math.ceil(video.num_frames / video.fps))
    elif "num_frames" not in known:
        # A rate, as GLM-4.1V has it, or one by the video's length alone, as GLM-4.6V does.
        given = {"fps": min(fps or processor.fps or DEFAULT_FPS, video.fps)}
        most = 0.0  # what is listed is checked
    else:
        wanted = num_frames or (processor.num_frames if fps is None else None)
        rate = fps or processor.fps or DEFAULT_FPS
        most = min(wanted or video.num_frames / video.fps * rate, video.num_frames)
        # transformers' common rule takes the file's number, where there is one, in the place of a rate
        is_common = processor.sample_frames.__qualname__.startswith("BaseVideoProcessor.")
        given = {"num_frames": max(1, int(most))} if wanted or is_common else {"fps": rate}
    check_wanted(frame_sampling, most)
    try:
        indices = tuple(int(each) for each in processor.sample_frames(source_metadata(video), **given))
    except ValueError as error:
        raise RequestError(f"received {given} of {video.num_frames} frames: {error}; change it") from error
    check_wanted(frame_sampling, len(indices))
    return indices


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


@dataclass(slots=True)
class SourceMetadata:
    """Describes a video to transformers' processors as their VideoMetadata does. duration: seconds."""

    total_num_frames: int
    fps: float
    duration: float

    def __getitem__(self, name: str) -> float:
        value: float = getattr(self, name)
        return value


def source_metadata(video: VideoFacts) -> SourceMetadata:
    """Describes a video before any of its frames is decoded."""
    return SourceMetadata(video.num_frames, video.fps, video.num_frames / video.fps)


def shown_metadata(frame_indices: Sequence[int], fps: float) -> dict[str, Any]:
    """Describes a video by the frames that were taken of it, as transformers' processors read it."""
    num_frames = frame_indices[-1] + 1
    return {
        "total_num_frames": num_frames,
        "fps": fps,
        "duration": num_frames / fps,
        "frames_indices": list(frame_indices),
    }
