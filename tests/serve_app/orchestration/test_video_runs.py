"""One long video read by several media workers at once: the same frames and tokens, whoever is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from encoders import FrameSampling
from epd.sampling_params import SamplingParams
from epd.topology import Stage
from serve_app.messages import FetchMedia, ReadFrames
from tests.media import write_video
from tests.serve_app.deployments import Deployment, Question, deployed, undisturbed

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

VIDEO: frozenset[Stage] = frozenset({"video"})
MORE = {"v1": VIDEO, "v2": VIDEO}


@pytest.fixture(scope="module")
def long_video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """H.264 of 24 s, with B-frames and a keyframe every two seconds."""
    return write_video(tmp_path_factory.mktemp("long") / "long.mp4", num_frames=240, seed=7)


@pytest.fixture(scope="module")
def question(long_video: Path) -> Question:
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    return Question((long_video,), sampling=sampling, frame_sampling=FrameSampling(num_frames=40))


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], question: Question) -> tuple[int, ...]:
    return undisturbed(checkpoints["qwen2_5_vl"], [question])[0]


class Watched:
    """Notes which media workers are asked for what, and how many reads are in progress."""

    def __init__(self, deployment: Deployment) -> None:
        self.fleet, self._fetch = deployment.fleet, deployment.fleet.fetch
        self.reads: Counter[str] = Counter()
        self.now: Counter[str] = Counter()
        self.max_at_once = 0
        self.kill_after: tuple[str, int] | None = None
        self.fleet.fetch = self.fetch  # type: ignore[method-assign]

    async def fetch(self, stage: Stage, target: str, message: Any) -> Any:
        if not isinstance(message, ReadFrames):
            return await self._fetch(stage, target, message)
        self.reads[target] += 1
        self.now[target] += 1
        self.max_at_once = max(self.max_at_once, sum(num > 0 for num in self.now.values()))
        if self.kill_after == (target, self.reads[target]):
            asyncio.get_running_loop().call_soon(self.fleet.kill, target)
        try:
            return await self._fetch(stage, target, message)
        finally:
            self.now[target] -= 1


@pytest.mark.parametrize("victim", [None, "v0", "v1"])
def test_tokens_equal_whoever_is_lost(
    checkpoints: dict[str, Path], question: Question, expected: tuple[int, ...], victim: str | None
) -> None:
    async def run() -> None:
        fleet = {"more_workers": MORE, "restart_s": 0.3}
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d", fleet=fleet) as deployment:
            watched = Watched(deployment)
            if victim is not None:
                watched.kill_after = (victim, 2)
            answer = await deployment.ask(question)
            assert answer.tokens == expected
            assert answer.end is not None
            assert answer.end.num_retries == 0
            assert set(watched.reads) >= {"v0", "v1", "v2"}
            assert watched.max_at_once >= 2
            counters = (await deployment.service.status()).counters
            assert counters.get("workers_lost", 0) == (victim is not None)
            await deployment.settle()

    asyncio.run(run())


def test_many_long_videos_share_the_workers(
    checkpoints: dict[str, Path], question: Question, expected: tuple[int, ...], tmp_path: Path
) -> None:
    """While every worker reads, none is asked to read a second video's runs."""

    async def run() -> None:
        data = question.media[0].read_bytes()
        paths = [tmp_path / f"{number}.mp4" for number in range(4)]
        for number, path in enumerate(paths):
            path.write_bytes(data + b"\0\0\0\x09free" + bytes([number]))  # another content, the same frames
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d", fleet={"more_workers": MORE}) as deployment:
            watched = Watched(deployment)
            answers = await deployment.ask_all([replace(question, media=(path,)) for path in paths])
            assert [answer.tokens for answer in answers] == [expected] * 4
            assert set(watched.reads) == {"v0", "v1", "v2"}
            await deployment.settle()

    asyncio.run(run())


def test_a_file_that_differs_elsewhere_is_read_at_one_worker(
    checkpoints: dict[str, Path],
    question: Question,
    expected: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a path names another file on another machine."""

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d", fleet={"more_workers": MORE}) as deployment:
            watched, send = Watched(deployment), deployment.fleet.send

            async def differing(stage: Stage, target: str, message: Any, bulk: Any = None) -> Any:
                reply = await send(stage, target, message, bulk)
                is_other = isinstance(message, FetchMedia) and target != "v0"
                return tuple(replace(each, mm_hash="other") for each in reply) if is_other else reply

            deployment.fleet.send = differing  # type: ignore[method-assign,assignment]
            assert (await deployment.ask(question)).tokens == expected
            assert set(watched.reads) == {"v0"}
            await deployment.settle()

    asyncio.run(run())
