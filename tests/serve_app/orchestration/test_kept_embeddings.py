"""Tokens that are dropped anyway are not sent: answers stay, bytes from encode to prefill fall."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from epd.encode.encoder_cache import CachedGroup
from epd.encoders import FrameSampling
from epd.encoders.groups import MediaGroup
from epd.reduction import (
    PREFILL_METHODS,
    QUESTION_METHODS,
    SELECTION_METHODS,
    WINDOW_METHODS,
    ReductionPolicy,
)
from epd.sampling_params import SamplingParams
from epd.serve_app.orchestration.group_feed import ItemFrames
from epd.serve_app.worker.worker_roles import EncodeRole
from epd.stages.encode.encoder import EncodeStage
from epd.stages.encode.encoder_pool import EncoderPool
from epd.stages.encode.readings import Readings
from tests.media import write_video
from tests.serve_app.deployments import Answered, Deployment, Question, deployed

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
METHODS = SELECTION_METHODS + QUESTION_METHODS
QUARTER = ReductionPolicy("balanced", 0.25)


class Sent:
    """What is copied from pools of encoders to those of prefill workers. num_kept: groups cut before."""

    def __init__(self) -> None:
        self.num_bytes = self.num_groups = self.num_kept = 0


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    sent, copy = Sent(), EncoderPool.copy

    def counted(pool: EncoderPool, source: EncoderPool, from_place: CachedGroup, to: CachedGroup) -> None:
        sent.num_bytes += from_place.num_embeddings * source.layout.bytes_per_embedding
        sent.num_groups += 1
        sent.num_kept += bool(from_place.places)
        copy(pool, source, from_place, to)

    monkeypatch.setattr(EncoderPool, "copy", counted)
    return sent


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows as small as the groups of a deployment of tests."""
    monkeypatch.setattr("epd.encoders.reduction.reading.WINDOW_TOKENS", 16)


@pytest.fixture
def question(media: dict[str, Path]) -> Question:
    return Question((media["video"], media["image"], media["tall_video"]), "What is where?", SHORT)


def ask(path: Path, topology: str, question: Question, *policies: ReductionPolicy, **options: Any) -> Any:
    """The tokens of one question at each of the policies, in turn."""

    async def run() -> list[tuple[int, ...]]:
        async with deployed(path, topology, **options) as deployment:
            answers = [await deployment.ask(question, reduction=policy) for policy in policies]
            await settled(deployment)
            return [answer.tokens for answer in answers]

    return asyncio.run(run())


async def settled(deployment: Deployment) -> None:
    await deployment.settle()
    assert [stage.num_readings for stage in encoders(deployment)] == [0] * len(encoders(deployment))


def encoders(deployment: Deployment) -> list[EncodeStage]:
    roles = [core.hosted.get("encode") for core in deployment.cores()]
    return [role.stage for role in roles if isinstance(role, EncodeRole)]


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_every_method_keeps_its_tokens_and_sends_what_it_keeps(
    family: str, checkpoints: dict[str, Path], question: Question, sent: Sent
) -> None:
    """Each method at one encoder, and in one worker that does everything."""
    policies = [ReductionPolicy(method, 0.25) for method in METHODS]
    policies += [ReductionPolicy(method, 0.25) for method in PREFILL_METHODS]
    expected = ask(checkpoints[family], "1epd", question, *policies)
    assert sent.num_kept == 0
    assert ask(checkpoints[family], "1e1p1d", question, *policies) == expected
    assert sent.num_kept >= 3 * len(METHODS)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    ("topology", "sharding", "is_cut"),
    [
        ("1e1pd", "groups", True),
        ("1ed1p", "groups", True),
        ("2e1p1d", "request", True),
        ("2e1p1d", "groups", True),
        ("1ep1d", "groups", False),
        ("1e1epd", "local", False),
    ],
)
def test_encoders_cut_groups_that_they_send(
    topology: str, sharding: str, is_cut: bool, checkpoints: dict[str, Path], question: Question, sent: Sent
) -> None:
    model = checkpoints["qwen2_5_vl"]
    expected, sent.num_groups = ask(model, "1epd", question, QUARTER), 0
    assert ask(model, topology, question, QUARTER, sharding=sharding) == expected
    assert sent.num_kept == (sent.num_groups if is_cut else 0)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    ("topology", "sharding", "is_cut"),
    [("4e1p1d", "groups", True), ("1ep1d", "groups", False), ("1e1epd", "local", False)],
)
def test_several_encoders_cut_windows_that_are_chosen_from_alone(
    topology: str, sharding: str, is_cut: bool, checkpoints: dict[str, Path], question: Question, sent: Sent
) -> None:
    """Their groups are spread over all of them, and a second method finds them in their caches."""
    model, policies = checkpoints["qwen2_5_vl"], [ReductionPolicy(each, 0.25) for each in WINDOW_METHODS]
    expected, sent.num_groups = ask(model, "1epd", question, *policies), 0
    assert ask(model, topology, question, *policies, sharding=sharding) == expected
    assert sent.num_kept == (sent.num_groups if is_cut else 0)


