"""Two lives of a server, the first one killed: the second finds the keys and values of media on disk."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd.shapes import make_scene
from epd.video.demo_video import write_demo_video
from tests.ports import kept_port
from tests.serve_app.server import wait_until

_START_S = 900.0
_OTHER, _QUESTION = "How many shapes are there?", "Describe the video."


class Life:
    """One process of a server."""

    def __init__(self, process: subprocess.Popen[bytes], http: httpx.Client) -> None:
        self._process = process
        self._http = http

    @property
    def is_ready(self) -> bool:
        assert self._process.poll() is None
        try:
            return self._http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def ask(self, video: Path, question: str) -> dict[str, Any]:
        """The JSON of an answer."""
        url = f"data:video/mp4;base64,{base64.b64encode(video.read_bytes()).decode()}"
        content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": question}]
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 30}
        answer: dict[str, Any] = self._http.post("/v1/chat/completions", json=body).raise_for_status().json()
        return answer

    def counted(self, name: str) -> float:
        found = re.search(rf"^epd_{name}_total (\S+)$", self._http.get("/metrics").text, re.M)
        assert found is not None, name
        return float(found[1])


@contextmanager
def life(folder: Path, topology: str) -> Iterator[Life]:
    """A server, killed at the end."""
    with kept_port() as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_START_S) as http:
        options = ["--local", "--topology", topology, "--port", str(port), "--cache-dir", str(folder)]
        with subprocess.Popen([sys.executable, "-m", "epd", "serve", *options]) as process:
            try:
                started = Life(process, http)
                wait_until(lambda: started.is_ready, _START_S)
                yield started
            finally:
                process.kill()


@pytest.fixture
def video(tmp_path: Path) -> Path:
    path = tmp_path / "scene.mp4"
    write_demo_video(path, make_scene(3, 12.0), fps=8, height=224, width=224)
    return path


def test_the_successor_of_a_killed_server_encodes_nothing(video: Path, tmp_path: Path) -> None:
    """Another topology finds it too, and another question."""
    with life(tmp_path / "kept", "1e1p1d") as first:
        asked = first.ask(video, _QUESTION)
        wait_until(lambda: first.counted("store_written_bytes") > 0)
        other = first.ask(video, _OTHER)
    with life(tmp_path / "kept", "1epd") as second:
        again = second.ask(video, _OTHER)
        assert again["choices"] == other["choices"]
        assert second.ask(video, _QUESTION)["choices"] == asked["choices"]
        wait_until(lambda: second.counted("store_read_tokens") > 0)
        assert second.counted("encoded_patches") == second.counted("store_failures") == 0
        details = again["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] >= second.counted("store_read_tokens")


def test_a_batch_that_goes_on_encodes_nothing_of_what_it_knows(video: Path, tmp_path: Path) -> None:
    source, kept = tmp_path / "in.jsonl", tmp_path / "kept"
    command = [sys.executable, "-m", "epd", "batch", str(source), str(tmp_path / "out.jsonl"), "--json"]
    summaries = []
    for number, question in enumerate((_QUESTION, _OTHER)):
        with source.open("a") as lines:
            lines.write(json.dumps({"id": str(number), "video": str(video), "question": question}) + "\n")
        done = subprocess.run([*command, "--cache-dir", str(kept)], capture_output=True, check=True)
        summaries.append(json.loads(done.stdout))
    first, second = summaries
    assert (first["num_encoded"], first["num_answered"]) == (first["num_groups"], 1)
    assert (second["num_encoded"], second["num_answered"], second["num_done_before"]) == (0, 2, 1)
