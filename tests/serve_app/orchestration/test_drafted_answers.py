"""Drafts on workers of any topology: the same answers, and counters of what was drafted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from epd.kv.drafting import DraftConfig
from epd.sampling_params import SamplingParams
from tests.serve_app.deployments import Question, deployed
from tests.tiny_models import add_head, build_qwen3_5

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

SAMPLINGS = (
    SamplingParams(max_tokens=48),
    SamplingParams(max_tokens=48, temperature=0.5, seed=11, repetition_penalty=1.1, min_tokens=4),
)


@pytest.mark.parametrize("method", ["prompt-lookup", "recycling", "auto", "mtp"])
@pytest.mark.parametrize("topology", ["1epd", "1e1p1d"])
def test_the_answers_are_the_same(
    checkpoints: dict[str, Path], still_video: Path, tmp_path: Path, topology: str, method: str
) -> None:
    model = checkpoints["qwen2_5_vl"]
    if method == "mtp":
        model = add_head(build_qwen3_5(tmp_path / "headed"))
    questions = [Question((still_video,), "What is shown?", sampling) for sampling in SAMPLINGS]

    async def run(name: str) -> tuple[list[tuple[int, ...]], dict[str, float]]:
        settings = {"drafting": DraftConfig(name, 4)}
        async with deployed(model, topology, settings=settings) as deployment:
            answers = await deployment.ask_all(questions)
            await deployment.settle()
            return [answer.tokens for answer in answers], dict((await deployment.service.status()).counters)

    plain, without = asyncio.run(run("none"))
    drafted, counters = asyncio.run(run(method))
    assert drafted == plain
    assert without["spec_decode_num_drafts"] == 0
    num_drafted = counters["spec_decode_num_draft_tokens"]
    assert num_drafted >= counters["spec_decode_num_accepted_tokens"] >= 0
    assert num_drafted >= counters["spec_decode_num_drafts"] > 0 or method not in ("recycling", "mtp")
