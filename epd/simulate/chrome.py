"""What every worker did, and every request went through, as a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from epd.simulate.records import SimulationResult

_MICROSECONDS = 10**6  # ticks in one
_STAGES = (
    ("wait", "due", "placed"),
    ("read media", "placed", "media_read"),
    ("encode", "media_read", "encoded"),
    ("prefill", "encoded", "first_token"),
    ("decode", "first_token", "end"),
)


def chrome_trace(result: SimulationResult) -> str:
    """JSON. Process 1: a row for each worker. Process 2: a row for each request, by stage."""
    events = [*_worker_events(result), *_request_events(result)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _event(name: str, process: int, row: int, start: int, ticks: int) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": process,
        "tid": row,
        "ts": start / _MICROSECONDS,
        "dur": ticks / _MICROSECONDS,
    }


def _worker_events(result: SimulationResult) -> Iterator[dict[str, Any]]:
    rows = {name: row for row, name in enumerate(dict.fromkeys(span.worker for span in result.spans))}
    for name, row in rows.items():
        yield {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}
    for span in result.spans:
        yield _event(span.name, 1, rows[span.worker], span.start, span.ticks)


def _request_events(result: SimulationResult) -> Iterator[dict[str, Any]]:
    for row in result.rows:
        for name, start, stop in _STAGES:
            if 0 <= row[start] < row[stop]:
                index = int(row["index"])
                yield _event(name, 2, index, int(row[start]), int(row[stop] - row[start]))
