"""A video that was named is asked about by its name alone in another life: not a byte of it is fetched."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from epd.serve_app.http.api import ApiSettings
from epd.serve_app.http.requests.named_media import KeptNames
from epd.serve_app.service import FetchedItem
from epd.store.piece_files import PieceFiles
from epd.types import MediaFacts
from epd.video import FetchPolicy
from tests.serve_app.conftest import JSON, data_url, media_settings, video_part
from tests.serve_app.http.test_frame_lists import drawn, listed
from tests.serve_app.http.test_media_uuid import alone, body_of, named
from tests.serve_app.real_app import RealApp, real_app

_CHAT = "/v1/chat/completions"


class Web:
    """A server of one video. num_fetched: times that it was asked for."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.num_fetched = 0
        self.url = ""


@pytest.fixture
def web(media: dict[str, Path]) -> Iterator[Web]:
    web = Web(media["video"].read_bytes())

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            web.num_fetched += 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(web.content)))
            self.end_headers()
            self.wfile.write(web.content)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        web.url = f"http://localhost:{server.server_port}/video.mp4"
        yield web
        server.shutdown()
        thread.join()


@contextmanager
def life(model: Path, kept: Path) -> Iterator[RealApp]:
    """An application with nothing in memory, over a folder."""
    about = {"kind": "names of videos"}
    settings = ApiSettings(name_files=lambda: PieceFiles(kept, "names", 1 << 20, about))
    fetch = FetchPolicy(allowed_hosts=frozenset({"localhost"}))
    with real_app(
        model,
        "1e1p1d",
        settings,
        replace(media_settings(fetch), model=model),
        cache_dir=kept,
        workers={"cache_dir": kept},
    ) as app:
        yield app


def asked(app: RealApp, part: JSON, **more: Any) -> tuple[Any, JSON]:
    """The answer, and what was found for it."""
    response = app.http.post(_CHAT, json=body_of(part, temperature=0, max_tokens=8, **more))
    assert response.status_code == 200, response.text
    found = response.json()
    return found["choices"], found["epd"]["cache"]


def refused(app: RealApp, part: JSON, **more: Any) -> str:
    response = app.http.post(_CHAT, json=body_of(part, max_tokens=8, **more))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == "unknown_uuid"
    return str(error["message"])


def drop(kept: Path, kind: str) -> None:
    """Removes what is kept of a kind."""
    for folder in kept.iterdir():
        if folder.is_dir() and kind in (folder / "about.json").read_text():
            rmtree(folder)


def test_a_name_is_enough_after_a_restart(checkpoints: dict[str, Path], web: Web, tmp_path: Path) -> None:
    """Of keys and values, then of embeddings. Without these, the frames are asked for."""
    model, kept = checkpoints["qwen2_5_vl"], tmp_path / "kept"
    with life(model, kept) as first:
        expected, _ = asked(first, named(video_part(web.url), "film"))
        assert web.num_fetched == 1
        assert asked(first, alone("video", "film"))[0] == expected
        assert web.num_fetched == 1, "nor is it in the same life"
        refused(first, alone("video", "another"))
    for _ in range(2):
        with life(model, kept) as again:
            choices, cache = asked(again, alone("video", "film"))
            assert choices == expected
            assert cache["kv"] or cache["embeddings"]
            assert "not known" not in refused(again, alone("video", "film"), cache_salt="of another")
        drop(kept, "keys and values")
    drop(kept, "embeddings")
    with life(model, kept) as last:
        assert "not all of the medium's frames are kept" in refused(last, alone("video", "film"))
        assert asked(last, named(video_part(web.url), "film"))[0] == expected
    assert web.num_fetched == 2


def test_frames_that_nobody_kept_are_fetched_where_the_url_is_known(
    checkpoints: dict[str, Path], web: Web, tmp_path: Path
) -> None:
    """The URL is in memory alone. Another medium there is not taken for the one that was named."""
    more: JSON = {"media_io_kwargs": {"video": {"num_frames": 3}}}
    with life(checkpoints["qwen2_5_vl"], tmp_path) as app:
        asked(app, named(video_part(web.url), "film"))
        choices, _ = asked(app, alone("video", "film"), **more)
        assert web.num_fetched == 2
        assert choices == asked(app, video_part(web.url), **more)[0]
        web.content += b"\0\0\0\x08free"
        other: JSON = {"media_io_kwargs": {"video": {"num_frames": 12}}}
        assert "another medium is at its URL now" in refused(app, alone("video", "film"), **other)


def test_a_name_stands_for_what_was_named_last(
    checkpoints: dict[str, Path], media: dict[str, Path], web: Web, tmp_path: Path
) -> None:
    """Also for another kind of video, of which no facts are kept."""
    model = checkpoints["qwen2_5_vl"]
    with life(model, tmp_path) as first:
        asked(first, named(video_part(web.url), "film"))
        asked(first, named(video_part(web.url), "list"))
        asked(first, named(listed(drawn(4)), "list"))
        tall = video_part(data_url(media["tall_video"], "video/mp4"))
        expected, _ = asked(first, named(tall, "film"))
    with life(model, tmp_path) as second:
        assert asked(second, alone("video", "film"))[0] == expected
        assert "received the uuid 'list' without video_url" in refused(second, alone("video", "list"))
    assert [each for each in tmp_path.rglob("*") if b"film" in str(each).encode()] == []


def test_a_name_that_another_release_kept_is_not_known(tmp_path: Path) -> None:
    files = PieceFiles(tmp_path, "names", 1 << 20, {"kind": "names of videos"})
    names, key = KeptNames(files), (b"client", "video", "holiday")
    item = FetchedItem(MediaFacts("video", 8, 8, 12, 2.0), "hash", 99)
    names.keep(key, item)
    assert asyncio.run(names.known(key)) == item
    names.keep(key, replace(item, facts=Length("video", 6.0)))  # type: ignore[arg-type]
    assert asyncio.run(names.known(key)) is None
    names.close()


@dataclass(frozen=True)
class Length:
    """What another release might know of a medium."""

    kind: str
    length_s: float
