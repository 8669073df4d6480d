"""What was learnt of a medium is kept by its content: nobody opens it again to plan a second question."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import av
import pytest

from epd.control.recent import Recent
from epd.encoders import FrameSampling
from epd.models import embedded_model_path
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.service import AnswerRequest
from tests.serve_app.conftest import Front, data_url, video_part
from tests.serve_app.deployments import Question


@pytest.fixture(scope="module")
def model() -> Path:
    return embedded_model_path()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Whatever FFmpeg is made to open."""
    found: list[object] = []
    open_media: Callable[..., object] = av.open
    monkeypatch.setattr(
        av, "open", lambda *args, **kwargs: found.append(args[0]) or open_media(*args, **kwargs)
    )
    return found


def test_one_opening_for_the_first_question_none_for_the_second(
    run_front: Callable[..., Front], model: Path, media: dict[str, Path], opened: list[object]
) -> None:
    front, planner = run_front(), RequestPlanner(model)
    lengths = []
    for number in range(3):
        assert front.ask_about(video_part(data_url(media["video"], "video/mp4"))).status_code == 200
        request = front.service.requests[number]
        sources = tuple(source for source in request.media)
        lengths.append(len(planner._video_plan(sources[0], FrameSampling(num_frames=4)).times_s))
        assert len(opened) == 1, opened
    assert lengths == [4, 4, 4]


def test_a_sampling_of_its_own_is_planned_anew(model: Path, media: dict[str, Path]) -> None:
    planner = RequestPlanner(model)
    source = Question((media["video"],)).request().media[0]
    plans = [planner._video_plan(source, FrameSampling(num_frames=number)) for number in (4, 6, 4)]
    assert [plan.num_frames for plan in plans] == [4, 6, 4]
    assert plans[0] is plans[2]


def test_a_long_prompt_does_not_hold_up_a_short_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer of one thread is held up until the other thread has its plan."""
    planner, other_is_done = RequestPlanner(model), threading.Event()
    plan_chat = type(planner.adapter).plan_chat

    def held_up(self: object, media: object, messages: object) -> object:
        if "long" in str(messages):
            assert other_is_done.wait(60)
        return plan_chat(self, media, messages)  # type: ignore[arg-type]

    monkeypatch.setattr(type(planner.adapter), "plan_chat", held_up)

    def plan(text: str) -> int:
        request: AnswerRequest = Question((), text).request()
        return len(planner.plan(request).prompt)

    with ThreadPoolExecutor(2) as threads:
        long, short = threads.submit(plan, "long"), threads.submit(plan, "short")
        assert short.result(timeout=50) > 0
        other_is_done.set()
        assert long.result(timeout=50) > 0


def test_recent_forgets_what_was_not_asked_for() -> None:
    recent: Recent[str, int] = Recent(2)
    recent.set("a", 1)
    recent.set("b", 2)
    assert recent.get("a") == 1
    recent.set("c", 3)
    assert (recent.get("a"), recent.get("b"), recent.get("c"), len(recent)) == (1, None, 3, 2)
