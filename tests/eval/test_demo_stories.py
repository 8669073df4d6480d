"""Questions of a demo that take more than one word are judged by what their answers state."""

from __future__ import annotations

import re

from epd.eval.plan import demo_cases
from epd.shapes.questions import ONE_WORD_KINDS


def test_stories_are_judged_by_facts_and_their_truth_is_right() -> None:
    cases = demo_cases(60, [32], 0, has_stories=True)
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


def _later(answer: str, seconds: int) -> str:
    """A description in which one object appears so much later."""
    return re.sub(r'(at |"from": ?)(\d+)', lambda it: f"{it[1]}{int(it[2]) + seconds}", answer, count=1)
