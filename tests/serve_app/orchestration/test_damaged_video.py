"""Frames that could not be decoded are in the report of every answer about their video."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from epd.encode.encoder_cache import GroupKey
from epd.encoders import FrameSampling
from epd.sampling_params import SamplingParams
from epd.serve_app.orchestration.substituted import SubstitutedFrames
from tests.serve_app.conftest import Front
from tests.serve_app.deployments import Deployment, Question, deployed
from tests.serve_app.fakes import USAGE, FakeService

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


def question(path: Path, text: str) -> Question:
    return Question((path,), text, SamplingParams(max_tokens=4), FrameSampling(num_frames=8))


async def reported(deployment: Deployment, path: Path, text: str) -> int:
    end = (await deployment.ask(question(path, text))).end
    assert end is not None
    return end.usage.num_substituted_frames


@pytest.mark.parametrize("topology", ["1epd", "2e1p1d"])
def test_the_report_says_how_many_frames_could_not_be_decoded(
    checkpoints: dict[str, Path], media: dict[str, Path], damaged_video: Path, topology: str
) -> None:
    """Also when the video's frames come from a cache and are not decoded again."""

    async def run() -> list[int]:
        async with deployed(checkpoints["qwen2_5_vl"], topology) as deployment:
            asked = [
                (damaged_video, "What is shown?"),
                (damaged_video, "Which colour?"),
                (media["video"], "?"),
            ]
            return [await reported(deployment, path, text) for path, text in asked]

    assert asyncio.run(run()) == [1, 1, 0]


def test_the_api_reports_them(run_front: Callable[..., Front]) -> None:
    front = run_front(FakeService(usage=replace(USAGE, num_substituted_frames=3)))
    assert front.ask().json()["epd"]["substituted_frames"] == 3
    assert '"substituted_frames":3' in front.ask(stream=True).text
    assert run_front().ask().json()["epd"]["substituted_frames"] == 0


def test_what_is_known_of_groups_is_bounded() -> None:
    known = SubstitutedFrames(max_groups=2)
    keys = [GroupKey("video", (float(i),), (0, 0), (28, 28), "model") for i in range(4)]
    known.note(keys[0], 5)
    known.note(keys[1], 0)
    known.note(keys[2], 2)
    assert known.total(keys) == 7
    known.note(keys[3], 1)
    assert known.total(keys) == 3
    known.note(keys[2], 0)
    assert known.total(keys) == 1
