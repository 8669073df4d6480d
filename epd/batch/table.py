"""Writes the results of a run as a table: a row for each line that was answered or explained."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path

from epd.batch.lines import JSON
from epd.batch.records import answer_text, reason_of
from epd.batch.result_files import errors_path

COLUMNS = (
    "id", "media", "question", "answer", "finish_reason", "expected", "is_right", "prompt_tokens",
    "completion_tokens", "line", "error", "message",
)  # fmt: skip


def write_table(table: Path, results: Path) -> None:
    """Writes the table of the results of a run, and of its failures. A reader never sees half of it."""
    beside = table.with_name(f".{table.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(map(_row, _records(results)))
        writer.writerows(map(_row, _records(errors_path(results))))
    beside.replace(table)


def _records(path: Path) -> Iterator[JSON]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _row(record: JSON) -> JSON:
    """Returns the cells of a record of either form."""
    row = {**record, "media": "; ".join(record.get("media", ()))}
    if "custom_id" in record:
        row["id"] = record["custom_id"]
        completion = (record["response"] or {}).get("body") or {}
        if record["error"] is None:
            row |= {"answer": answer_text(completion), "usage": completion.get("usage")}
            row["finish_reason"] = completion["choices"][0]["finish_reason"]
    row |= row.get("usage") or {}
    if record.get("error"):
        row["error"], row["message"] = reason_of(record)
    return row
