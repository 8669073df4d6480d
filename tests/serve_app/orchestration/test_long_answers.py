"""Answers of a hundred tokens and more that are right, while what makes them changes in their middle.

shapes-vl-2 describes a video, in sentences and as JSON. The truth is transformers' `generate`, and the scene.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoProcessor

from epd.encoders import FrameSampling
from epd.engine_config import EngineConfig
from epd.kv.drafting import DraftMethod
from epd.models import embedded_model_path
from epd.reduction import KEEP_ALL, ReductionPolicy
from epd.sampling_params import SamplingParams
from epd.serve_app.observability import record as record_module
from epd.serve_app.observability.record import RequestRecord
from epd.serve_app.service import TokenDelta
from epd.shapes import make_scene
from epd.video.demo_video import write_demo_video
from tests import reference
from tests.colocated import ColocatedPipeline
from tests.serve_app.deployments import LETTERS, Question, deployed, undisturbed, until_decoding
from tests.tiny_models import load_reference
from training.clips import HELD_OUT_SEED
from training.stories import TOLD_KINDS, facts_told, make_stories

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

MODEL = embedded_model_path("shapes-vl-2")
NUM_FRAMES, LONGEST, LONG = 32, 384, 100
SCENE = make_scene(HELD_OUT_SEED + 77, float(NUM_FRAMES), 6)
TOLD = [each for each in make_stories(SCENE, random.Random(0), 1.0) if each.kind in TOLD_KINDS]
# In its middle an answer loses tokens, behind layers that saw all of them.
DROPPING = ReductionPolicy("mustdrop", 0.5)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "video.mp4"
    write_demo_video(path, SCENE, fps=4, height=360, width=640)
    return path


@pytest.fixture(scope="module")
def questions(clip: Path) -> list[Question]:
    params, sampling = SamplingParams(max_tokens=LONGEST), FrameSampling(num_frames=NUM_FRAMES)
    return [Question((clip,), each.text, params, sampling) for each in TOLD]


@pytest.fixture(scope="module")
def expected(questions: list[Question]) -> list[tuple[int, ...]]:
    """What transformers answers."""
    processor, model = AutoProcessor.from_pretrained(MODEL, local_files_only=True), load_reference(MODEL)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reference, "MAX_TOKENS", LONGEST)
        answers = [
            reference.generated(
                model, reference.processor_inputs(processor, each.media, each.text, each.frame_sampling)
            )
            for each in questions
        ]
    assert all(LONG <= len(answer) < LONGEST for answer in answers)
    return answers


@pytest.mark.parametrize("method", ["none", "prompt-lookup", "recycling"])
def test_descriptions_are_true_and_those_of_generate(
    method: DraftMethod, questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    pipeline = ColocatedPipeline.load(MODEL, EngineConfig(num_threads=1, draft=method, max_draft=5))
    context = pipeline.prefill_media(questions[0].media, num_frames=NUM_FRAMES)
    answers = pipeline.answer_all(context, [each.text for each in questions], max_tokens=LONGEST)
    assert [answer.token_ids for answer in answers] == expected
    for question, answer in zip(TOLD, answers, strict=True):
        assert facts_told(question.kind, SCENE, 2.0, answer.text).is_all
    assert (pipeline.engine.counts.num_accepted_tokens > LONG) == (method != "none")


@pytest.fixture(scope="module")
def dropping(questions: list[Question]) -> list[tuple[int, ...]]:
    """What one worker answers that drops tokens."""

    async def run() -> list[tuple[int, ...]]:
        async with deployed(MODEL, "1epd") as alone:
            return [(await alone.ask(each, reduction=DROPPING)).tokens for each in questions]

    return asyncio.run(run())


@pytest.mark.parametrize("policy", [KEEP_ALL, DROPPING], ids=["whole", "dropping"])
@pytest.mark.parametrize("becomes", ["p", "e"])
def test_a_decode_worker_changes_its_role_in_the_middle(
    becomes: str,
    policy: ReductionPolicy,
    questions: list[Question],
    expected: list[tuple[int, ...]],
    dropping: list[tuple[int, ...]],
) -> None:
    """Answers move with what they hold and stay the same; those that drop are those of one worker."""

    async def run() -> None:
        async with deployed(MODEL, "1e1p2d") as deployment:
            deployment.held.is_on = True
            asking = [asyncio.create_task(deployment.ask(each, reduction=policy)) for each in questions]
            await until_decoding(deployment, "d0", 1)
            switch = await deployment.service.switch_roles("d0", frozenset({LETTERS[becomes]}))
            deployment.held.is_on = False
            assert (switch.num_moved > 0, switch.num_redone) == (True, 0)
            answers = [(await each).tokens for each in asking]
            assert answers == (dropping if policy is DROPPING else expected)
            assert all(len(answer) >= LONG for answer in answers)
            await deployment.settle()

    asyncio.run(run())


def test_time_between_tokens_is_that_of_the_stream(
    questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0  # of the record, while it takes what has come
    monkeypatch.setattr(record_module, "perf_counter", lambda: now_s)

    async def run() -> None:
        nonlocal now_s
        record = RequestRecord()
        async with deployed(MODEL, "1e1p1d") as deployment, deployment.requested(questions[0]) as request:
            arrivals = []
            async with aclosing(deployment.service.answer(request)) as answer:
                async for items in answer:
                    now_s = asyncio.get_running_loop().time()
                    for item in items:
                        record.note(item)
                    if any(isinstance(item, TokenDelta) for item in items):
                        arrivals.append(now_s)
        assert record.end is not None
        assert record.tpot_s is not None
        gaps = record.end.usage.completion_tokens - 1
        assert gaps >= LONG - 1
        assert record.tpot_s * gaps == pytest.approx(arrivals[-1] - arrivals[0])

    asyncio.run(run())


def test_drawn_answers_are_as_long_and_the_same_in_every_layout(questions: list[Question]) -> None:
    params = [SamplingParams(max_tokens=LONGEST, temperature=0.3, seed=seed) for seed in range(2)]
    drawn = [replace(each, sampling=own) for each, own in zip(questions, params, strict=True)]
    alone = undisturbed(MODEL, drawn)
    assert all(len(answer) >= LONG // 2 for answer in alone)

    async def run() -> None:
        for topology in ("1ep1d", "1e2p2d"):
            async with deployed(MODEL, topology) as deployment:
                assert [answer.tokens for answer in await deployment.ask_all(drawn)] == alone
                await deployment.settle()

    asyncio.run(run())
