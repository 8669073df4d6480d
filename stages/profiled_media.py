"""Chooses what a model is measured with: images and videos where it sees, clips of sound where it hears."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from epd import video
from epd.bench.media import draw_sound
from epd.encoders import FrameSampling, VideoFacts
from epd.encoders.plans import AudioSpec, MediaPlan
from epd.errors import UnsupportedMediaError
from epd.pixel_limits import PixelLimits
from epd.profiles.measuring import Action
from epd.profiles.media import MediaRule
from epd.video.demo_video import write_scene
from epd.workload.requests import AudioClip, Resolution, VideoSpec

Points = Iterator[tuple[float, float, Action]]

_IMAGE_SIDES, _IMAGE_BATCHES = (56, 112, 224, 448), (1, 4)
_TYPICAL_SIDE = 224
_CLIP_BATCHES, _CLIP_SHARES = (1, 2, 4), (0.125, 0.5, 1.0)  # of the longest clip that the model takes
_VIDEO_SIZES, _VIDEO_FRAMES, _VIDEO_S = ((160, 96), (320, 192), (640, 384)), (2, 8), 2.0
# Beside 2048 pixels of height: sizes are cut to whole patches, and some shape comes close to the limit.
_WIDTHS = tuple(range(1024, 4097, 64))
_PHOTO_SIDES = (256, 512, 1024)
_WHOLE = PixelLimits(is_low_detail=True)  # of an image that would have tiles


class Sample(NamedTuple):
    """A medium as an encoder gets it. frames: uint8 [N, h, w, 3], or the bytes of samples [1, B]."""

    plan: MediaPlan
    frames: Tensor


class Reading(NamedTuple):
    """Points of reading a kind of media. units: of the cost, as `epd.profiles.cost` has them."""

    kind: str
    units: str
    items: str
    points: Points


def media_of(adapter: Any) -> _Sound | _Pictures:
    """Returns sound for a model that hears, else pictures."""
    try:
        return _Sound(adapter, adapter.audio)
    except UnsupportedMediaError:
        return _Pictures(adapter)


class _Pictures:
    """Measures a model that sees."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter

    def rule(self) -> MediaRule:
        """Describes what the adapter plans for a large image and a video of ten seconds, as a rule."""
        image = self._adapter.plan_image(2048, 2048)
        clip = self._ten_seconds(720, 1280)
        hour = self._adapter.plan_video(VideoFacts(86_400, 24.0, 2048, 2048), FrameSampling())
        per_unit = image.grid.h * image.grid.w
        num_tiles = image.num_units * image.grid.num_tiles
        whole = image if image.grid.num_tiles == 1 else self._adapter.plan_image(2048, 2048, _WHOLE)
        side = whole.size[0] // whole.grid.h
        if num_tiles > 1 or image.is_joined_whole:
            return MediaRule(
                "tiles",
                max(1, side),
                tile_patches=per_unit,
                tile_tokens=max(1, image.num_tokens // num_tiles),
                max_tiles=max(1, num_tiles - 1),
                video_fps=clip.num_frames / 10,
                max_frames=hour.num_frames,
            )
        return MediaRule(
            "grid",
            side,
            merge=round((per_unit / image.tokens_per_unit) ** 0.5),
            max_pixels=max(_area(self._adapter.plan_image(2048, width).size) for width in _WIDTHS),
            max_frame_pixels=max(_area(self._ten_seconds(2048, width).size) for width in _WIDTHS),
            frames_per_unit=clip.frames_per_unit,
            max_video_tokens=hour.num_tokens,
            video_fps=clip.num_frames / 10,
            max_frames=hour.num_frames,
        )

    def _ten_seconds(self, height: int, width: int) -> Any:
        return self._adapter.plan_video(VideoFacts(240, 24.0, height, width), FrameSampling())

    def batches(self) -> Iterator[tuple[Sample, int]]:
        """Yields what is encoded, and how often in one batch: images of several sizes, alone and together."""
        for side in _IMAGE_SIDES:
            sample = self._image(side)
            for batch in _IMAGE_BATCHES:
                yield sample, batch

    def typical(self) -> Sample:
        """Returns what memory, and batches beside passes, are measured with."""
        return self._image(_TYPICAL_SIDE)

    def _image(self, side: int) -> Sample:
        plan = self._adapter.plan_image(side, side)
        return Sample(plan, torch.zeros((1, *plan.size, 3), dtype=torch.uint8))

    def readings(self, folder: Path) -> Iterator[Reading]:
        """Yields what is read; files are made in the folder."""
        yield Reading("video", "source pixels", "frames", _video_points(folder))
        yield Reading("images", "pixels", "images", _photo_points(folder))


class _Sound:
    """Measures a model that hears. Each clip is as much work for the tower, which pads it."""

    def __init__(self, adapter: Any, spec: AudioSpec) -> None:
        self._adapter = adapter
        self._spec = spec

    def rule(self) -> MediaRule:
        plan = self.typical().plan
        tokens_per_s = plan.num_tokens * self._spec.rate / self._spec.max_samples
        return MediaRule("clips", 1, tile_patches=plan.grid.num_patches, tokens_per_s=tokens_per_s)

    def batches(self) -> Iterator[tuple[Sample, int]]:
        """Yields the longest clip, alone and several."""
        sample = self.typical()
        for batch in _CLIP_BATCHES:
            yield sample, batch

    def typical(self) -> Sample:
        num_samples = self._spec.max_samples
        silence = torch.zeros(num_samples, dtype=torch.float32).view(torch.uint8)
        return Sample(self._adapter.plan_audio(num_samples), silence[None])

    def readings(self, folder: Path) -> Iterator[Reading]:
        yield Reading("audio", "seconds", "clips", self._clips(folder))

    def _clips(self, folder: Path) -> Points:
        part = video.AudioSlice(self._spec.rate, self._spec.max_samples)
        for share in _CLIP_SHARES:
            clip = AudioClip(share * self._spec.max_samples / self._spec.rate)
            path = folder / f"{share}.wav"
            draw_sound(path, 7, clip)
            yield clip.duration_s, 1, lambda path=path: video.load_audio(path, part)  # type: ignore[misc]


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]


def _video_points(folder: Path) -> Points:
    """Measures short videos of which few or more frames are wanted; one thread decodes."""
    for width, height in _VIDEO_SIZES:
        path = folder / f"{width}.mp4"
        spec = VideoSpec(_VIDEO_S, 24, Resolution(width, height))
        write_scene(path, 7, spec, lambda: None)
        for wanted in _VIDEO_FRAMES:
            times_s = [(index + 0.5) * _VIDEO_S / wanted for index in range(wanted)]

            def read(path: Path = path, times_s: list[float] = times_s) -> None:
                video.decode(path, times_s, workers=1)

            yield spec.num_frames * width * height, wanted, read


def _photo_points(folder: Path) -> Points:
    for side in _PHOTO_SIDES:
        path = folder / f"{side}.jpg"
        noise = np.random.default_rng(0).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((side, side)).save(path, quality=90)
        yield side * side, 1, lambda path=path: video.load_image(path)  # type: ignore[misc]
