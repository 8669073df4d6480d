"""Videos that children of a GPU decode beside those of the CPU. The GPU is `tests/video/twin_device.py`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from epd import video
from epd.errors import InfeasibleError
from epd.serve_app.media import frame_reader
from epd.serve_app.media.frame_reader import ChildDecoder, FrameStream
from epd.serve_app.media.media_processes import MediaProcesses
from epd.serve_app.media_messages import DecodeOrder
from epd.serve_app.service import HeldItem
from epd.types import Frames
from epd.video import ChildLimits, ChildStream, MediaChildren, open_file
from epd.video.children import process
from epd.video.children.walls import NETWORK, PRIVILEGES
from tests.video.recipes import RECIPES, make
from tests.video.util import psnr_db

LIMITS = ChildLimits(group_s=600.0, patience_s=600.0, max_children=2)
TIMES_S, SIZES, SIZE = tuple(0.005 + index / 6 for index in range(12)), (4, 4, 4), (40, 56)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("clips")
    return {name: make(RECIPES[name], folder / name) for name in ("h264_b.mp4", "odd_size.mp4")}


@pytest.fixture
def of_cpu() -> Iterator[MediaChildren]:
    with closing(MediaChildren(LIMITS, decodes_video=True)) as children:
        yield children


@pytest.fixture
def of_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[MediaChildren]:
    server = "from epd.video.children.server"
    twin = f"from tests.video.twin_device import install; install(); {server}"
    monkeypatch.setattr(process, "_BOOT", process._BOOT.replace(server, twin))
    with closing(MediaChildren(LIMITS, decodes_video=True, device="cuda")) as children:
        children.server.start()
        monkeypatch.undo()
        yield children


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch, of_gpu: None) -> None:
    """So that the GPU is the faster one; after the fixture that undoes what it patched."""
    monkeypatch.setattr(frame_reader, "usable_cpus", lambda: 2)


def begun(decoder: ChildDecoder, path: Path, pixels: float = 1e9) -> ChildStream:
    order = DecodeOrder(HeldItem("hold", 0), TIMES_S, SIZES, SIZE)
    stream = decoder(open_file(path, "it"), "it", order, pixels)
    assert isinstance(stream, ChildStream)
    return stream


def rest_of(stream: FrameStream, num_groups: int = len(SIZES)) -> Frames:
    groups = [stream.read() for _ in range(num_groups)]
    stream.close()
    return Frames(
        *(np.concatenate(each) for each in zip(*((it.data, it.pts_s) for it in groups), strict=True))
    )


def test_a_gpu_takes_as_many_videos_as_it_has_children_and_the_cpu_the_others(
    of_cpu: MediaChildren, of_gpu: MediaChildren, clips: dict[str, Path]
) -> None:
    decoder, truth = ChildDecoder(of_cpu, of_gpu), video.decode(clips["h264_b.mp4"], TIMES_S, SIZE)
    streams = [begun(decoder, clips["h264_b.mp4"]) for _ in range(4)]
    assert [stream.children is of_gpu for stream in streams] == [True, True, False, False]
    read = [rest_of(stream) for stream in streams]
    assert all(np.array_equal(frames.pts_s, truth.pts_s) for frames in read)
    assert [np.array_equal(frames.data, truth.data) for frames in read] == [False, False, True, True]
    assert min(psnr_db(frames.data, truth.data) for frames in read) >= 65
    with closing(begun(decoder, clips["h264_b.mp4"])) as stream:
        assert stream.children is of_gpu


def test_a_child_that_dies_leaves_its_groups_to_the_cpu(
    of_cpu: MediaChildren, of_gpu: MediaChildren, clips: dict[str, Path]
) -> None:
    truth = video.decode(clips["h264_b.mp4"], TIMES_S, SIZE)
    stream = begun(ChildDecoder(of_cpu, of_gpu), clips["h264_b.mp4"])
    first = stream.read()
    (child,) = of_gpu._parked.values()
    os.kill(child.pid, signal.SIGKILL)
    rest = rest_of(stream, 2)
    assert stream.children is of_cpu
    assert not np.array_equal(first.data, truth.data[:4])
    assert np.array_equal(rest.data, truth.data[4:])
    assert [*first.pts_s, *rest.pts_s] == [*truth.pts_s]


def test_a_gpu_that_fails_is_said_once_and_left_alone_after_three_videos(
    of_cpu: MediaChildren, clips: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    truth = video.decode(clips["h264_b.mp4"], TIMES_S, SIZE)
    with closing(MediaChildren(LIMITS, decodes_video=True, device="cuda:99")) as absent:
        decoder, tried = ChildDecoder(of_cpu, absent), list[bool]()
        for _ in range(4):
            stream = begun(decoder, clips["h264_b.mp4"])
            tried.append(stream.children is absent)
            assert np.array_equal(rest_of(stream).data, truth.data)
    assert tried == [True, True, True, False]
    said = [record.getMessage() for record in caplog.records if "the CPU decodes" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("the CPU decodes a video in place of cuda:99: cuda:99 opens no video (")


def test_a_kind_that_a_gpu_does_not_decode_is_no_failure(
    of_cpu: MediaChildren, of_gpu: MediaChildren, clips: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    truth, decoder = video.decode(clips["odd_size.mp4"], TIMES_S, SIZE), ChildDecoder(of_cpu, of_gpu)
    for _ in range(4):
        stream = begun(decoder, clips["odd_size.mp4"])
        assert stream.children is of_gpu
        assert np.array_equal(rest_of(stream).data, truth.data)
    assert len([record for record in caplog.records if "decodes no h264 of yuv444p" in record.message]) == 1


def test_children_of_a_gpu_have_fewer_walls_and_a_required_sandbox_allows_none(
    of_gpu: MediaChildren,
) -> None:
    assert of_gpu.server.walls <= {NETWORK, PRIVILEGES}
    with (
        closing(MediaProcesses(requires_walls=True, device="cuda")) as processes,
        pytest.raises(InfeasibleError, match="--video-device cuda and --require-media-sandbox"),
    ):
        processes.start()
