"""Writes the logs of a server to stderr: as lines of text, or as JSON with a key for each field.

2026-11-26 23:41:14,330 INFO epd.serve_app.observability.record request_id=... status=200 ...
{"time": "2026-11-26T23:41:14.330+00:00", "level": "INFO", "logger": "...", "event": "request", ...}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

# Operators read these lines without asking for them; lines of requests and of workers only on request.
OPERATION = "epd.serve_app.operation"
_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_SOURCES = ("epd", "asyncio", "uvicorn", "py.warnings")
_FIELDS = "fields"  # of a log record

operation = logging.getLogger(OPERATION)


def with_fields(event: str, fields: Mapping[str, object]) -> dict[str, Any]:
    """Returns what a call of a logger takes as `extra`: fields, which JSON shows in place of the message."""
    return {_FIELDS: {"event": event, **fields}}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        shown: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            **(getattr(record, _FIELDS, None) or {"message": record.getMessage()}),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown, ensure_ascii=False, default=str)


def write_logs(log_format: LogFormat = "text", *, shows_requests: bool) -> None:
    """Writes logs to stderr from now on. shows_requests: a line for each request too, and workers' news."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT))
    logging.captureWarnings(log_format == "json")
    for name in _SOURCES:
        if not logging.getLogger(name).handlers:
            logging.getLogger(name).addHandler(handler)
    operation.setLevel(logging.INFO)
    if shows_requests:
        logging.getLogger("epd.serve_app").setLevel(logging.INFO)
