"""Media of requests: from wherever they may come to files of their own, and away again."""

from __future__ import annotations

import contextlib
import errno
import gc
import http.server
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import monotonic

import httpx
import pytest

from epd.control.request_budget import RequestLimits
from epd.errors import CancelledError, MediaLimitError, OverloadedError
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.server_state import ApiSettings
from epd.serve_app.media.spool_files import ByteBudget, RequestFolder
from epd.serve_app.service import MediaReference
from epd.types import content_hash
from epd.video import FetchPolicy
from tests.serve_app.conftest import JSON, Front, data_url, image_part, media_settings, video_part
from tests.serve_app.fakes import FakeService
from tests.serve_app.http.test_api_keys import ask
from tests.serve_app.http.test_api_keys import line as key_line
from tests.serve_app.server import NEVER_S, wait_until
from tests.video.corpus import corpus


@pytest.fixture
def folder(tmp_path: Path, media: dict[str, Path]) -> Path:
    """A folder that file: URLs may name, with a picture in it and a link that leads out."""
    inside = tmp_path / "media"
    inside.mkdir()
    (inside / "a b.png").write_bytes(media["image"].read_bytes())
    (inside / "out.png").symlink_to(media["image"])
    return inside


@pytest.fixture
def web(media: dict[str, Path]) -> Iterator[str]:
    """A server on loopback with the test's media; `slow` never ends."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            while self.path == "/slow" and not stopped.wait(0.05):
                self.wfile.write(b"x")
            if self.path in ("/image", "/video"):
                self.wfile.write(media[self.path[1:]].read_bytes())

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):
                super().handle()

    stopped = threading.Event()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://localhost:{server.server_port}"
        stopped.set()
        server.shutdown()
        thread.join()


LOCAL = FetchPolicy(allowed_hosts=frozenset({"localhost"}), max_s=NEVER_S, grace_s=NEVER_S)


def test_data_urls_become_files_in_order(front: Front, media: dict[str, Path]) -> None:
    response = front.ask_about(
        image_part(data_url(media["image"], "image/png")),
        video_part(data_url(media["video"], "video/mp4")),
        image_part(data_url(media["wide_image"], "image/png")),
    )
    assert response.status_code == 200, response.text
    request = front.service.requests[0]
    names = ("image", "video", "wide_image")
    assert [source.kind for source in request.media] == ["image", "video", "image"]
    assert [source.mm_hash for source in request.media] == [content_hash(media[name]) for name in names]
    assert front.service.files_seen[0] == [media[name].read_bytes() for name in names]
    assert [source.num_bytes for source in request.media] == [media[name].stat().st_size for name in names]
    front.wait_until_empty()
    assert not any(path.exists() for path in front.service.paths_seen[0])


def test_media_of_earlier_turns_come_first(front: Front, media: dict[str, Path]) -> None:
    image, video = (
        image_part(data_url(media["image"], "image/png")),
        video_part(data_url(media["video"], "video/mp4")),
    )
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "First?"}, video]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [image]},
    ]
    assert front.ask({"messages": turns}).status_code == 200
    assert [source.kind for source in front.service.requests[0].media] == ["video", "image"]


def code_of(refused: httpx.Response) -> str:
    """Of the error, which is the client's."""
    assert refused.status_code == 400, refused.text
    code: str = refused.json()["error"]["code"]
    return code


def test_a_download(run_front: Callable[..., Front], web: str, media: dict[str, Path]) -> None:
    front = run_front(fetch=LOCAL)
    assert front.ask_about(image_part(f"{web}/image")).status_code == 200
    assert front.service.files_seen[0] == [media["image"].read_bytes()]


def test_no_private_address_is_asked(front: Front, web: str) -> None:
    response = front.ask_about(image_part(f"{web}/image"))
    assert code_of(response) == "media_forbidden"
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["message"].startswith("image, number 1 of the media: ")


def test_a_download_that_never_ends_is_given_up(run_front: Callable[..., Front], web: str) -> None:
    response = run_front(fetch=replace(LOCAL, max_s=1.0)).ask_about(image_part(f"{web}/slow"))
    assert code_of(response) == "media_limit"
    assert "took more than 1 s" in response.json()["error"]["message"]


