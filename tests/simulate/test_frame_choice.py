"""Frames of simulated videos, against the plan of a server: as many, and as many tokens of each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from benchmarks.encode.published_processors import opened
from epd.encoders import FrameSampling, MediaPlan, VideoFacts
from epd.errors import RequestBudgetError
from epd.profiles.analytic import analytic_profile
from epd.profiles.profile import PromptRule
from epd.reduction import KEEP_ALL, VisualBudget
from epd.simulate import JobMaker
from epd.simulate.frame_choice import FrameChooser, VideoWishes
from epd.stages.media import PromptRoom, plan_within
from epd.workload.requests import PlannedRequest, RequestShape, Resolution, VideoSpec

NAMES = ("Qwen2.5-VL-7B", "Qwen3-VL-8B", "InternVL3-8B", "LLaVA-OneVision-7B")
SIZES = ("640x360", "1920x1080", "720x1280")
QUESTION = "What happens in these videos, and in which order?"
ANSWER = 200


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    return request.param, opened(request.param, tmp_path_factory.mktemp("published"), has_words=True)


def drawn(seed: int) -> tuple[RequestShape, VideoWishes]:
    """Few or very many videos, with a budget or named frames at times; hundreds of tokens for each."""
    draw = random.Random(seed)
    count = draw.choice([1, 2, 3, 8, 12])
    videos = tuple(
        VideoSpec(draw.choice([5.0, 60.0, 600.0]), 30, Resolution.parse(draw.choice(SIZES)))
        for _ in range(count)
    )
    wishes = [
        VideoWishes(),
        VideoWishes(max_visual_tokens=draw.choice([4000, 40_000])),
        VideoWishes(num_frames=draw.choice([8, 64])),
        VideoWishes(fps=0.5, max_visual_tokens=8000),
    ]
    return RequestShape(10, ANSWER, videos=videos), draw.choice(wishes)


def served(adapter: Any, context: int, shape: RequestShape, wishes: VideoWishes) -> tuple[int, float, int]:
    """The frames, the share that is kept and the visual tokens of a server; or zeros for a refusal."""
    facts = [VideoFacts(v.num_frames, float(v.fps), v.size.height, v.size.width) for v in shape.videos]

    def lay_out(plans: Sequence[MediaPlan]) -> Any:
        return adapter.plan_prompt(plans, QUESTION)

    try:
        media = plan_within(
            [partial(adapter.plan_video, each) for each in facts],
            FrameSampling(fps=wishes.fps, num_frames=wishes.num_frames),
            KEEP_ALL,
            VisualBudget(wishes.max_visual_tokens),
            PromptRoom(context, ANSWER),
            lay_out,
        )
    except RequestBudgetError:
        return 0, 0.0, 0
    usage = media.prompt.usage(0)
    return usage.num_frames, media.reduction.retention, usage.visual_tokens


def planned(profile: Any, shape: RequestShape, wishes: VideoWishes) -> tuple[int, float, int]:
    """The same of the simulator."""
    try:
        chosen = FrameChooser(profile, wishes).chosen(shape)
    except RequestBudgetError:
        return 0, 0.0, 0
    tokens = sum(group.num_tokens for groups in chosen.groups for group in groups)
    return sum(group.num_frames for groups in chosen.groups for group in groups), chosen.retention, tokens


def test_requests_have_the_frames_and_tokens_that_a_server_chooses(model: tuple[str, Any]) -> None:
    """Whole, thinner, fewer or refused: each is drawn for some model."""
    name, adapter = model
    profile = analytic_profile("h100", name)
    num_text = len(adapter.plan_prompt([], QUESTION))
    profile = replace(profile, prompt=PromptRule(num_text, 0.0))
    kinds = set()
    for seed in range(16):
        shape, wishes = drawn(seed)
        context = profile.context_tokens or 0
        frames, retention, tokens = served(adapter, context, shape, wishes)
        mine = planned(profile, shape, wishes)
        shown = f"{len(shape.videos)} videos, {wishes}"
        assert mine[:2] == (pytest.approx(frames, rel=0.005, abs=1), retention), shown
        assert mine[2] == pytest.approx(tokens, rel=0.005, abs=4), shown
        kinds.add(
            (retention, frames < sum(FrameChooser(profile, wishes).rule.num_sampled(v) for v in shape.videos))
        )
    assert len(kinds) >= 3, kinds


def test_a_job_has_what_was_chosen() -> None:
    """Twenty films of ten minutes do not fit the context: the prompt does."""
    profile = analytic_profile("h100", "qwen2.5-vl-7b")
    film = VideoSpec(600.0, 30, Resolution(1920, 1080))
    request = PlannedRequest(0, 0.0, RequestShape(40, 200, videos=(film,) * 20), 1, 2)
    job = JobMaker(profile).job(request)
    assert 100_000 < job.num_prompt_tokens < 128_000
    one = JobMaker(profile).job(replace(request, shape=RequestShape(40, 200, videos=(film,))))
    assert one.num_prompt_tokens == 23_040 + 40
    fewer = JobMaker(profile, wishes=VideoWishes(num_frames=64)).job(
        replace(request, shape=RequestShape(40, 200, videos=(film,)))
    )
    assert sum(group.media.num_frames for group in fewer.groups) == 64
    with pytest.raises(RequestBudgetError, match=r"allowed: fewer than the 128,000 tokens"):
        JobMaker(profile, wishes=VideoWishes(num_frames=768)).job(request)


def test_the_time_to_read_a_film_is_that_of_all_its_pixels() -> None:
    """Whatever is sampled: every frame is decoded."""
    profile = analytic_profile("h100", "qwen2.5-vl-7b")
    film = VideoSpec(600.0, 30, Resolution(1920, 1080))
    request = PlannedRequest(0, 0.0, RequestShape(40, 200, videos=(film,)), 1, 2)
    for wishes in (VideoWishes(), VideoWishes(num_frames=64)):
        job = JobMaker(profile, wishes=wishes).job(request)
        seconds = sum(group.decode_ticks for group in job.groups) / 1e12
        assert seconds == pytest.approx(18_000 * 1920 * 1080 / 1.5e8, rel=1e-6)
