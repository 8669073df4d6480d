"""Requests that cannot fit are refused while they are planned, before the work that they would take."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epd.control.request_budget import RequestLimits
from epd.encoders import Adapter, FrameSampling, PixelLimits, PromptPlan
from epd.errors import RequestBudgetError, RequestError
from epd.models import embedded_model_path
from epd.sampling_params import SamplingParams
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.orchestration.request_planner import RequestPlanner
from tests.serve_app.deployments import Question
from tests.serve_app.media_fleet import MediaFleet, reference_to, unheld

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


@pytest.fixture(scope="module")
def planner() -> RequestPlanner:
    return RequestPlanner(embedded_model_path(), limits=RequestLimits(max_frames=16))


def test_ceilings_are_those_of_the_model(planner: RequestPlanner) -> None:
    longest = max(len(token.encode()) for token in planner.adapter.tokenizer.get_vocab())
    assert planner.limits == RequestLimits(max_frames=16).for_model(32_768, longest)


def test_frames_of_all_videos_share_one_ceiling(planner: RequestPlanner, media: dict[str, Path]) -> None:
    video = media["video"]
    assert planner.plan(Question((video, video), frame_sampling=FrameSampling(num_frames=8)).request()).media
    with pytest.raises(RequestBudgetError, match="10 frames are to be sampled; allowed 6 beside the other"):
        planner.plan(Question((video, video), frame_sampling=FrameSampling(num_frames=10)).request())


def test_images_of_too_many_pixels_are_not_decoded(
    media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = RequestPlanner(embedded_model_path(), limits=RequestLimits(max_image_pixels=60 * 150))
    planner.check_images(Question((media["wide_image"],)).request())
    service = Orchestrator(fleet := MediaFleet(), planner)  # type: ignore[arg-type]
    monkeypatch.setattr("epd.video.OwnReader.load_image", lambda *_: pytest.fail("an image was decoded"))

    async def ask() -> None:
        paths = (media["wide_image"], media["image"])
        async with service.media.sources("r", tuple(map(reference_to, paths))) as sources:
            await service.prompts.plan(Question(paths).request(sources))

    with pytest.raises(RequestBudgetError, match=r"allowed 9,000 \(max_image_pixels\)"):
        asyncio.run(ask())
    fleet.close()


def test_small_images_count_as_large_as_they_are_asked_for(media: dict[str, Path]) -> None:
    planner = RequestPlanner(embedded_model_path(), limits=RequestLimits(max_image_pixels=20_000))
    sources = unheld((media["wide_image"],) * 2)
    planner.check_images(Question((media["wide_image"],) * 2).request(sources))
    large = tuple(replace(each, pixels=PixelLimits(min_pixels=12_000)) for each in sources)
    with pytest.raises(RequestBudgetError, match=r"received images of 24,000 pixels in all; allowed 20,000"):
        planner.check_images(Question((media["wide_image"],) * 2).request(large))


def test_media_beyond_the_context_are_refused_before_the_prompt_is_laid_out(
    media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = RequestPlanner(embedded_model_path())
    planner.card = type(planner.card)("small", 0, 50)
    monkeypatch.setattr(planner.adapter, "plan_chat", lambda *_: pytest.fail("the prompt was laid out"))
    with pytest.raises(RequestError, match="visual tokens, of which 1 is kept; allowed: fewer than the 50"):
        planner.plan(Question((media["video"],), frame_sampling=FrameSampling(num_frames=32)).request())


def test_planning_takes_no_time_for_what_is_refused(planner: RequestPlanner, media: dict[str, Path]) -> None:
    start_s = time.thread_time()  # of this thread: the machine may be busy
    with pytest.raises(RequestError):
        planner.plan(Question((media["video"],), frame_sampling=FrameSampling(start_s=1e308)).request())
    assert time.thread_time() - start_s < 1.0


@pytest.mark.parametrize(
    ("own", "asked", "most", "expected"),
    [(None, None, 32_768, 256), (64, None, 64, 64), (64, 900, 900, 900), (None, 10**6, 32_768, 32_768)],
)
def test_an_answer_may_fill_the_context_and_is_planned_for_as_a_typical_one(
    planner: RequestPlanner, own: int | None, asked: int | None, most: int, expected: int
) -> None:
    """own: of the checkpoint. An answer may be what is asked for, or take the rest of 32,768 tokens."""
    planner.settings = replace(planner.settings, max_tokens=own)
    plan = planner.plan(Question((), sampling=SamplingParams(max_tokens=asked)).request())
    room = 32_768 - len(plan.prompt)
    assert plan.sampling.max_tokens == min(most, room)
    assert plan.expected_tokens == min(expected, room)


def test_a_long_text_that_is_tokenised_holds_up_no_other(
    planner: RequestPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in the tokeniser at once: neither waits for the other."""
    with planner._adapters.borrowed(), planner._adapters.borrowed():
        pass  # a tokeniser for each is loaded and tried before it is counted who is in one
    both = threading.Barrier(2, timeout=200.0)
    adapter = type(planner.adapter)
    plan_chat = adapter.plan_chat

    def met(self: Adapter, *arguments: Any) -> PromptPlan:
        both.wait()
        return plan_chat(self, *arguments)

    monkeypatch.setattr(adapter, "plan_chat", met)
    with ThreadPoolExecutor(2) as threads:
        plans = list(
            threads.map(planner.plan, [Question((), "one?").request(), Question((), "two?").request()])
        )
    assert [len(plan.prompt) > 0 for plan in plans] == [True, True]
