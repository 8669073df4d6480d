"""The reader of a GPU, on the CPU: NV12 and P010 are made of libavcodec's frames, all else is as there."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import av
import av.error
import numpy as np
import pytest
import torch
from av.video.frame import VideoFrame

from epd import video
from epd.errors import CorruptMediaError
from epd.types import Frames
from epd.video.decoding.device import DeviceFailedError, VideoDevice, rgb_of
from epd.video.decoding.segment import Feed, Stamp
from epd.video.decoding.session import DecoderSession
from epd.video.sources.source import Media, OpenVideo
from tests.video.conftest import Clip
from tests.video.recipes import picture
from tests.video.twin_device import open_here, planes_here
from tests.video.util import assert_same_frames, psnr_db

SIZE = (40, 56)
TIMES_S = [0.005 + index / 12 for index in range(23)]
# Frames of 8 bits differ by a level in a pixel of some hundreds. Deeper ones are dithered by swscale.
PSNR_8_BITS, PSNR_10_BITS = 65.0, 47.0
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU in this machine")


class Twin(VideoDevice):
    """Makes planes of frames that libavcodec decoded. fails_at: the number of the frame that is lost."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__("twin", num_sessions=2)
        self.fails_at, self.num_taken = fails_at, 0

    open = open_here

    def planes(self, frame: VideoFrame) -> tuple[torch.Tensor, torch.Tensor] | None:
        self.num_taken += 1
        if self.fails_at is not None and self.num_taken > self.fails_at:
            raise RuntimeError("an illegal memory access was encountered")
        return planes_here(self, frame)


def _assert_close(got: Frames, truth: Frames, psnr: float) -> None:
    assert got.data.shape == truth.data.shape
    assert np.array_equal(got.pts_s, truth.pts_s)
    assert got.num_substituted == 0
    assert psnr_db(got.data, truth.data) >= psnr


@pytest.mark.parametrize(
    "name",
    [
        *("h264_pyramid.mp4", "h264_one_key.mp4", "h264.avi", "vfr.ts", "interlaced.ts", "full_range.mp4"),
        *("rotated_90.mp4", "mirrored.mp4", "edit_list.mp4", "hevc_open.mkv", "hevc_10bit.mp4"),
    ],
)
@pytest.mark.parametrize("size", [None, SIZE])
def test_times_are_the_exact_readers_and_pixels_within_a_bar(
    name: str, size: tuple[int, int] | None, clip: Clip
) -> None:
    truth, device = video.decode(clip(name), TIMES_S, size), Twin()
    psnr = PSNR_10_BITS if "10bit" in name else PSNR_8_BITS
    _assert_close(video.decode(clip(name), TIMES_S, size, device=device), truth, psnr)
    assert device.num_frames >= len(set(truth.pts_s))
    assert device.num_failures == 0


@pytest.mark.parametrize("matrix", [1, 4, 5, 7, 9])
@pytest.mark.parametrize("colour_range", [1, 2])
def test_matrix_and_range_are_the_streams(matrix: int, colour_range: int) -> None:
    frame = VideoFrame.from_ndarray(picture(3, 64, 48), "rgb24").reformat(format="yuv420p")
    frame.colorspace, frame.color_range = matrix, colour_range
    truth = frame.reformat(format="rgb24", interpolation="BILINEAR").to_ndarray()
    got = rgb_of(frame, *planes_here(VideoDevice(), frame)).permute(1, 2, 0).numpy()
    assert np.abs(got - truth).max() <= 1


def test_what_the_device_does_not_decode_is_the_cpus_and_said_once(
    clip: Clip, caplog: pytest.LogCaptureFixture
) -> None:
    truth, device = video.decode(clip("odd_size.mp4"), TIMES_S, SIZE), Twin()
    for _ in range(2):
        assert_same_frames(video.decode(clip("odd_size.mp4"), TIMES_S, SIZE, device=device), truth)
    assert device.num_frames == 0
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "twin decodes no h264 of yuv444p pixels and 131 x 97; the CPU decodes it, and all that is alike"
    ]


