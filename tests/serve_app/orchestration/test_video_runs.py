"""One long video read by several media workers at once: the same frames and tokens, whoever is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epd.encoders import FrameSampling
from epd.sampling_params import SamplingParams
from epd.serve_app.media_messages import FetchMedia, ReadFile, ReadFrames
from epd.serve_app.service import MediaReference
from epd.topology import Stage
from tests.media import write_video
from tests.serve_app.conftest import data_url
from tests.serve_app.deployments import Answered, Deployment, Question, deployed, undisturbed

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
        self.chunks: Counter[str] = Counter()
        self.max_at_once = 0
        self.kill_after: tuple[str, int] | None = None
        self.kill_once_read: tuple[str, frozenset[str]] | None = None  # victim, workers that have answered
        self.answered: set[str] = set()
        self.fleet.fetch = self.fetch  # type: ignore[method-assign]

    async def fetch(self, stage: Stage, target: str, message: Any) -> Any:
        self.chunks[target] += isinstance(message, ReadFile)
        if not isinstance(message, ReadFrames):
            return await self._fetch(stage, target, message)
        self.reads[target] += 1
        self.now[target] += 1
        self.max_at_once = max(self.max_at_once, sum(num > 0 for num in self.now.values()))
        if self.kill_after == (target, self.reads[target]):
            asyncio.get_running_loop().call_soon(self.fleet.kill, target)
        try:
            reply = await self._fetch(stage, target, message)
            self.answered.add(target)
            self._kill_once_read()
            return reply
        finally:
            self.now[target] -= 1

    def _kill_once_read(self) -> None:
        if self.kill_once_read is not None and self.kill_once_read[1] <= self.answered:
            victim, self.kill_once_read = self.kill_once_read[0], None
            asyncio.get_running_loop().call_soon(self.fleet.kill, victim)


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


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    num_bytes = 10_000
    for module in ("fleet_media", "media_worker"):
        monkeypatch.setattr(f"epd.serve_app.media.{module}.FILE_CHUNK_BYTES", num_bytes)
    return num_bytes


def test_a_file_that_differs_elsewhere_is_sent_there(
    checkpoints: dict[str, Path],
    question: Question,
    expected: tuple[int, ...],
    small_chunks: int,
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
            assert set(watched.reads) == {"v0", "v1", "v2"}
            num_chunks = -(-question.media[0].stat().st_size // small_chunks)
            assert watched.chunks == {"v0": 2 * num_chunks, "v1": 0, "v2": 0}
            assert num_chunks > 2
            await deployment.settle()


async def answer_from_data(deployment: Deployment, question: Question) -> Answered:
    """The answer to a question whose video comes in the request itself."""
    reference, answered = MediaReference("video", data_url(question.media[0], "video/mp4"), "it"), Answered()
    async with deployment.service.media.sources("r", [reference]) as sources:
        async for items in deployment.service.answer(question.request(sources)):
            answered.take_all(items)
    return answered


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("victim", [None, "v0"])
def test_a_video_that_came_in_the_request(
    checkpoints: dict[str, Path], question: Question, expected: tuple[int, ...], victim: str | None
) -> None:
    """The workers that were given its bytes read on when the first is lost."""

    async def run() -> None:
        fleet = {"more_workers": MORE, "restart_s": 0.3}
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d", fleet=fleet) as deployment:
            watched = Watched(deployment)
            if victim is not None:
                watched.kill_once_read = (victim, frozenset(MORE))  # these have the bytes then
            assert (await answer_from_data(deployment, question)).tokens == expected
            assert set(watched.reads) == {"v0", "v1", "v2"}
            assert watched.kill_once_read is None
            await deployment.settle()

    asyncio.run(run())


@pytest.mark.usefixtures("small_chunks")
def test_a_worker_without_room_for_the_bytes_reads_nothing(
    checkpoints: dict[str, Path], question: Question, expected: tuple[int, ...]
) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d", fleet={"more_workers": MORE}) as deployment:
            watched = Watched(deployment)
            for name in MORE:
                deployment.fleet.media[name].spool.budget.take(8 << 30)
            assert (await answer_from_data(deployment, question)).tokens == expected
            assert set(watched.reads) == {"v0"}
            await deployment.settle()

    asyncio.run(run())
