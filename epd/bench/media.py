"""Draws images and videos for requests: once per seed and spec, kept as files until a round needs them."""

from __future__ import annotations

import base64
import threading
import wave
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from PIL import Image

from epd.client.body import MediaPart
from epd.errors import RequestError
from epd.machine import usable_cpus
from epd.shapes import SceneRenderer, make_scene
from epd.workload.requests import AudioClip, PlannedRequest, Resolution, VideoSpec

ImageFormat = Literal["png", "jpeg"]
ShowProgress = Callable[[int, int], None]
_MAX_ROUND_BYTES = 4 * 2**30
_JPEG_QUALITY = 90
_SOUND_RATE, _NOTE_S, _NOTES_HZ = 16_000, 0.25, (100.0, 2_000.0)  # of clips of sound: notes at random


class WriteVideo(Protocol):
    """Draws a video and writes it as MP4; calls on_frame after every frame."""

    def __call__(self, path: Path, seed: int, spec: VideoSpec, on_frame: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class MediaKey:
    """Identifies a medium: equal keys are equal content."""

    seed: int
    spec: Resolution | VideoSpec | AudioClip

    @property
    def num_frames(self) -> int:
        return self.spec.num_frames if isinstance(self.spec, VideoSpec) else 1


def media_keys(request: PlannedRequest) -> list[MediaKey]:
    """Returns the media of a request, in order: images, videos, clips of sound."""
    shape = request.shape
    specs: tuple[Resolution | VideoSpec | AudioClip, ...] = (*shape.images, *shape.videos, *shape.audios)
    return [MediaKey(request.media_seed + place, spec) for place, spec in enumerate(specs)]


def draw_image(path: Path, seed: int, size: Resolution, image_format: ImageFormat) -> None:
    """Writes a picture of the shapes world."""
    scene = make_scene(seed, 10.0)
    pixels = SceneRenderer(scene, size.height, size.width).frame(scene.objects[0].start_s)
    Image.fromarray(pixels).save(path, format=image_format, quality=_JPEG_QUALITY)


def draw_sound(path: Path, seed: int, clip: AudioClip) -> None:
    """Writes notes of random pitch as WAV: one channel, 16 bits."""
    rng = np.random.default_rng(seed)
    num_samples = max(1, round(clip.duration_s * _SOUND_RATE))
    times_s = np.arange(num_samples) / _SOUND_RATE
    notes = rng.uniform(*_NOTES_HZ, int(clip.duration_s / _NOTE_S) + 1)
    sound = np.sin(2 * np.pi * notes[(times_s / _NOTE_S).astype(int)] * times_s)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_SOUND_RATE)
        file.writeframes((16_000 * sound).astype("<i2").tobytes())


class MediaLibrary:
    """Keeps media in a folder. Existing files are used unchanged: names contain seed and spec."""

    def __init__(self, folder: Path, write_video: WriteVideo, *, image_format: ImageFormat = "jpeg") -> None:
        self._folder = folder
        self._write_video = write_video
        self._image_format: ImageFormat = image_format

    def draw(self, requests: Iterable[PlannedRequest], show: ShowProgress) -> int:
        """Draws the missing media of these requests on all CPUs; returns how many were drawn."""
        keys = dict.fromkeys(key for request in requests for key in media_keys(request))
        missing = [key for key in keys if not self.path(key).exists()]
        self._folder.mkdir(parents=True, exist_ok=True)
        progress = _FrameProgress(sum(key.num_frames for key in missing), show)
        with ThreadPoolExecutor(usable_cpus()) as pool:
            drawn = [pool.submit(self._draw_one, key, progress) for key in missing]
            try:
                for one in as_completed(drawn):
                    one.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return len(missing)

    def path(self, key: MediaKey) -> Path:
        """Returns the file of a medium."""
        spec = key.spec
        if isinstance(spec, VideoSpec):
            return self._folder / f"{key.seed}-{spec.size}-{spec.duration_s:g}s-{spec.fps}fps.mp4"
        if isinstance(spec, AudioClip):
            return self._folder / f"{key.seed}-{spec.duration_s:g}s.wav"
        return self._folder / f"{key.seed}-{spec}.{self._image_format}"

    def load(self, requests: Iterable[PlannedRequest]) -> dict[MediaKey, MediaPart]:
        """Returns the media of a round in memory. Raises RequestError when they are too large."""
        keys = dict.fromkeys(key for request in requests for key in media_keys(request))
        num_bytes = sum(self.path(key).stat().st_size for key in keys) * 4 // 3
        if num_bytes > _MAX_ROUND_BYTES:
            raise RequestError(
                f"the media of a round take {num_bytes} bytes; allowed {_MAX_ROUND_BYTES}; "
                "ask for fewer requests"
            )
        return {key: self._part(key) for key in keys}

    def _part(self, key: MediaKey) -> MediaPart:
        mimes = {VideoSpec: "video/mp4", AudioClip: "audio/wav", Resolution: f"image/{self._image_format}"}
        return MediaPart(mimes[type(key.spec)], base64.b64encode(self.path(key).read_bytes()))

    def _draw_one(self, key: MediaKey, progress: _FrameProgress) -> None:
        # Under another name until it is whole, so that a stopped run leaves no half file behind.
        path = self.path(key)
        part = path.with_suffix(".part")
        if isinstance(key.spec, VideoSpec):
            self._write_video(part, key.seed, key.spec, progress.add_one)
        elif isinstance(key.spec, AudioClip):
            draw_sound(part, key.seed, key.spec)
            progress.add_one()
        else:
            draw_image(part, key.seed, key.spec, self._image_format)
            progress.add_one()
        part.replace(path)


class _FrameProgress:
    """Adds up the frames that several threads have drawn."""

    def __init__(self, num_frames: int, show: ShowProgress) -> None:
        self._num_frames = num_frames
        self._show = show
        self._num_done = 0
        self._lock = threading.Lock()

    def add_one(self) -> None:
        with self._lock:
            self._num_done += 1
            self._show(self._num_done, self._num_frames)
