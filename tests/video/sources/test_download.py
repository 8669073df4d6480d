"""Fetching: bytes from allowed places only, within limits, whatever redirects and names do.

Modules: `video/sources/addresses.py`, `video/sources/data_uri.py`, `video/sources/policy.py`.
"""

from __future__ import annotations

import base64
import http.server
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pytest

from epd import video
from epd.errors import (
    CancelledError,
    EPDError,
    MediaForbiddenError,
    MediaLimitError,
    MediaNotFoundError,
    UnsupportedMediaError,
)
from epd.video.sources.addresses import is_public
from epd.video.sources.policy import BytesSink
from tests.video.conftest import Clip

BODY = bytes(range(256)) * 1000
NEVER_S = 3600.0
ALLOWED = frozenset({"127.0.0.1", "media.test", ".cdn.test"})


class Handler(http.server.BaseHTTPRequestHandler):
    """A media server with bad manners on request."""

    def do_GET(self) -> None:
        kind = self.path.strip("/").split("?")[0]
        if kind == "body":
            self._answer(200, BODY, {"Content-Length": str(len(BODY))})
        elif kind == "unsized":
            self._answer(200, BODY, {})
        elif kind == "short":
            self._answer(200, BODY[:100], {"Content-Length": str(len(BODY))})
        elif kind == "claims_much":
            self._answer(200, b"", {"Content-Length": str(1 << 40)})
        elif kind == "claims_nonsense":
            self._answer(200, b"", {"Content-Length": "many"})
        elif kind == "loop":
            self._answer(302, b"", {"Location": "/loop"})
        elif kind.startswith("to:"):
            self._answer(302, b"", {"Location": kind[3:].replace("|", "/")})
        elif kind == "slow":
            self._answer(200, b"", {"Content-Length": str(1 << 20)})
            self._drip(b"x")
        elif kind == "slow_head":
            self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Filler: ")
            self._drip(b"x")
        else:
            self._answer(404, b"", {})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _drip(self, piece: bytes) -> None:
        """Goes on until the client has gone."""
        with suppress(OSError):
            while True:
                self.wfile.write(piece)
                self.wfile.flush()
                time.sleep(0.05)

    def log_message(self, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def to_loopback(host: str, port: int, timeout_s: float) -> list[str]:
    return ["127.0.0.1"]


def policy(**options: object) -> video.FetchPolicy:
    """options: of it; by default no download is too slow, since this process may have to wait for a core."""
    patient = {"max_s": NEVER_S, "grace_s": NEVER_S}
    own = {"allowed_hosts": ALLOWED, "resolver": to_loopback, **patient, **options}
    return video.FetchPolicy(**own)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["body", "unsized", "to:|body", "to:|to:|body", "body?token=secret"])
def test_bytes_from_an_allowed_host(port: int, kind: str) -> None:
    assert video.fetch(f"http://127.0.0.1:{port}/{kind}", policy()) == BODY
    assert video.fetch(f"http://a.cdn.test:{port}/{kind}", policy()) == BODY


def test_a_private_address_is_refused_by_default(port: int) -> None:
    for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "2130706433", "127.1"):
        with pytest.raises(MediaForbiddenError):
            video.fetch(f"http://{host}:{port}/body")


def test_who_runs_the_process_may_name_a_private_address(port: int) -> None:
    """And is led to no other: a host that redirects chooses for itself."""
    trusting = video.FetchPolicy(trusts_urls=True, max_s=NEVER_S, grace_s=NEVER_S)
    for path in ("body", "to:|body"):
        assert video.fetch(f"http://127.0.0.1:{port}/{path}", trusting) == BODY
    with pytest.raises(MediaForbiddenError, match=r"the host localhost .* of --allowed-media-hosts; name it"):
        video.fetch(f"http://127.0.0.1:{port}/to:http:||localhost:{port}|body", trusting)


def test_every_address_of_a_name_is_checked(port: int) -> None:
    def one_is_private(host: str, port: int, timeout_s: float) -> list[str]:
        return ["93.184.215.14", "10.0.0.1"]

    with pytest.raises(MediaForbiddenError, match=r"10\.0\.0\.1"):
        video.fetch(f"http://media.example:{port}/body", video.FetchPolicy(resolver=one_is_private))


def test_the_checked_address_is_the_one_connected_to(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], timeout: float | None = None) -> object:
        connected.append(address)
        raise OSError("not in a test")

    answers = iter([["93.184.215.14"], ["127.0.0.1"]])
    monkeypatch.setattr("epd.video.sources.addresses.socket.create_connection", connect)
    with pytest.raises(MediaNotFoundError):
        video.fetch(f"http://rebinding.test:{port}/", video.FetchPolicy(resolver=lambda *_: next(answers)))
    assert connected == [("93.184.215.14", port)]


