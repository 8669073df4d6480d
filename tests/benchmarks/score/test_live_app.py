"""The application as a process to be measured: its log, its CPU time, what it says when it does not start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.score.app_profile import _AppLoad
from benchmarks.score.live_app import LiveApp, ServedRequest, TrafficResult, counted_in, live_app, served_in
from epd.bench.media import MediaLibrary
from epd.errors import UnavailableError
from epd.profiles.media import MediaRule
from epd.video.demo_video import write_scene
from epd.workload.metrics import ClientRecord

LINE = (
    "2026-11-21 12:00:00,000 INFO epd.serve_app.observability.record request_id=a status=200 "
    "prompt_tokens=56 cached_tokens=15 "
    "ttft_s=0.0505 total_s=0.0531 stages_s=probe:0.003,encode:0.009,prefill:0.015 queued_s=-"
)


def test_a_counter_is_added_up_over_its_labels() -> None:
    lines = [
        "# TYPE epd_a_total counter",
        'epd_a_total{w="x"} 2.0',
        'epd_a_total{w="y"} 3.0',
        "epd_c_total 4.0",
    ]
    text = "\n".join([*lines, "epd_a_total_b 9.0", ""])
    assert [counted_in(text, name) for name in ("epd_a_total", "epd_c_total", "epd_d_total")] == [5, 4, 0]


def test_a_line_of_the_log_tells_the_work_of_each_stage() -> None:
    stages_s = {"probe": 0.003, "encode": 0.009, "prefill": 0.015}
    (served,) = served_in([LINE])
    assert served == ServedRequest(0.0505, 56, 15, stages_s)
    (served,) = served_in([LINE.replace("stages_s=probe:0.003,encode:0.009,prefill:0.015", "stages_s=-")])
    assert served.stages_s == {}


@pytest.mark.parametrize("place", range(1, len(LINE), 7))
def test_a_line_that_is_printed_in_two_pieces_misleads_nobody(place: int) -> None:
    served = served_in([LINE, LINE[:place], LINE[place:], LINE.replace("ttft_s=0.0505", "ttft_s=-")])
    assert all(each == served_in([LINE])[0] for each in served)


def record(index: int, ttft_s: float, error: str | None = None) -> ClientRecord:
    times_s = (index + ttft_s,)
    return ClientRecord(index, index, index, index + 1.0, times_s, completion_tokens=5, error=error)


def test_times_are_medians_and_cpu_time_is_without_what_idling_takes() -> None:
    ttfts_s = (0.1, 0.2, 0.3, 0.4, 0.9)
    records = tuple(record(index, ttft_s) for index, ttft_s in enumerate(ttfts_s))
    result = TrafficResult(
        (*records, record(5, 0.95, "HTTP 500")),
        served_in([LINE] * 5),
        cpu_s=3.0,
        elapsed_s=10.0,
        core_speed=1.0,
    )
    found = result.figures(idle_cores=0.1)
    assert found.ttft_s == pytest.approx(0.3)
    assert found.tpot_s == pytest.approx(0.7 / 4)
    assert found.cpu_s == pytest.approx(0.4)
    assert (found.encode_s, found.prefill_s, found.new_tokens) == (0.009, 0.015, 41)


def test_an_application_that_fails_is_reported() -> None:
    class Failing(LiveApp):
        def __init__(self) -> None:
            """Nothing runs."""

        def idle_cores(self, seconds: float = 0.0) -> float:
            return seconds

        def send(self, *_: object, **__: object) -> TrafficResult:  # type: ignore[override]
            return TrafficResult((record(0, 0.1, "HTTP 500"),), (), 0.0, 1.0, 1.0)

    with pytest.raises(UnavailableError, match="HTTP 500"):
        _AppLoad(Failing(), "1epd", MediaLibrary(Path("media"), write_scene), MediaRule("grid", 14))


def test_cpu_time_is_that_of_a_process_and_all_it_has_started(tmp_path: Path) -> None:
    burn = "import time\nend = time.process_time() + 0.7\nwhile time.process_time() < end: pass\n"
    start = f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {burn + 'input()'!r}])"
    with subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE) as process:
        app = LiveApp("http://nowhere", process, tmp_path / "log")
        while app.cpu_s() - sum(os.times()[:2]) < 0.5:
            assert process.poll() is None
            time.sleep(0.2)
        assert process.stdin is not None
        process.stdin.close()


def test_what_does_not_start_is_reported(tmp_path: Path) -> None:
    with (
        pytest.raises(UnavailableError, match="no worker does decode"),
        live_app(["--topology", "1e1p"], tmp_path / "log"),
    ):
        pass
