"""Compares what a test simulates with benchmarks/results/epd_paper.json, so that the file cannot be old."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from benchmarks.published.tables import Row
from tests import ROOT

Record = dict[str, Any]


@cache
def records() -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = json.loads((ROOT / "benchmarks/results/epd_paper.json").read_text())
    return found


def assert_recorded(scenario: str, rows: Sequence[Row], *, is_all: bool = True) -> None:
    """Raises AssertionError unless the file has these rows of a scenario. is_all: and no others."""
    simulated, known = [row.record() for row in rows], records()[scenario]
    assert simulated, scenario
    missing = [row for row in simulated if not any(_is_near(row, each) for each in known)]
    assert not missing, "python -m benchmarks.planning.epd_paper writes the file anew"
    assert not is_all or len(simulated) == len(known)


def _is_near(one: Record, other: Record) -> bool:
    """Returns whether two rows say the same: fits and logarithms differ in the last digit by processor."""
    same = one | {"simulated": 0} == other | {"simulated": 0}
    return same and math.isclose(one["simulated"], other["simulated"], rel_tol=1e-6, abs_tol=2e-4)
