"""Health, status, metrics and the log: what operators see, and what nobody may see.

Modules: `serve_app/observability/logs.py`, `serve_app/observability/metrics.py`,
`serve_app/observability/record.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from epd.serve_app.observability import record as record_module
from epd.serve_app.observability.metrics import SERVICE_COUNTERS, ServerMetrics
from epd.serve_app.observability.record import RequestRecord
from epd.serve_app.service import AnswerEnd, TokenDelta
from epd.serve_app.service_status import ServiceStatus
from tests import ROOT
from tests.serve_app.conftest import Front, data_url, image_part
from tests.serve_app.fakes import TIMINGS, USAGE, FakeService
from tests.serve_app.server import wait_until


def samples(front: Front) -> dict[str, float]:
    """Values by name and labels."""
    families = text_string_to_metric_families(front.http.get("/metrics").text)
    return {
        sample.name
        + "".join(f",{name}={sample.labels[name]}" for name in sorted(sample.labels)): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_of_requests(run_front: Callable[..., Front]) -> None:
    front = run_front()
    front.ask()
    front.ask(stream=True)
    front.ask(temperature=-1)
    front.wait_until_empty()
    counts = {"status=200,stream=false": 1, "status=200,stream=true": 1, "status=400,stream=false": 1}
    # A request is counted once its client has read the end.
    wait_until(lambda: {each: samples(front).get(f"epd_requests_total,{each}") for each in counts} == counts)
    seen = samples(front)
    assert seen["epd_requests_in_flight"] == 0
    assert seen["epd_time_to_first_token_seconds_count"] == 2
    assert seen["epd_time_per_output_token_seconds_count"] == 2
    assert seen["epd_request_seconds_count"] == 2
    assert seen["epd_stage_seconds_sum,stage=encode"] == pytest.approx(0.6)
    assert seen["epd_stage_queue_seconds_count,stage=prefill"] == 2
    assert seen["epd_completion_tokens_total"] == 2 * USAGE.completion_tokens
    assert seen["epd_cached_tokens_total"] == 32
    assert seen["epd_visual_tokens_dropped_total"] == 48
    assert seen["epd_request_errors_total,error=RequestError"] == 1
    assert seen["epd_held_body_bytes"] == seen["epd_spooled_media_bytes"] == seen["epd_dropped_traces"] == 0


def test_time_between_tokens_is_that_of_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two choices of five tokens, a second between each: eight gaps in four seconds would be half of it."""
    record = RequestRecord()
    for now_s in range(100, 105):
        monkeypatch.setattr(record_module, "perf_counter", partial(float, now_s))
        for index in range(2):
            record.note(TokenDelta(index, "a", (1,)))
    record.note(AnswerEnd(replace(USAGE, completion_tokens=10), TIMINGS))
    assert record.tpot_s == 1.0


def test_metrics_of_workers(front: Front) -> None:
    seen = samples(front)
    assert seen["epd_ready"] == 1
    assert seen["epd_worker_up,roles=e,worker=e1"] == 0
    assert seen["epd_worker_running,roles=p,worker=p0"] == 2
    assert seen["epd_worker_kv_usage,roles=d,worker=d0"] == 0.125
    assert "epd_worker_kv_usage,roles=e,worker=e0" not in seen
    assert seen["epd_worker_encoder_cache_usage,roles=e,worker=e0"] == 0.25
    assert seen["epd_role_switches_total,worker=p0"] == 3
    assert seen["epd_encoder_cache_hits_total"] == 7
    assert seen["epd_topology_info,topology=2e1p1d"] == 1


def test_a_counter_of_the_service_does_not_repeat_one_of_the_front(run_front: Callable[..., Front]) -> None:
    """Prometheus takes nothing from a page that has a metric twice."""
    service = FakeService(counters={"frames": 3.0, "retries": 2.0, "new_one": 1.0})
    text = run_front(service).http.get("/metrics").text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert "epd_frames_total 0.0" in text
    assert {"epd_retries_total 2.0", "epd_new_one_total 1.0"} <= set(text.splitlines())


def test_the_counters_of_workers_are_described() -> None:
    """Their names stand in the code that counts them."""
    sources = "".join(
        path.read_text() for path in (ROOT / "serve_app").rglob("*.py") if path.name != "metrics.py"
    )
    assert [name for name in SERVICE_COUNTERS if f'"{name}"' not in sources] == []