def test_a_file_is_used_where_it_lies(run_front: Callable[..., Front], folder: Path) -> None:
    front = run_front(fetch=FetchPolicy(media_folder=folder))
    response = front.ask_about(image_part(f"file://{folder}/a%20b.png"))
    assert response.status_code == 200, response.text
    assert front.service.paths_seen[0] == [folder / "a b.png"]
    assert (folder / "a b.png").exists()


def test_a_file_that_changed_has_another_hash(
    run_front: Callable[..., Front], folder: Path, media: dict[str, Path]
) -> None:
    front = run_front(fetch=FetchPolicy(media_folder=folder))
    path = folder / "a b.png"
    front.ask_about(image_part(path.as_uri()))
    path.write_bytes(media["wide_image"].read_bytes())
    os.utime(path, ns=(1, 1))
    front.ask_about(image_part(path.as_uri()))
    hashes = [request.media[0].mm_hash for request in front.service.requests]
    assert hashes == [content_hash(media["image"]), content_hash(media["wide_image"])]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("out.png", "media_forbidden"),
        ("../secret.png", "media_forbidden"),
        ("", "media_forbidden"),
        ("nothing.png", "media_not_found"),
        ("a%00b.png", "media_not_found"),
    ],
)
def test_other_files_are_not_read(
    run_front: Callable[..., Front], folder: Path, media: dict[str, Path], name: str, code: str
) -> None:
    (folder.parent / "secret.png").write_bytes(media["image"].read_bytes())
    response = run_front(fetch=FetchPolicy(media_folder=folder)).ask_about(
        image_part(f"file://{folder}/{name}")
    )
    assert code_of(response) == code
    assert str(folder) not in response.text


def test_no_file_is_read_without_a_folder(front: Front, media: dict[str, Path]) -> None:
    assert code_of(front.ask_about(image_part(media["image"].as_uri()))) == "media_forbidden"


@pytest.mark.parametrize("url", ["", "/etc/passwd", "image.png", "ftp://host/x", "javascript:0", "C:\\x.png"])
def test_other_urls_are_refused(front: Front, url: str) -> None:
    response = front.ask_about(image_part(url))
    assert response.status_code == 400
    assert "allowed http, https, data, file" in response.json()["error"]["message"]


def test_kinds_are_what_they_are_called(front: Front, media: dict[str, Path]) -> None:
    response = front.ask_about(image_part(data_url(media["video"], "video/mp4")))
    assert code_of(response) == "unsupported_media"
    assert "send it as video_url" in response.json()["error"]["message"]


