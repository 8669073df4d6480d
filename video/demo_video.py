"""Encodes shapes-world scenes as real H.264: groups of pictures, B-frames, one frame in memory at a time."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import IO

import av

from epd.errors import RequestError, check_file
from epd.shapes import Scene, SceneRenderer, make_questions, make_scene
from epd.types import UInt8Array
from epd.workload.requests import VideoSpec

_GOP_S = 2.0
_MIN_SIDE, _MAX_SIDE = 32, 4096
_MAX_FPS = 240
# With x264's macroblock tree, 160x90 frames came out differently from one run to the next (AVX-512).
_EXACT = {"mbtree": "0"}


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


def drawn_frames(scene: Scene, times_s: Iterable[float], height: int, width: int) -> Iterator[UInt8Array]:
    """Yields the scene's frames, uint8 [H, W, 3], at increasing times."""
    yield from map(SceneRenderer(scene, height, width).frame, times_s)


def write_demo_video(
    out: Path,
    scene: Scene,
    *,
    fps: int,
    height: int,
    width: int,
    draw: Callable[[Scene, Iterable[float], int, int], Iterable[UInt8Array]] = drawn_frames,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Path:
    """Draws and encodes a scene to `out` and writes its truth beside it as JSON; returns the truth's path.

    draw: yields the frames of a scene, as `drawn_frames` does.
    progress: called with (frames done, frames in all) after every frame.
    Raises RequestError for a rate that no video has or a folder that does not exist.
    """
    if not 1 <= fps <= _MAX_FPS:
        raise RequestError(f"fps is {fps}, it must be 1 to {_MAX_FPS}")
    check_file(out)
    total = max(1, round(scene.duration_s * fps))
    times_s = (index / fps for index in range(total))

    def frames() -> Iterable[UInt8Array]:
        for num_done, image in enumerate(draw(scene, times_s, height, width), start=1):
            yield image
            progress(num_done, total)

    encode_h264(out, frames(), fps=Fraction(fps), height=height, width=width)
    truth = out.with_suffix(".json")
    truth.write_text(json.dumps(_truth(scene, fps, height, width), indent=2) + "\n")
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
