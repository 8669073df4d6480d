"""A video that was named is asked about by its name alone in another life: not a byte of it is fetched.

Modules: `epd/store/object_values.py`.
"""

from __future__ import annotations

import asyncio
import http.server
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import pytest

from epd.serve_app.http.api import ApiSettings
from epd.serve_app.http.requests import named_media
from epd.serve_app.http.requests.named_media import KeptNames
from epd.serve_app.service import FetchedItem
from epd.store import object_store, object_values, slabs
from epd.store.object_values import ObjectValues
from epd.store.piece_files import PieceFiles
from epd.types import MediaFacts, MediaKind
from epd.video import FetchPolicy
from tests.serve_app.conftest import JSON, data_url, media_settings, video_part
from tests.serve_app.http.test_frame_lists import drawn, listed
from tests.serve_app.http.test_media_uuid import alone, body_of, named
from tests.serve_app.real_app import RealApp, real_app
from tests.store.object_servers import S3, Objects, s3
from tests.store.test_slabs import emptied, flipped, missing, run, truncated

__all__ = ("s3",)

_CHAT = "/v1/chat/completions"
_KEY: tuple[bytes, MediaKind, str] = (b"client", "video", "holiday")
_ITEM = FetchedItem(MediaFacts("video", 8, 8, 12, 2.0), "hash", 99)


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


_ABOUT = {"kind": "names of videos"}


def files_of(kept: Path, url: str | None = None) -> tuple[PieceFiles, ObjectValues | None]:
    objects = None if url is None else ObjectValues(url, "names", _ABOUT)
    return PieceFiles(kept, "names", 1 << 20, _ABOUT), objects


def names_in(kept: Path, url: str | None = None) -> KeptNames:
    return KeptNames(*files_of(kept, url))


@contextmanager
def life(model: Path, kept: Path, url: str | None = None) -> Iterator[RealApp]:
    """An application with nothing in memory, over a folder. url: of an object store."""
    settings = ApiSettings(name_files=lambda: files_of(kept, url))
    fetch = FetchPolicy(allowed_hosts=frozenset({"localhost"}))
    with real_app(
        model,
        "1e1p1d",
        settings,
        replace(media_settings(fetch), model=model),
        cache_dir=kept,
        workers={"cache_dir": kept, "cache_objects": url},
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
    names = names_in(tmp_path)
    names.keep(_KEY, _ITEM)
    assert asyncio.run(names.known(_KEY)) == _ITEM
    names.keep(_KEY, replace(_ITEM, facts=Length("video", 6.0)))  # type: ignore[arg-type]
    assert asyncio.run(names.known(_KEY)) is None
    names.close()


def test_a_name_is_enough_on_another_machine(
    checkpoints: dict[str, Path], web: Web, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a folder of its own, and the same bucket."""
    for name in ("_FIRST_LOOK_S", "_CLOSE_S"):
        monkeypatch.setattr(slabs, name, 3600.0)
    model, url = checkpoints["qwen2_5_vl"], s3.url(uuid.uuid4().hex)
    with life(model, tmp_path / "one", url) as first:
        expected, _ = asked(first, named(video_part(web.url), "film"))
    with life(model, tmp_path / "two", url) as second:
        choices, cache = asked(second, alone("video", "film"))
        assert choices == expected
        assert cache["kv"]["objects"]["bytes"] > 0
        assert "received the uuid 'film'" in refused(second, alone("video", "film"), cache_salt="another")
    assert web.num_fetched == 1


@dataclass
class Machines:
    """What two machines know of names. at_s: the time of their clocks."""

    url: str
    one: KeptNames
    two: KeptNames
    at_s: float = 0.0

    def keep(self, names: KeptNames, item: FetchedItem | None) -> None:
        """Names something a second later, and waits until it is kept."""
        self.at_s += 1.0
        names.keep(_KEY, item)
        asyncio.run(names.known(_KEY))

    def known(self) -> list[FetchedItem | None]:
        return [asyncio.run(each.known(_KEY)) for each in (self.one, self.two)]


@pytest.fixture
def machines(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setattr(object_store, "_SILENT_S", 0.0)
    for name in ("_CONNECT_S", "_REQUEST_S"):
        monkeypatch.setattr(object_store, name, 60.0)
    url = s3.url(uuid.uuid4().hex)
    both = Machines(url, names_in(tmp_path / "one", url), names_in(tmp_path / "two", url))
    monkeypatch.setattr(named_media, "time", SimpleNamespace(time=lambda: both.at_s))
    yield both
    both.one.close()
    both.two.close()


def test_of_two_machines_the_one_that_named_last_counts(machines: Machines) -> None:
    """Also where the other one has an older name on its disk, and where nothing is kept of the last one."""
    other = replace(_ITEM, mm_hash="other")
    assert machines.known() == [None, None]
    machines.keep(machines.one, _ITEM)
    assert machines.known() == [_ITEM, _ITEM]
    machines.keep(machines.two, other)
    assert machines.known() == [other, other]
    machines.keep(machines.one, _ITEM)
    assert machines.known() == [_ITEM, _ITEM]
    machines.keep(machines.two, None)
    assert machines.known() == [None, None]
    code, listed = run("ls", machines.url)
    assert (code, listed.split()[1:3]) == (0, ["1", "piece"])


def test_names_are_known_on_their_machine_while_the_store_fails(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it did not take is newer than what it has, once it answers again. One warning."""
    other = replace(_ITEM, mm_hash="other")
    machines.keep(machines.two, other)
    with monkeypatch.context() as patch:
        patch.setattr(object_values, "put", fails)
        patch.setattr(object_values, "read_whole", fails)
        machines.keep(machines.one, _ITEM)
        machines.keep(machines.one, _ITEM)
        assert machines.known() == [_ITEM, other]
    assert machines.known() == [_ITEM, other]
    warnings = [each.message for each in caplog.records if "does not answer" in each.message]
    assert len(warnings) == 2, "of each machine"


def fails(*_: object) -> None:
    raise OSError("no route")


def test_a_silent_store_is_left_alone(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    machines.keep(machines.two, _ITEM)
    monkeypatch.setattr(object_store, "_SILENT_S", 3600.0)
    with monkeypatch.context() as patch:
        patch.setattr(object_values, "read_whole", fails)
        machines.known()
    monkeypatch.setattr(object_values, "read_whole", lambda *_: pytest.fail("it was asked"))
    monkeypatch.setattr(object_values, "put", lambda *_: pytest.fail("it was asked"))
    machines.keep(machines.one, _ITEM)
    assert machines.known() == [_ITEM, _ITEM], "each on its disk"


@pytest.mark.parametrize("damage", [flipped, truncated, emptied, missing])
def test_a_damaged_name_is_not_known_elsewhere(
    machines: Machines, s3: S3, damage: Callable[[Objects, str], None]
) -> None:
    machines.keep(machines.one, _ITEM)
    prefix = machines.url.split("/")[3].split("?")[0]
    objects = Objects(machines.url, s3, prefix)
    (path,) = objects.paths(".value")
    assert run("verify", machines.url) == (0, "1 piece, 0 damaged\n")
    damage(objects, path)
    assert machines.known() == [_ITEM, None]
    if damage is not missing:
        assert run("verify", machines.url)[0] == 1
    assert objects.paths(".value") == []
    machines.keep(machines.one, _ITEM)
    assert machines.known() == [_ITEM, _ITEM]


@dataclass(frozen=True)
class Length:
    """What another release might know of a medium."""

    kind: str
    length_s: float
