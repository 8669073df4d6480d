"""Writes each request as a Chrome trace, for chrome://tracing or Perfetto: one row per worker and stage."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from epd.errors import RequestError
from epd.serve_app.observability.record import RequestTrace
from epd.serve_app.service import StageSpan
from epd.workload.chrome_trace import Event, complete, dumps, instant, named

SUFFIX = ".trace.json"
_US_PER_S = 1_000_000
_REQUEST_ROW = 0


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