def test_two_apps_count_for_themselves(run_front: Callable[..., Front]) -> None:
    one, other = run_front(), run_front()
    one.ask()
    one.wait_until_empty()
    wait_until(lambda: "epd_requests_total,status=200,stream=false" in samples(one))
    assert "epd_requests_total,status=200,stream=false" not in samples(other)


def test_health(run_front: Callable[..., Front]) -> None:
    front = run_front()
    assert (front.http.get("/health").status_code, front.http.get("/health").json()) == (
        200,
        {"status": "ok"},
    )
    front.service.is_ready = False
    assert front.http.get("/health").status_code == 503


def test_status(front: Front) -> None:
    status = front.http.get("/v1/epd/status").json()
    assert (status["topology"], status["is_ready"], status["num_requests"]) == ("2e1p1d", True, 0)
    assert [(worker["name"], worker["roles"]) for worker in status["workers"]] == [
        ("e0", "e"), ("e1", "e"), ("p0", "p"), ("d0", "d")
    ]  # fmt: skip


def test_one_line_for_a_request_and_no_secret_in_it(
    run_front: Callable[..., Front], caplog: pytest.LogCaptureFixture, media: dict[str, Path]
) -> None:
    caplog.set_level("DEBUG", "epd.serve_app")
    front = run_front(api_key="open-sesame")
    headers = {"authorization": "Bearer open-sesame"}
    url = data_url(media["image"], "image/png")
    parts = [image_part(url), {"type": "text", "text": "my secret question"}]
    message = {"role": "user", "content": parts}
    front.http.post("/v1/chat/completions", json={"messages": [message]}, headers=headers)
    front.http.post("/v1/chat/completions", json={"messages": [message], "n": 0}, headers=headers)
    front.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": [image_part("http://127.0.0.1/x?token=hidden")]}]},
        headers=headers,
    )
    front.wait_until_empty()
    wait_until(lambda: caplog.text.count("request_id=") == 3)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("epd.serve_app")]
    lines.sort(key=lambda line: ("status=400" in line, "Forbidden" in line))  # one may come after the next
    assert len(lines) == 3
    assert "status=200" in lines[0]
    for part in (
        "model=shapes-vl stream=False media=1 frames=8 visual_tokens=24 dropped_tokens=24 prompt_tokens=40 ",
        "cached_tokens=16 completion_tokens=4 retries=0 ttft_s=0.",
        "stages_s=probe:0.010,decode_video:0.200,encode:0.300,prefill:0.100,decode:0.050 queued_s=-",
    ):
        assert part in lines[0]
    assert "status=400 error=RequestError" in lines[1]
    assert [field.partition("=")[0] for field in lines[2].split()] == [
        field.partition("=")[0] for field in lines[0].split()
    ]
    assert "status=400 error=MediaForbiddenError" in lines[2]
    for secret in ("secret question", "sesame", url[:40], "hidden"):
        assert secret not in caplog.text


def test_pages_and_probes_are_not_logged(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "epd.serve_app")
    ids: list[str] = []
    for path in ("/", "/health", "/metrics", "/v1/models"):
        response = front.http.get(path)
        assert response.status_code == 200
        ids.append(response.headers["x-request-id"])
    ids.append(asked := front.ask().headers["x-request-id"])
    wait_until(lambda: asked in caplog.text)  # and so what came before would be there
    assert [each for each in ids if each in caplog.text] == [asked]


def test_a_status_that_fails_is_a_bug_that_stays_inside(run_front: Callable[..., Front]) -> None:
    class Broken(FakeService):
        async def status(self):  # type: ignore[no-untyped-def]
            raise KeyError("secret")

    front = run_front(Broken())
    response = front.http.get("/health")
    assert response.status_code == 500
    assert "secret" not in response.text
    assert front.ask().status_code == 200


def test_a_front_among_others_names_itself_in_every_sample() -> None:
    status = ServiceStatus(True, "1epd", counters={"retries": 2.0})
    alone, one = (without_times(ServerMetrics(front).render(status)) for front in ("", "f1"))
    families = list(text_string_to_metric_families(one))
    labels = [sample.labels for family in families for sample in family.samples]
    assert len(labels) > 20
    assert {each.get("front") for each in labels} == {"f1"}
    assert one.replace('front="f1",', "").replace('{front="f1"}', "") == alone


def without_times(page: bytes) -> str:
    """The page without the times at which its counters were made."""
    return "\n".join(line for line in page.decode().splitlines() if "_created" not in line)
