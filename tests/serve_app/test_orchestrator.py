"""Whole answers by workers in threads: the tokens of the colocated pipeline, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.colocated import ColocatedPipeline
from tests.serve_app.orchestration import MAX_TOKENS, NUM_FRAMES, Question, deployed

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

MODELS = ("qwen2_5_vl", "shapes-vl")
TOPOLOGIES = ("1epd", "1ep1d", "1e1pd", "1e1p1d", "2e1p1d", "2e2p2d")
KINDS: tuple[tuple[str, ...], ...] = (
    (),
    ("image",),
    ("video",),
    ("wide_image", "image"),
    ("tall_video",),
    ("image", "video"),
)
TEXTS = ("What is shown?", "how many", "Which colour is the shape? Ä 漢 🙂", "when?")


@pytest.fixture(scope="module")
def questions(media: dict[str, Path]) -> list[Question]:
    """32, of all kinds of media, no two alike."""
    return [
        Question(
            tuple(media[name] for name in KINDS[number % len(KINDS)]),
            f"{TEXTS[number % len(TEXTS)]} {number}",
        )
        for number in range(32)
    ]


@pytest.fixture(scope="module")
def expected(
    checkpoints: dict[str, Path], questions: list[Question]
) -> Callable[[str], list[tuple[int, ...]]]:
    """The tokens of the colocated pipeline for every question, by model."""
    known: dict[str, list[tuple[int, ...]]] = {}

    def get(model: str) -> list[tuple[int, ...]]:
        if model not in known:
            pipeline = ColocatedPipeline.load(checkpoints[model])
            known[model] = [
                pipeline.ask(each.media, each.text, num_frames=NUM_FRAMES, max_tokens=MAX_TOKENS).token_ids
                for each in questions
            ]
        return known[model]

    return get


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("model", MODELS)
def test_tokens_equal_the_colocated_pipeline(
    model: str,
    topology: str,
    checkpoints: dict[str, Path],
    questions: list[Question],
    expected: Callable[[str], list[tuple[int, ...]]],
) -> None:
    wanted = expected(model)

    async def run() -> None:
        async with deployed(checkpoints[model], topology) as deployment:
            answers = await deployment.ask_all(questions)
            assert [answer.tokens for answer in answers] == wanted
            await deployment.settle()

    asyncio.run(run())
