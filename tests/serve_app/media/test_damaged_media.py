"""Damaged media through the real thing: HTTP, orchestrator, workers as threads, media read by children.

Every file is answered or refused; no reply shows a path of ours, no worker is lost, nothing hangs.
"""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from epd.models import embedded_model_path
from epd.serve_app.http.api import create_api
from epd.serve_app.media.media_processes import MediaProcesses
from epd.video import FetchPolicy, MediaChildren
from tests.serve_app.conftest import JSON, image_part, media_settings, video_part
from tests.serve_app.deployments import Deployment, deployed
from tests.serve_app.hostile import png
from tests.serve_app.real_app import PATIENT
from tests.video.corpus import Variant, corpus
from tests.video.recipes import GOP15, Recipe, make

HANG_S = 600.0
REFUSALS = {400, 413, 415, 422}


@pytest.fixture(scope="module")
def children() -> Iterator[MediaChildren]:
    children = MediaChildren(PATIENT, decodes_video=True)
    yield children
    children.close()


@asynccontextmanager
async def asked(children: MediaChildren, folder: Path) -> AsyncIterator[tuple[Deployment, httpx.AsyncClient]]:
    """The application over `folder` as its spool and its media folder."""
    media = media_settings(FetchPolicy(media_folder=folder), folder)
    fleet = {"processes": MediaProcesses(children, children), "media": media}
    async with deployed(embedded_model_path(), "1epd", fleet=fleet) as deployment:
        app = create_api(deployment.service, deployment.service.media)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield deployment, http
        await deployment.settle()
        app.state.server.close()


async def ask(http: httpx.AsyncClient, part: JSON) -> httpx.Response:
    content = [part, {"type": "text", "text": "What?"}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 2,
        "epd": {"num_frames": 4} if part["type"] == "video_url" else {},
    }
    return await asyncio.wait_for(http.post("/v1/chat/completions", json=body), HANG_S)


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def as_data(data: bytes) -> str:
    return f"data:;base64,{as_base64(data)}"


def frame_lists(image: bytes) -> dict[str, list[str]]:
    """Lists of frames, of which at least one is none: each frame in base64, or what stands in its place."""
    good, rest = as_base64(image), random.Random(5)
    noise = bytes(rest.randrange(256) for _ in range(200))
    wide = as_base64(png(96, 8))
    damaged = {
        "cut": as_base64(image[: len(image) // 2]),
        "cut in its head": as_base64(image[:20]),
        "its last byte gone": as_base64(image[:-1]),
        "noise": as_base64(noise),
        "noise in its middle": as_base64(image[:100] + noise + image[300:]),
        "one bit": as_base64(image[:60] + bytes([image[60] ^ 1]) + image[61:]),
        "empty": "",
        "a text": as_base64(b"no image"),
        "no base64": "*" * 40,
        "not all of base64": good[:-3],
        "other alphabet": good.replace("+", "-").replace("/", "_"),
        "a line break": good[:40] + "\n" + good[40:],
        "a URL": "https://example.org/a.png",
        "a whole data URL": "data:image/png;base64",
        "of another size": wide,
        "of a claimed size": as_base64(png(64, 48, claimed=(30_000, 30_000))),
        "of one pixel": as_base64(png(1, 1)),
        "a video": as_base64(b"\0\0\0\x18ftypmp42" + bytes(64)),
    }
    lists = {name: [good, frame, good] for name, frame in damaged.items()}
    return {**lists, "the first alone": [damaged["cut"]], "all empty": ["", "", ""], "none": [""]}


def test_every_damaged_list_of_frames_is_answered_or_refused(
    children: MediaChildren, tmp_path: Path, media: dict[str, Path]
) -> None:
    image = media["image"].read_bytes()
    lists = frame_lists(image)
    good = [as_base64(image)] * 3

    async def run() -> dict[str, httpx.Response]:
        async with asked(children, tmp_path) as (deployment, http):
            replies = {}
            for name, frames in {**lists, "sound": good}.items():
                part = video_part("data:video/jpeg;base64," + ",".join(frames))
                replies[name] = await ask(http, part)
            status = await deployment.service.status()
            assert status.counters.get("workers_lost", 0) == 0
            return replies

    replies = asyncio.run(run())
    for name, reply in replies.items():
        assert reply.status_code == 200 or reply.status_code in REFUSALS, (name, reply.text)
        assert not any(word in reply.text for word in (str(tmp_path), "/proc", "epd-media")), name
        if reply.status_code != 200 and name not in ("all empty", "none"):
            assert "frame" in reply.json()["error"]["message"], (name, reply.text)
    assert replies.pop("sound").status_code == 200
    assert len(replies) >= 20
    assert sum(reply.status_code != 200 for reply in replies.values()) >= 15


def test_every_damaged_file_is_answered_or_refused(
    children: MediaChildren, tmp_path: Path, media: dict[str, Path]
) -> None:
    recipe = Recipe("small.mp4", options=GOP15, num_frames=30, width=96, height=64)
    variants = list(corpus({"small.mp4": make(recipe, tmp_path / "small.mp4")}, per_damage=2))
    image = media["image"].read_bytes()
    images = [Variant(f"cut-{size}.png", image[:size]) for size in (10, 60, len(image) // 2)]

    async def run() -> list[tuple[str, httpx.Response]]:
        async with asked(children, tmp_path) as (deployment, http):
            replies = []
            for variant in variants:
                replies.append((variant.name, await ask(http, video_part(as_data(variant.data)))))
                path = tmp_path / "named.mp4"
                path.write_bytes(variant.data)
                replies.append((variant.name, await ask(http, video_part(path.as_uri()))))
            for variant in (*images, Variant("sound", image)):
                replies += [(variant.name, await ask(http, image_part(as_data(variant.data))))]
            status = await deployment.service.status()
            assert status.counters.get("workers_lost", 0) == 0
            return replies

    replies = asyncio.run(run())
    for name, reply in replies:
        assert reply.status_code == 200 or reply.status_code in REFUSALS, (name, reply.text)
        assert str(tmp_path) not in reply.text, (name, reply.text)
        assert "/proc" not in reply.text, (name, reply.text)
        assert "epd-media" not in reply.text, (name, reply.text)
    statuses = [reply.status_code for _, reply in replies]
    assert statuses[-1] == 200
    assert statuses.count(200) > 10  # some damage is harmless
    assert len(statuses) - statuses.count(200) > 40
