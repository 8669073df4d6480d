"""Traces of requests: files for a viewer, and spans for a collector.

Modules: `epd/workload/chrome_trace.py`, `serve_app/observability/otel_export.py`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from epd.errors import RequestError, UnavailableError
from epd.serve_app.observability.otel_export import OtelExport
from epd.serve_app.observability.record import RequestTrace
from epd.serve_app.observability.tracing import TraceFolder, Tracing, chrome_events, otlp_export, rows_of
from epd.serve_app.service import StageSpan
from tests.serve_app.conftest import JSON, Front
from tests.serve_app.fakes import FakeService
from tests.serve_app.server import NEVER_S, wait_until

START_S = 1_700_000_000.0
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def span(start_s: float, stop_s: float, stage: Any = "encode", worker: str = "e0", **place: int) -> StageSpan:
    return StageSpan(stage, worker, START_S + start_s, START_S + stop_s, **place)


def trace(*spans: StageSpan, name: str = "q", start_s: float = START_S, **more: Any) -> RequestTrace:
    known: dict[str, Any] = {"first_token_s": start_s + 2.0, "error": "", "traceparent": "", "attributes": {}}
    return RequestTrace(name, start_s, start_s + 3.0, spans=spans, **(known | more))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.trace.json"))  # one that is being written begins with a dot


def test_a_file_for_a_request(run_front: Callable[..., Front], tmp_path: Path) -> None:
    front = run_front(trace_dir=tmp_path / "traces")
    response = front.ask(stream=True, user="my secret")
    wait_until(lambda: len(files(tmp_path / "traces")) == 1)
    events: list[JSON] = json.loads(files(tmp_path / "traces")[0].read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in complete].count("encode") == 3
    assert {(event["args"]["item"], event["args"]["group"]) for event in complete[1:]} == {
        (0, 0),
        (0, 1),
        (0, 2),
    }
    assert complete[0]["name"] == "request"
    assert complete[0]["args"]["epd.request_id"] == front.service.requests[0].request_id
    assert complete[0]["args"]["gen_ai.usage.output_tokens"] == 4
    assert all(event["dur"] == pytest.approx(20_000, abs=1) for event in complete[1:])
    assert '"events"' not in response.text  # the client did not ask for them
    assert "secret" not in files(tmp_path / "traces")[0].read_text()


def test_events_are_shown_to_whom_asks_and_traced_as_well(
    run_front: Callable[..., Front], tmp_path: Path
) -> None:
    front = run_front(trace_dir=tmp_path)
    assert front.ask(stream=True, epd={"events": True}).text.count('"stage":"encode"') == 3
    whole = front.ask(epd={"events": True}).json()["epd"]
    assert [event["stage"] for event in whole["events"]].count("encode") == 3
    assert "events" not in front.ask().json()["epd"]
    wait_until(lambda: len(files(tmp_path)) == 3)


def test_failed_requests_are_traced_too(run_front: Callable[..., Front], tmp_path: Path) -> None:
    front = run_front(FakeService(error=UnavailableError("gone")), trace_dir=tmp_path)
    front.ask()
    wait_until(lambda: len(files(tmp_path)) == 1)
    args = json.loads(files(tmp_path)[0].read_text())["traceEvents"][2]["args"]
    assert (args["error.type"], args["http.response.status_code"]) == ("UnavailableError", 503)


def test_no_spans_are_asked_for_without_a_reader(front: Front) -> None:
    front.ask(stream=True)
    assert not front.service.requests[0].wants_spans


def test_what_overlaps_has_rows_of_its_own() -> None:
    first, second, third = span(0, 2), span(1, 3), span(2, 4)
    other = span(0, 1, worker="e1")
    rows = rows_of([third, other, second, first])
    assert sorted(rows, key=str) == sorted(
        [("e0 encode", [first, third]), ("e0 encode", [second]), ("e1 encode", [other])], key=str
    )


def test_times_count_from_arrival_in_microseconds() -> None:
    events = [event for event in chrome_events(trace(span(0.5, 0.75, group=3))) if event["ph"] != "M"]
    request, token, encode = events
    assert (request["ts"], request["dur"]) == (0.0, 3e6)
    assert token["ts"] == 2e6
    assert (encode["ts"], encode["dur"], encode["args"]) == (5e5, 2.5e5, {"worker": "e0", "group": 3})
    assert request["tid"] != encode["tid"]


def test_only_the_latest_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    folder = TraceFolder(tmp_path, 3)
    for number in range(6):
        folder.write(trace(name=f"q{number}", start_s=START_S + number))
    assert [path.name.split("-")[1] for path in files(tmp_path)] == [f"q{n}.trace.json" for n in (3, 4, 5)]
    assert (tmp_path / "mine.json").exists()
    assert len(list(tmp_path.iterdir())) == 4


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="trace folder"):
        TraceFolder(tmp_path / "file", 1)


class Slow:
    """A sink that waits until it is let go; the first trace it is given fails."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.names: list[str] = []
        self.is_closed = False

    def write(self, trace: RequestTrace) -> None:
        self.go.wait(NEVER_S)
        self.names.append(trace.request_id)
        if len(self.names) == 1:
            raise OSError("disk full")

    def close(self) -> None:
        self.is_closed = True


