"""Compares what a test simulates with benchmarks/results/epd_paper.json, so that the file cannot be old."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from epd.published.tables import Row
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
    if is_all:
        assert simulated == known, "python -m benchmarks.epd_paper writes the file anew"
    else:
        assert [row for row in simulated if row not in known] == []
