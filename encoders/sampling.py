"""Which frames of a video a model sees: the Hugging Face processor's own rule, made total."""

from __future__ import annotations

from typing import Any

from encoders.adapter import Sampling, VideoFacts
from epd.errors import RequestError

# For checkpoints whose processor names no rate: what the Qwen-VL model cards sample at.
DEFAULT_FPS = 2.0


def sample_indices(processor: Any, video: VideoFacts, sampling: Sampling) -> tuple[int, ...]:
    """Indices of the wanted source frames, ascending, at least one.

    `processor` is a transformers video processor: its `fps`, `num_frames`, `min_frames` and `max_frames` hold
    where `sampling` says nothing. More frames than there are cannot be had: then all of them, in whole units.
    Raises RequestError for a rate or number that is not positive, or for both at once.
    """
    check_sampling(sampling)
    unit = int(processor.temporal_patch_size)
    if video.num_frames <= unit:
        return tuple(range(video.num_frames))
    indices = processor.sample_frames(source_metadata(video), **_arguments(processor, video, sampling, unit))
    return tuple(int(index) for index in indices)


def check_sampling(sampling: Sampling) -> None:
    """Raises RequestError for a rate or number that is not positive, or for both at once."""
    if sampling.fps is not None and sampling.num_frames is not None:
        raise RequestError(
            f"got fps={sampling.fps} and num_frames={sampling.num_frames}; give one of the two"
        )
    if sampling.fps is not None and not 0 < sampling.fps < float("inf"):
        raise RequestError(f"fps must be a positive number of frames per second, got {sampling.fps}")
    if sampling.num_frames is not None and sampling.num_frames < 1:
        raise RequestError(f"num_frames must be at least 1, got {sampling.num_frames}")


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
