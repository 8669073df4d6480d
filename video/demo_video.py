"""Encodes shapes-world scenes as real H.264: groups of pictures, B-frames, one frame in memory at a time.

Backgrounds are drawn, or videos of a folder in loops: a clip is scaled to cover the frame, cut to it around
its centre, and muted as drawn backgrounds are, so that the objects before it can be told from it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import groupby, tee
from pathlib import Path
from typing import IO

import av
import numpy as np

from epd.errors import MediaError, RequestError, check_file
from epd.shapes import STILL, Footage, Scene, SceneRenderer, footage_level, make_questions, make_scene
from epd.shapes.footage import resized
from epd.types import UInt8Array
from epd.video.containers.probe import probe
from epd.video.decoding.pixels import Size
from epd.video.decoding.stream import stream
from epd.workload.requests import VideoSpec

_DARKEST, _SHARE_OF_CONTRAST = 40, 2
_GOP_S = 2.0
_MIN_SIDE, _MAX_SIDE = 32, 4096
_MAX_FPS = 240
# With x264's macroblock tree, 160x90 frames came out differently from one run to the next (AVX-512).
_EXACT = {"mbtree": "0"}


@dataclass(frozen=True, slots=True)
class _Clip:
    """One video. size: (height, width), pixels."""

    path: Path
    duration_s: float
    size: Size


class BackgroundClips:
    """The videos of a folder, ordered by name; holds no frames."""

    def __init__(self, folder: Path) -> None:
        """Raises RequestError for a folder without a video that can be read."""
        self.folder = folder
        paths = sorted(path for path in folder.glob("*") if path.is_file())
        self._clips = [clip for clip in map(_read, paths) if clip is not None]
        if not self._clips:
            raise RequestError(
                f"received the backgrounds {str(folder)!r}, with {len(paths)} files and no video among them; "
                "allowed: folders of videos; name another"
            )

    def play(self, seed: int, times_s: Iterable[float], height: int, width: int) -> Iterator[UInt8Array]:
        """Yields a background for each time, uint8 [H, W, 3]; the seed chooses the clip.

        times_s: increasing. Raises MediaError for a clip that cannot be decoded.
        """
        clip = self._clips[seed % len(self._clips)]
        size = _covering(clip.size, (height, width))
        for loop, times in groupby(times_s, lambda time_s: time_s // clip.duration_s):
            wanted = [max(0.0, time_s - loop * clip.duration_s) for time_s in times]
            with stream(clip.path, wanted, size, workers=1, groups_ahead=1) as groups:
                for group in groups:
                    for image in group.frames.data:
                        yield _muted(_centre(image, height, width))


def _read(path: Path) -> _Clip | None:
    try:
        info = probe(path)
    except MediaError:
        return None
    return _Clip(path, info.duration_s, (info.height, info.width)) if info.duration_s > 0 else None


def _covering(size: Size, frame: Size) -> Size:
    """Returns the least size with the clip's proportions that covers the frame."""
    scale = max(frame[0] / size[0], frame[1] / size[1])
    return max(frame[0], round(size[0] * scale)), max(frame[1], round(size[1] * scale))


def _centre(image: UInt8Array, height: int, width: int) -> UInt8Array:
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    return image[top : top + height, left : left + width]


