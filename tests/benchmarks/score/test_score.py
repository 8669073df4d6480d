"""The arithmetic of the score, its history and its page."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own, when it is imported
    from benchmarks.score import measuring
    from benchmarks.score.__main__ import (
        RESULTS,
        Found,
        found_of,
        is_met,
        score_of,
        scores_of,
        with_entry,
        written,
    )
    from benchmarks.score.app_costs import Figures
    from benchmarks.score.app_profile import AppRound, KindAsked
    from benchmarks.score.measuring import (
        CASES,
        SENSES,
        SIGHT,
        SOUND,
        Case,
        LiveRun,
        Measured,
        Run,
        Sense,
        measure,
        sense_of,
    )
    from benchmarks.score.shared_cores import HostCosts
    from epd.profiles.profile import PromptRule

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
    parts = [sense_of(case).workloads[case.workload] for case in CASES]
    assert {name for part in parts for name in ("images", "videos", "audios") if name in part} == {
        "images",
        "videos",
        "audios",
    }
    for topology in {case.topology for case in CASES}:
        seeds = [sense_of(case).seed(case) for case in CASES if case.topology == topology]
        assert len(set(seeds)) == len(seeds)


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


FIGURES = Figures(0.02, 0.005, 0.0, 0.01, 0.08, 40.0, 0.0)


def live(case: Case) -> LiveRun:
    return LiveRun(case, 5.0, FIGURES, 3500.0)


def a_round() -> AppRound:
    kinds = tuple(KindAsked(layout, 0, 8.0, 7, FIGURES, 3500.0) for layout in ("1epd", "1e1p1d"))
    return AppRound(HostCosts(2, 0.1), PromptRule(8.0), kinds)


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    runs = [live(case) for case in CASES[:5]]
    Run(tmp_path).add_round(SIGHT, a_round())
    Run(tmp_path).add_runs(runs[:3])
    Run(tmp_path).add_round(SOUND, a_round())
    Run(tmp_path).add_runs(runs[3:])
    assert Run(tmp_path).measured() == Measured({"sight": (a_round(),), "sound": (a_round(),)}, tuple(runs))
    Run(tmp_path).clear()
    assert Run(tmp_path).measured() == Measured()


def steps_of(run: Run, cases: Sequence[Case], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns what is measured, in order."""
    steps: list[str] = []

    def layout(run: Run, _sense: Sense, _profile: object, topology: str, left: Sequence[Case]) -> None:
        steps.append(f"{topology} {len(left)}")
        run.add_runs([live(case) for case in left])

    def asked(_stages: object, model: Path, *_: object, numbers: Sequence[int]) -> AppRound:
        steps.append(f"{model.name} round {numbers[0]}")
        return a_round()

    monkeypatch.setattr(Run, "stages", lambda *_: None)
    monkeypatch.setattr(Run, "model", lambda _, sense: Path(sense.name))
    monkeypatch.setattr(measuring, "fitted", lambda _stages, rounds: len(rounds))
    monkeypatch.setattr(measuring, "measure_layout", layout)
    monkeypatch.setattr(measuring, "app_round", asked)
    measure(run, cases)
    return steps


def test_rounds_of_the_profile_are_before_between_and_after_the_live_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = ["sight round 0", "1epd 5", "1ep1d 5", "sight round 1", "1e1pd 5", "1e1p1d 5", "sight round 2"]
    whole = [*seen, "sound round 0", "1epd 2", "1e1p1d 2"]
    assert steps_of(Run(tmp_path / "whole"), CASES, monkeypatch) == whole
    assert steps_of(Run(tmp_path / "whole"), CASES, monkeypatch) == []
    parts = Run(tmp_path / "parts")
    assert steps_of(parts, CASES[:7], monkeypatch) == ["sight round 0", "1epd 5", "1ep1d 2"]
    assert steps_of(parts, CASES, monkeypatch) == ["1ep1d 3", *whole[3:]]


def test_each_model_has_a_profile_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile gets the stages and the rounds of its model, and nothing of live runs."""
    run, given = Run(tmp_path), []
    for sense in SENSES.values():
        run.add_round(sense, a_round())
        run.add_runs([live(next(sense.cases()))])
    monkeypatch.setattr(Run, "stages", lambda _, sense: sense.name)
    monkeypatch.setattr("benchmarks.score.__main__.fitted", lambda stages, rounds: (stages, len(rounds)))
    monkeypatch.setattr(
        "benchmarks.score.__main__.compared", lambda profile, one: [given.append((profile, one.case))]
    )
    found_of(run)
    assert given == [(("sight", 1), CASES[0]), (("sound", 1), next(SOUND.cases()))]
