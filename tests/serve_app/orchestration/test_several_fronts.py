"""Several orchestrators over one fleet: each answers as if it were alone, and misses none that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from epd.control.admission import QueueSummary
from epd.control.routing import InFlight
from epd.errors import UnavailableError
from epd.kv.pass_limits import PassLimits
from epd.sampling_params import SamplingParams
from epd.serve_app.fleet import WorkerChanged, WorkerLost
from epd.serve_app.messages import EncodeGroup, owner_of
from epd.serve_app.orchestration import worker_calls
from epd.serve_app.orchestration.config import SwitchLimits
from epd.serve_app.orchestration.requests import Attempt
from epd.serve_app.orchestration.worker_calls import DecodeMoves
from epd.serve_app.role_messages import AskRemaining, Offload
from epd.serve_app.worker_info import EVERY_STAGE
from tests.serve_app.deployments import Answered, Question, undisturbed, until_decoding
from tests.serve_app.shared_fleet import Front, fronts_over

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

KINDS = (("image",), ("video",), (), ("image", "tall_video"))
PREFILL, DECODE = frozenset({"prefill"}), frozenset({"decode"})
LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def asked(media: dict[str, Path], sampling: SamplingParams, num_questions: int) -> list[Question]:
    return [
        Question(tuple(media[name] for name in KINDS[number % len(KINDS)]), f"what {number}?", sampling)
        for number in range(num_questions)
    ]


@pytest.fixture(scope="module")
def questions(media: dict[str, Path]) -> list[Question]:
    return asked(media, SamplingParams(max_tokens=40, ignore_eos=True), 8)


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], questions: list[Question]) -> list[tuple[int, ...]]:
    return undisturbed(checkpoints["qwen2_5_vl"], questions)


@pytest.fixture(scope="module")
def long_questions(media: dict[str, Path]) -> list[Question]:
    return asked(media, LONG, 3)


@pytest.fixture(scope="module")
def long_expected(checkpoints: dict[str, Path], long_questions: list[Question]) -> list[tuple[int, ...]]:
    return undisturbed(checkpoints["qwen2_5_vl"], long_questions)


async def ask_at_both(fronts: list[Front], questions: list[Question]) -> list[list[Answered]]:
    return list(await asyncio.gather(*(front.ask_all(questions) for front in fronts)))


def tokens_of(answers: list[list[Answered]]) -> list[list[tuple[int, ...]]]:
    return [[answer.tokens for answer in each] for each in answers]


async def in_the_middle(fronts: list[Front], questions: list[Question]) -> asyncio.Task[list[list[Answered]]]:
    """All questions are placed by each front, d0 has begun an answer of each, and none goes on while held."""
    fronts[0].held.is_on = True
    asking = asyncio.create_task(ask_at_both(fronts, questions))
    for front in fronts:
        await until_decoding(front, "d0", 1)
        await until(partial(are_placed, front, len(questions)))
    return asking


def are_placed(front: Front, num_requests: int) -> bool:
    """A request that is still looking for workers may be submitted, taken back and submitted again."""
    attempts = front.service.requests.attempts.values()
    return len(attempts) == num_requests and all(each.is_placed for each in attempts)


async def until_any_busy(fronts: list[Front], worker: str) -> None:
    """Returns when a front has work at the worker: groups of one serve the others, which may have none."""
    await until(lambda: any(front.service.router.in_flight(worker) != InFlight() for front in fronts))


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The owners whose answers have begun to move to other decode workers."""
    owners: set[str] = set()
    move = DecodeMoves.move

    async def noted(placer: DecodeMoves, attempt: Attempt) -> bool:
        is_moving = await move(placer, attempt)
        owners.update({owner_of(attempt.id)} if is_moving else ())
        return is_moving

    monkeypatch.setattr(DecodeMoves, "move", noted)
    return owners


async def until(is_so: Callable[[], bool]) -> None:
    """Returns when it is so."""
    while not is_so():
        await asyncio.sleep(0.005)