def _muted(image: UInt8Array) -> UInt8Array:
    """Returns the image with half of its contrast, values 40 to 167."""
    return np.asarray(image // _SHARE_OF_CONTRAST + _DARKEST, np.uint8)


def encode_h264(
    target: str | Path | IO[bytes],
    frames: Iterable[UInt8Array],
    *,
    fps: Fraction,
    height: int,
    width: int,
    crf: int = 23,
    preset: str = "veryfast",
) -> int:
    """Writes frames (uint8 [H, W, 3], RGB) as an H.264 MP4 at a constant rate; returns how many were written.

    Keyframes every two seconds, two B-frames, 4:2:0: height and width must be even. The same frames give the
    same file, each time and on every processor with SSE4 or later.
    """
    gop = str(max(1, round(fps * Fraction(_GOP_S))))
    num_frames = 0
    destination = str(target) if isinstance(target, Path) else target
    with av.open(destination, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.codec_context.thread_count = 1
        stream.options = {"crf": str(crf), "preset": preset, "g": gop, "keyint_min": gop, "bf": "2"} | _EXACT
        for image in frames:
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = num_frames, 1 / fps
            container.mux(stream.encode(frame))
            num_frames += 1
        container.mux(stream.encode(None))
    return num_frames


def parse_size(text: str) -> tuple[int, int]:
    """Returns (height, width) of a size written as WxH, for example 640x360.

    Raises RequestError unless both are even numbers of 32 to 4096 pixels.
    """
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    width, height = map(int, match.groups()) if match else (0, 0)
    if not all(side % 2 == 0 and _MIN_SIDE <= side <= _MAX_SIDE for side in (height, width)):
        raise RequestError(
            f"size is {text!r}, it must be WIDTHxHEIGHT with even numbers of {_MIN_SIDE} to {_MAX_SIDE}; "
            "try 640x360"
        )
    return height, width


@dataclass(frozen=True, slots=True)
class Filming:
    """Says how scenes are filmed. backgrounds: what is behind the objects; None draws it."""

    footage: Footage = STILL
    backgrounds: BackgroundClips | None = None

    @classmethod
    def of(cls, level: str, folder: Path | None) -> Filming:
        """Returns a level of footage, with the clips of a folder. Raises RequestError."""
        return cls(footage_level(level), None if folder is None else BackgroundClips(folder))

    def frames(self, scene: Scene, times_s: Iterable[float], height: int, width: int) -> Iterator[UInt8Array]:
        """Yields the scene's frames, uint8 [H, W, 3], at increasing times. Raises MediaError."""
        renderer = SceneRenderer(scene, height, width, self.footage)
        if self.backgrounds is None:
            yield from map(renderer.frame, times_s)
        else:
            times_s, shown_s = tee(times_s)
            behind = self.backgrounds.play(scene.seed, shown_s, height, width)
            yield from map(renderer.frame, times_s, behind)

    def record(self) -> dict[str, object]:
        """Returns what a truth file says of it: nothing, where nothing disturbs the picture."""
        footage = {} if self.footage == STILL else {"footage": asdict(self.footage)}
        return footage | ({"background": str(self.backgrounds.folder)} if self.backgrounds else {})


PLAIN = Filming()


def write_demo_video(
    out: Path,
    scene: Scene,
    *,
    fps: int,
    height: int,
    width: int,
    filming: Filming = PLAIN,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Path:
    """Draws and encodes a scene to `out` and writes its truth beside it as JSON; returns the truth's path.

    progress: called with (frames done, frames in all) after every frame.
    Raises RequestError for a rate that no video has or a folder that does not exist.
    """
    if not 1 <= fps <= _MAX_FPS:
        raise RequestError(f"fps is {fps}, it must be 1 to {_MAX_FPS}")
    check_file(out)
    total = max(1, round(scene.duration_s * fps))
    times_s = (index / fps for index in range(total))

    def frames() -> Iterable[UInt8Array]:
        for num_done, image in enumerate(filming.frames(scene, times_s, height, width), start=1):
            yield image
            progress(num_done, total)

    encode_h264(out, frames(), fps=Fraction(fps), height=height, width=width)
    truth = out.with_suffix(".json")
    shown = _truth(resized(scene, filming.footage), fps, height, width) | filming.record()
    truth.write_text(json.dumps(shown, indent=2) + "\n")
    return truth


def write_scene(path: Path, seed: int, spec: VideoSpec, on_frame: Callable[[], None]) -> None:
    """Draws and encodes the scene of a seed to `path`; calls on_frame after every frame."""
    size = spec.size
    renderer = SceneRenderer(make_scene(seed, spec.duration_s), size.height, size.width)

    def frames() -> Iterable[UInt8Array]:
        for index in range(spec.num_frames):
            yield renderer.frame(index / spec.fps)
            on_frame()

    encode_h264(path, frames(), fps=Fraction(spec.fps), height=size.height, width=size.width)


def _truth(scene: Scene, fps: int, height: int, width: int) -> dict[str, object]:
    questions = make_questions(scene, random.Random(scene.seed), num_per_kind=2)
    return {
        **scene.truth(),
        "fps": fps,
        "height": height,
        "width": width,
        "questions": [{"kind": str(q.kind), "question": q.text, "answer": q.answer} for q in questions],
    }
