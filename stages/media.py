"""Plans media from paths, and decodes planned media group by group."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from epd import video
from epd.encoders import OWN_LIMITS, Adapter, Embeddings, FrameSampling, MediaPlan, PixelLimits, VideoFacts
from epd.encoders.batch import FrameEncoder
from epd.encoders.groups import MediaGroup, plan_groups
from epd.errors import MediaLimitError, UnsupportedMediaError
from epd.stages.timing import busy
from epd.types import Float32Array, StageTimings, UInt8Array


@dataclass(frozen=True, slots=True)
class PlannedMedia:
    """Holds a source and its plan.

    image: its units at planned size, uint8 [N, h, w, 3], or the bytes of a clip's samples, uint8 [1, B]; not
        for a video.
    """

    source: str | Path
    plan: MediaPlan
    image: Tensor | None = None

    def pixels_of(self, group: MediaGroup) -> Tensor:
        """Returns the part of `image` that the group shows."""
        assert self.image is not None
        return self.image[group.start : group.stop]


@dataclass(frozen=True, slots=True)
class FoundVideo:
    """Holds a video that was inspected, before its frames are chosen."""

    source: str | Path
    facts: video.MediaFacts
    pixels: PixelLimits = OWN_LIMITS

    def plan_of(self, adapter: Adapter) -> Callable[[FrameSampling], MediaPlan]:
        """Returns what plans it. That raises MediaLimitError, which names the source, and RequestError."""
        return lambda sampling: plan_known(adapter, self.source, self.facts, sampling, self.pixels).plan


@dataclass(frozen=True, slots=True)
class DecodedGroup:
    """Holds a group and its frames, uint8 [N, h, w, 3].

    num_substituted: frames that could not be decoded and show a neighbour.
    """

    group: MediaGroup
    frames: Tensor
    num_substituted: int = 0


# A group and its embeddings.
EncodedGroup = tuple[MediaGroup, Embeddings]


def plan_media(
    adapter: Adapter, source: str | Path, frame_sampling: FrameSampling, pixels: PixelLimits = OWN_LIMITS
) -> PlannedMedia:
    """Inspects and plans one source. Raises MediaError, and RequestError for a useless frame_sampling."""
    return plan_known(adapter, source, video.look(source), frame_sampling, pixels)


def plan_known(
    adapter: Adapter,
    source: str | Path,
    facts: video.MediaFacts,
    frame_sampling: FrameSampling,
    pixels: PixelLimits = OWN_LIMITS,
) -> PlannedMedia:
    """Plans a source that was inspected. Raises as `plan_media`."""
    image = video.load_image(source) if facts.kind == "image" else None
    samples = _samples(adapter, source, frame_sampling) if facts.kind == "audio" else None
    with _named(source):
        if samples is not None:
            return plan_clip(adapter, source, samples, frame_sampling.start_s)
        if image is not None:
            return plan_pixels(adapter, source, image, pixels)
        return PlannedMedia(source, plan_video(adapter, facts, frame_sampling, pixels))


def _samples(adapter: Adapter, source: str | Path, sampling: FrameSampling) -> Float32Array:
    with _named(source):
        part = audio_part(adapter, sampling.start_s, sampling.end_s)
    return video.load_audio(source, part)


@contextmanager
def _named(source: str | Path) -> Iterator[None]:
    """Names the source in errors about what the model takes."""
    try:
        yield
    except (MediaLimitError, UnsupportedMediaError) as error:
        raise type(error)(f"'{source}': {error}") from error


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


def decode_groups(
    media: Sequence[PlannedMedia], group_tokens: int, timings: StageTimings
) -> Generator[DecodedGroup, None, None]:
    """Decodes all items in order, group by group; each group has about `group_tokens` visual tokens.

    Frames of a video are decoded by threads of the stream while the consumer works on earlier groups. To stop
    them early, close the generator.
    """
    plans = [item.plan for item in media]
    groups = plan_groups(plans, [""] * len(plans), model="", group_tokens=group_tokens)
    for item, its_groups in groupby(groups, lambda group: group.item):
        if media[item].image is None:
            yield from _decode_video(media[item], list(its_groups), timings)
        else:
            for group in its_groups:
                yield DecodedGroup(group, media[item].pixels_of(group))


def _decode_video(
    media: PlannedMedia, groups: Sequence[MediaGroup], timings: StageTimings
) -> Iterator[DecodedGroup]:
    sizes = [group.num_frames for group in groups]
    with busy(timings, "decode_video_s"):
        stream = video.stream(media.source, media.plan.times_s, media.plan.size, group_sizes=sizes)
    with stream as decoded:
        for group in groups:
            with busy(timings, "decode_video_s"):
                frames = next(decoded).frames
            yield DecodedGroup(group, torch.from_numpy(frames.data), frames.num_substituted)


@torch.inference_mode()
def encode_group(encoder: FrameEncoder, decoded: DecodedGroup, timings: StageTimings) -> EncodedGroup:
    """Preprocesses the frames of a group and encodes them."""
    with busy(timings, "preprocess_s"):
        patches = encoder.patches(decoded.frames, decoded.group.plan)
    with busy(timings, "encode_s"):
        (embeddings,) = encoder.encode([patches])
    return decoded.group, embeddings