def test_the_same_questions_at_two_fronts_get_the_same_tokens(
    checkpoints: dict[str, Path], questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    """They have the same media, so that groups of one serve requests of the other."""

    async def run() -> None:
        async with fronts_over(checkpoints["qwen2_5_vl"], "2e2p2d") as fronts:
            assert tokens_of(await ask_at_both(fronts, questions)) == [expected, expected]
            for front in fronts:
                await front.settle()
                assert (await front.service.status()).counters.get("retries", 0) == 0

    asyncio.run(run())


@pytest.mark.parametrize("victim", ["e0", "p0", "d0"])
def test_a_lost_worker_changes_no_token_of_either(
    victim: str, checkpoints: dict[str, Path], questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        async with fronts_over(checkpoints["qwen2_5_vl"], "2e2p2d") as fronts:
            asking = asyncio.create_task(ask_at_both(fronts, questions))
            await until_any_busy(fronts, victim)
            fronts[0].fleet.kill(victim)
            assert tokens_of(await asking) == [expected, expected]
            for front in fronts:
                await front.settle()

    asyncio.run(run())


@pytest.mark.parametrize("worker", ["e0", "p0", "d0"])
def test_a_front_that_is_gone_takes_nothing_from_the_other(
    worker: str, checkpoints: dict[str, Path], questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    """It goes while it has work at every stage: its room is free at once, and its media are known."""

    async def run() -> None:
        async with fronts_over(checkpoints["qwen2_5_vl"], "2e2p2d") as (gone, other):
            lost = asyncio.create_task(gone.ask_all(questions))
            asking = asyncio.create_task(other.ask_all(questions))
            await until_any_busy([gone, other], worker)
            await asyncio.sleep(0.05)
            await gone.crash()
            assert [answer.tokens for answer in await asking] == expected
            await other.settle()
            assert (await other.service.status()).counters.get("workers_lost", 0) == 0
            assert (await other.ask(questions[1])).tokens == expected[1]
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)

    asyncio.run(run())


def test_a_switch_moves_the_answers_of_every_front(
    checkpoints: dict[str, Path],
    long_questions: list[Question],
    long_expected: list[tuple[int, ...]],
    moved: set[str],
) -> None:
    async def run() -> None:
        async with fronts_over(checkpoints["qwen2_5_vl"], "1e1p2d") as fronts:
            asking = await in_the_middle(fronts, long_questions)
            switch = await fronts[0].service.switch_roles("d0", PREFILL)
            assert moved == {"a", "b"}
            assert switch.num_moved > 0
            assert switch.num_redone == 0
            fronts[0].held.is_on = False
            answers = await asking
            assert tokens_of(answers) == [long_expected, long_expected]
            assert [answer.end.num_retries for each in answers for answer in each if answer.end] == [0] * 6
            for front in fronts:
                await front.settle()
                assert (await front.service.status()).topology == "1e2p1d"

    asyncio.run(run())


@pytest.mark.parametrize("worker", ["e0", "p0"])
def test_a_switch_hands_on_what_other_fronts_have_there(
    worker: str, checkpoints: dict[str, Path], questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        async with fronts_over(checkpoints["qwen2_5_vl"], "2e2p2d", "abc") as fronts:
            asking = asyncio.create_task(ask_at_both(fronts, questions))
            await until_any_busy(fronts, worker)
            switch = await fronts[0].service.switch_roles(worker, DECODE)
            assert switch.error == ""
            assert tokens_of(await asking) == [expected] * 3
            for front in fronts:
                await front.settle()

    asyncio.run(run())


def test_only_the_front_that_leads_switches_roles(checkpoints: dict[str, Path]) -> None:
    async def run() -> None:
        async with fronts_over(checkpoints["qwen2_5_vl"], "1e1p2d") as (leader, other):
            with pytest.raises(UnavailableError, match="send the request again"):
                await other.service.switch_roles("d0", PREFILL)
            leader.service.switcher.leads, other.service.switcher.leads = False, True
            assert (await other.service.switch_roles("d0", PREFILL)).error == ""
            with pytest.raises(UnavailableError, match="send the request again"):
                await leader.service.switch_roles("d0", DECODE)

    asyncio.run(run())


def test_the_next_leader_ends_the_switch_of_one_that_is_gone(
    checkpoints: dict[str, Path], long_questions: list[Question], long_expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        limits = SwitchLimits(drain_s=1000.0)
        async with fronts_over(checkpoints["qwen2_5_vl"], "1e1p2d", switching=limits) as (gone, other):
            await gone.fleet.send("decode", "d0", Offload(frozenset(), DECODE))
            other.shared.publish(WorkerChanged("d0"))
            assert not other.fleet.workers["d0"].takes("decode")
            await gone.crash()
            other.service.switcher.leads = True
            await until(lambda: other.fleet.workers["d0"].takes("decode"))
            answers = await other.ask_all(long_questions)
            assert [answer.tokens for answer in answers] == long_expected

    asyncio.run(run())


def test_a_worker_that_says_after_a_new_leader_has_come_that_it_leaves_stays(
    checkpoints: dict[str, Path],
) -> None:
    """Who has asked it to is gone. A front that does not lead leaves it alone."""

    async def run() -> None:
        async with fronts_over(checkpoints["qwen2_5_vl"], "1e1p2d", "abc") as (gone, other, leader):
            await gone.crash()
            asked: list[str] = []
            for front in (other, leader):
                send = front.service.switcher.roll_back_abandoned

                async def noted(front: Front = front, send: Callable[..., Any] = send) -> None:
                    await send()
                    asked.append(front.service.owner)

                front.service.switcher.roll_back_abandoned = noted  # type: ignore[method-assign]
            other.service.switcher.leads, leader.service.switcher.leads = False, True
            await until(lambda: asked == [leader.service.owner])  # nothing was abandoned by then
            await leader.fleet.send("decode", "d0", Offload(frozenset(), DECODE))
            leader.shared.publish(WorkerChanged("d0"))
            await until(lambda: leader.fleet.workers["d0"].takes("decode"))
            assert set(asked) == {leader.service.owner}

    asyncio.run(run())


async def drain(front: Front, worker: str) -> None:
    """The worker leaves for good, as it does by itself. Returns when it has nothing left."""
    info, fleet = front.fleet.workers[worker], front.fleet
    stage = min(info.roles)
    await fleet.send(stage, worker, Offload(frozenset(), EVERY_STAGE))
    front.shared.publish(WorkerChanged(worker))
    while not (await fleet.send(stage, worker, AskRemaining(EVERY_STAGE))).is_over:
        await asyncio.sleep(0.01)
    fleet._threads.pop(worker).lose("it has left")
    infos: Any = fleet.workers
    del infos[worker]
    front.shared.publish(WorkerLost(worker, "it has left", info.incarnation, is_planned=True))


@pytest.mark.parametrize("worker", ["e0", "p0", "d0"])
def test_a_worker_that_drains_loses_nothing_of_any_front(
    worker: str, checkpoints: dict[str, Path], questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        async with fronts_over(checkpoints["qwen2_5_vl"], "2e2p2d", max_attempts=1) as fronts:
            asking = asyncio.create_task(ask_at_both(fronts, questions))
            await until_any_busy(fronts, worker)
            await drain(fronts[0], worker)
            assert tokens_of(await asking) == [expected, expected]
            for front in fronts:
                await front.settle()
                counters = (await front.service.status()).counters
                assert counters.get("workers_lost", 0) == counters.get("retries", 0) == 0

    asyncio.run(run())


def test_the_only_worker_of_a_role_completes_its_answers_before_it_ends(
    checkpoints: dict[str, Path], long_questions: list[Question], long_expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        limits = SwitchLimits(leave_s=0.0)
        async with fronts_over(checkpoints["qwen2_5_vl"], "1e1p1d", switching=limits) as fronts:
            asking = await in_the_middle(fronts, long_questions[:1])
            draining = asyncio.create_task(drain(fronts[0], "d0"))
            await until(lambda: not fronts[0].fleet.workers["d0"].takes("decode"))
            fronts[0].held.is_on = False
            await draining
            answers = await asking
            assert tokens_of(answers) == [long_expected[:1]] * 2
            assert [answer.end.num_retries for each in answers for answer in each if answer.end] == [0, 0]

    asyncio.run(run())


def test_answers_move_from_a_worker_that_drains(
    checkpoints: dict[str, Path],
    long_questions: list[Question],
    long_expected: list[tuple[int, ...]],
    moved: set[str],
) -> None:
    async def run() -> None:
        async with fronts_over(checkpoints["qwen2_5_vl"], "1e1p2d") as fronts:
            asking = await in_the_middle(fronts, long_questions)
            await drain(fronts[0], "d0")
            assert moved
            fronts[0].held.is_on = False
            assert tokens_of(await asking) == [long_expected, long_expected]
            for front in fronts:
                await front.settle()

    asyncio.run(run())


def held_encoding(front: Front) -> asyncio.Event:
    """Prompts with media stay at their prefill workers until the event is set."""
    send, may_encode = front.fleet.send, asyncio.Event()

    async def held(stage: Any, target: str, message: Any, bulk: Any = None) -> Any:
        if isinstance(message, EncodeGroup):
            await may_encode.wait()
        return await send(stage, target, message, bulk)

    front.fleet.send = held  # type: ignore[method-assign]
    return may_encode


def test_each_front_sees_the_work_of_the_other(
    checkpoints: dict[str, Path], long_questions: list[Question], long_expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        async with fronts_over(checkpoints["qwen2_5_vl"], "1e2p2d") as (busy, other):
            other.service.share(QueueSummary())
            busy.held.is_on = True
            may_encode = held_encoding(busy)
            asking = asyncio.create_task(busy.ask_all(long_questions[:1]))
            router = other.service.router
            await until(lambda: any(router.load(name).num_prefills for name in ("p0", "p1")))
            may_encode.set()
            await until(lambda: any(router.load(name).num_decodes for name in ("d0", "d1")))
            (at,) = [name for name in ("d0", "d1") if router.load(name).num_decodes]
            assert router.load(at) == busy.service.router.in_flight(at)
            assert next(router.decode_order(("d0", "d1"))) != at
            busy.held.is_on = False
            assert [answer.tokens for answer in await asking] == long_expected[:1]
            await until(lambda: not any(any(router.load(name)) for name in other.fleet.workers))
            assert not busy.service.router._others

    asyncio.run(run())


def test_room_that_one_front_frees_wakes_the_other(
    checkpoints: dict[str, Path],
    long_questions: list[Question],
    long_expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is room for one answer at a time, and nobody looks for it without a reason."""
    monkeypatch.setattr(worker_calls, "_POLL_S", 3600.0)
    only: dict[str, Any] = {"settings": {"scheduler": PassLimits(max_chunk_tokens=64, max_num_seqs=1)}}

    async def run() -> None:
        async with fronts_over(checkpoints["qwen2_5_vl"], "1e1p1d", **only) as (first, second):
            first.held.is_on = True
            asking = [asyncio.create_task(first.ask(long_questions[0]))]
            await until_decoding(first, "d0", 1)
            second.service.share(QueueSummary())
            asking.append(asyncio.create_task(second.ask(long_questions[0])))
            await until(lambda: len(second.service.queue) == 1)
            first.held.is_on = False
            answers = await asyncio.gather(*asking)
            assert [answer.tokens for answer in answers] == long_expected[:1] * 2

    asyncio.run(run())
