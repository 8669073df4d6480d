"""Questions of a demo that take more than one word are judged by what their answers state."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from epd.eval.plan import demo_cases
from epd.eval.verdicts import VerdictLog
from epd.shapes.questions import ONE_WORD_KINDS
from tests.media import write_video
from training.drawn_eval import drawn, main
from training.footage import LEVELS, PLAIN, write_filmed


def test_stories_are_judged_by_facts_and_their_truth_is_right() -> None:
    with drawn(PLAIN, has_stories=True):
        cases = demo_cases(60, [32], 0)
    items = {item.kind: item for case in cases for item in case.video.items}
    told = {"describe", "json", "when", "where", "motion", "count over time", "follow-up"}
    assert told | {*ONE_WORD_KINDS} == set(items)
    for item in (each for case in cases for each in case.video.items):
        assert item.is_answered_by(item.answer), item
    described, as_json, when = items["describe"], items["json"], items["when"]
    for item, other in ((described, as_json), (as_json, described)):
        assert item.is_answered_by(f" {item.answer}\n")
        assert item.is_answered_by(_later(item.answer, 1)), "a time that is near"
        assert not item.is_answered_by(_later(item.answer, 3))
        assert not item.is_answered_by(other.answer), "the right facts in another form"
        assert not item.is_answered_by(item.answer[: len(item.answer) // 2])
        assert item.count_facts is not None
        assert item.count_facts(item.answer).f1 == 1
        assert item.count_facts(other.answer).found == 0
    assert not when.is_answered_by(described.answer)
    assert when.count_facts is None


def test_without_stories_every_answer_is_a_word() -> None:
    kinds = {item.kind for case in demo_cases(30, [32], 0) for item in case.video.items}
    assert kinds == set(map(str, ONE_WORD_KINDS))


def test_facts_of_descriptions_are_counted_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of the questions about a video are to describe it, in sentences and as JSON."""
    demo = ("--demo", "2", "--frames", "8", "--ttft-videos", "0", "--num-threads", "1", "--retention", "1.0")
    options = (*demo, "--model", "shapes-vl-2", "--out", str(tmp_path / "log"), "--by", "kind")
    assert main(["--stories", *options]) == 0
    told = VerdictLog.read(tmp_path / "log").verdicts
    assert [each.kind for each in told] == ["describe", "json"]
    assert all(each.is_right and each.facts.is_all and each.facts_found % 6 == 0 for each in told), told
    assert all(each.facts_found for each in told)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["json", "full", "1", "1", "100.0", "20.7-100.0", "1.000"] in rows


def test_demo_videos_are_filmed_as_asked_and_verdicts_of_other_footage_are_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []

    def write(*args: Any, **options: Any) -> Path:
        shown.append(options["filming"])
        return write_filmed(*args, **options)

    monkeypatch.setattr("training.drawn_eval.write_filmed", write)
    (tmp_path / "clips").mkdir()
    behind = write_video(tmp_path / "clips" / "behind.mp4").parent
    filmed = ("--footage", "busy", "--background", str(behind))
    out = tmp_path / "verdicts.jsonl"
    demo = ("--demo", "5", "--frames", "8", "--ttft-videos", "0", "--num-threads", "1")
    options = (*demo, "--model", "shapes-vl", "--retention", "1.0", "--out", str(out))
    assert main([*options, *filmed]) == 0
    assert [(each.footage, each.backgrounds.folder) for each in shown] == [(LEVELS["busy"], behind)]
    log = VerdictLog.read(out)
    assert str(behind) in log.run.data
    assert "'num_posts': 2" in log.run.data
    assert len(log.verdicts) == 5
    capsys.readouterr()
    assert main(options) == 2
    assert "write to another file" in capsys.readouterr().err


def _later(answer: str, seconds: int) -> str:
    """A description in which one object appears so much later."""
    return re.sub(r'(at |"from": ?)(\d+)', lambda it: f"{it[1]}{int(it[2]) + seconds}", answer, count=1)
