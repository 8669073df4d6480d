"""Whole answers by workers in threads: the tokens of the colocated pipeline, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from epd.encoders import FrameSampling
from epd.errors import InfeasibleError, MediaError, OverloadedError, RequestError, UnavailableError
from epd.kv.pass_limits import PassLimits
from epd.machine import steady_time_s
from epd.sampling_params import SamplingParams
from epd.serve_app.role_messages import SetRoles
from tests.colocated import ColocatedPipeline
from tests.serve_app.deployments import (
    MAX_TOKENS,
    NEVER_S,
    NUM_FRAMES,
    Answered,
    Deployment,
    Question,
    deployed,
    until_decoding,
)

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


def test_a_second_question_encodes_and_decodes_no_frame(
    checkpoints: dict[str, Path], media: dict[str, Path]
) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "2e2p1d") as deployment:
            first = await deployment.ask(Question((media["video"],), "What is shown?"), wants_spans=True)
            second = await deployment.ask(Question((media["video"],), "How many?"), wants_spans=True)
            assert {span.stage for span in first.spans} >= {"decode_video", "encode", "prefill", "decode"}
            assert {span.stage for span in second.spans} == {"probe", "prefill", "decode"}
            looked = [span.frame_times_s for span in second.spans if span.frame_times_s]
            assert looked == [span.frame_times_s for span in first.spans if span.frame_times_s]
            assert second.end is not None
            assert len(looked[0]) == second.end.usage.num_frames
            assert second.end.cached_tokens >= second.end.usage.visual_tokens > 0
            assert second.end.timings.encode_s == second.end.timings.decode_video_s == 0
            await deployment.settle()

    asyncio.run(run())


def test_a_part_of_a_video_is_another_video_to_every_cache(
    checkpoints: dict[str, Path], media: dict[str, Path]
) -> None:
    """Parts of equal length and as many frames: each answer is the colocated pipeline's."""
    parts: list[dict[str, float]] = [{}, {"end_s": 2.0}, {"start_s": 2.0}, {"start_s": 1.0, "end_s": 3.0}, {}]
    pipeline = ColocatedPipeline.load(checkpoints["qwen2_5_vl"])
    wanted = [
        pipeline.ask([media["video"]], TEXTS[0], num_frames=4, max_tokens=MAX_TOKENS, **part).token_ids
        for part in parts
    ]
    assert len(set(wanted)) == 4

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "2e1p1d") as deployment:
            for part, tokens in zip(parts, wanted, strict=True):
                frames = FrameSampling(num_frames=4, **part)
                answer = await deployment.ask(Question((media["video"],), TEXTS[0], frame_sampling=frames))
                assert answer.tokens == tokens
            past = Question((media["video"],), TEXTS[0], frame_sampling=FrameSampling(start_s=4.0))
            with pytest.raises(RequestError, match="in which no frame begins"):
                await deployment.ask(past)
            await deployment.settle()

    asyncio.run(run())


def test_the_same_media_at_once_are_encoded_once(
    checkpoints: dict[str, Path], media: dict[str, Path]
) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "2e1p1d") as deployment:
            await deployment.ask_all([Question((media["video"],), f"What {i}?") for i in range(6)])
            await deployment.settle()
            counters = (await deployment.service.status()).counters
            assert counters["encoded_groups"] == 2

    asyncio.run(run())


def test_several_answers_and_their_log_probabilities(
    checkpoints: dict[str, Path], media: dict[str, Path]
) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, n=3, seed=5, logprobs=2, ignore_eos=True)

    async def run(topology: str) -> dict[int, list[int]]:
        async with deployed(checkpoints["qwen2_5_vl"], topology) as deployment:
            answered = await deployment.ask(Question((media["image"],), sampling=params))
            await deployment.settle()
            assert {choice: len(tokens) for choice, tokens in answered.token_ids.items()} == {
                0: 6,
                1: 6,
                2: 6,
            }
            assert all(len(each.alternatives) == 2 and each.logprob < 0 for each in answered.logprobs)
            assert len(answered.logprobs) == 18
            return answered.token_ids

    assert asyncio.run(run("1e1p1d")) == asyncio.run(run("1epd"))