def test_a_slow_sink_costs_traces_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    sink = Slow()
    tracing = Tracing([sink])
    for number in range(200):
        tracing.add(trace(name=f"q{number}"))
    lost = tracing.num_dropped
    assert 130 <= lost < 200
    sink.go.set()
    tracing.close()
    assert len(sink.names) == 200 - lost
    assert tracing.num_dropped == lost + 1
    assert "q0: its trace is lost" in caplog.text
    assert sink.is_closed


def exported(*traces: RequestTrace) -> list[Any]:
    """Spans as OpenTelemetry's own exporter got them."""
    exporter = InMemorySpanExporter()
    export = OtelExport(exporter)
    for one in traces:
        export.write(one)
    export.close()
    return list(exporter.get_finished_spans())


def test_opentelemetry_has_a_span_for_each_stage_and_group() -> None:
    spans = exported(
        trace(
            span(0.5, 0.75, item=0, group=1),
            span(1.0, 1.5, "prefill", "p0"),
            attributes={"epd.request_id": "q", "epd.ttft_s": 2.0},
        )
    )
    by_name = {one.name: one for one in spans}
    root = by_name["chat_completion"]
    assert root.parent is None
    assert dict(root.attributes) == {"epd.request_id": "q", "epd.ttft_s": 2.0}
    assert root.events[0].timestamp == int((START_S + 2.0) * 1e9)
    assert root.resource.attributes["service.name"] == "epd"
    assert {by_name[name].parent.span_id for name in ("encode", "prefill")} == {root.context.span_id}
    assert dict(by_name["encode"].attributes) == {"epd.worker": "e0", "epd.item": 0, "epd.group": 1}
    assert (by_name["prefill"].start_time, by_name["prefill"].end_time) == (
        int((START_S + 1.0) * 1e9),
        int((START_S + 1.5) * 1e9),
    )


def test_a_span_belongs_to_the_trace_of_the_client() -> None:
    (root,) = exported(trace(traceparent=PARENT))
    assert f"{root.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{root.parent.span_id:016x}" == PARENT.split("-")[2]
    (alone,) = exported(trace(traceparent="nonsense"))
    assert alone.parent is None


def test_an_error_is_the_status_of_its_span() -> None:
    (root,) = exported(trace(error="UnavailableError"))
    assert not root.status.is_ok
    assert root.status.description == "UnavailableError"


def test_the_header_of_the_client_reaches_the_trace(run_front: Callable[..., Front]) -> None:
    front = run_front()
    sink = Slow()
    sink.go.set()
    seen: list[RequestTrace] = []
    sink.write = seen.append  # type: ignore[method-assign]
    front.server.front.tracing, front.server.front.is_traced = Tracing([sink]), True
    front.http.post("/v1/chat/completions", json={}, headers={"traceparent": PARENT})
    wait_until(lambda: len(seen) == 1)
    assert (seen[0].traceparent, seen[0].error) == (PARENT, "RequestError")


def test_an_endpoint_without_the_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp", None)
    with pytest.raises(RequestError, match=r"opentelemetry-exporter-otlp-proto-http.*--trace-dir"):
        otlp_export("http://localhost:4318")


def test_the_exporter_gets_the_path_of_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = []

    class Module:
        def OTLPSpanExporter(self, endpoint: str) -> InMemorySpanExporter:
            endpoints.append(endpoint)
            return InMemorySpanExporter()

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", Module())
    for endpoint in ("http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"):
        otlp_export(endpoint).close()
    assert set(endpoints) == {"http://c:4318/v1/traces"}
