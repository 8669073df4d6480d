"""Gives results the columns of a table: of parts in Parquet, and of Ray Data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import epd
from epd.batch.lines import JSON
from epd.batch.places import arrow
from epd.batch.records import key_of
from epd.batch.result_files import cells_of

_TEXTS = ("id", "uri", "question", "answer", "json", "finish_reason", "expected", "model", "version", "key")
_COUNTS = ("line", "prompt_tokens", "completion_tokens", "substituted_frames")


def part_row(record: JSON, num_attempts: int = 1) -> JSON:
    """Returns the row of a record of either form. num_attempts: runs that have asked it, with this one."""
    cells = cells_of(record)
    row = {name: cells.get(name) for name in (*_COUNTS, *_TEXTS)}
    line_id, error = cells.get("id"), record.get("error")
    return row | {
        "id": None if line_id is None else str(line_id),
        "uri": cells["media"] or None,
        "json": _json(cells.get("answer")),
        "key": key_of(record),
        "version": epd.__version__,
        "is_right": record.get("is_right"),
        "error": error
        and {
            "type": cells["error"],
            "message": cells["message"],
            "status": error.get("status") or (record.get("response") or {}).get("status_code"),
            "attempts": num_attempts,
        },
    }


def part_table(rows: Sequence[JSON]) -> Any:
    """Returns rows as a table of pyarrow, whose columns have the same types whatever the rows."""
    pa = arrow("pyarrow")
    texts, numbers = ("type", "message"), ("status", "attempts")
    error = [*((name, pa.string()) for name in texts), *((name, pa.int32()) for name in numbers)]
    columns = [
        *((name, pa.string()) for name in _TEXTS),
        *((name, pa.int64()) for name in _COUNTS),
        ("is_right", pa.bool_()),
        ("error", pa.struct(error)),
    ]
    return pa.Table.from_pylist(list(rows), pa.schema(columns))


def _json(answer: Any) -> str | None:
    """Returns an answer that is an object or a list of JSON, in one form; None for any other."""
    with suppress(ValueError, RecursionError):
        found = json.loads(answer) if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "[") else None
        return None if found is None else json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    return None
