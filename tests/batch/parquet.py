"""Tables in Parquet, written and read by pyarrow alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write_table(path: Path, rows: Sequence[dict[str, Any]], rows_a_group: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=rows_a_group)
    return path


def committed_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of the parts that the manifest names."""
    manifest = json.loads((folder / "_manifest.json").read_text())
    parts = [(each["rows"], pq.read_table(folder / each["name"]).to_pylist()) for each in manifest["parts"]]
    assert all(num_rows == len(rows) for num_rows, rows in parts)
    return [row for _, rows in parts for row in rows]