@pytest.mark.parametrize(
    "target",
    [
        "http:||localhost:{port}|body",
        "http:||169.254.169.254|latest",
        "file:|||etc|passwd",
        "ftp:||127.0.0.1|x",
    ],
)
def test_every_redirect_is_checked(port: int, target: str) -> None:
    with pytest.raises(MediaForbiddenError):
        video.fetch(f"http://127.0.0.1:{port}/to:{target.format(port=port)}", policy())


def test_only_listed_hosts_are_asked(port: int) -> None:
    for host in ("cdn.test.evil", "evilcdn.test", "localhost"):
        with pytest.raises(MediaForbiddenError, match="in --allowed-media-hosts"):
            video.fetch(f"http://{host}:{port}/body", policy())


@pytest.mark.parametrize("kind", ["body", "unsized", "claims_much"])
def test_too_many_bytes(port: int, kind: str) -> None:
    with pytest.raises(MediaLimitError):
        video.fetch(f"http://127.0.0.1:{port}/{kind}", policy(max_bytes=len(BODY) - 1))


@pytest.mark.parametrize("kind", ["slow", "slow_head"])
def test_too_slow(port: int, kind: str) -> None:
    """The server goes on for as long as it is listened to."""
    with pytest.raises(MediaLimitError, match=r"took more than 0\.4 s"):
        video.fetch(f"http://127.0.0.1:{port}/{kind}", policy(max_s=0.4))


def test_too_many_redirects(port: int) -> None:
    with pytest.raises(MediaLimitError):
        video.fetch(f"http://127.0.0.1:{port}/loop", policy())


@pytest.mark.parametrize("kind", ["nothing", "short", "claims_nonsense"])
def test_no_good_answer(port: int, kind: str) -> None:
    with pytest.raises(MediaNotFoundError) as caught:
        video.fetch(f"http://127.0.0.1:{port}/{kind}?token=secret", policy())
    assert "secret" not in str(caught.value)


def test_nobody_listens_and_nobody_knows() -> None:
    with pytest.raises(MediaNotFoundError):
        video.fetch("http://127.0.0.1:9/body", policy())
    with pytest.raises(MediaNotFoundError):
        video.fetch("http://no-such-name.invalid/x", video.FetchPolicy(max_s=5))


@pytest.mark.parametrize(
    "url",
    [
        "http://user:pass@127.0.0.1/x",
        "http://",
        "http://[::1/x",
        "gopher://x/y",
        "http://127.0.0.1:99999/",
        "rtsp://x/y",
    ],
)
def test_urls_that_make_no_sense(url: str) -> None:
    with pytest.raises(EPDError):
        video.fetch(url, policy())


def test_data_uris() -> None:
    encoded = base64.b64encode(BODY).decode()
    assert video.fetch(f"data:video/mp4;base64,{encoded}") == BODY
    assert video.fetch("data:,a%20b") == b"a b"
    with pytest.raises(MediaLimitError):
        video.fetch(f"data:video/mp4;base64,{encoded}", video.FetchPolicy(max_bytes=1000))
    for bad in ("data:video/mp4;base64", "data:;base64,@@@@", "data:;base64,abcde"):
        with pytest.raises(UnsupportedMediaError):
            video.fetch(bad)


def test_local_files_only_from_the_media_folder(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "in.mp4").write_bytes(b"inside")
    (tmp_path / "out.mp4").write_bytes(b"outside")
    (folder / "link.mp4").symlink_to(tmp_path / "out.mp4")
    os.mkfifo(folder / "pipe.mp4")
    allowed = video.FetchPolicy(media_folder=folder)
    assert video.fetch(folder / "in.mp4", allowed) == b"inside"
    assert video.fetch(f"file://{folder}/in.mp4", allowed) == b"inside"
    outside = (
        folder / "link.mp4",
        folder / ".." / "out.mp4",
        tmp_path / "out.mp4",
        "file://host/x",
        "/etc/passwd",
    )
    for path in (*outside, folder / "pipe.mp4", folder):
        with pytest.raises(MediaForbiddenError):
            video.fetch(path, allowed)
    with pytest.raises(MediaForbiddenError, match="set media_folder"):
        video.fetch(folder / "in.mp4")
    with pytest.raises(MediaNotFoundError):
        video.fetch(folder / "missing.mp4", allowed)
    with pytest.raises(MediaLimitError):
        video.fetch(folder / "in.mp4", video.FetchPolicy(media_folder=folder, max_bytes=3))


