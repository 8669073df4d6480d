"""Questions answered side by side get the answers they get alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd.engine_config import EngineConfig
from epd.errors import RequestError
from epd.models import embedded_model_path
from epd.shapes import make_scene
from epd.video.demo_video import write_demo_video
from tests.colocated import ColocatedPipeline
from tests.conversations import dialogue

QUESTIONS = ["How many shapes are there?", "Which shape appears first?", "What colour is the star?"]


@pytest.fixture(scope="module")
def pipeline() -> ColocatedPipeline:
    return ColocatedPipeline.load(embedded_model_path(), EngineConfig(num_threads=1))


def test_answers_side_by_side_equal_answers_alone(
    pipeline: ColocatedPipeline, media: dict[str, Path]
) -> None:
    context = pipeline.prefill_media([media["video"]], num_frames=4)
    alone = [pipeline.answer(context, question, max_tokens=4) for question in QUESTIONS]
    steps_before = pipeline.engine.counts.num_steps
    together = pipeline.answer_all(context, QUESTIONS, max_tokens=4)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert [answer.usage for answer in together] == [answer.usage for answer in alone]
    assert pipeline.engine.counts.num_steps - steps_before <= 4
    assert all(0 < answer.ttft_s <= answer.timings.total_s for answer in together)
    pipeline.engine.check_integrity()


def test_a_question_that_makes_no_sense_leaves_nothing_behind(
    pipeline: ColocatedPipeline, media: dict[str, Path]
) -> None:
    context = pipeline.prefill_media([media["video"]], num_frames=4)
    with pytest.raises(RequestError, match="empty"):
        pipeline.answer_all(context, [QUESTIONS[0], " "])
    assert not pipeline.engine.has_work()
    assert pipeline.answer_all(context, []) == []


def test_a_follow_up_is_about_the_answer_before(tmp_path: Path) -> None:
    scene = make_scene(3_000_000_010, 16.0)
    first, *_, last = scene.objects
    write_demo_video(tmp_path / "video.mp4", scene, fps=4, height=360, width=640)
    pipeline = ColocatedPipeline.load(embedded_model_path("shapes-vl-2"), EngineConfig(num_threads=1))
    context = pipeline.prefill_media([tmp_path / "video.mp4"], num_frames=16)
    earlier = [
        [(f"Which shape appears {place}?", item.shape)] for place, item in (("first", first), ("last", last))
    ]
    asked = [dialogue(context.kinds, "What colour is it?", each) for each in earlier]
    assert [answer.text for answer in pipeline.answer_all(context, asked)] == [first.colour, last.colour]
    with pytest.raises(RequestError, match="empty"):
        dialogue(context.kinds, "What colour is it?", [("Which shape appears first?", " ")])
