"""Three deployments of Serve under load: a front is killed, replica counts change, a release follows another.

`make soak` runs more streams, and the updates that take long.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray import serve

from epd.sampling_params import SamplingParams
from tests.media import write_video
from tests.ports import free_port
from tests.serve_app.deployments import Answered, Question, clear_questions
from tests.serve_app.ray.conftest import SHARED_HANG_S
from tests.serve_app.ray.declared_app import (
    DEPLOYMENTS,
    DeclaredApp,
    Stream,
    Truth,
    declared_app,
    truth,
    until,
)
from tests.serve_app.ray.ray_session import IGNORED, RaySession
from tests.what_waits import what_waits

pytestmark = [pytest.mark.filterwarnings(each) for each in IGNORED]

IS_SOAK = "EPD_SOAK" in os.environ
NUM_STREAMS, NUM_TOKENS = (100, 600) if IS_SOAK else (8, 100)
KINDS = (("image",), ("video",), (), ("image", "tall_video"))
SEED = 5


@pytest.fixture(scope="module")
def asked(checkpoints: dict[str, Path], media: dict[str, Path]) -> tuple[list[Question], list[Answered]]:
    """Greedy and drawn, of every kind; and what is right."""
    questions = [
        Question(
            tuple(media[name] for name in KINDS[number % len(KINDS)]),
            f"what {number}?",
            SamplingParams(
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                temperature=number % 3 / 2,
                top_k=5,
                seed=SEED + number,
            ),
        )
        for number in range(NUM_STREAMS * 4 // 3 + 1)
    ]
    return clear_questions(checkpoints["qwen2_5_vl"], questions, NUM_STREAMS, num_kv_tokens=1 << 17)


@pytest.fixture(scope="module")
def questions(asked: tuple[list[Question], list[Answered]]) -> list[Question]:
    return asked[0]


@pytest.fixture(scope="module")
def expected(asked: tuple[list[Question], list[Answered]]) -> list[Truth]:
    return [truth(answer) for answer in asked[1]]


@pytest.fixture(scope="module", params=["proxy", "listening"] if IS_SOAK else ["shared"])
def app(
    expected: list[Truth],
    ray_session: RaySession,
    checkpoints: dict[str, Path],
    request: pytest.FixtureRequest,
) -> Iterator[DeclaredApp]:
    """Two fronts, behind the proxy or listening themselves, and a worker for each stage, of decode two.

    expected: computed before the application takes the cores
    """
    if request.param == "shared":
        yield request.getfixturevalue("shared_app")
        return
    with declared_app(
        ray_session,
        front_port=free_port() if request.param == "listening" else None,
        model=checkpoints["qwen2_5_vl"],
        topology="1e1p2d",
        num_fronts=2,
        allowed_media_path="/",
        num_kv_tokens=1 << 17,
        max_num_seqs=128,
        hang_s=30,
        drain_s=120,  # streams of the soak take longer than by default
    ) as app:
        yield app


def say(capsys: pytest.CaptureFixture[str], row: str) -> None:
    with capsys.disabled():
        print(f"\n{row}", end="")


def are_streaming(streams: list[Stream]) -> bool:
    assert not any(stream.outcome for stream in streams), [stream.outcome for stream in streams]
    return all(stream.text for stream in streams)


async def first_answer(app: DeclaredApp) -> tuple[float, int]:
    """Asks until it is answered. Returns the seconds that took, and how many requests failed before."""
    start_s, num_failed = time.monotonic(), 0
    while True:
        async with app.streams([Question((), "well?", SamplingParams(max_tokens=1))]) as streams:
            pass
        if streams[0].outcome == "whole":
            return time.monotonic() - start_s, num_failed
        num_failed += 1
        assert time.monotonic() - start_s < 60, streams[0].outcome


async def asked_again(app: DeclaredApp, streams: list[Stream]) -> int:
    """Asks again what was reset in the moment in which its front stopped to listen. Returns their number."""
    reset = [
        number for number, each in enumerate(streams) if each.outcome.startswith("cut") and not each.text
    ]
    async with app.streams([streams[number].question for number in reset]) as again:
        pass
    for number, stream in zip(reset, again, strict=True):
        streams[number] = stream
    return len(reset)


def numbers_cut(streams: list[Stream]) -> list[int]:
    return [number for number, stream in enumerate(streams) if stream.outcome.startswith("cut")]


def asks_about_a_video(question: Question) -> bool:
    return [path.suffix for path in question.media] == [".mp4"]


def test_serve_lists_three_deployments(app: DeclaredApp) -> None:
    deployments = serve.status().applications["epd"].deployments
    assert {name: dict(each.replica_states) for name, each in deployments.items()} == {
        "Front": {"RUNNING": 2},
        "Media": {"RUNNING": 1},
        "Stage": {"RUNNING": 4},
    }


def test_a_killed_front_takes_its_own_streams_with_it_and_nothing_else(
    app: DeclaredApp,
    ray_session: RaySession,
    questions: list[Question],
    expected: list[Truth],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def run() -> None:
        before = app.all_replicas()
        new = Question((write_video(tmp_path / "new.mp4", seed=77),), "new?")
        async with app.streams([new]) as first:
            pass
        # One after the other: Serve's proxy sees how many each front has, and gives both some.
        with ray_session.holding():
            async with app.streams(questions, every_s=0.05) as streams:
                await until(lambda: are_streaming(streams))
                killed = max(before["Front"].values())
                os.kill(killed, signal.SIGKILL)
                killed_s = time.monotonic()
                answering = asyncio.create_task(first_answer(app))
                # Until when something is known to have been held: a late status is not a late release.
                held_s, seen = 0.0, list[str]()

                async def is_freed() -> bool:
                    nonlocal held_s
                    asked_s = time.monotonic() - killed_s
                    workers = await app.workers()
                    came_s = time.monotonic() - killed_s
                    num_running = workers["d0"]["num_running"] + workers["d1"]["num_running"]
                    left = [stream.outcome for stream in streams if not stream.outcome.startswith("cut")]
                    assert not any(left), left  # if one has ended, those that were cut may have, too
                    seen.append(f"{asked_s:.2f} to {came_s:.2f} s: {num_running} run, {len(left)} not cut")
                    if came_s - asked_s > 1:
                        seen.append(what_waits())
                    if len(left) < NUM_STREAMS and num_running <= len(left):
                        return True
                    held_s = time.monotonic() - killed_s
                    return False

                await until(is_freed)
                cut = numbers_cut(streams)
                ray_session.held_file.unlink()
                again_s, num_failed = await answering
                about_videos = [number for number, each in enumerate(questions) if asks_about_a_video(each)]
                number = min(about_videos, key=lambda each: each not in cut)  # of those cut, if there is one
                async with app.streams([questions[number]]) as retried:
                    pass
        cut = numbers_cut(streams)
        kept = [number for number in range(NUM_STREAMS) if number not in cut]
        assert kept, "one front had all streams"
        assert [streams[number].outcome for number in kept] == ["whole"] * len(kept)
        assert [streams[number].truth for number in kept] == [expected[number] for number in kept]
        # Noticed by its connections, not by its silence.
        assert held_s < SHARED_HANG_S, "\n".join(seen)
        assert again_s < SHARED_HANG_S
        report = retried[0].report
        assert retried[0].truth == expected[number]
        assert report["cached_tokens"] >= report["visual_tokens"] > 0
        assert report["stages_s"]["encode"] == 0
        await until(app.is_empty)
        # Serve may list the killed one for a while.
        await until(lambda: asyncio.to_thread(lambda: killed not in app.replicas("Front").values()))
        await app.until_replicas(Front=2)
        back_s = time.monotonic() - killed_s
        after = app.all_replicas()
        assert (after["Stage"], after["Media"]) == (before["Stage"], before["Media"])
        assert len(after["Front"].keys() & before["Front"].keys()) == 1
        async with app.streams(questions) as again:
            pass
        assert [stream.truth for stream in again] == expected
        say(
            capsys,
            f"front killed under {NUM_STREAMS} streams: {len(kept)} whole, {len(cut)} cut, freed after "
            f"{held_s:.2f} s, served again after {again_s:.2f} s and {num_failed} failed requests, both "
            f"fronts after {back_s:.1f} s; first token of a new video {first[0].report['ttft_s']:.3f} s, of "
            f"the retry {report['ttft_s']:.3f} s, {report['cached_tokens']} tokens cached",
        )

    asyncio.run(run())


@pytest.mark.parametrize(
    ("deployment", "numbers"),
    [("Stage", (6, 4)), ("Front", (3, 2)), ("Media", (2, 1))] if IS_SOAK else [("Stage", (5, 4))],
)
def test_another_number_of_replicas_changes_just_that(
    deployment: str,
    numbers: tuple[int, ...],
    app: DeclaredApp,
    ray_session: RaySession,
    questions: list[Question],
    expected: list[Truth],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """More come while all streams are in their middle; where one leaves, streams go on meanwhile."""

    async def run() -> None:
        for number in numbers:
            before = app.all_replicas()
            with ray_session.holding():
                async with app.streams(questions) as streams:
                    await until(lambda: are_streaming(streams))
                    app.deploy({deployment: number})
                    if number < len(before[deployment]):
                        ray_session.held_file.unlink()
                    seconds = await app.until_replicas(**{deployment: number})
                    ray_session.held_file.unlink(missing_ok=True)
            assert [stream.outcome for stream in streams] == ["whole"] * NUM_STREAMS
            assert [stream.truth for stream in streams] == expected
            after = app.all_replicas()
            for name in DEPLOYMENTS:
                if name != deployment:
                    assert after[name] == before[name]
            kept = before[deployment].items() & after[deployment].items()
            assert len(kept) == min(number, len(before[deployment]))
            say(capsys, f"{deployment}: {len(before[deployment])} -> {number} replicas in {seconds:.1f} s")
            await until(app.is_empty)

    asyncio.run(run())


@pytest.mark.skipif(not IS_SOAK, reason="replaces all replicas: make soak")
def test_a_rolling_update_loses_no_stream(
    app: DeclaredApp, questions: list[Question], expected: list[Truth], capsys: pytest.CaptureFixture[str]
) -> None:
    """Waves of streams follow each other while all replicas are replaced, as they are when `args` change."""

    async def run() -> None:
        before = app.all_replicas()
        app.deploy(max_num_seqs=96)
        updating = asyncio.create_task(app.until_replicas(Front=2, Media=1, Stage=4))
        num_streams = num_again = 0
        while not updating.done():
            async with app.streams(questions[: NUM_STREAMS // 4]) as streams:
                pass
            if app.front_config:
                num_again += await asked_again(app, streams)
            assert {stream.outcome for stream in streams} == {"whole"}
            assert [stream.truth for stream in streams] == expected[: len(streams)]
            num_streams += len(streams)
        after = app.all_replicas()
        for name in DEPLOYMENTS:
            assert not after[name].keys() & before[name].keys()
        say(
            capsys,
            f"rolling update in {await updating:.1f} s, {num_streams} streams whole, "
            f"{num_again} of them asked again",
        )

    asyncio.run(run())
