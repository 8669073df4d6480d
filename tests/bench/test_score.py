"""The arithmetic of the score, its history and its page."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own, when it is imported
    from benchmarks.score import CASES, RESULTS, Found, Run, is_met, score_of, scores_of, with_entry, written

HERE = {"date": "2999-01-01 10:00 UTC", "cores": 2}


def found_with(errors: dict[str, float]) -> list[Found]:
    """Returns every pair with the same error of each figure; half of it at the profile's speed."""
    return [
        Found(case, figure, 0.2, 0.2 * (1 + error), 0.2 * (1 + error / 2))
        for case in CASES
        for figure, error in errors.items()
    ]


def test_errors_of_both_signs_do_not_cancel() -> None:
    found = score_of([-0.1, 0.1, 0.3, -0.3, 0.0])
    assert found == {"mean": 0.16, "median": 0.1, "p90": 0.3, "bias": 0.0}
    with pytest.raises(ValueError, match="at least one pair"):
        score_of([])


def test_the_aim_holds_for_the_median_and_the_tail() -> None:
    assert is_met(score_of([0.1] * 9 + [0.9]))  # one of ten may be far off
    assert not is_met(score_of([0.05] * 8 + [0.9] * 2))
    assert not is_met(score_of([-0.11] * 10))


def test_each_figure_has_its_score() -> None:
    scores = scores_of(found_with({"TTFT": 0.2, "TPOT": -0.1}))
    assert [scores[name]["median"] for name in ("TTFT", "TPOT", "both", "steady")] == [0.2, 0.1, 0.15, 0.075]
    assert [scores[name]["bias"] for name in ("TTFT", "TPOT", "both", "steady")] == [0.2, -0.1, 0.05, 0.025]


def test_there_are_enough_pairs() -> None:
    assert len(CASES) == len(set(CASES)) >= 16
    assert len({case.topology for case in CASES}) >= 4
    assert len({case.retention for case in CASES}) >= 2


def test_history_is_only_added_to(tmp_path: Path) -> None:
    (tmp_path / "score.json").write_text((RESULTS / "score.json").read_text())
    before = json.loads((tmp_path / "score.json").read_text())["history"]
    written(found_with({"TTFT": 0.2, "TPOT": -0.1}), tmp_path, HERE)
    results = json.loads((tmp_path / "score.json").read_text())
    assert results["history"][:-1] == before
    assert results["history"][-1]["pairs"] == len(CASES)
    assert len(results["pairs"]) == 2 * len(CASES)
    page = (tmp_path / "score.md").read_text()
    assert "missed" in page
    assert "| 2026-11-21 | 16 | TTFT | not kept | not kept | 11.6% | not kept |" in page
    assert "| 1e1p1d | video of 4 to 8 s | 0.5 | 200.0 | 240.0 | +20% | 200.0 | 180.0 | -10% |" in page
    with pytest.raises(ValueError, match="cannot follow"):
        with_entry(results["history"], {"date": "2026-11-20"})


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    found = found_with({"TTFT": 0.2})
    Run(tmp_path).add(found[:3])
    Run(tmp_path).add(found[3:5])
    assert Run(tmp_path).found() == found[:5]
    Run(tmp_path).clear()
    assert Run(tmp_path).found() == []