@pytest.mark.usefixtures("narrow")
def test_several_encoders_send_what_one_does(
    checkpoints: dict[str, Path], tmp_path: Path, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every method, from all encoders: they read different parts of one video."""
    model, readers = checkpoints["qwen2_5_vl"], set[tuple[int, Any]]()
    video = write_video(tmp_path / "long.mp4", num_frames=120, seed=7)
    question = Question((video,), "What is where?", SHORT, FrameSampling(num_frames=40))
    policies = [ReductionPolicy(method, 0.25) for method in METHODS]
    expected, sizes, read = ask(model, "1epd", question, *policies), list[int](), Readings.read

    def noted(readings: Readings, job: Any, *arguments: Any) -> Any:
        readers.add((id(readings), job.ticket.key.reading))
        return read(readings, job, *arguments)

    monkeypatch.setattr(Readings, "read", noted)
    for topology in ("1e1p1d", "2e1p1d", "4e1p1d"):
        readers.clear()
        sent.num_bytes = sent.num_groups = sent.num_kept = 0
        assert ask(model, topology, question, *policies) == expected
        assert sent.num_kept == sent.num_groups
        assert len({encoder for encoder, _ in readers}) >= min(int(topology[0]), 2)
        assert len({name for _, name in readers}) == len(readers), "each is read by one"
        sizes.append(sent.num_bytes)
    assert sizes == [sizes[0]] * 3


def test_windows_that_need_a_later_group_are_sent_whole(
    checkpoints: dict[str, Path], media: dict[str, Path], sent: Sent
) -> None:
    question = Question((media["video"],), "What is where?", SHORT)
    expected = ask(checkpoints["qwen2_5_vl"], "1epd", question, QUARTER)
    assert ask(checkpoints["qwen2_5_vl"], "1e1p1d", question, QUARTER) == expected
    assert sent.num_kept == 0


@pytest.mark.usefixtures("narrow")
def test_bytes_fall_with_retention_and_nothing_is_encoded_again(
    checkpoints: dict[str, Path], media: dict[str, Path], sent: Sent
) -> None:
    """Also where a second question keeps more than the first, from the encoder's cache."""
    model = checkpoints["qwen2_5_vl"]
    frames = FrameSampling(num_frames=16)
    question = Question((media["video"], media["tall_video"]), "What is where?", SHORT, frames)
    levels = [0.25, 0.5, 0.75, 1.0]
    policies = [ReductionPolicy("balanced", level) for level in levels]
    expected = [ask(model, "1epd", question, policy)[0] for policy in policies]
    sizes, nums_groups = [], []
    sent.num_groups = sent.num_bytes = 0

    async def run() -> None:
        async with deployed(model, "1e1p1d") as deployment:
            for policy, tokens in zip(policies, expected, strict=True):
                answer = await deployment.ask(question, reduction=policy)
                assert answer.tokens == tokens
                sizes.append(sent.num_bytes)
                nums_groups.extend([sent.num_groups, encoders(deployment)[0].counts.num_groups])
                sent.num_groups = sent.num_bytes = 0
            await settled(deployment)

    asyncio.run(run())
    assert nums_groups == [nums_groups[0]] * 8
    assert nums_groups[0] >= 8
    assert [size / sizes[-1] for size in sizes] == pytest.approx(levels, abs=0.04)


@pytest.mark.usefixtures("narrow")
def test_what_prefill_has_whole_is_not_sent_again(
    checkpoints: dict[str, Path], media: dict[str, Path], sent: Sent
) -> None:
    question = Question((media["video"],), "What is where?", SHORT)
    policies = (ReductionPolicy(), QUARTER)
    expected = [ask(checkpoints["qwen2_5_vl"], "1epd", question, policy)[0] for policy in policies]
    alone = sent.num_bytes
    assert ask(checkpoints["qwen2_5_vl"], "1e1p1d", question, policies[0]) == expected[:1]
    whole, sent.num_bytes = sent.num_bytes - alone, 0
    assert ask(checkpoints["qwen2_5_vl"], "1e1p1d", question, *policies) == expected
    assert sent.num_bytes == whole


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("num_embeddings", [64, 4096])
def test_many_questions_at_once_share_little_memory(
    num_embeddings: int, checkpoints: dict[str, Path], question: Question, sent: Sent
) -> None:
    """Whole groups of one question may not even fit the cache of a worker."""
    model = checkpoints["qwen2_5_vl"]
    policies = [ReductionPolicy(method, level) for level in (0.3, 0.6) for method in ("balanced", "mustdrop")]
    expected = [ask(model, "1epd", question, policy)[0] for policy in policies]

    async def run() -> None:
        options = {"num_embeddings": num_embeddings}
        async with deployed(model, "1e1p1d", settings=options) as deployment:
            asked = [deployment.ask(question, reduction=policy) for policy in policies * 2]
            answers = await asyncio.gather(*asked)
            assert [answer.tokens for answer in answers] == expected * 2
            await settled(deployment)

    asyncio.run(run())
    assert sent.num_kept > 0


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("moment", "is_retried"), [(0, True), (1, True), (2, True), (3, False)])
def test_an_encoder_that_is_lost_in_the_middle_of_a_reading_costs_a_retry(
    moment: int,
    is_retried: bool,
    checkpoints: dict[str, Path],
    media: dict[str, Path],
    sent: Sent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has frames of the first `moment` + 1 groups alone when it is lost; the retry gets whole groups.

    Each of two videos is read in four groups. A loss between the two readings costs nothing.
    """
    frames = FrameSampling(num_frames=16)
    question = Question((media["video"], media["tall_video"]), "What is where?", SHORT, frames)
    model, read, copy = checkpoints["qwen2_5_vl"], ItemFrames.read, EncoderPool.copy
    expected = ask(model, "1epd", question, QUARTER)[0]
    options: dict[str, Any] = {"stall_timeout_s": 1000.0}  # the watchdog would retry it, too
    sent.num_groups = 0

    async def run() -> Answered:
        loop, is_lost = asyncio.get_running_loop(), asyncio.Event()
        async with deployed(model, "1e1p1d", settings={"num_embeddings": 32}, **options) as deployment:

            def lose() -> None:
                deployment.fleet.kill("e0")
                is_lost.set()

            def copy_then_lose(*arguments: Any) -> None:
                copy(*arguments)
                if sent.num_groups == moment + 1:
                    loop.call_soon_threadsafe(lose)

            async def read_so_many(frames: ItemFrames, group: MediaGroup, patience_s: float) -> Any:
                if (group.item, group.index) > (0, moment):
                    await is_lost.wait()
                return await read(frames, group, patience_s)

            monkeypatch.setattr(EncoderPool, "copy", copy_then_lose)
            monkeypatch.setattr(ItemFrames, "read", read_so_many)
            answer = await deployment.ask(question, reduction=QUARTER)
            await settled(deployment)
            return answer

    answer = asyncio.run(run())
    assert answer.tokens == expected
    assert answer.end is not None
    assert sent.num_groups >= 8
    assert sent.num_kept == (moment + 1 if is_retried else sent.num_groups)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("topology", ["1e1p1d", "2e1p1d"])
def test_groups_that_come_early_do_not_keep_the_first_one_out(
    topology: str,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    sent: Sent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three media workers read one video, the first one late, and an encoder takes one group at a time."""
    model, read = checkpoints["qwen2_5_vl"], ItemFrames.read
    video = write_video(tmp_path / "long.mp4", num_frames=120, seed=7)
    question = Question((video,), "What is where?", SHORT, FrameSampling(num_frames=40))
    expected = ask(model, "1epd", question, QUARTER)

    async def late(frames: ItemFrames, group: MediaGroup, patience_s: float) -> Any:
        await asyncio.sleep(0.3 if group.index == 0 else 0)
        return await read(frames, group, patience_s)

    monkeypatch.setattr(ItemFrames, "read", late)
    fleet = {"more_workers": {"v1": frozenset({"video"}), "v2": frozenset({"video"})}}
    options = {"fleet": fleet, "max_backlog_patches": 1, "stall_timeout_s": 120.0}
    assert ask(model, topology, question, QUARTER, **options) == expected
    assert sent.num_kept >= 8


@pytest.mark.usefixtures("narrow")
def test_an_encoder_that_fails_to_choose_costs_a_retry(
    checkpoints: dict[str, Path], question: Question, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read, num_reads = checkpoints["qwen2_5_vl"], Readings.read, 0
    expected = ask(model, "1epd", question, QUARTER)

    def fails_once(*arguments: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        kept = read(*arguments)
        if num_reads == 2:
            raise RuntimeError("no memory")
        return kept

    monkeypatch.setattr(Readings, "read", fails_once)
    sent.num_groups = 0
    assert ask(model, "1e1p1d", question, QUARTER) == expected
    assert 0 < sent.num_kept < sent.num_groups


@pytest.mark.usefixtures("narrow")
def test_a_question_that_is_given_up_leaves_nothing_at_the_encoder(
    checkpoints: dict[str, Path], question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client leaves between two groups of a video."""
    read = ItemFrames.read

    async def first_alone(frames: ItemFrames, group: MediaGroup, patience_s: float) -> Any:
        if group.index > 0:
            await asyncio.Event().wait()
        return await read(frames, group, patience_s)

    monkeypatch.setattr(ItemFrames, "read", first_alone)

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            asking = asyncio.create_task(deployment.ask(question, reduction=QUARTER))
            (encoder,) = encoders(deployment)
            while not (encoder.num_readings and encoder.counts.num_groups):
                await asyncio.sleep(0.002)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await settled(deployment)

    asyncio.run(run())
