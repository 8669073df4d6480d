"""`python -m tests.batch.store_job FOLDER URL...`: a batch from a store into a store, in small parts."""

from __future__ import annotations

import sys
from pathlib import Path

from epd.batch.driver import BatchPlan, run_batch
from epd.batch.folder import write_lines
from epd.batch.http_backend import HttpBackend
from epd.batch.lines import LineDefaults
from epd.batch.result_parts import PartsFolder
from tests.batch.test_http_backend import KEY


def main(folder: Path, *urls: str) -> None:
    write_lines(folder / "lines.jsonl", "s3://videos/rows", [])
    out = PartsFolder("s3://videos/answers", max_rows=25)
    plan = BatchPlan(folder / "lines.jsonl", out, LineDefaults(folder))
    run_batch(plan, lambda _: HttpBackend.open(urls, KEY))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
