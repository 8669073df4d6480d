"""The service without HTTP: events of a question, errors as they are raised, and nothing left behind."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from epd.engine_config import DEFAULT_ENGINE
from epd.errors import MediaNotFoundError, RequestError, UnsupportedMediaError
from epd.serve_app.cli.own_model import OwnConversation, open_model
from epd.serve_app.local.own_service import OwnService
from tests.media import write_video
from tests.serve_app.server import wait_until

QUESTION = "What is shown?"


def test_spans_say_what_was_planned_and_how_many_frames_are_encoded(
    service: OwnService, tmp_path: Path
) -> None:
    clip, spans = write_video(tmp_path / "clip.mp4", seed=21), []
    conversation = OwnConversation(service, [clip], frames=20, max_tokens=2, max_visual_tokens=40)
    answer = conversation.ask(QUESTION, on_span=spans.append)
    whole, *_ = [span for span in spans if span["stage"] == "probe"]
    limits, plan = whole["notes"]
    assert limits.startswith("limits of a video")
    assert plan.startswith("20 frames of ")
    assert f": {answer.usage.visual_tokens} of {answer.usage.visual_tokens_before} " in whole["choice"]
    encoded = [span["frames"] for span in spans if span["stage"] == "encode"]
    assert sum(encoded) == whole["frames"] == 20


def test_nothing_is_chosen_where_all_has_room(service: OwnService, media: dict[str, Path]) -> None:
    spans: list[dict[str, Any]] = []
    OwnConversation(service, [media["video"]], frames=2, max_tokens=1).ask(QUESTION, on_span=spans.append)
    assert spans[0]["choice"] is None


def test_errors_are_typed_and_name_the_file(service: OwnService, tmp_path: Path) -> None:
    (tmp_path / "song.mp4").write_text("no video\n" * 99)
    url = (tmp_path / "song.mp4").as_uri()
    with pytest.raises(UnsupportedMediaError, match=rf"^'{tmp_path}/song.mp4' "):
        OwnConversation(service, [url]).ask(QUESTION)
    with pytest.raises(MediaNotFoundError, match=r"none\.mp4"):
        OwnConversation(service, [(tmp_path / "none.mp4").as_uri()]).ask(QUESTION)
    with pytest.raises(RequestError, match="temperature"):
        OwnConversation(service, [], temperature=-1).ask(QUESTION)


def test_an_answer_that_is_left_ends_at_the_worker(service: OwnService, media: dict[str, Path]) -> None:
    def leave(piece: str) -> None:
        raise ConnectionError(piece)

    generated = service.counters()["generated_tokens"]
    conversation = OwnConversation(service, [media["image"]], max_tokens=4000, ignore_eos=True)
    with pytest.raises(ConnectionError):
        conversation.ask(QUESTION, leave)
    wait_until(lambda: all(not each.num_running for each in service.status.workers))
    assert service.counters()["generated_tokens"] - generated < 4000


def test_no_thread_is_left_when_it_is_closed(checkpoints: dict[str, Path]) -> None:
    before = set(threading.enumerate())
    with open_model(checkpoints["qwen2_5_vl"], DEFAULT_ENGINE) as service:
        OwnConversation(service, [], max_tokens=1).ask(QUESTION)
    wait_until(lambda: set(threading.enumerate()) <= before)
