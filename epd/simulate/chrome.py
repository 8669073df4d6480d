"""Traces the work of every worker and the stages of every request for chrome://tracing or Perfetto."""

from __future__ import annotations

from collections.abc import Iterator

from epd.simulate.records import SimulationResult
from epd.workload.chrome_trace import Event, complete, dumps, named

_TICKS_PER_US = 10**6
_STAGES = (
    ("wait", "due", "placed"),
    ("read media", "placed", "media_read"),
    ("encode", "media_read", "encoded"),
    ("prefill", "encoded", "first_token"),
    ("decode", "first_token", "end"),
)


def chrome_trace(result: SimulationResult) -> str:
    """Returns JSON. Process 1: a row for each worker. Process 2: a row for each request, by stage."""
    return dumps([*_worker_events(result), *_request_events(result)])


def _worker_events(result: SimulationResult) -> Iterator[Event]:
    rows = {name: row for row, name in enumerate(dict.fromkeys(span.worker for span in result.spans))}
    for name, row in rows.items():
        yield named("thread_name", row, name)
    for span in result.spans:
        yield complete(span.name, rows[span.worker], span.start / _TICKS_PER_US, span.ticks / _TICKS_PER_US)


def _request_events(result: SimulationResult) -> Iterator[Event]:
    for row in result.rows:
        for name, start, stop in _STAGES:
            if 0 <= row[start] < row[stop]:
                start_us = int(row[start]) / _TICKS_PER_US
                duration_us = int(row[stop] - row[start]) / _TICKS_PER_US
                yield complete(name, int(row["index"]), start_us, duration_us, process=2)
