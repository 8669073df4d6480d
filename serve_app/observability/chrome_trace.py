"""A request as a Chrome trace: a file for `chrome://tracing` or Perfetto, one row for each worker's stage.

Source: Trace Event Format (Google, 2016), complete events "X", instant events "i", metadata "M".
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from epd.errors import RequestError
from serve_app.observability.record import RequestTrace
from serve_app.service import StageSpan

SUFFIX = ".trace.json"
_US_PER_S = 1_000_000
_REQUEST_ROW = 0


class TraceFolder:
    """One file for each request, the latest `max_files`: older ones are deleted; names sort by arrival.

    Raises RequestError for what can be no folder.
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
        """Raises OSError. A file is there as a whole or not at all."""
        name = f"{trace.start_s * 1000:015.0f}-{trace.request_id}{SUFFIX}"
        partial = self._path / f".{name}"
        partial.write_text(json.dumps({"traceEvents": list(chrome_events(trace))}))
        os.replace(partial, self._path / name)
        for old in sorted(self._path.glob(f"*{SUFFIX}"))[: -self._max_files]:
            old.unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is held."""


def chrome_events(trace: RequestTrace) -> Iterator[dict[str, Any]]:
    """Times count from arrival, so that a viewer begins at zero; args of the request tell the true one."""
    yield _name("process_name", _REQUEST_ROW, trace.request_id)
    yield _name("thread_name", _REQUEST_ROW, "request")
    args = {**trace.attributes, "arrival_unix_s": trace.start_s}
    yield _complete("request", _REQUEST_ROW, 0.0, trace.stop_s - trace.start_s, args)
    if trace.first_token_s is not None:
        first_us = (trace.first_token_s - trace.start_s) * _US_PER_S
        yield {"name": "first token", "ph": "i", "s": "p", "pid": 1, "tid": _REQUEST_ROW, "ts": first_us}
    for row, (label, spans) in enumerate(rows_of(trace.spans), start=1):
        yield _name("thread_name", row, label)
        for span in spans:
            place = {"worker": span.worker, "item": span.item, "group": span.group}
            args = {key: value for key, value in place.items() if value is not None}
            yield _complete(span.stage, row, span.start_s - trace.start_s, span.stop_s - span.start_s, args)


def rows_of(spans: Iterable[StageSpan]) -> list[tuple[str, list[StageSpan]]]:
    """Spans by worker and stage. What overlaps gets rows of its own: a viewer would nest it or drop it."""
    rows: dict[tuple[str, str], list[list[StageSpan]]] = defaultdict(list)
    for span in sorted(spans, key=lambda one: one.start_s):
        lanes = rows[span.worker, span.stage]
        free = next((lane for lane in lanes if lane[-1].stop_s <= span.start_s), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return [(f"{worker} {stage}", lane) for (worker, stage), lanes in rows.items() for lane in lanes]


def _complete(name: str, row: int, start_s: float, seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start_s * _US_PER_S, "dur": seconds * _US_PER_S}
    return {"name": name, "cat": "epd", "ph": "X", "pid": 1, "tid": row, **times, "args": args}


def _name(what: str, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}
