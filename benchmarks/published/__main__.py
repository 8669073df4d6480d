"""Repeats published figures with the simulator and prints both.

    python -m benchmarks.published epd-table1 [--json] [--plot FILE]

Without a name it lists those that there are.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published.plots import plot_rows
from benchmarks.published.report import print_rows
from benchmarks.published.scenarios import SCENARIOS, run_scenario
from epd import console


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("scenario", nargs="?", choices=list(SCENARIOS), metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print records in place of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture of the rows")
    options = parser.parse_args(arguments)
    if options.scenario is None:
        print(*SCENARIOS, sep="\n")
        return
    rows = run_scenario(options.scenario)
    if options.json:
        console.print_json([row.record() for row in rows])
    else:
        print_rows(rows, console.stdout_console())
    if options.plot is not None:
        plot_rows(rows, options.plot)


if __name__ == "__main__":
    main()
