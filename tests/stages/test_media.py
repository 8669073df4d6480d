"""Media planned within a budget: prompts of every family have room, and nothing else is changed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from epd.encoders import Adapter, FrameSampling, MediaPlan, VideoFacts, load_adapter
from epd.errors import RequestBudgetError
from epd.frame_sampling import ListedTimes
from epd.reduction import KEEP_ALL, NO_BUDGET, ReductionPolicy, VisualBudget
from epd.stages.media import BudgetedMedia, PlanOf, PromptRoom, plan_within
from tests.conversations import plan_prefix
from tests.encoders.tiny_tiles import BUILDERS

SECONDS = (1, 60, 3600, 36_000)


@pytest.fixture(scope="module")
def adapter(checkpoints: dict[str, Path]) -> Adapter:
    return load_adapter(checkpoints["shapes-vl"])


def video_of(adapter: Adapter, seconds: int) -> PlanOf:
    return partial(adapter.plan_video, VideoFacts(seconds * 24, 24.0, 90, 160))


def planned(
    adapter: Adapter,
    *items: MediaPlan | PlanOf,
    sampling: FrameSampling | None = None,
    reduction: ReductionPolicy = KEEP_ALL,
    budget: VisualBudget = NO_BUDGET,
    context: int | None = 4096,
) -> BudgetedMedia:
    return plan_within(
        items,
        sampling or FrameSampling(),
        reduction,
        budget,
        PromptRoom(context, 16),
        partial(plan_prefix, adapter),
    )


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("context", [256, 600, 4096, 32_768])
def test_a_prompt_of_any_length_of_video_has_room(adapter: Adapter, seconds: int, context: int) -> None:
    made = planned(adapter, video_of(adapter, seconds), context=context)
    assert len(made.prompt) + 1 <= context
    if made.line:
        assert len(made.prompt) + 16 <= context, "an answer has room, too"
        assert f"{made.plans[0].num_frames} of {made.num_wanted} frames" in made.line


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("most", [10, 100, 1000, 100_000])
def test_a_budget_is_kept_to_and_used(adapter: Adapter, seconds: int, most: int) -> None:
    made = planned(adapter, video_of(adapter, seconds), budget=VisualBudget(most), context=32_768)
    assert made.prompt.num_visual_tokens <= most
    if made.line:
        assert made.prompt.num_visual_tokens >= most / 2


def test_what_has_room_is_planned_as_without_a_budget(adapter: Adapter) -> None:
    plan_of = video_of(adapter, 60)
    made = planned(adapter, plan_of)
    assert made.plans == (plan_of(FrameSampling()),)
    assert (made.reduction, made.line) == (KEEP_ALL, "")


def test_what_has_room_only_just_is_planned_as_it_was(adapter: Adapter) -> None:
    plan_of = video_of(adapter, 60)
    num_tokens = len(planned(adapter, plan_of).prompt)
    assert planned(adapter, plan_of, context=num_tokens + 1).line == ""
    assert planned(adapter, plan_of, context=num_tokens).plans[0].num_frames < 60


def test_the_line_is_of_what_was_chosen_not_of_what_was_asked_for(adapter: Adapter) -> None:
    image = adapter.plan_image(90, 160)
    quarter = ReductionPolicy(retention=0.25)
    assert planned(adapter, image, video_of(adapter, 60), reduction=quarter).line == ""
    few = planned(adapter, image, video_of(adapter, 60), budget=VisualBudget(300))
    assert few.line.startswith(f"{1 + few.plans[1].num_frames} of 61 frames at retention 1: ")


def test_what_cannot_be_thinned_keeps_its_tokens(tmp_path: Path) -> None:
    adapter = load_adapter(BUILDERS["llava_onevision"](tmp_path / "model"))
    image, video = adapter.plan_image(90, 160), video_of(adapter, 3600)
    assert image.is_joined_whole
    made = planned(adapter, image, video, budget=VisualBudget(image.num_tokens + 60))
    assert made.prompt.media[0].num_tokens == image.num_tokens
    assert made.reduction.is_on, "the video is thinned"
    with pytest.raises(RequestBudgetError, match="raise max_visual_tokens"):
        planned(adapter, image, budget=VisualBudget(image.num_tokens - 1))


def test_frames_and_retention_that_were_asked_for_are_kept(adapter: Adapter) -> None:
    plan_of = video_of(adapter, 3600)
    sampling = FrameSampling(num_frames=40)
    thinned = planned(adapter, plan_of, sampling=sampling, budget=VisualBudget(50))
    assert (thinned.plans[0].num_frames, thinned.reduction.retention) == (40, 0.15)
    fewer = planned(
        adapter,
        plan_of,
        reduction=ReductionPolicy(retention=0.4),
        budget=VisualBudget(50, keeps_retention=True),
    )
    assert fewer.reduction.retention == 0.4
    assert fewer.plans[0].num_frames < 40


def test_asking_for_more_than_the_context_is_refused(adapter: Adapter) -> None:
    plan_of = video_of(adapter, 3600)
    with pytest.raises(RequestBudgetError, match=r"ask for fewer frames or media$"):
        planned(adapter, plan_of, sampling=FrameSampling(num_frames=3000), context=4096)
    for every in (FrameSampling(takes_all=True), FrameSampling(listed=ListedTimes())):
        with pytest.raises(RequestBudgetError, match="ask for fewer frames"):
            planned(adapter, plan_of, sampling=every, context=4096)
    with pytest.raises(RequestBudgetError, match=r"received a budget of 50 .* raise max_visual_tokens"):
        planned(adapter, plan_of, sampling=FrameSampling(num_frames=400), budget=VisualBudget(50, True))
    with pytest.raises(RequestBudgetError, match=r"received a budget of 2 .* 3 at least"):
        planned(adapter, plan_of, budget=VisualBudget(2))


def test_images_and_several_videos_share_a_budget(adapter: Adapter) -> None:
    items = (video_of(adapter, 600), adapter.plan_image(90, 160), video_of(adapter, 60))
    made = planned(adapter, *items, budget=VisualBudget(1000))
    long, image, short = made.plans
    assert made.prompt.num_visual_tokens <= 1000
    assert image == items[1]
    assert 8 <= long.num_frames / short.num_frames <= 12


def test_a_rule_that_takes_more_frames_than_a_request_may_have_gets_as_many(adapter: Adapter) -> None:
    sampling = FrameSampling(max_frames=100)
    made = planned(adapter, video_of(adapter, 600), video_of(adapter, 600), sampling=sampling)
    assert [plan.num_frames for plan in made.plans] == [50, 50]
    with pytest.raises(RequestBudgetError, match="max_frames"):
        planned(adapter, video_of(adapter, 600), sampling=FrameSampling(fps=1.0, max_frames=100))


@pytest.mark.parametrize("family", [*BUILDERS, "qwen2_5_vl", "qwen3_vl"])
def test_every_family_fits_its_longest_video(
    checkpoints: dict[str, Path], tmp_path: Path, family: str
) -> None:
    path = BUILDERS[family](tmp_path / family) if family in BUILDERS else checkpoints[family]
    adapter = load_adapter(path)
    for seconds in SECONDS:
        made = planned(adapter, video_of(adapter, seconds), context=512)
        assert len(made.prompt) < 512
