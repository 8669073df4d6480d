"""What a server did between two scrapes of its metrics, and the lines of it in a log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from epd.serve_app.observability.figures import Figures, Scrape, log_figures, quantile
from epd.serve_app.observability.logs import OPERATION, JsonFormatter, with_fields
from tests.serve_app.conftest import Front
from tests.serve_app.fakes import USAGE, FakeService
from tests.serve_app.server import wait_until

BEFORE = """# HELP epd_requests_total Finished requests.
epd_requests_total{status="200",stream="true"} 4.0
epd_prompt_tokens_total 100.0
epd_generated_tokens_total 50.0
epd_time_to_first_token_seconds_bucket{le="0.1"} 4.0
epd_time_to_first_token_seconds_bucket{le="1.0"} 4.0
epd_time_to_first_token_seconds_bucket{le="+Inf"} 4.0
"""
NOW = """epd_requests_total{front="a",status="200",stream="true"} 8.0
epd_requests_total{front="a",status="400",stream="false"} 6.0
epd_requests_in_flight{front="a"} 5.0
epd_queue_length{front="a"} 2.0
epd_prompt_tokens_total{front="a"} 1100.0
epd_generated_tokens_total{front="a"} 40.0
epd_worker_kv_usage{front="a",roles="p",worker="p0"} 0.5
epd_worker_kv_usage{front="a",roles="d",worker="d0"} 0.75
epd_time_to_first_token_seconds_bucket{front="a",le="0.1"} 6.0
epd_time_to_first_token_seconds_bucket{front="a",le="1.0"} 8.0
epd_time_to_first_token_seconds_bucket{front="a",le="+Inf"} 8.0
"""


def test_rates_and_latencies_of_an_interval() -> None:
    """10 s, four answers: two within 0.1 s, two within 1 s. A worker that was lost took its count along."""
    now = Scrape(NOW, at_s=11.0)
    figures = Figures.between(Scrape(BEFORE, at_s=1.0), now)
    assert now.front == "a"
    assert (figures.num_running, figures.num_waiting) == (3, 2)
    assert (figures.requests_per_s, figures.prompt_tokens_per_s) == (1.0, 100.0)
    assert figures.generation_tokens_per_s == 0
    assert figures.kv_usage == 0.75
    assert figures.ttft_p50_s == pytest.approx(0.1)
    assert figures.ttft_p99_s == pytest.approx(0.1 + 0.9 * (0.99 * 4 - 2) / 2)
    assert figures.tpot_p50_s is None
    assert "3 requests running, 2 waiting, 1.00 ended/s; tokens/s: prompt 100.0" in figures.line()
    assert figures.line().endswith("TPOT p50 -; KV use 75.0%")


@pytest.mark.parametrize(
    ("buckets", "share", "wanted"),
    [
        ([], 0.5, None),
        ([(0.1, 0.0), (float("inf"), 0.0)], 0.5, None),
        ([(0.1, 0.0), (0.2, 10.0), (float("inf"), 10.0)], 0.5, 0.15),
        ([(0.1, 0.0), (0.2, 5.0), (float("inf"), 10.0)], 0.99, 0.2),  # above the last bound
        ([(0.1, 3.0), (0.2, 3.0), (float("inf"), 3.0)], 1.0, 0.1),
    ],
)
def test_quantiles_are_those_of_prometheus(
    buckets: list[tuple[float, float]], share: float, wanted: float | None
) -> None:
    assert quantile(buckets, share) == (None if wanted is None else pytest.approx(wanted))


def figure_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the lines of figures, as JSON has them."""
    records = [json.loads(JsonFormatter().format(each)) for each in caplog.records if each.name == OPERATION]
    return [each for each in records if each.get("event") == "figures"]


def test_a_busy_server_logs_figures_and_an_idle_one_nothing(
    run_front: Callable[..., Front], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", OPERATION)
    idle = run_front(log_stats_s=0.05)
    assert asyncio.run(_one_interval(idle)) == []
    front = run_front(FakeService(), log_stats_s=0.05)
    front.ask()
    wait_until(lambda: any(each["requests_per_s"] for each in figure_lines(caplog)))
    [line] = [each for each in figure_lines(caplog) if each["requests_per_s"]]
    assert line["prompt_tokens_per_s"] == pytest.approx(
        USAGE.prompt_tokens * line["requests_per_s"], rel=0.01
    )
    assert line["kv_usage"] == 0.5
    assert line["level"] == "INFO"


async def _one_interval(front: Front) -> list[str]:
    """Runs the loop over scrapes of a front in which nothing happens. Returns what it logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(OPERATION).addHandler(handler)
    num_scrapes = 0

    async def render() -> bytes:
        nonlocal num_scrapes
        num_scrapes += 1
        return front.http.get("/metrics").content

    loop = asyncio.create_task(log_figures(render, 0.01))
    while num_scrapes < 3:
        await asyncio.sleep(0.01)
    loop.cancel()
    logging.getLogger(OPERATION).removeHandler(handler)
    return lines


@pytest.fixture
def record() -> Callable[..., logging.LogRecord]:
    def make(message: str, *arguments: object, **more: Any) -> logging.LogRecord:
        return logging.getLogger("epd.x").makeRecord("epd.x", 30, "", 0, message, arguments, None, **more)

    return make


def test_json_has_a_key_for_each_field(record: Callable[..., logging.LogRecord]) -> None:
    shown = json.loads(JsonFormatter().format(record("worker %s is lost", "p0")))
    assert (shown["level"], shown["logger"], shown["message"]) == ("WARNING", "epd.x", "worker p0 is lost")
    fields = with_fields(
        "request", {"status": 200, "ttft_s": 0.25, "stages_s": {"encode": 0.3}, "error": None}
    )
    shown = json.loads(JsonFormatter().format(record("status=200", extra=fields)))
    assert (shown["event"], shown["status"], shown["ttft_s"]) == ("request", 200, 0.25)
    assert shown["stages_s"] == {"encode": 0.3}
    assert shown["error"] is None
    assert "message" not in shown
