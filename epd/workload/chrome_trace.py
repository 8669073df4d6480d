"""Events of a trace for chrome://tracing or Perfetto: one row per worker, stage or request.

Source: Trace Event Format (Google, 2016), complete events "X", instant events "i", metadata "M".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Event = dict[str, Any]


def complete(
    name: str,
    row: int,
    ts_us: float,
    dur_us: float,
    *,
    process: int = 1,
    args: Mapping[str, Any] | None = None,
) -> Event:
    """Work that begins at `ts_us` and takes `dur_us`, in microseconds."""
    event = {"name": name, "cat": "epd", "ph": "X", "pid": process, "tid": row, "ts": ts_us, "dur": dur_us}
    return event if args is None else {**event, "args": dict(args)}


def instant(name: str, row: int, ts_us: float) -> Event:
    return {"name": name, "ph": "i", "s": "p", "pid": 1, "tid": row, "ts": ts_us}


def named(what: Literal["process_name", "thread_name"], row: int, name: str) -> Event:
    """Names the process or one of its rows."""
    return {"name": what, "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}


def dumps(events: Iterable[Event]) -> str:
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events)})
