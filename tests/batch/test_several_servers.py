"""Each medium has a server of its own while that is there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

import pytest

from epd.batch.driver import BatchPlan, run_batch
from epd.batch.http_backend import HttpBackend
from epd.batch.line_index import LineIndex
from epd.batch.lines import LineDefaults
from epd.batch.summary import Summary
from epd.batch.tasks import Backend
from epd.errors import UnavailableError
from tests.batch.test_http_backend import KEY, FakeServer, serving
from tests.ports import kept_port

NUM_VIDEOS, NUM_QUESTIONS = 12, 4


def run(folder: Path, urls: Sequence[str], num_questions: int = NUM_QUESTIONS) -> Summary:
    lines: list[dict[str, Any]] = [
        {"id": f"{video} {number}", "video": f"https://media.test/{video}.mp4", "question": f"q{number}"}
        for number in range(num_questions)
        for video in range(NUM_VIDEOS)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    @contextmanager
    def opened(_: LineIndex) -> Iterator[Backend]:
        with HttpBackend.open(urls, KEY) as backend:
            yield backend

    return run_batch(BatchPlan(folder / "in.jsonl", folder / "out.jsonl", LineDefaults(folder)), opened)


def named(servers: Sequence[FakeServer]) -> list[str]:
    """Returns endpoints whose names, and so the videos that each has first, are the same in every run."""
    return [f"{name}={server.url}" for name, server in zip("abc", servers, strict=True)]


def videos(server: FakeServer) -> set[str]:
    return {video for video, *_ in server.spans}


@contextmanager
def three(**options: Any) -> Iterator[list[FakeServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(FakeServer(**options))) for _ in range(3)]


def test_a_video_goes_to_one_server_and_to_the_same_in_the_next_run(tmp_path: Path) -> None:
    with three(pause_s=0.0) as servers:
        urls = named(servers)
        run(tmp_path, urls)
        first = [videos(server) for server in servers]
        assert sum(map(len, first)) == len(set.union(*first)) == NUM_VIDEOS
        assert all(first)
        run(tmp_path, urls[::-1], NUM_QUESTIONS + 2)
        assert [videos(server) for server in servers] == first
    assert sum(len(server.spans) for server in servers) == NUM_VIDEOS * (NUM_QUESTIONS + 2)


def test_the_videos_of_a_server_that_is_lost_go_to_others_and_no_other_moves(tmp_path: Path) -> None:
    with three(pause_s=0.0) as servers, kept_port() as port:
        urls = [*named(servers), f"gone=http://127.0.0.1:{port}"]
        summary = run(tmp_path, urls)
        assert (summary.tally.num_answered, summary.tally.num_failed) == (NUM_VIDEOS * NUM_QUESTIONS, 0)
        with_gone = [videos(server) for server in servers]
        for server in servers:
            server.spans.clear()
        (tmp_path / "out.jsonl").unlink()
        run(tmp_path, urls[:3])
        assert [videos(server) for server in servers] == with_gone


@contextmanager
def hanging_up() -> Iterator[tuple[str, list[str]]]:
    """A server that ends each connection. Yields its URL, and who has connected."""
    met: list[str] = []

    class HangingUp(BaseRequestHandler):
        def handle(self) -> None:
            met.append(self.client_address)

    with ThreadingTCPServer(("127.0.0.1", 0), HangingUp) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", met
        finally:
            server.shutdown()


def test_a_server_that_was_just_lost_is_asked_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its videos may find that out, and not each question."""
    monkeypatch.setattr("epd.batch.http_backend._LOST_S", 600.0)
    num_questions = 20
    with three(pause_s=0.0) as servers, hanging_up() as (lost, met):
        summary = run(tmp_path, [f"lost={lost}", *named(servers)], num_questions)
        assert summary.tally.num_answered == NUM_VIDEOS * num_questions
        assert 1 < len(met) <= NUM_VIDEOS + 1


def test_a_server_that_is_busy_gives_lines_to_the_next(tmp_path: Path) -> None:
    with three(pause_s=0.0) as servers:
        servers[0].answer = lambda _: (503, {"error": {"message": "later"}})
        summary = run(tmp_path, named(servers))
        assert summary.tally.num_answered == NUM_VIDEOS * NUM_QUESTIONS
        assert videos(servers[0])


def test_without_any_server_nothing_is_asked(tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(UnavailableError):
        run(tmp_path, [f"http://127.0.0.1:{stack.enter_context(kept_port())}" for _ in range(3)])
