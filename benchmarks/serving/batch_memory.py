"""Memory of the process that drives a batch from Parquet to Parquet, by the number of rows.

    python -m benchmarks.serving.batch_memory [--rows 1000 100000 1000000]

The engine is faked. Each size runs in a process of its own. Five rows are about the same video. Results go to
benchmarks/results/batch_memory.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from epd.batch.driver import BatchPlan, run_batch
from epd.batch.folder import write_lines
from epd.batch.line_index import LineIndex
from epd.batch.lines import LineDefaults
from epd.batch.result_parts import PartsFolder
from epd.batch.summary import peak_bytes
from epd.batch.tasks import Backend, MediaTask, Outcome
from tests import ROOT
from tests.batch.fakes import FakeBackend

ROWS_A_GROUP = 10_000
RESULTS = ROOT / "benchmarks" / "results"


class Instant(FakeBackend):
    """Answers at once, and remembers nothing."""

    def _outcomes(self, tasks: Iterator[MediaTask]) -> Iterator[Outcome | None]:
        for task in tasks:
            yield from map(self._outcome, task.lines)


def write_rows(path: Path, num_rows: int) -> None:
    with pq.ParquetWriter(
        path, pa.schema({name: pa.string() for name in ("id", "video", "question")})
    ) as file:
        for start in range(0, num_rows, ROWS_A_GROUP):
            numbers = range(start, min(num_rows, start + ROWS_A_GROUP))
            rows = {
                "id": [f"row-{number}" for number in numbers],
                "video": [f"https://host/{number // 5}.mp4" for number in numbers],
                "question": [f"question {number}" for number in numbers],
            }
            file.write_table(pa.table(rows, file.schema))


def run(num_rows: int) -> dict[str, Any]:
    @contextmanager
    def opened(_: LineIndex) -> Iterator[Backend]:
        yield Instant()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.parquet", num_rows)
        start_s = time.monotonic()
        write_lines(folder / "lines.jsonl", folder / "rows.parquet", [])
        plan = BatchPlan(folder / "lines.jsonl", PartsFolder(f"{folder}/out"), LineDefaults(folder))
        summary = run_batch(plan, opened)
        assert summary.tally.num_answered == num_rows
        return {
            "rows": num_rows,
            "wall_s": round(time.monotonic() - start_s, 1),
            "peak_mib": peak_bytes() >> 20,
            "parts": len(list((folder / "out").glob("*.parquet"))),
        }


def page(found: list[dict[str, Any]]) -> str:
    lines = [f"| {each['rows']:,} | {each['peak_mib']} | {each['parts']} |" for each in found]
    return "\n".join(
        [
            "# Memory of a batch by the number of its rows",
            "",
            "`epd batch` went from Parquet to Parquet with an engine that answers at once.",
            "Five rows are about each video.",
            "`python -m benchmarks.serving.batch_memory` repeats it.",
            "",
            "| rows | most memory of the process, MiB | parts written |",
            "|---:|---:|---:|",
            *lines,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--one", action="store_true", help="Run one size here, and print it.")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run(given.rows[0])))
        return
    found = []
    for num_rows in given.rows:
        command = [sys.executable, "-m", __spec__.name, "--one", "--rows", str(num_rows)]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(found[-1], flush=True)
    (RESULTS / "batch_memory.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "batch_memory.md").write_text(page(found))


if __name__ == "__main__":
    main()
