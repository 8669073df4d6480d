"""A small picture of a medium, as the page shows it where the browser cannot show the format."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest
from PIL import Image

from epd.serve_app.media.media_processes import MediaProcesses
from epd.serve_app.media.media_worker import MediaWorker
from epd.serve_app.media_messages import FetchMedia, ReadPicture, ReleaseMedia
from epd.serve_app.service import HeldItem
from epd.types import UInt8Array
from tests.media import write_audio_only
from tests.serve_app.conftest import Front, data_url, image_part, media_settings, video_part
from tests.serve_app.http.page_use import avi_video, heic_image
from tests.serve_app.media_fleet import ANY_FILE, reference_to

NEAR = 20  # levels that two lossy codecs may change


def asked(front: Front, *parts: Any) -> httpx.Response:
    return front.http.post("/v1/epd/picture", json={"messages": [{"role": "user", "content": [*parts]}]})


def pixels_of(reply: httpx.Response) -> UInt8Array:
    assert (reply.status_code, reply.headers["content-type"]) == (200, "image/jpeg"), reply.text
    return np.asarray(Image.open(io.BytesIO(reply.content)))


def mean_colours(pixels: UInt8Array) -> UInt8Array:
    """Of the four quarters, uint8 [2, 2, 3]."""
    height, width = pixels.shape[0] // 2 * 2, pixels.shape[1] // 2 * 2
    quarters = pixels[:height, :width].reshape(2, height // 2, 2, width // 2, 3)
    return quarters.mean((1, 3)).astype(np.uint8)


def is_near(found: UInt8Array, expected: UInt8Array) -> bool:
    return bool((np.abs(found.astype(int) - expected.astype(int)) <= NEAR).all())


def test_a_heic_is_shown_whole_and_small(front: Front, tmp_path: Path) -> None:
    """Four quarters of known colours, 960 x 480, come as 320 x 160."""
    colours = np.array([[[200, 30, 30], [30, 200, 30]], [[30, 30, 200], [200, 200, 40]]], np.uint8)
    path = heic_image(tmp_path / "a.heic", colours.repeat(240, 0).repeat(480, 1))
    pixels = pixels_of(asked(front, image_part(data_url(path, "image/heic"))))
    assert pixels.shape == (160, 320, 3)
    assert is_near(mean_colours(pixels), colours)
    front.wait_until_empty()


def test_of_a_video_the_first_frame_is_shown(front: Front, tmp_path: Path) -> None:
    path = avi_video(tmp_path / "a.avi")
    with av.open(str(path)) as container:
        frames = container.decode(video=0)
        first, second = (next(frames).to_ndarray(format="rgb24") for _ in range(2))
    assert not is_near(mean_colours(first), mean_colours(second))
    pixels = pixels_of(asked(front, video_part(data_url(path, "video/x-msvideo"))))
    assert pixels.shape == first.shape
    assert is_near(mean_colours(pixels), mean_colours(first))
    front.wait_until_empty()


def test_a_medium_is_kept_by_its_uuid(front: Front, media: dict[str, Path]) -> None:
    named = {**image_part(data_url(media["image"], "image/png")), "uuid": "seen-before"}
    assert asked(front, named).status_code == 200
    assert front.ask_about({"type": "image_url", "uuid": "seen-before"}).status_code == 200
    assert front.service.files_seen == [[media["image"].read_bytes()]]


def test_what_has_no_picture_is_refused(front: Front, tmp_path: Path) -> None:
    sound = {"url": data_url(write_audio_only(tmp_path / "a.mp4"), "audio/mp4")}
    for part, said in (
        ({"type": "audio_url", "audio_url": sound}, "is sound, which has no picture"),
        ({"type": "text", "text": "What?"}, "no medium in messages; allowed: an image or a video"),
        (image_part("data:image/heic;base64,AAAA"), "that can be read"),
    ):
        reply = asked(front, part)
        assert (reply.status_code, said in reply.json()["error"]["message"]) == (400, True), reply.text
    front.wait_until_empty()


@pytest.fixture
def processes() -> Iterator[MediaProcesses]:
    processes = MediaProcesses()
    yield processes
    processes.close()


def test_processes_of_their_own_draw_the_same(
    processes: MediaProcesses, tmp_path: Path, media: dict[str, Path]
) -> None:
    paths = (avi_video(tmp_path / "a.avi"), media["image"])
    found = []
    for reader in (processes, None):
        worker = MediaWorker(media_settings(ANY_FILE, tmp_path), reader)
        worker.handle(FetchMedia("/h#1", tuple(map(reference_to, paths))))
        found.append([worker.handle(ReadPicture(HeldItem("/h#1", item), 64))[1].tobytes() for item in (0, 1)])
        worker.handle(ReleaseMedia("/h#1"))
        worker.close()
    assert found[0] == found[1]
