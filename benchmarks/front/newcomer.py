"""What a newcomer types wrongly, what is said, and after how long: each row in a process of its own.

    python -m benchmarks.front.newcomer [--no-save]

The rows are those of `tests/serve_app/cli/test_newcomer.py`, which checks the words. The terminal has 60
columns, no colours, and stdin is a terminal. seconds: to the end of the process. cpu_s: user and system.
Results go to benchmarks/results/newcomer.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.reporting import RESULTS, Row, markdown, setting
from tests import ROOT
from tests.serve_app.cli.test_newcomer import ROWS, stand_in, words_of

_TITLES = {"summary": "Seconds of a row", "rows": "Rows"}
_PLAIN = {"NO_COLOR": "1", "COLUMNS": "60", "EPD_URL": "", "PYTHONPATH": str(ROOT)}


def timed(typed: str, folder: Path) -> Row:
    """Types words in a folder. Returns what is said on stderr, and what it took."""
    command = [sys.executable, "-m", "epd", *words_of(typed)]
    ours, terminal = os.openpty()
    begun_s = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | _PLAIN,
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    with process.stderr as said:
        line = said.read().decode()
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.monotonic() - begun_s
    process.returncode = os.waitstatus_to_exitcode(status)
    for end in (ours, terminal):
        os.close(end)
    assert (process.returncode, line.count("\n")) == (2, 1), (typed, line)
    return {
        "typed": f"epd {typed}",
        "said": line.removeprefix("error: ").strip().replace(str(folder), "FOLDER").replace("|", "\\|"),
        "seconds": round(seconds, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
    }


def summary(rows: list[Row]) -> list[Row]:
    return [
        {
            "of": name,
            "rows": len(rows),
            "median": statistics.median(row[name] for row in rows),
            "90th percentile": round(statistics.quantiles([row[name] for row in rows], n=10)[-1], 2),
            "slowest": max(row[name] for row in rows),
        }
        for name in ("seconds", "cpu_s")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--no-save", action="store_true")
    wanted = parser.parse_args()
    here = setting(["typer"])
    with TemporaryDirectory() as name:
        folder = Path(name)
        stand_in(folder)
        rows = [timed(typed, folder) for typed, _ in ROWS]
    results = {"setting": here, "summary": summary(rows), "rows": rows}
    page = markdown("What a newcomer types", "python -m benchmarks.front.newcomer", results, _TITLES)
    if wanted.no_save:
        print(page)
        return
    (RESULTS / "newcomer.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "newcomer.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
