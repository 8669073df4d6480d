"""Animated pictures as `video_url` and as `image_url`, and transparency, through the whole application."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epd.errors import RequestError
from epd.models import embedded_model_path
from epd.serve_app.app_args import AppArgs
from epd.types import UInt8Array
from tests.serve_app.conftest import data_url
from tests.serve_app.real_app import RealApp, real_app
from tests.video.pictures import CLEAR, RGBA, Part, apng, gif, png, webp

JSON = dict[str, Any]
SIZE = (64, 64)
RED, GREEN, BLUE = (220, 20, 20, 255), (20, 220, 20, 255), (20, 20, 220, 255)
WRITERS = {"gif": gif, "apng": apng, "webp": webp}


@pytest.fixture(scope="module")
def app() -> Iterator[RealApp]:
    with real_app(embedded_model_path(), "1epd") as app:
        yield app


def fill(colour: tuple[int, int, int, int]) -> UInt8Array:
    return np.full((64, 64, 4), colour, np.uint8)


def slides() -> list[Part]:
    return [
        Part(fill(colour), delay_ms=500, disposal=CLEAR) for colour in (RED, GREEN, BLUE, RED, GREEN, BLUE)
    ]


def part(kind: str, data: bytes, tmp_path: Path) -> JSON:
    path = tmp_path / "picture"
    path.write_bytes(data)
    return {"type": kind, kind: {"url": data_url(path, "image/x")}}


def ask(app: RealApp, *parts: JSON) -> tuple[int, JSON]:
    body = {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "Which shape?"}]}],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 5,
        "epd": {"num_frames": 6} if any(each["type"] == "video_url" for each in parts) else {},
    }
    reply = app.http.post("/v1/chat/completions", json=body)
    return reply.status_code, reply.json()


def seen(reply: JSON) -> list[tuple[str, float]]:
    first = reply["choices"][0]["logprobs"]["content"][0]
    return [(each["token"], round(each["logprob"], 3)) for each in first["top_logprobs"]]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_video_where_a_video_is_taken(app: RealApp, tmp_path: Path, kind: str) -> None:
    status, reply = ask(app, part("video_url", WRITERS[kind](SIZE, slides()), tmp_path))
    assert status == 200
    assert (reply["epd"]["frames"], reply["epd"]["unseen_frames"]) == (6, 0)


@pytest.mark.parametrize("kind", WRITERS)
def test_the_first_frame_where_an_image_is_taken_and_the_others_are_told(
    app: RealApp, tmp_path: Path, kind: str
) -> None:
    status, moving = ask(app, part("image_url", WRITERS[kind](SIZE, slides()), tmp_path))
    assert status == 200
    assert moving["epd"]["unseen_frames"] == 5
    _, still = ask(app, part("image_url", png(SIZE, 8, RGBA, [row.tobytes() for row in fill(RED)]), tmp_path))
    assert still["epd"]["unseen_frames"] == 0
    assert seen(moving) == seen(still)


def test_one_file_in_both_ways_in_one_request(app: RealApp, tmp_path: Path) -> None:
    data = gif(SIZE, slides())
    both = [part(kind, data, tmp_path) for kind in ("image_url", "video_url", "image_url")]
    status, reply = ask(app, *both)
    assert status == 200
    assert (reply["epd"]["frames"], reply["epd"]["unseen_frames"]) == (8, 10)


def test_a_still_picture_is_no_video(app: RealApp, tmp_path: Path) -> None:
    status, reply = ask(app, part("video_url", gif(SIZE, slides()[:1]), tmp_path))
    assert status == 400
    assert "send it as image_url" in reply["error"]["message"]


def test_transparency_is_seen_as_white(app: RealApp, tmp_path: Path) -> None:
    hidden = fill(RED)
    hidden[16:48, 16:48] = (0, 0, 0, 0)
    flat = fill(RED)
    flat[16:48, 16:48] = 255
    replies = [
        ask(app, part("image_url", png(SIZE, 8, RGBA, [row.tobytes() for row in pixels]), tmp_path))[1]
        for pixels in (hidden, flat)
    ]
    assert seen(replies[0]) == seen(replies[1])


def test_the_background_is_an_argument_that_is_checked() -> None:
    assert AppArgs(image_background="#102030").image_background == "#102030"
    with pytest.raises(ValueError, match="allowed: #rrggbb"):
        AppArgs(image_background="snow")
    with pytest.raises((ValueError, RequestError)):
        AppArgs(image_background="1,2,256")
