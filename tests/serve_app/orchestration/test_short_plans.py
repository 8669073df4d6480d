"""Short requests are planned at once, others by a thread; both get the same plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epd.encoders import Adapter, FrameSampling, load_adapter
from epd.reduction import ReductionPolicy
from epd.serve_app.orchestration import request_planner
from epd.serve_app.orchestration.live_answer import AnswerPlan
from epd.serve_app.orchestration.request_planner import RequestPlanner
from tests.serve_app.deployments import Question


@pytest.fixture
def planner(checkpoints: dict[str, Path]) -> RequestPlanner:
    return RequestPlanner(checkpoints["qwen2_5_vl"], group_tokens=16)


def content(plan: AnswerPlan | None) -> AnswerPlan:
    """Returns a plan without what differs from one time to the next."""
    assert plan is not None
    return replace(plan, plan_s=0.0, seed=0)


def same(left: AnswerPlan, right: AnswerPlan) -> bool:
    return (
        left.prompt.token_ids.tolist() == right.prompt.token_ids.tolist()
        and left.prompt.positions.tolist() == right.prompt.positions.tolist()
        and left.mm_hashes == right.mm_hashes
        and left.visual_tokens == right.visual_tokens
        and [group.spec.key for group in left.groups] == [group.spec.key for group in right.groups]
    )


def test_a_short_text_is_planned_at_once(planner: RequestPlanner) -> None:
    request = Question((), "what is this?").request()
    assert same(content(planner.plan_at_once(request)), content(planner.plan(request)))


def test_a_video_is_planned_at_once_when_it_is_known(planner: RequestPlanner, media: dict[str, Path]) -> None:
    request = Question((media["video"],), frame_sampling=FrameSampling(num_frames=8)).request()
    assert planner.plan_at_once(request) is None
    first = planner.plan(request)
    assert same(content(planner.plan_at_once(request)), content(first))
    other = Question((media["video"],), frame_sampling=FrameSampling(num_frames=4)).request()
    assert planner.plan_at_once(other) is None


@pytest.mark.parametrize(("method", "share"), [("mustdrop", 0.76), ("funnel", None), ("evs", None)])
def test_groups_are_encoded_as_the_method_asks(
    planner: RequestPlanner, media: dict[str, Path], method: str, share: float | None
) -> None:
    request = Question((media["video"],), frame_sampling=FrameSampling(num_frames=8)).request()
    reduced = planner.plan(replace(request, reduction=ReductionPolicy(method, 0.25)))
    assert {group.spec.key.tower_share for group in reduced.groups} == {share}
    whole = [group.spec.key for group in planner.plan(request).groups]
    keys = [group.spec.key for group in reduced.groups]
    assert (keys == whole) == (share is None), "what is merged is shared with no other method"


def test_what_may_take_longer_is_left_to_a_thread(
    planner: RequestPlanner, media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = Question((), "x" * (request_planner._MAX_SHORT_CHARS + 1)).request()
    assert planner.plan_at_once(long) is None
    video = Question((media["video"],), frame_sampling=FrameSampling(num_frames=8)).request()
    num_tokens = planner.plan(video).media[0].num_tokens
    monkeypatch.setattr(request_planner, "_MAX_SHORT_VISUAL_TOKENS", num_tokens)
    assert planner.plan_at_once(video) is not None
    monkeypatch.setattr(request_planner, "_MAX_SHORT_VISUAL_TOKENS", num_tokens - 1)
    assert planner.plan_at_once(video) is None
    turns = Question((), "hi").request()
    many = replace(turns, messages=turns.messages * (request_planner._MAX_SHORT_MESSAGES + 1))
    assert planner.plan_at_once(many) is None
    for words, is_short in ((("red",) * 16, True), (("red",) * 17, False), (("x" * 2000,), False)):
        asked = replace(turns, sampling=replace(turns.sampling, bad_words=words))
        assert (planner.plan_at_once(asked) is not None) == is_short


def test_no_adapter_is_opened_in_the_event_loop(
    planner: RequestPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds; while threads use all that are open, a short request waits for a thread, too."""
    request = Question((), "what is this?").request()
    opened: list[Path] = []

    def load(path: Path, **options: Any) -> Adapter:
        opened.append(path)
        return load_adapter(path, **options)

    monkeypatch.setattr(request_planner, "load_adapter", load)
    with planner._adapters.borrowed():
        assert planner.plan_at_once(request) is None
        assert opened == []
        planner.plan(request)
        assert len(opened) == 1
        assert planner.plan_at_once(request) is not None
    assert len(opened) == 1
