"""Writes traces of finished requests in a separate thread, so that no answer waits for a disk.

Chrome's format, for chrome://tracing or Perfetto, has one row for each worker.
"""

from __future__ import annotations

import importlib
import logging
import os
import queue
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from epd.errors import RequestError
from epd.serve_app.observability.record import RequestTrace
from epd.serve_app.service import StageSpan
from epd.workload.chrome_trace import Event, complete, dumps, instant, named

SUFFIX = ".trace.json"
_US_PER_S = 1_000_000
_REQUEST_ROW = 0
logger = logging.getLogger(__name__)

_MAX_WAITING = 64
_TRACES_PATH = "/v1/traces"
_PACKAGE = "opentelemetry-exporter-otlp-proto-http"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_EXPORT = "epd.serve_app.observability.otel_export"


class TraceSink(Protocol):
    """Receives traces. Called from one thread."""

    def write(self, trace: RequestTrace) -> None: ...

    def close(self) -> None: ...


class Tracing:
    """Passes traces to all sinks. num_dropped: traces that failed or came faster than sinks took them."""

    def __init__(self, sinks: Sequence[TraceSink]) -> None:
        self._sinks = sinks
        self._waiting: queue.Queue[RequestTrace | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self.num_dropped = 0

    @property
    def is_on(self) -> bool:
        return bool(self._sinks)

    def add(self, trace: RequestTrace) -> None:
        """Queues a trace without waiting."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(trace)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Writes the queued traces."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
        for sink in self._sinks:
            sink.close()

    def _run(self) -> None:
        while (trace := self._waiting.get()) is not None:
            for sink in self._sinks:
                self._write(sink, trace)

    def _write(self, sink: TraceSink, trace: RequestTrace) -> None:
        try:
            sink.write(trace)
        except Exception:  # the edge of a thread: a lost trace must not end anything else
            self.num_dropped += 1
            logger.warning("request_id=%s: its trace is lost", trace.request_id, exc_info=True)


def tracing_of(folder: Path | None, max_files: int, otlp_endpoint: str | None) -> Tracing:
    """Creates the tracing. Raises RequestError if an endpoint's packages are missing, or for a bad folder."""
    sinks: list[TraceSink] = []
    if folder is not None:
        sinks.append(TraceFolder(folder, max_files))
    if otlp_endpoint:
        sinks.append(otlp_export(otlp_endpoint))
    return Tracing(sinks)


def otlp_export(endpoint: str) -> TraceSink:
    """Returns an export to the OTLP/HTTP collector at a base URL, as in http://localhost:4318.

    Raises RequestError if the required packages are not installed.
    """
    try:
        exporter, export = map(importlib.import_module, (_EXPORTER, _EXPORT))
    except ImportError as error:
        raise RequestError(
            f"received the trace endpoint {endpoint}; allowed with the package {_PACKAGE}, which is "
            f"not installed ({error.name} is missing); install it, or use --trace-dir"
        ) from error
    url = endpoint.rstrip("/").removesuffix(_TRACES_PATH) + _TRACES_PATH
    sink: TraceSink = export.OtelExport(exporter.OTLPSpanExporter(endpoint=url))
    return sink


class TraceFolder:
    """Keeps one file per request, the latest `max_files`; names sort by arrival.

    Raises RequestError where the folder cannot be made.
    """

    def __init__(self, path: Path, max_files: int) -> None:
        self._path = path
        self._max_files = max_files
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"received the trace folder {path}: {error.strerror}; allowed: a folder that can be written"
            ) from error

    def write(self, trace: RequestTrace) -> None:
        """Writes the file as a whole or not at all. Raises OSError."""
        name = f"{trace.start_s * 1000:015.0f}-{trace.request_id}{SUFFIX}"
        partial = self._path / f".{name}"
        partial.write_text(dumps(chrome_events(trace)))
        os.replace(partial, self._path / name)
        for old in sorted(self._path.glob(f"*{SUFFIX}"))[: -self._max_files]:
            old.unlink(missing_ok=True)

    def close(self) -> None:
        """Does nothing: no file is open."""


def chrome_events(trace: RequestTrace) -> Iterator[Event]:
    """Events with times from arrival, so that a viewer begins at zero; the request's args hold Unix time."""
    yield named("process_name", _REQUEST_ROW, trace.request_id)
    yield named("thread_name", _REQUEST_ROW, "request")
    args = {**trace.attributes, "arrival_unix_s": trace.start_s}
    total_us = (trace.stop_s - trace.start_s) * _US_PER_S
    yield complete("request", _REQUEST_ROW, 0.0, total_us, args=args)
    if trace.first_token_s is not None:
        yield instant("first token", _REQUEST_ROW, (trace.first_token_s - trace.start_s) * _US_PER_S)
    for row, (label, spans) in enumerate(rows_of(trace.spans), start=1):
        yield named("thread_name", row, label)
        for span in spans:
            place = {"worker": span.worker, "item": span.item, "group": span.group}
            args = {key: value for key, value in place.items() if value is not None}
            start_us = (span.start_s - trace.start_s) * _US_PER_S
            yield complete(span.stage, row, start_us, (span.stop_s - span.start_s) * _US_PER_S, args=args)


def rows_of(spans: Iterable[StageSpan]) -> list[tuple[str, list[StageSpan]]]:
    """Groups spans by worker and stage. Overlapping spans get separate rows: viewers nest or drop them."""
    rows: dict[tuple[str, str], list[list[StageSpan]]] = defaultdict(list)
    for span in sorted(spans, key=lambda one: one.start_s):
        tracks = rows[span.worker, span.stage]
        free = next((track for track in tracks if track[-1].stop_s <= span.start_s), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    return [(f"{worker} {stage}", track) for (worker, stage), tracks in rows.items() for track in tracks]
