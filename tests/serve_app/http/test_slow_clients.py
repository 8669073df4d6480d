"""Slow sockets, bodies and URLs beside plain questions.

Workers as threads behind the server that fronts run; `make soak` does the same to the application on Ray,
whose fronts listen themselves or are behind Serve's proxy.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import monotonic, sleep

import httpx
import pytest

from epd.serve_app.http.address import HttpAddress
from epd.video import FetchPolicy
from tests.ports import free_port
from tests.serve_app.conftest import JSON, QUESTION, data_url, image_part, media_settings
from tests.serve_app.ray.ray_session import IGNORED, RaySession, running_app
from tests.serve_app.real_app import UNUSED, real_app
from tests.serve_app.server import START_S, wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
    *(pytest.mark.filterwarnings(each) for each in IGNORED),
]
IS_SOAK = "EPD_SOAK" in os.environ
KINDS = ["threads", "fronts", "proxy"] if IS_SOAK else ["threads"]
HOSTS = frozenset({"127.0.0.1"})
BODY = {**QUESTION, "max_tokens": 4}
MB = 1 << 20


@dataclass(frozen=True)
class App:
    http: httpx.Client
    alone_s: float = 0.0

    @property
    def address(self) -> tuple[str, int]:
        assert self.http.base_url.port is not None
        return self.http.base_url.host, self.http.base_url.port

    def connected(self, num_bytes: int | None = None, announced: int = MB) -> socket.socket:
        """A connection that asks nothing, or one whose body ends after so many bytes, and is not complete."""
        sock = socket.create_connection(self.address, timeout=START_S)
        if num_bytes is not None:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x.localhost\r\nContent-Length: {announced}"
            sock.sendall(head.encode() + b"\r\n\r\n" + b" " * num_bytes)
        return sock

    def ask_patiently(self, body: JSON) -> int:
        """The status, once it comes."""
        url = self.http.base_url.join("/v1/chat/completions")
        return httpx.post(url, json=body, timeout=START_S, trust_env=False).status_code

    def median_s(self) -> float:
        """Seconds of a plain question, health and metrics over new connections, all of which are answered."""
        seconds = []
        for _ in range(10):
            start = monotonic()
            with httpx.Client(base_url=self.http.base_url, trust_env=False, timeout=START_S) as http:
                assert http.post("/v1/chat/completions", json=BODY).status_code == 200
                assert http.get("/health").status_code == 200
                assert http.get("/metrics").status_code == 200
            seconds.append(monotonic() - start)
        return median(seconds)

    def check_answers(self) -> None:
        """A plain question takes no second, or on a busy machine not much more than it took alone.

        What is slow for its own sake is slow again, and what others made slow is not always.
        """
        most_s = max(1.0, 4 * self.alone_s)
        assert any(self.median_s() < most_s for _ in range(5))


@contextmanager
def running(kind: str, path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The application's URL."""
    if kind == "threads":
        with real_app(path, "1epd", media=media_settings(FetchPolicy(allowed_hosts=HOSTS))) as real:
            yield real.url
            real.wait_until_empty()
        return
    address = HttpAddress(port=free_port())
    session: RaySession = request.getfixturevalue("ray_session")
    own = address if kind == "fronts" else None
    with running_app(session, own, topology="1epd", allowed_media_hosts=HOSTS) as url:
        yield url


@pytest.fixture(scope="module", params=KINDS)
def app(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Iterator[App]:
    with (
        running(request.param, checkpoints["shapes-vl"], request) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=START_S, limits=UNUSED) as http,
    ):
        app = App(http)
        app.median_s()  # imports
        yield replace(app, alone_s=app.median_s())

        def num_left() -> int:
            status = http.get("/v1/epd/status").json()
            return int(status["num_requests"] + status["num_waiting"])

        wait_until(lambda: num_left() == 0)


@pytest.mark.parametrize("num_bytes", [None, 10], ids=["silent", "unfinished"])
def test_640_slow_sockets(app: App, num_bytes: int | None) -> None:
    with ExitStack() as stack:
        sockets = [stack.enter_context(app.connected(num_bytes)) for _ in range(640)]
        app.check_answers()
        assert sockets[0].recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.skipif(not IS_SOAK, reason="takes a GiB of memory: make soak")
def test_a_gib_of_unfinished_bodies(app: App) -> None:
    """Where no proxy takes them first, the front itself ends those that are too much."""
    with ExitStack() as stack:
        for _ in range(9):
            with suppress(ConnectionError):
                stack.enter_context(app.connected(114 * MB, announced=120 * MB))
        app.check_answers()


def test_a_header_of_64_mb(app: App) -> None:
    with app.connected() as sock, pytest.raises(ConnectionError):  # noqa: PT012
        sock.sendall(b"GET / HTTP/1.1\r\nA: ")
        for _ in range(256):
            sock.sendall(b"x" * (256 << 10))
    app.check_answers()


@contextmanager
def dripping_server() -> Iterator[str]:
    """The URL of a server whose answers come byte by byte, for ever."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        over = threading.Event()

        def drip(sock: socket.socket) -> None:
            with sock, suppress(OSError):
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 1000000\r\n\r\n")
                while not over.is_set():
                    sock.sendall(b"x")
                    sleep(0.2)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/image.png"
        over.set()


@pytest.mark.parametrize(("num_requests", "num_urls"), [(8, 1), (1, 64)])
def test_slow_urls(app: App, media: dict[str, Path], num_requests: int, num_urls: int) -> None:
    known = image_part(data_url(media["image"], "image/png"))
    with dripping_server() as url, ThreadPoolExecutor(num_requests) as attackers:
        content = [image_part(url)] * num_urls + [{"type": "text", "text": "What is it?"}]
        slow = {**BODY, "messages": [{"role": "user", "content": content}]}
        asked = [attackers.submit(app.ask_patiently, slow) for _ in range(num_requests)]
        sleep(0.5)
        app.check_answers()
        content = [known, {"type": "text", "text": "?"}]
        about = {**BODY, "messages": [{"role": "user", "content": content}]}
        seconds = []
        while not seconds or (len(seconds) < 5 and seconds[-1] >= max(5.0, 10 * app.alone_s)):
            start = monotonic()
            response = app.http.post("/v1/chat/completions", json=about)
            assert response.status_code == 200, response.text
            seconds.append(monotonic() - start)
        assert min(seconds) < max(5.0, 10 * app.alone_s)
        assert {each.result() for each in asked} <= {400, 413, 408, 429}
