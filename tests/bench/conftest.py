"""A server that takes exactly as long as it is told to, and media that cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epd.bench.media import MediaLibrary
from epd.workload.requests import VideoSpec
from tests.bench.fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture
def library(tmp_path: Path) -> MediaLibrary:
    """Draws real images; a video is a few bytes that tell its seed and length."""

    def write_video(path: Path, seed: int, spec: VideoSpec, on_frame: Callable[[], None]) -> None:
        path.write_bytes(f"video {seed} {spec.duration_s}".encode())
        for _ in range(spec.num_frames):
            on_frame()

    return MediaLibrary(tmp_path / "media", write_video)