def test_what_cannot_be_answered_is_refused_and_leaves_nothing(
    checkpoints: dict[str, Path], media: dict[str, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.mp4"
    data = media["video"].read_bytes()
    middle = len(data) // 3
    broken.write_bytes(data[:middle] + bytes(len(data) // 2) + data[middle + len(data) // 2 :])
    tiny = {"num_kv_tokens": 32}

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            with pytest.raises(MediaError):
                await deployment.ask(Question((broken,)))
            await deployment.ask(Question((media["image"],)))
            await deployment.settle()
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d", settings=tiny) as deployment:
            with pytest.raises(InfeasibleError):
                await deployment.ask(Question((media["video"],)))
            await deployment.settle()

    asyncio.run(run())


@pytest.mark.parametrize("topology", ["1epd", "2e1p2d"])
def test_cancelled_at_any_moment_leaves_nothing(
    topology: str, checkpoints: dict[str, Path], media: dict[str, Path]
) -> None:
    rng = random.Random(topology)
    params = SamplingParams(max_tokens=200, ignore_eos=True)

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], topology) as deployment:
            for number in range(4):
                kinds = rng.sample(KINDS, 5)
                asking = [
                    asyncio.create_task(
                        deployment.ask(Question(tuple(media[name] for name in kind), f"{number} {i}", params))
                    )
                    for i, kind in enumerate(kinds)
                ]
                for task in asking:
                    await asyncio.sleep(rng.uniform(0, 0.06))
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
                await deployment.settle()
            answered = await deployment.ask(Question((media["image"],)))
            assert answered.end is not None

    asyncio.run(run())


def test_a_flood_is_answered_with_overload_and_what_was_taken_completes(
    checkpoints: dict[str, Path], media: dict[str, Path]
) -> None:
    async def run() -> None:
        options = {"max_waiting": 4, "max_prefills": 1, "settings": {"num_kv_tokens": 512}}
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d", **options) as deployment:
            deployment.held.is_on = True
            asking = [
                asyncio.create_task(deployment.ask(Question((media["image"],), str(i)))) for i in range(40)
            ]
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)  # one is refused
            deployment.held.is_on = False
            results = await asyncio.gather(*asking, return_exceptions=True)
            refused = [each for each in results if isinstance(each, OverloadedError)]
            answered = [each for each in results if isinstance(each, Answered)]
            assert len(refused) + len(answered) == 40
            assert len(answered) >= 4
            assert refused
            assert all(1 <= each.retry_after_s <= 60 for each in refused)
            assert all(each.end for each in answered)
            await deployment.settle()

    asyncio.run(run())


def test_a_deadline_that_cannot_be_met_is_an_overload(
    checkpoints: dict[str, Path], media: dict[str, Path]
) -> None:
    long = SamplingParams(max_tokens=6000, ignore_eos=True)

    async def run() -> None:
        options = {"settings": {"scheduler": PassLimits(max_num_seqs=1)}}
        async with deployed(checkpoints["qwen2_5_vl"], "1epd", **options) as deployment:
            first = asyncio.create_task(deployment.ask(Question((media["image"],), sampling=long)))
            while not deployment.service.router.in_flight("epd0").num_decodes:
                await asyncio.sleep(0.01)
            with pytest.raises(OverloadedError):
                await deployment.ask(Question(()), deadline_s=steady_time_s() + 0.05)
            first.cancel()
            await deployment.settle()

    asyncio.run(run())


@pytest.mark.parametrize("step_s", [2 * NEVER_S, -2 * NEVER_S])
def test_a_step_of_the_wall_clock_refuses_nothing_that_waits(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """As when a machine wakes up, or first learns the time."""
    questions = [Question((), f"what {number}?") for number in range(6)]

    async def run() -> None:
        options = {"max_wait_s": NEVER_S, "settings": {"scheduler": PassLimits(max_num_seqs=1)}}
        async with deployed(checkpoints["qwen2_5_vl"], "1epd", **options) as deployment:
            deployment.held.is_on = True
            asking = asyncio.create_task(deployment.ask_all(questions))
            while not len(deployment.service.queue):
                await asyncio.sleep(0.001)
            unix_s = time.time()
            monkeypatch.setattr(time, "time", lambda: unix_s + step_s)
            deployment.held.is_on = False
            assert all(answer.tokens for answer in await asking)
            assert deployment.service.queue.num_refused == 0

    asyncio.run(run())


def test_draining_refuses_what_is_new_and_closing_ends_what_runs(checkpoints: dict[str, Path]) -> None:
    endless = Question((), sampling=SamplingParams(max_tokens=6000, ignore_eos=True))

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            short = asyncio.create_task(deployment.ask(Question(())))
            await asyncio.sleep(0)
            assert await deployment.service.drain(NEVER_S)
            assert (await short).end is not None
            with pytest.raises(UnavailableError):
                await deployment.ask(Question(()))
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            deployment.held.is_on = True
            asking = asyncio.create_task(deployment.ask(endless))
            await until_decoding(deployment, "d0", 1)
            assert not await deployment.service.drain(0.1)
        with pytest.raises(UnavailableError):
            await asking

    asyncio.run(run())


async def switches_of(deployment: Deployment, name: str) -> int:
    workers = (await deployment.service.status()).workers
    return next(each.num_role_switches for each in workers if each.name == name)


def test_roles_change_while_requests_run(checkpoints: dict[str, Path], questions: list[Question]) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "2e1p1d") as deployment:
            expected = await deployment.ask_all(questions[:12])
            asking = asyncio.create_task(deployment.ask_all(questions[:12]))
            for stage in ("prefill", "decode", "encode"):
                await asyncio.sleep(0.15)
                await deployment.fleet.send("encode", "e1", SetRoles(frozenset({stage})))
            assert [each.tokens for each in await asking] == [each.tokens for each in expected]
            await deployment.settle()
            while (await switches_of(deployment, "e1")) < 3:  # a worker at rest tells of it once
                await asyncio.sleep(0.02)
            status = await deployment.service.status()
            assert status.topology == "2e1p1d"
            assert await switches_of(deployment, "e1") == 3

    asyncio.run(run())
