"""What a demuxer says once holds for every frame after it, whichever are decoded and by how many decoders."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest

from epd import video
from epd.types import UInt8Array
from tests.video.recipes import GOP15, PYRAMID, Recipe, make

FLV_HEADER, TAG_HEADER, TAG_END = 13, 11, 4  # bytes


def every_frame(path: Path) -> list[UInt8Array]:
    """All frames, decoded one after another."""
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def later(flv: bytes, shift_ms: int) -> bytes:
    """The pictures of an FLV, and the header of their codec, that much later."""
    found, at = b"", FLV_HEADER
    while at < len(flv):
        end = at + TAG_HEADER + int.from_bytes(flv[at + 1 : at + 4]) + TAG_END
        if flv[at] == 9:
            time_ms = int.from_bytes(flv[at + 4 : at + 7]) + shift_ms
            found += flv[at : at + 4] + time_ms.to_bytes(3) + flv[at + 7 : end]
        at = end
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_that_goes_on_with_another_header(workers: int, tmp_path: Path) -> None:
    """As of a recording whose encoder was started again with other options and another size."""
    before = make(Recipe("before.flv", options=GOP15), tmp_path / "before.flv")
    after = make(
        Recipe("after.flv", options={**PYRAMID, "g": "15"}, width=192, height=128), tmp_path / "after.flv"
    )
    path = tmp_path / "both.flv"
    path.write_bytes(before.read_bytes() + later(after.read_bytes(), 2000))
    truth = every_frame(after)

    for wanted in ([10], [50], [5, 40, 59], range(60)):
        frames = video.decode(path, [2 + (index + 0.5) / 30 for index in wanted], workers=workers)
        assert frames.num_substituted == 0
        assert np.array_equal(frames.data, [truth[index] for index in wanted]), wanted


@pytest.mark.parametrize("name", ["grey.avi", "grey.mov"])
def test_colours_of_a_palette(name: str, tmp_path: Path) -> None:
    """Microscopes and screen recorders of old write 8 bits a pixel, and the palette once."""
    path = tmp_path / name
    palette = np.random.default_rng(0).integers(0, 256, (256, 4), np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("rawvideo", rate=10, width=64, height=48, pix_fmt="pal8")
        for index in range(20):
            frame = av.VideoFrame(64, 48, "pal8")
            values = np.zeros((48, frame.planes[0].line_size), np.uint8)
            values[:, :64] = np.add.outer(np.arange(48), np.arange(64)) + 5 * index
            frame.planes[0].update(values.tobytes())
            frame.planes[1].update(palette.tobytes())
            frame.pts = index
            container.mux(stream.encode(frame))
    truth = every_frame(path)
    for wanted in ([3], [18], [2, 9, 15]):
        frames = video.decode(path, [(index + 0.5) / 10 for index in wanted])
        assert np.array_equal(frames.data, [truth[index] for index in wanted]), wanted
