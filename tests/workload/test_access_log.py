"""Our own access log as a trace: lines as `epd.serve_app.observability.record` and the ingress write them.

Modules: `epd/workload/trace_media.py`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from epd.errors import RequestError
from epd.serve_app.cli.program import app
from epd.serve_app.observability.logs import write_logs
from epd.serve_app.observability.record import RequestRecord
from epd.serve_app.service import AnswerEnd
from epd.types import StageTimings, Usage
from epd.workload.config import load_workload
from epd.workload.requests import RequestShape, Resolution
from epd.workload.trace import parse_log
from epd.workload.trace_media import ModelSight


def end(usage: Usage) -> AnswerEnd:
    return AnswerEnd(usage, StageTimings(), cached_tokens=3)


@pytest.fixture
def lines(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Five requests, in the order in which they ended; one was refused, one broken off."""
    ends: list[tuple[float, float, int, int, AnswerEnd | None]] = [
        # ended at, took, status, media, end
        (10.0, 0.5, 200, 0, end(Usage(0, 0, 40, 7))),
        (10.1, 0.0, 429, 1, None),
        (10.2, 1.2, 200, 2, end(Usage(2, 24, 64, 9, visual_tokens_before=32))),
        (10.4, 0.4, 499, 1, None),
        (10.5, 0.25, 200, 1, end(Usage(20, 150, 180, 1))),
    ]
    logger = logging.getLogger("epd")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)
    write_logs(shows_requests=True)
    for ended_s, took_s, status, media, ended in ends:
        monkeypatch.setattr(logging.time, "time", lambda ended_s=ended_s: 1_750_000_000 + ended_s)
        monkeypatch.setattr(logging.time, "time_ns", lambda ended_s=ended_s: round((1.75e9 + ended_s) * 1e9))
        monkeypatch.setattr("epd.serve_app.observability.record.perf_counter", lambda: 1000.0)
        one = RequestRecord(start=1000.0 - took_s, status=status, end=ended, num_media=media)
        one.log()
    monkeypatch.undo()
    return capfd.readouterr().err.splitlines()


def test_lines_of_the_app_become_requests(lines: list[str]) -> None:
    assert len(lines) == 5
    rows = parse_log(["Started a local Ray instance", *lines])
    assert [round(row.time_s, 2) for row in rows] == [0.0, 0.5, 1.25]
    images, text, video = rows
    assert (images.num_media, images.visual_tokens, images.text_tokens) == (2, 32, 40)
    assert (text.num_media, text.text_tokens, text.completion_tokens) == (0, 40, 7)
    assert (video.num_frames, video.has_videos, images.has_videos) == (20, True, False)
    assert [row.time_s for row in parse_log(lines, max_rows=1)] == [0.0]


def test_media_get_sizes_that_become_as_many_tokens(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "ingress.log"
    path.write_text("\n".join(lines))
    workload = load_workload(None, {"trace": path, "token_side": 28, "frames_per_s": 2.0}).resolve()
    shapes = [request.shape for request in workload.requests(0)]
    assert shapes[0] == RequestShape(40, 9, (Resolution(112, 112),) * 2)
    assert shapes[1] == RequestShape(40, 7)
    [video] = shapes[2].videos
    # 150 tokens of 10 pairs of frames are 15 for each: 4 x 4 are the nearest to a square.
    assert (video.duration_s, video.size) == (10.0, Resolution(112, 112))


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 135, 1000])
def test_a_size_becomes_about_as_many_tokens(num_tokens: int) -> None:
    size = ModelSight().size(num_tokens)
    found = max(1, size.width // 28) * max(1, size.height // 28)
    assert found == pytest.approx(num_tokens, rel=0.1, abs=1)


def test_the_simulator_reads_it(lines: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ingress.log"
    path.write_text("\n".join(f"(ServeReplica:epd:ingress pid=7) {line}" for line in lines))
    app(["simulate", "--trace", str(path), "--topology", "1e1p1d", "--json"], standalone_mode=False)
    assert json.loads(capfd.readouterr().out)["num_requests"] == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "request_id=a status=200 prompt_tokens=5 visual_tokens=0 total_s=1",
            "line 1 of the access log: no time",
        ),
        ("2026-11-21 12:00:00,000 request_id=a status=200 prompt_tokens=5 total_s=1", "'visual_tokens'"),
        ("2026-11-21 12:00:00,000 request_id=a status=429 prompt_tokens=-", "no answered request"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(line: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_log([line])
