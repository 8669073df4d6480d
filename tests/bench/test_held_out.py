"""The page of predictions is that of the kept results, and says plainly where the aim is missed.

Modules: `benchmarks/planning/held_out.py`.
"""

from __future__ import annotations

from benchmarks.planning.held_out import Prediction, error_rows, page
from benchmarks.reporting import RESULTS


def test_the_page_is_that_of_the_kept_results() -> None:
    kept = (RESULTS / "held_out.md").read_text(encoding="utf-8")
    assert kept == page(), "run python -m benchmarks.planning.held_out"


def test_errors_are_counted_by_source_and_figure_without_signs() -> None:
    found = [
        *(Prediction("a", "x", "TTFT", 1.0, 1.0 + error) for error in (-0.05, 0.05, 0.2)),
        Prediction("a", "x", "TPOT", 1.0, 1.4),
        Prediction("b", "x", "TTFT", 2.0, 1.0),
    ]
    told = [
        (row["source"], row["figure"], row["rows"], row["median"], row["aim"]) for row in error_rows(found)
    ]
    assert told == [
        ("a", "TTFT", 3, "5.0%", "met"),
        ("a", "TPOT", 1, "40.0%", "missed"),
        ("a", "all", 4, "12.5%", "missed"),
        ("b", "TTFT", 1, "50.0%", "missed"),
    ]
