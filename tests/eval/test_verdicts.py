"""Verdicts survive a kill, and rows say of them what counting by hand does.

Modules: `epd/eval/plan.py`, `epd/eval/rows.py`, `serve_app/cli/eval.py`.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from epd.errors import RequestError
from epd.eval.items import FULL, EvalCase, EvalItem, EvalSetting, EvalVideo
from epd.eval.plan import EvalPlan, todos
from epd.eval.rows import RowSelection, eval_rows, table_rows, wilson_interval
from epd.eval.verdicts import RunInfo, TTFTSample, Verdict, VerdictLog
from epd.serve_app.cli.eval import plot_rows, print_rows

RUN = RunInfo("demo", "shapes-vl", max_tokens=16, seed=1)
HALF = EvalSetting("half", 0.5)


def verdict(setting: EvalSetting, number: int, is_right: bool, video: str = "v0") -> Verdict:
    tokens = round(100 * setting.retention)
    kind = "even" if number % 2 == 0 else "odd"
    return Verdict(
        setting.method,
        setting.retention,
        8,
        video,
        f"{video}-{number}",
        kind,
        truth="yes",
        answer="yes" if is_right else "no",
        is_right=is_right,
        visual_tokens=tokens,
        kv_bytes=tokens * 10,
        duration_group="3600" if number < 4 else "60",
    )


def sample(setting: EvalSetting, video: str, ttft_s: float) -> TTFTSample:
    return TTFTSample(setting.method, setting.retention, 8, video, ttft_s, ttft_s / 2)


def judged_log(path: Path | None = None) -> VerdictLog:
    """Ten questions: all tokens get 8 right; half of them 7, of which one that all tokens get wrong."""
    log = VerdictLog(RUN, path)
    log.append([verdict(FULL, number, number < 8) for number in range(10)])
    log.append([verdict(HALF, number, number < 6 or number == 9) for number in range(10)])
    log.append([sample(FULL, f"v{i}", 1.0 + i) for i in range(3)])
    log.append([sample(HALF, f"v{i}", 0.6 + i) for i in range(2)])
    return log


def test_a_row_says_what_counting_by_hand_says() -> None:
    (row,) = eval_rows(judged_log(), RowSelection(("half",), (0.5,), (8,)))
    assert (row.method, row.retention, row.num_frames, row.num_questions, row.num_videos) == (
        "half",
        0.5,
        8,
        10,
        1,
    )
    assert row.accuracy == pytest.approx(0.7)
    assert row.accuracy_of_full == pytest.approx(0.8)
    assert row.relative_accuracy == pytest.approx(7 / 8)
    assert (row.wins, row.losses) == (1, 2)
    assert row.p_value == pytest.approx(1.0)
    assert (row.visual_tokens, row.kv_bytes) == (50, 500)
    assert (row.ttft_s, row.prefill_s, row.num_cold) == (pytest.approx(1.1), pytest.approx(0.55), 2)
    assert [(each.name, each.num_questions, each.accuracy, each.facts_f1) for each in row.kinds] == [
        ("even", 5, pytest.approx(0.6), None),
        ("odd", 5, pytest.approx(0.8), None),
    ]


def test_facts_of_descriptions_are_counted_together(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    some = replace(verdict(FULL, 0, is_right=False), facts_found=4, facts_missed=2, facts_invented=1)
    VerdictLog(RUN, path).append([some, replace(verdict(FULL, 2, is_right=True), facts_found=6)])
    (row,) = eval_rows(log := VerdictLog.read(path), RowSelection.of(log))
    (even,) = row.kinds
    assert even.facts_f1 == pytest.approx(2 * 10 / (2 * 10 + 2 + 1))
    assert even.record()["facts_f1"] == even.facts_f1


def test_a_record_has_the_names_that_were_promised() -> None:
    record = eval_rows(judged_log(), RowSelection(("half",), (0.5,), (8,)))[0].record()
    promised = {
        "method",
        "retention",
        "num_frames",
        "num_questions",
        "accuracy",
        "ttft_s",
        "visual_tokens",
        "accuracy_of_full",
        "p_value",
        "wins",
        "losses",
        "accuracy_low",
        "accuracy_high",
        "kv_bytes",
    }
    assert promised <= record.keys()
    interval = wilson_interval(3, 5)
    assert record["kinds"]["even"] == {
        "num_questions": 5,
        "accuracy": pytest.approx(0.6),
        "accuracy_low": interval.low,
        "accuracy_high": interval.high,
        "facts_f1": None,
    }
    durations = {
        name: (part["num_questions"], part["accuracy"]) for name, part in record["duration_groups"].items()
    }
    assert durations == {"60": (6, pytest.approx(0.5)), "3600": (4, 1.0)}
    assert list(durations) == ["60", "3600"], "from short to long"
    assert json.loads(json.dumps(record)) == record


def test_with_all_tokens_every_method_has_the_row_of_all_tokens() -> None:
    rows = eval_rows(judged_log(), RowSelection(("half", "other"), (1.0, 0.5), (8, 16)))
    assert [(row.method, row.retention) for row in rows] == [("half", 1.0), ("half", 0.5), ("other", 1.0)]
    assert rows[0] == replace(rows[2], method="half")
    assert (rows[0].wins, rows[0].losses, rows[0].p_value) == (0, 0, 1.0)


def test_a_log_is_shown_whole_with_all_tokens_once() -> None:
    log = judged_log()
    assert RowSelection.of(log) == RowSelection(("half",), (1.0, 0.5), (8,))
    assert RowSelection.of(log).settings == (FULL, HALF)
    assert RowSelection(("a", "b"), (0.5,), (8,)).settings == (
        FULL,
        EvalSetting("a", 0.5),
        EvalSetting("b", 0.5),
    )
    assert [(row.method, row.retention) for row in eval_rows(log, RowSelection.of(log))] == [
        ("half", 1.0),
        ("half", 0.5),
    ]
    assert [row.method for row in table_rows(log, RowSelection.of(log))] == ["full", "half"]


def test_methods_can_be_tested_against_each_other() -> None:
    log = judged_log()
    log.append([verdict(EvalSetting("other", 0.5), number, number < 4) for number in range(10)])
    half, other = eval_rows(log, RowSelection(("half", "other"), (0.5,), (8,), against="other"))
    assert (half.against, half.wins, half.losses, half.p_value) == ("other", 3, 0, pytest.approx(0.25))
    assert (half.accuracy_of_full, half.relative_accuracy) == (pytest.approx(0.8), pytest.approx(7 / 8))
    assert (other.wins, other.losses, other.p_value) == (0, 0, 1.0)
    assert EvalSetting("x", 0.5) in RowSelection(("half",), (0.5,), (8,), against="x").settings


def test_pairs_are_only_questions_asked_both_ways() -> None:
    log = VerdictLog(RUN)
    log.append([verdict(FULL, number, True) for number in range(4)])
    log.append([verdict(HALF, number, False) for number in range(2, 8)])
    row = next(row for row in table_rows(log, RowSelection.of(log)) if row.method == "half")
    assert (row.num_questions, row.wins, row.losses, row.accuracy_of_full) == (6, 0, 2, 1.0)
    assert row.relative_accuracy == 0.0
    alone = VerdictLog(RUN)
    alone.append([verdict(HALF, 0, True)])
    (row,) = table_rows(alone, RowSelection.of(alone))
    assert (row.accuracy, row.accuracy_of_full, row.p_value, row.ttft_s) == (1.0, None, None, None)


def test_a_killed_evaluation_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    before = judged_log(path)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines(keepends=True)[1][:25])
    again = VerdictLog(RUN, path)
    assert again.verdicts == before.verdicts
    assert again.samples == before.samples
    more = verdict(HALF, 11, True)
    again.append([more])
    assert VerdictLog.read(path).verdicts == [*before.verdicts, more]
    assert path.read_bytes().startswith(whole)


def test_what_is_known_need_not_be_asked_again(tmp_path: Path) -> None:
    log = judged_log(tmp_path / "verdicts.jsonl")
    items = tuple(EvalItem(f"v0-{number}", "?", "yes") for number in range(10))
    case = EvalCase(EvalVideo("v0", "v0.mp4", items), 8)
    assert log.has_verdicts(case, HALF)
    assert log.has_sample(case, HALF)
    assert not log.has_verdicts(EvalCase(case.video, 16), HALF)
    assert not log.has_verdicts(case, EvalSetting("half", 0.25))
    one_more = EvalVideo("v0", "v0.mp4", (*items, EvalItem("v0-10", "?", "yes")))
    assert not log.has_verdicts(EvalCase(one_more, 8), HALF)
    assert not log.has_sample(EvalCase(EvalVideo("v2", "v2.mp4", items), 8), HALF)


def test_the_plan_knows_what_is_left_and_times_in_another_order_for_each_video() -> None:
    settings = (FULL, HALF, EvalSetting("half", 0.25))
    cases = tuple(
        EvalCase(EvalVideo(f"v{i}", f"v{i}.mp4", (EvalItem(f"v{i}-0", "?", "yes"),)), frames)
        for frames in (8, 16)
        for i in range(4)
    )
    plan = EvalPlan(cases, settings, num_cold_videos=3)
    empty = list(todos(plan, VerdictLog(RUN)))
    assert [len(todo) for todo in empty] == [6, 6, 6, 3] * 2
    firsts = [todo.untimed[0] for todo in empty if todo.untimed]
    assert firsts == [*settings, *settings]
    assert all(set(todo.untimed) == set(settings) for todo in empty if todo.untimed)

    log = VerdictLog(RUN)
    log.append([verdict(each, 0, True, video=f"v{i}") for each in settings for i in range(4)])
    log.append([sample(HALF, "v1", 1.0)])
    left = list(todos(plan, log))
    assert [len(todo) for todo in left] == [3, 2, 3, 6, 6, 6, 3]
    assert left[1].untimed == (settings[2], FULL)
    assert left[1].unjudged == ()


def test_a_question_judged_twice_counts_once_as_judged_last(tmp_path: Path) -> None:
    log = VerdictLog(RUN, tmp_path / "verdicts.jsonl")
    log.append([verdict(FULL, 0, False)])
    log.append([verdict(FULL, 0, True)])
    assert VerdictLog.read(tmp_path / "verdicts.jsonl").verdicts == [verdict(FULL, 0, True)]


def test_files_of_another_run_or_of_no_run_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    judged_log(path)
    with pytest.raises(RequestError, match=r"seed=1.*seed=2"):
        VerdictLog(replace(RUN, seed=2), path)
    notes = tmp_path / "notes.txt"
    for text in ("line of another file\nand half of one", '{"record": "verdict"}\n', '{"a": 1}\n', "half"):
        notes.write_text(text)
        with pytest.raises(RequestError, match="give a file of epd eval --out"):
            VerdictLog(RUN, notes)
        assert notes.read_text() == text
    with pytest.raises(RequestError, match="cannot be read"):
        VerdictLog.read(tmp_path / "missing.jsonl")
    with pytest.raises(RequestError, match="cannot write"):
        VerdictLog(RUN, tmp_path / "no" / "verdicts.jsonl")


def test_the_table_fits_80_columns_and_the_picture_is_drawn(tmp_path: Path) -> None:
    log = judged_log()
    rows = table_rows(log, RowSelection.of(log))
    assert [row.method for row in rows] == ["full", "half"]
    console = Console(file=io.StringIO(), width=80)
    print_rows(rows, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "8 frames, 10 questions, 1 videos"
    half = next(line.split() for line in lines if line.startswith("half"))
    assert half == ["half", "0.5", "50", "0.0005", "70.0", "39.7-89.2", "87.5", "1", "2", "1", "1.100"]
    print_rows(rows, console, by="duration")
    words = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    parts = [line[:4] for line in words if line[:1] in (["60"], ["3600"])]
    assert parts == [
        ["60", "full", "1", "6"],
        ["60", "half", "0.5", "6"],
        ["3600", "full", "1", "4"],
        ["3600", "half", "0.5", "4"],
    ]
    assert ["60", "half", "0.5", "6", "50.0", "18.8-81.2"] in words
    wide = replace(rows[1], method="quickprefill", visual_tokens=30720, kv_bytes=123_000_000, retention=0.15)
    print_rows([replace(wide, ttft_s=12.345, wins=123, losses=113, p_value=1e-10)], console)
    assert "…" not in console.file.getvalue()  # type: ignore[attr-defined]
    plot_rows(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
