"""Asking a fleet about a video that stands still for a while: fewer units encoded, the same answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from epd.sampling_params import SamplingParams
from tests.serve_app.deployments import Question, deployed

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

QUESTIONS = ("What is shown?", "Which colour?")


@pytest.mark.parametrize("topology", ["1epd", "2e1p1d"])
def test_the_answer_is_the_same_and_units_are_skipped(
    checkpoints: dict[str, Path], still_video: Path, topology: str
) -> None:
    questions = [Question((still_video,), text, SamplingParams(max_tokens=8)) for text in QUESTIONS]

    async def run(skip_static: float | None) -> tuple[list[tuple[int, ...]], int]:
        settings = {"skip_static": skip_static}
        async with deployed(checkpoints["qwen2_5_vl"], topology, settings=settings) as deployment:
            answers = await deployment.ask_all(questions)
            await deployment.settle()
            counters = (await deployment.service.status()).counters
            assert counters["encoded_groups"] == 2
            return [answer.tokens for answer in answers], counters["units_skipped"]

    whole, none = asyncio.run(run(None))
    exact, num_skipped = asyncio.run(run(0.0))
    assert exact == whole
    assert len(set(whole)) == len(QUESTIONS)
    assert (none, num_skipped) == (0, 1)