def test_frames_that_libavcodec_decodes_in_its_place_are_exact(clip: Clip) -> None:
    class Refusing(Twin):
        def planes(self, frame: VideoFrame) -> None:  # noqa: ARG002 - as if it were not on the device
            self.num_taken += 1

    device = Refusing()
    truth = video.decode(clip("h264_b.mp4"), TIMES_S, SIZE)
    assert_same_frames(video.decode(clip("h264_b.mp4"), TIMES_S, SIZE, device=device), truth)
    assert device.num_taken
    assert not device.num_frames
    assert not device.num_failures


def test_without_a_device_the_cpu_decodes_and_after_three_videos_it_is_left_alone(
    clip: Clip, caplog: pytest.LogCaptureFixture
) -> None:
    truth, device = video.decode(clip("h264_b.mp4"), TIMES_S, SIZE), VideoDevice("cuda:99")
    for _ in range(4):
        assert_same_frames(video.decode(clip("h264_b.mp4"), TIMES_S, SIZE, device=device), truth)
    assert device.num_failures == 3
    assert len([record for record in caplog.records if "opens no video" in record.getMessage()]) == 1


@pytest.mark.parametrize("fails_at", [0, 9])
def test_a_device_that_is_lost_leaves_the_other_groups_to_the_cpu(fails_at: int, clip: Clip) -> None:
    path, device = clip("h264_pyramid.mp4"), Twin(fails_at)
    truth = video.decode(path, TIMES_S, SIZE)
    with video.stream(path, TIMES_S, SIZE, group_size=5, device=device) as groups:
        got = list(groups)
    assert [(group.index, group.start, len(group.frames)) for group in got] == [
        (0, 0, 4),
        *((index, 5 * index - 1, min(5, 24 - 5 * index)) for index in range(1, 5)),
    ]
    data = np.concatenate([group.frames.data for group in got])
    _assert_close(Frames(data, np.concatenate([group.frames.pts_s for group in got])), truth, PSNR_8_BITS)
    assert np.array_equal(data[-5:], truth.data[-5:])
    assert device.num_failures == 1


def test_a_damaged_file_is_judged_by_the_cpu_and_is_not_the_devices_failure(clip: Clip) -> None:
    data = clip("h264_b.mp4").read_bytes()
    damaged = data[: len(data) // 3] + bytes(len(data) // 3) + data[2 * len(data) // 3 :]
    with pytest.raises(CorruptMediaError) as of_cpu:
        video.decode(damaged, TIMES_S, SIZE)
    device = Twin()
    with pytest.raises(CorruptMediaError) as of_device:
        video.decode(damaged, TIMES_S, SIZE, device=device)
    assert str(of_device.value) == str(of_cpu.value)
    assert device.num_failures == 0


@pytest.mark.parametrize(
    ("error", "is_damage"), [(av.error.ExternalError, False), (av.error.InvalidDataError, True)]
)
def test_a_decoder_without_its_device_is_no_damage(
    error: type[Exception], is_damage: bool, clip: Clip
) -> None:
    def decode(packet: object) -> list[VideoFrame]:
        raise error(1, "of the driver")

    class Failing(Twin):
        def open(self, media: Media, open_timeout_s: float) -> OpenVideo:
            context: Any = SimpleNamespace(name="h264", decode=decode, flush_buffers=lambda: None)
            stream: Any = SimpleNamespace(codec_context=context)
            return OpenVideo(media, super().open(media, open_timeout_s).container, stream)

    media, info = Media(clip("h264_b.mp4")), video.probe(clip("h264_b.mp4"))
    session: DecoderSession = Failing().new_session(media, info, 10.0)
    packet: Any = SimpleNamespace(pts=0)
    chunk: Any = SimpleNamespace(ops=[Feed(Stamp(0, 0, True, 1, True, packet), True)])
    if is_damage:
        assert list(session.run(chunk)) == [None]
    else:
        with pytest.raises(DeviceFailedError):
            list(session.run(chunk))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", ["h264_pyramid.mp4", "hevc_open.mkv", "hevc_10bit.mp4", "interlaced.ts"])
def test_nvdec_gives_the_frames_of_the_exact_reader(name: str, clip: Clip) -> None:
    truth, device = video.decode(clip(name), TIMES_S, SIZE), VideoDevice("cuda")
    got = video.decode(clip(name), TIMES_S, SIZE, device=device)
    _assert_close(got, truth, PSNR_10_BITS if "10bit" in name else PSNR_8_BITS)
    assert device.num_failures == 0
