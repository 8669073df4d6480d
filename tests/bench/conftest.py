"""Servers that take exactly as long as they are told to, and media that cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import pytest

from epd.bench import client
from epd.bench.media import MediaLibrary
from epd.workload.requests import VideoSpec
from tests.bench.fake_server import FakeServer, FakeServers
from tests.faults.virtual_time import Clock, VirtualLoop

T = TypeVar("T")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


class VirtualTime:
    """An event loop whose clock moves when nothing is left to do, and servers in its time."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.servers = FakeServers()
        self.loop = VirtualLoop(self.clock, 0)

    def server(self, **manner: Any) -> FakeServer:
        return self.servers.add(**manner)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualTime]:
    """Lets clients of chats ask its servers, by its clock. A machine that is slow changes no figure."""
    found = VirtualTime()
    asks = partial(httpx.AsyncClient, transport=found.servers)
    monkeypatch.setattr(client, "httpx", SimpleNamespace(**{**vars(httpx), "AsyncClient": asks}))
    monkeypatch.setattr(client, "time", SimpleNamespace(perf_counter=found.clock.monotonic))
    yield found
    found.run(found.loop.shutdown_asyncgens())
    found.loop.close()


@pytest.fixture
def library(tmp_path: Path) -> MediaLibrary:
    """Draws real images; a video is a few bytes that tell its seed and length."""

    def write_video(path: Path, seed: int, spec: VideoSpec, on_frame: Callable[[], None]) -> None:
        path.write_bytes(f"video {seed} {spec.duration_s}".encode())
        for _ in range(spec.num_frames):
            on_frame()

    return MediaLibrary(tmp_path / "media", write_video)
