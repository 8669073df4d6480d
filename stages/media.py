"""Plans media whose facts, pixels or samples are known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from epd import video
from epd.encoders import OWN_LIMITS, Adapter, FrameSampling, MediaPlan, PixelLimits, VideoFacts
from epd.types import Float32Array, UInt8Array


@dataclass(frozen=True, slots=True)
class PlannedMedia:
    """Holds a source and its plan.

    image: its units at planned size, uint8 [N, h, w, 3], or the bytes of a clip's samples, uint8 [1, B]; not
        for a video.
    """

    source: str | Path
    plan: MediaPlan
    image: Tensor | None = None


def plan_video(
    adapter: Adapter,
    facts: video.MediaFacts,
    frame_sampling: FrameSampling,
    pixels: PixelLimits = OWN_LIMITS,
) -> MediaPlan:
    """Plans a video that was inspected. Raises MediaLimitError, RequestError."""
    known = VideoFacts(facts.num_frames, facts.fps, facts.height, facts.width, facts.is_frame_list)
    return adapter.plan_video(known, frame_sampling, pixels)


def plan_pixels(
    adapter: Adapter, source: str | Path, image: UInt8Array, pixels: PixelLimits = OWN_LIMITS
) -> PlannedMedia:
    """Plans a decoded image, uint8 [H, W, 3], and resizes it to its planned size. Raises MediaLimitError."""
    plan = adapter.plan_image(image.shape[0], image.shape[1], pixels)
    return PlannedMedia(source, plan, adapter.resize(torch.from_numpy(image), plan))


def audio_part(adapter: Adapter, start_s: float, end_s: float | None) -> video.AudioSlice:
    """Returns which samples of a medium the model hears. Raises UnsupportedMediaError if it hears nothing."""
    spec = adapter.audio
    return video.AudioSlice(spec.rate, spec.max_samples, start_s, end_s)


def plan_clip(adapter: Adapter, source: str | Path, samples: Float32Array, start_s: float) -> PlannedMedia:
    """Plans a clip of sound, float32 [N] at the model's rate. Raises MediaLimitError."""
    plan = adapter.plan_audio(len(samples), start_s)
    return PlannedMedia(source, plan, torch.from_numpy(samples.copy().view(np.uint8))[None])
