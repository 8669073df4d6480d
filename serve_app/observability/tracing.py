"""Writes traces of finished requests in a separate thread, so that no answer waits for a disk."""

from __future__ import annotations

import importlib
import logging
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from epd.errors import RequestError
from epd.serve_app.observability.chrome_trace import TraceFolder
from epd.serve_app.observability.record import RequestTrace

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