def corrupt(media: dict[str, Path]) -> dict[str, bytes]:
    image, clip = media["image"].read_bytes(), media["video"].read_bytes()
    return {
        "nothing": b"", "noise": bytes(range(256)) * 8, "text": b"<html>not found</html>",
        "half a header": image[:10], "cut video": clip[: len(clip) // 2], "video head": clip[:64],
        "playlist": b"#EXTM3U\nfile:///etc/passwd\n",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["nothing", "noise", "text", "half a header", "cut video", "video head", "playlist"]
)
@pytest.mark.parametrize("part", [image_part, video_part])
def test_corrupt_media_are_the_clients_to_mend(
    front: Front, tmp_path: Path, media: dict[str, Path], part: Callable[[str], JSON], name: str
) -> None:
    path = tmp_path / "x"
    path.write_bytes(corrupt(media)[name])
    response = front.ask_about(part(data_url(path, "application/octet-stream")))
    assert code_of(response) in ("unsupported_media", "corrupt_media")
    assert str(front.spool.path) not in response.text
    assert front.service.requests == []
    assert front.ask().status_code == 200


def test_the_corrupt_corpus_of_video_is_no_error_of_ours(
    front: Front, tmp_path: Path, media: dict[str, Path]
) -> None:
    variants = list(corpus({"video.mp4": media["video"]}, per_damage=2))
    assert len(variants) > 30
    for variant in variants:
        (tmp_path / "x").write_bytes(variant.data)
        response = front.ask_about(video_part(data_url(tmp_path / "x", "video/mp4")))
        if response.status_code != 200:
            codes = ("media_limit", "unsupported_media", "corrupt_media")
            assert code_of(response) in codes, (variant.name, response.text)


@pytest.mark.parametrize("url", ["data:image/png;base64", "data:image/png;base64,@@@", "data:,", "data:"])
def test_data_urls_without_data(front: Front, url: str) -> None:
    assert code_of(front.ask_about(image_part(url))) in ("unsupported_media", "corrupt_media")


def test_limits(run_front: Callable[..., Front], folder: Path, media: dict[str, Path]) -> None:
    size = media["image"].stat().st_size
    part = image_part(data_url(media["image"], "image/png"))
    small = run_front(fetch=FetchPolicy(max_bytes=size - 1, media_folder=folder))
    assert code_of(small.ask_about(part)) == "media_limit"
    assert code_of(small.ask_about(image_part(f"file://{folder}/a%20b.png"))) == "media_limit"
    few = run_front(limits=RequestLimits(max_media=2))
    assert few.ask_about(part, part).status_code == 200
    assert code_of(few.ask_about(part, part, part)) == "request_budget"


def test_a_full_spool_takes_no_more(run_front: Callable[..., Front], media: dict[str, Path]) -> None:
    part = image_part(data_url(media["image"], "image/png"))
    front = run_front(max_spooled_bytes=media["image"].stat().st_size * 3 // 2)
    response = front.ask_about(part, part)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "2"
    assert front.ask_about(part).status_code == 200


def test_a_service_that_fails_leaves_no_file(run_front: Callable[..., Front], media: dict[str, Path]) -> None:
    front = run_front(FakeService(error=RuntimeError("broken")))
    assert front.ask_about(image_part(data_url(media["image"], "image/png"))).status_code == 500
    front.wait_until_empty()


def test_media_sent_as_text_are_not_held_while_they_are_asked_about(
    run_front: Callable[..., Front], media: dict[str, Path]
) -> None:
    front = run_front(FakeService(holds_after=1))
    content = [image_part(data_url(media["image"], "image/png"))]
    body = {"messages": [{"role": "user", "content": content}], "stream": True}
    before = requests_held()  # of other tests
    with front.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert next(response.iter_lines())
        assert front.server.front.bodies.budget.num_taken == 0
        # The thread that has fetched them lets go of them a moment later.
        wait_until(lambda: [one for one in requests_held() if not any(one is each for each in before)] == [])


def requests_held() -> list[object]:
    return [one for one in gc.get_objects() if type(one) in (ChatRequest, MediaReference)]


def test_a_client_that_leaves_while_its_media_come(run_front: Callable[..., Front], web: str) -> None:
    front = run_front(fetch=LOCAL)
    with pytest.raises(Exception, match="timed out"):
        front.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": [image_part(f"{web}/slow")]}]},
            timeout=0.2,
        )
    front.wait_until_empty()
    wait_until(lambda: front.spool.num_downloads == 0)  # and the thread has found the folder closed
    front.wait_until_empty()
    assert front.service.requests == []


def test_defaults_are_bounded() -> None:
    settings, fetch = ApiSettings(), media_settings().fetch
    assert fetch.allowed_hosts is None
    assert fetch.media_folder is None
    assert settings.max_body_bytes <= settings.bodies.max_held_bytes <= 2 << 30


# Limits of each kind of source


@pytest.fixture
def dripping() -> Iterator[str]:
    """A server that sends a byte now and then, for ever; `/N` are addresses of it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while not stopped.wait(0.05):
                    self.wfile.write(b"x")

        def log_message(self, *_: object) -> None:
            pass

    stopped = threading.Event()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://localhost:{server.server_port}"
        stopped.set()
        server.shutdown()
        thread.join()


class Clock:
    """Stands for `time` where downloads are measured. later_s: than it is."""

    later_s = 0.0

    def monotonic(self) -> float:
        return monotonic() + self.later_s


def test_dripping_urls_hold_up_no_other_media(
    run_front: Callable[..., Front],
    dripping: str,
    web: str,
    folder: Path,
    media: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sixteen dripping URLs of two clients: data:, file: and quick http media are there all the same."""
    clock = Clock()
    monkeypatch.setattr("epd.video.sources.download.time", clock)
    slow = replace(LOCAL, media_folder=folder, max_s=3 * NEVER_S)
    front = run_front(fetch=slow, num_downloads=10, max_s=NEVER_S)
    urls = [image_part(f"{dripping}/{number}") for number in range(8)]
    with ThreadPoolExecutor(2) as clients:
        attacks = [clients.submit(front.ask_about, *urls) for _ in range(2)]
        wait_until(lambda: front.spool.num_downloads >= 8)
        for url in (data_url(media["image"], "image/png"), (folder / "a b.png").as_uri(), f"{web}/image"):
            assert front.ask_about(image_part(url)).status_code == 200
        assert not any(attack.done() for attack in attacks), "nothing waited for them"
        clock.later_s = 2 * NEVER_S
        for attack in attacks:
            response = attack.result(timeout=200)
            assert code_of(response) == "media_limit"
            assert "bytes a second" in response.json()["error"]["message"]
    wait_until(lambda: front.spool.num_downloads == 0)


def test_a_client_with_slow_urls_leaves_downloads_to_others(
    run_front: Callable[..., Front],
    dripping: str,
    web: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of ten requests has one: more than there may be at once."""
    clock = Clock()
    monkeypatch.setattr("epd.video.sources.download.time", clock)
    keys = tmp_path / "keys.jsonl"
    keys.write_text(f"{key_line('many', 'ann')}\n{key_line('one', 'ben')}\n")
    front = run_front(
        fetch=replace(LOCAL, max_s=3 * NEVER_S), num_downloads=8, max_s=NEVER_S, api_keys_file=keys
    )

    def about(key: str, url: str) -> httpx.Response:
        content = [image_part(url), {"type": "text", "text": "?"}]
        return ask(front, key, messages=[{"role": "user", "content": content}])

    with ThreadPoolExecutor(10) as requests:
        slow = [requests.submit(about, "many", f"{dripping}/{number}") for number in range(10)]
        wait_until(lambda: front.spool.num_downloads == 7)
        assert about("one", f"{web}/image").status_code == 200
        assert front.spool.num_downloads == 7
        clock.later_s = 2 * NEVER_S
        assert {code_of(each.result()) for each in slow} == {"media_limit"}


def test_a_download_ends_when_its_client_leaves(run_front: Callable[..., Front], dripping: str) -> None:
    front = run_front(fetch=LOCAL)
    with pytest.raises(httpx.ReadTimeout):
        front.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": [image_part(f"{dripping}/1")]}]},
            timeout=0.5,
        )
    wait_until(lambda: front.spool.num_downloads == 0)  # before the download's own grace ends
    front.wait_until_empty()


def test_64_slow_urls_of_one_request_end_together(run_front: Callable[..., Front], dripping: str) -> None:
    front = run_front(fetch=LOCAL, max_s=1.0)
    response = front.ask_about(*(image_part(f"{dripping}/{number}") for number in range(64)))
    assert code_of(response) == "media_limit"
    assert "took more than 1 s to fetch" in response.json()["error"]["message"]


def test_percent_encoded_megabytes_are_refused_before_they_are_decoded(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding 24 MB of escapes takes seconds, in which a front would do nothing else."""
    decoded: list[str] = []
    monkeypatch.setattr("epd.video.sources.data_uri.unquote_to_bytes", decoded.append)
    response = front.ask_about(image_part("data:image/png," + "%41" * 8_000_000))
    assert code_of(response) == "media_limit"
    assert "encode it as base64" in response.json()["error"]["message"]
    assert not decoded


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_503_and_costs_nothing_else(
    run_front: Callable[..., Front], media: dict[str, Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    front = run_front()
    part = image_part(data_url(media["image"], "image/png"))

    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("epd.serve_app.media.spool_files.os.write", full)
        response = front.ask_about(part)
        assert front.ask().status_code == 200
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    front.wait_until_empty()
    assert front.ask_about(part).status_code == 200


def test_bytes_are_asked_for_before_they_come(tmp_path: Path) -> None:
    """What a server announces is set aside at once; what it does not, piece by piece."""
    budget = ByteBudget(100, "media")
    folder = RequestFolder(tmp_path, budget, 60)
    with folder.new_file() as file:
        file.expect(40)
        assert budget.num_taken == 40
        file.write(b"x" * 30)
        file.write(b"x" * 15)
        assert budget.num_taken == 45
        with pytest.raises(MediaLimitError, match="61 bytes or more; allowed 60"):
            file.expect(16)
    other = RequestFolder(tmp_path, budget, 60)
    with other.new_file() as file, pytest.raises(OverloadedError):
        file.write(b"x" * 56)
    folder.close()
    with pytest.raises(CancelledError):
        folder.new_file()
    other.close()
    assert budget.num_taken == 0
    assert list(tmp_path.iterdir()) == []
