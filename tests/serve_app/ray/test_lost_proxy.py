"""What clients see when Serve's proxy is killed, where there is one: a row of docs/deployment.md's table.

`make soak` runs this. Fronts of `epd serve` listen themselves; those of `serve run` and `serve deploy` are
behind the proxy.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.serve_app.ray.ray_session import IGNORED, RaySession, running_app
from tests.serve_app.ray.test_lost_processes import Stream, chat, command_line, say
from tests.serve_app.server import wait_until

pytestmark = [
    *(pytest.mark.filterwarnings(each) for each in IGNORED),
    pytest.mark.skipif("EPD_SOAK" not in os.environ, reason="takes a minute of both cores: make soak"),
]
PROXY, TOKEN = "ray::ProxyActor", "RAY_AUTH_TOKEN"
AGAIN_S = 5.0


def proxies() -> set[int]:
    """Processes of this test's own cluster, which is known by its token."""
    ours = f"{TOKEN}={os.environ[TOKEN]}".encode()
    return {
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if PROXY in command_line(path).partition("\0")[0]
        and ours in (path.parent / "environ").read_bytes().split(b"\0")
    }


def is_served(url: str) -> bool:
    try:
        reply = httpx.post(
            f"{url}/v1/chat/completions", json=chat("Well?", max_tokens=1), timeout=2, trust_env=False
        )
    except httpx.HTTPError:
        return False
    return reply.status_code == httpx.codes.OK


def lost_workers(url: str) -> str:
    metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    return "".join(line for line in metrics.splitlines() if line.startswith("epd_workers_lost_total"))


def test_a_proxy_that_is_killed_comes_back_and_no_worker_is_lost(
    ray_session: RaySession, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_app(ray_session, topology="1epd") as url:
        before = lost_workers(url)
        (proxy,) = proxies()
        stream = Stream()
        reading = threading.Thread(target=stream.read, args=(url,), daemon=True)
        reading.start()
        wait_until(lambda: stream.num_lines > 3)
        start_s = time.monotonic()
        os.kill(proxy, signal.SIGKILL)
        time.sleep(0.2)  # until the system has let go of it
        wait_until(lambda: is_served(url), 60.0)
        again_s = time.monotonic() - start_s
        reading.join(60.0)
        say(capsys, f"{PROXY} SIGKILL: stream {stream.outcome}, served again after {again_s:.1f} s")
        assert stream.outcome.startswith("cut")
        assert again_s <= AGAIN_S
        assert lost_workers(url) == before
        wait_until(lambda: httpx.get(f"{url}/v1/epd/status", trust_env=False).json()["num_requests"] == 0, 30)