def test_what_is_fetched_decodes(clip: Clip) -> None:
    path = clip("h264_b.mp4")
    data = video.fetch(path, video.FetchPolicy(media_folder=path.parent))
    assert len(video.decode(data, [0.5])) == 1


@pytest.mark.parametrize(
    "address",
    [
        "10.1.2.3",
        "127.0.0.1",
        "169.254.169.254",
        "192.168.0.1",
        "172.16.0.1",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "2002:7f00:1::",
        "64:ff9b::7f00:1",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


def test_addresses_of_a_host_are_tried_in_turn(port: int) -> None:
    """Nobody listens at the first; the second answers."""
    both = policy(resolver=lambda *_: ["127.0.0.2", "127.0.0.1"])
    assert video.fetch(f"http://media.test:{port}/body", both) == BODY


@pytest.mark.parametrize("kind", ["slow", "slow_head"])
def test_slower_than_the_least_rate(port: int, kind: str) -> None:
    with pytest.raises(MediaLimitError, match=r"allowed: 100000 bytes a second after 0\.3 s"):
        video.fetch(f"http://127.0.0.1:{port}/{kind}", policy(grace_s=0.3))


@pytest.mark.parametrize("kind", ["slow", "slow_head"])
def test_a_download_is_cancelled_from_outside(port: int, kind: str) -> None:
    download = video.Download(policy())
    threading.Timer(0.2, download.cancel).start()
    with pytest.raises(CancelledError):
        download.run(f"http://127.0.0.1:{port}/{kind}", BytesSink())


def test_base64_in_pieces_and_with_escapes() -> None:
    data = os.urandom(3 << 20)
    text = base64.b64encode(data).decode()
    assert video.fetch(f"data:video/mp4;base64,{text}") == data
    escaped = text.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D")
    assert video.fetch(f"data:video/mp4;BASE64,{escaped}") == data
    for bad in (text[:-3] + "*==", text[:5000] + "=" + text[5000:], text[:5000] + "%2A" + text[5000:]):
        with pytest.raises((UnsupportedMediaError, MediaLimitError), match="base64"):
            video.fetch(f"data:video/mp4;base64,{bad}")


# What forgiving-base64 of the WHATWG's infra standard gives, None where it fails; by its rules, by hand.
FORGIVING: dict[str, bytes | None] = {
    "YQ==": b"a", "YQ": b"a", "YQ=": None, "YQ===": None, "YWI=": b"ab", "YWI": b"ab", "YWJj": b"abc",
    "YWJj=": None, "Y": None, "YWJjZ": None, " Y W J\tj\r\n\f": b"abc", "YQ = =": b"a", "YQ==\n": b"a",
    "": b"", "=": None, "==": None, "====": None, "YR==": b"a", "Y*Q=": None, "YWJj\x0b": None,
    "YWJj\u00a0": None, "YQ==YQ==": None, "YWJj\ufeff": None,
}  # fmt: skip


@pytest.mark.parametrize("form", FORGIVING, ids=repr)
@pytest.mark.parametrize("is_escaped", [False, True])
def test_base64_is_read_as_the_standard_says(form: str, is_escaped: bool) -> None:
    wanted, text = FORGIVING[form], quote(form, safe="") if is_escaped else form
    if wanted is None:
        with pytest.raises(UnsupportedMediaError, match="not base64"):
            video.fetch(f"data:;base64,{text}")
    else:
        assert video.fetch(f"data:;base64,{text}") == wanted


@pytest.mark.parametrize(
    "head",
    [
        "data:image/png;base64,", "data:;base64,", "DATA:IMAGE/PNG;BASE64,", "data:image/png; base64,",
        "data:image/png;base64 ,", "data: image/png ;charset=utf-8;base64,",
        "data:image/png;name=a.png;base64, ",
    ],
)  # fmt: skip
def test_heads_of_data_uris(head: str) -> None:
    assert video.fetch(f"{head}YWJj") == b"abc"


def test_more_forms_of_base64_that_clients_send() -> None:
    data = bytes(range(256)) * 50
    lines = base64.encodebytes(data).decode()
    assert "\n" in lines
    assert video.fetch(f"data:;base64,{lines}") == data
    assert video.fetch(f"data:;base64,{quote(lines)}") == data
    assert video.fetch(f"data:;base64,{base64.urlsafe_b64encode(data).decode()}") == data
    assert video.fetch("data:;base64,%59%57Jj") == b"abc"
    assert video.fetch("data:;base64,YWJj#part") == b"abc"
    assert video.fetch("data:base64,YWJj") == b"YWJj", "without a semicolon it is a media type"
    with pytest.raises(UnsupportedMediaError, match="not base64"):
        video.fetch("data:;base64,YW%zz")
