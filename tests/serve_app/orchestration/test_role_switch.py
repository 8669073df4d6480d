"""Workers that change roles under load: every answer ends with the tokens it would have had, none is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epd.errors import InfeasibleError, ModelError, RequestError, UnavailableError
from epd.kv.drafting import DraftConfig, DraftMethod
from epd.sampling_params import SamplingParams
from epd.serve_app.fleet import WorkerLostError
from epd.serve_app.messages import EncodeGroup, Message, Reserve
from epd.serve_app.orchestration import role_switch
from epd.serve_app.orchestration.config import SwitchLimits
from epd.serve_app.role_messages import AskRemaining, Move, Offload, Onload, Pause, SetRoles
from epd.topology import Stage, closed_roles, stages_of
from tests.serve_app.deployments import (
    LETTERS,
    NEVER_S,
    Answered,
    Deployment,
    Question,
    core_of,
    deployed,
    undisturbed,
    until_busy,
    until_decoding,
)

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

MEDIA = (("image",), ("video",), (), ("image", "tall_video"))
SEED = 5
KINDS = ("e->p", "p->d", "d->e", "e->d", "d->p", "p->e")


def roles(letters: str) -> frozenset[Stage]:
    return frozenset(LETTERS[letter] for letter in letters)


def params(number: int) -> SamplingParams:
    """Greedy and drawn, with penalties, and some with several answers."""
    return SamplingParams(
        max_tokens=40,
        ignore_eos=True,
        temperature=number % 3 / 2,
        presence_penalty=number % 2 / 2,
        seed=SEED + number,
        n=2 if number % 6 == 5 else 1,
    )


@pytest.fixture(scope="module")
def questions(media: dict[str, Path]) -> list[Question]:
    return [
        Question(tuple(media[name] for name in MEDIA[number % len(MEDIA)]), f"what {number}?", params(number))
        for number in range(6)
    ]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], questions: list[Question]) -> list[tuple[int, ...]]:
    return undisturbed(checkpoints["qwen2_5_vl"], questions)


@contextmanager
def on_message(
    deployment: Deployment, kind: type[Message[Any]], act: Callable[[Any], None], *, after: bool = False
) -> Iterator[None]:
    """Does something before each message of a kind is sent, or when its reply is there. It may raise."""
    send = deployment.fleet.send

    async def tampered(stage: Stage, target: str, message: Message[Any], bulk: Any = None) -> Any:
        if isinstance(message, kind) and not after:
            act(message)
        reply = await send(stage, target, message, bulk)
        if isinstance(message, kind) and after:
            act(message)
        return reply

    deployment.fleet.send = tampered  # type: ignore[method-assign]
    try:
        yield
    finally:
        deployment.fleet.send = send  # type: ignore[method-assign]


def refuse_moves(message: Reserve) -> None:
    """As if no other decode worker had room for what comes from one."""
    if message.sender.endswith(".decode"):
        raise WorkerLostError("no room; this is a test")


@pytest.mark.parametrize("kind", KINDS)
def test_a_switch_under_load_changes_no_token(
    kind: str, checkpoints: dict[str, Path], questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    before, after = kind.split("->")
    worker = f"{before}0"

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "2e2p2d") as deployment:
            asking = asyncio.create_task(deployment.ask_all(questions))
            await until_busy(deployment, worker)
            await asyncio.sleep(0.05)
            switch = await deployment.service.switch_roles(worker, roles(after))
            assert [answer.tokens for answer in await asking] == expected
            assert deployment.fleet.workers[worker].roles == roles(after)
            assert [answer.tokens for answer in await deployment.ask_all(questions)] == expected
            await deployment.settle()
            assert set(core_of(deployment.fleet, worker).hosted) == roles(after)
            status = await deployment.service.status()
            assert (switch.kind, switch.error) == (kind, "")
            assert status.switches == (switch,)
            assert status.counters.get("retries", 0) == status.counters["refused"] == 0

    asyncio.run(run())


# In the middle of answers


LONG = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.7, top_k=5, seed=SEED)


@pytest.fixture(scope="module")
def long_questions(media: dict[str, Path]) -> list[Question]:
    return [
        Question(tuple(media[name] for name in MEDIA[number % 4]), f"and {number}?", LONG)
        for number in range(4)
    ]


@pytest.fixture(scope="module")
def long_expected(checkpoints: dict[str, Path], long_questions: list[Question]) -> list[tuple[int, ...]]:
    return undisturbed(checkpoints["qwen2_5_vl"], long_questions)


async def decoding(deployment: Deployment, questions: list[Question]) -> asyncio.Task[list[Answered]]:
    """All questions are asked, d0 has begun half of the answers, and none goes on before `released`."""
    deployment.held.is_on = True
    asking = asyncio.create_task(deployment.ask_all(questions))
    await until_decoding(deployment, "d0", len(questions) // 2)
    return asking


async def released(deployment: Deployment, asking: asyncio.Task[list[Answered]]) -> list[Answered]:
    """Returns the answers, which go on from now on."""
    assert not asking.done()
    deployment.held.is_on = False
    return await asking


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("method", "runs_ahead"), [("none", False), ("none", True), ("recycling", False)])
def test_answers_move_with_their_keys_and_values(
    method: DraftMethod,
    runs_ahead: bool,
    n: int,
    checkpoints: dict[str, Path],
    long_questions: list[Question],
    long_expected: list[tuple[int, ...]],
) -> None:
    """Also while tokens are drafted for them, of which some hold and some do not, or passes run ahead.

    Of several answers to a question the prompt moves, and what followed is computed again.
    """
    if n > 1:
        long_questions = [replace(each, sampling=replace(each.sampling, n=n)) for each in long_questions]
        long_expected = undisturbed(checkpoints["qwen2_5_vl"], long_questions)

    async def run() -> None:
        settings = {"drafting": DraftConfig(method, 4), "async_scheduling": runs_ahead}
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p2d", settings=settings) as deployment:
            asking = await decoding(deployment, long_questions)
            switch = await deployment.service.switch_roles("d0", roles("p"))
            assert switch.num_moved > 0
            assert switch.num_redone == 0
            answers = await released(deployment, asking)
            assert [answer.tokens for answer in answers] == long_expected
            assert sum(answer.end.num_retries for answer in answers if answer.end) == 0
            await deployment.settle()
            counters = (await deployment.service.status()).counters
            assert (counters["spec_decode_num_drafts"] > 0) is (method != "none")

    asyncio.run(run())


def test_answers_that_nobody_has_room_for_are_done_again_when_the_drain_ends(
    checkpoints: dict[str, Path], long_questions: list[Question], long_expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        limits = SwitchLimits(drain_s=0.1)
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p2d", switching=limits) as deployment:
            asking = await decoding(deployment, long_questions)
            with on_message(deployment, Reserve, refuse_moves):
                switch = await deployment.service.switch_roles("d0", roles("p"))
            assert switch.num_moved == 0
            assert switch.num_redone > 0
            assert [answer.tokens for answer in await released(deployment, asking)] == long_expected
            await deployment.settle()

    asyncio.run(run())


def test_a_prompt_on_its_way_to_a_worker_that_leaves_decode_goes_to_another(
    checkpoints: dict[str, Path], long_questions: list[Question], long_expected: list[tuple[int, ...]]
) -> None:
    """The prefill worker hands it over to the other decode worker: nothing is begun again."""

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p2d") as deployment:
            fleet, send, may_encode = deployment.fleet, deployment.fleet.send, asyncio.Event()

            async def held(stage: Stage, target: str, message: Message[Any], bulk: Any = None) -> Any:
                if isinstance(message, EncodeGroup):
                    await may_encode.wait()
                return await send(stage, target, message, bulk)

            fleet.send = held  # type: ignore[method-assign]
            asking = asyncio.create_task(deployment.ask(long_questions[1]))
            attempts = deployment.service.attempts
            while not any(each.is_placed for each in attempts.values()):
                await asyncio.sleep(0.002)
            (attempt,) = attempts.values()
            former = attempt.decode_worker
            switching = asyncio.create_task(deployment.service.switch_roles(former, roles("p")))
            while attempt.decode_worker == former and not switching.done():
                await asyncio.sleep(0.002)
            may_encode.set()
            switch, answer = await switching, await asking
            assert (switch.num_handed_on, switch.num_moved, switch.num_redone) == (1, 0, 0)
            assert answer.tokens == long_expected[1]
            assert answer.end is not None
            assert answer.end.num_retries == 0
            await deployment.settle()

    asyncio.run(run())


def test_nobody_waits_for_a_stage_that_is_gone(
    checkpoints: dict[str, Path], questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    """What is on its way to a stage when that closes is not kept for ever where it comes from."""

    async def run() -> None:
        limits = SwitchLimits(drain_s=0.0)
        async with deployed(checkpoints["qwen2_5_vl"], "1e2p2d", switching=limits) as deployment:
            slow = core_of(deployment.fleet, "e0").hosted["encode"].stage._encoder  # type: ignore[attr-defined]
            encode = slow.encode

            def encode_slowly(*batch: Any) -> Any:
                time.sleep(0.1)
                return encode(*batch)

            slow.encode = encode_slowly
            asking = asyncio.create_task(deployment.ask_all(questions))
            await until_busy(deployment, "e0")
            await deployment.service.switch_roles("p0", roles("d"))
            await deployment.service.switch_roles("d0", roles("p"))
            assert [answer.tokens for answer in await asking] == expected
            await deployment.settle()

    asyncio.run(run())


def test_a_worker_that_answers_move_to_is_lost(
    checkpoints: dict[str, Path], long_questions: list[Question], long_expected: list[tuple[int, ...]]
) -> None:
    """As soon as the first is on its way: they go on where they were, or are done again."""

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p3d") as deployment:
            asking = await decoding(deployment, long_questions)
            with on_message(deployment, Move, lambda _: deployment.fleet.kill("d1")):
                await deployment.service.switch_roles("d0", roles("p"))
            assert [answer.tokens for answer in await released(deployment, asking)] == long_expected
            await deployment.settle()

    asyncio.run(run())


# What goes wrong


PHASES: dict[type[Message[Any]], str] = {
    Offload: "offload",
    AskRemaining: "offload",
    Pause: "migrate",
    Move: "migrate",
    Onload: "onload",
    SetRoles: "announce",
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_switch_that_fails_midway_leaves_everything_as_it_was(
    after: bool,
    checkpoints: dict[str, Path],
    long_questions: list[Question],
    long_expected: list[tuple[int, ...]],
) -> None:
    """A message of every phase fails, before it is sent or after it was acted upon."""

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p2d") as deployment:
            for kind, phase in PHASES.items():
                asking = await decoding(deployment, long_questions)
                times = iter([ModelError("this is a test")])

                def fail(_: Any, times: Iterator[ModelError] = times) -> None:
                    for error in times:
                        raise error

                with on_message(deployment, kind, fail, after=after), pytest.raises(UnavailableError) as told:
                    await deployment.service.switch_roles("d0", roles("p"))
                assert f"{phase}: this is a test" in str(told.value)
                assert deployment.fleet.workers["d0"].takes("decode")
                assert [answer.tokens for answer in await released(deployment, asking)] == long_expected
                await deployment.settle()
                assert set(core_of(deployment.fleet, "d0").hosted) == {"decode"}
            (total,) = (await deployment.service.status()).switch_totals
            assert (total.kind, total.num_done, total.num_failed) == ("d->p", 0, len(PHASES))
            assert (await deployment.service.status()).topology == "1e1p2d"
            assert (await deployment.service.switch_roles("d0", roles("p"))).error == ""

    asyncio.run(run())


@pytest.mark.parametrize("kind", PHASES, ids=lambda kind: kind.__name__)
def test_a_bug_in_a_switch_leaves_no_worker_closed(
    kind: type[Message[Any]],
    checkpoints: dict[str, Path],
    long_questions: list[Question],
    long_expected: list[tuple[int, ...]],
) -> None:
    """The first message of its kind meets an error that nobody expects."""

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p2d") as deployment:
            asking = await decoding(deployment, long_questions)
            bugs = iter([ZeroDivisionError("a bug")])

            def fail(_: Any) -> None:
                for bug in bugs:
                    raise bug

            with on_message(deployment, kind, fail), pytest.raises(UnavailableError) as caught:
                await deployment.service.switch_roles("d0", roles("p"))
            assert f"{PHASES[kind]}: a bug ended the request: ZeroDivisionError" in str(caught.value)
            assert deployment.fleet.workers["d0"].takes("decode")
            assert not deployment.service.switcher.in_flight
            assert [answer.tokens for answer in await released(deployment, asking)] == long_expected
            assert (await deployment.service.switch_roles("d0", roles("p"))).error == ""

    asyncio.run(run())


@pytest.mark.parametrize("kind", PHASES, ids=lambda kind: kind.__name__)
def test_a_worker_that_is_lost_in_its_switch_comes_back_as_it_was(
    kind: type[Message[Any]],
    checkpoints: dict[str, Path],
    long_questions: list[Question],
    long_expected: list[tuple[int, ...]],
) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p2d") as deployment:
            asking = await decoding(deployment, long_questions)
            lose = on_message(deployment, kind, lambda _: deployment.fleet.kill("d0"))
            with lose, pytest.raises(UnavailableError):
                await deployment.service.switch_roles("d0", roles("p"))
            assert [answer.tokens for answer in await released(deployment, asking)] == long_expected
            await deployment.settle()
            assert deployment.fleet.workers["d0"].takes("decode")

    asyncio.run(run())


def test_a_switch_that_takes_too_long_is_rolled_back(
    checkpoints: dict[str, Path],
    long_questions: list[Question],
    long_expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is late from when answers are to move on."""
    limits = property(lambda run: SwitchLimits(limit_s=0.3 if run.phase == "migrate" else NEVER_S))
    monkeypatch.setattr(role_switch._SwitchRun, "limits", limits)

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p2d") as deployment:
            asking = await decoding(deployment, long_questions)
            refused = pytest.raises(UnavailableError, match=r"migrate: it took more than 0.3 s")
            with on_message(deployment, Reserve, refuse_moves), refused:
                await deployment.service.switch_roles("d0", roles("p"))
            assert [answer.tokens for answer in await released(deployment, asking)] == long_expected
            await deployment.settle()

    asyncio.run(run())


def test_the_last_worker_of_a_role_keeps_it(
    checkpoints: dict[str, Path], long_questions: list[Question], long_expected: list[tuple[int, ...]]
) -> None:
    """At the beginning, and if the others are lost in the middle of it."""

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p2d") as deployment:
            may_restart = held_restarts(deployment)
            for worker in ("e0", "p0"):
                with pytest.raises(InfeasibleError, match="at least 1 must be left"):
                    await deployment.service.switch_roles(worker, roles("d"))
            asking = await decoding(deployment, long_questions)
            lose = on_message(deployment, Pause, lambda _: deployment.fleet.kill("d1"))
            with lose, pytest.raises(UnavailableError, match="there are 0 workers for decode"):
                await deployment.service.switch_roles("d0", roles("p"))
            may_restart.set()
            assert [answer.tokens for answer in await released(deployment, asking)] == long_expected
            await deployment.settle()

    asyncio.run(run())


def held_restarts(deployment: Deployment) -> asyncio.Event:
    """Lost workers are not started again before the event is set."""
    restart, may_restart = deployment.fleet._restart, asyncio.Event()

    async def held(name: str) -> None:
        await may_restart.wait()
        await restart(name)

    deployment.fleet._restart = held  # type: ignore[method-assign]
    return may_restart


def test_switches_that_cannot_be_are_refused(checkpoints: dict[str, Path]) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "2e2p2d") as deployment:
            switch = deployment.service.switch_roles
            for worker, letters, error, match in (
                ("x9", "d", RequestError, "allowed: d0, d1, e0, e1, p0, p1"),
                ("v0", "d", RequestError, "allowed: d0, d1, e0, e1, p0, p1"),
                ("e0", "v", RequestError, "allowed: some of decode, encode, prefill"),
                ("e0", "", RequestError, "name at least one"),
                ("e0", "e", RequestError, "already"),
            ):
                with pytest.raises(error, match=match):
                    await switch(worker, roles(letters))
            first = asyncio.create_task(switch("e0", roles("p")))
            await asyncio.sleep(0)
            with pytest.raises(UnavailableError, match=r"\['e0'\] are being switched"):
                await switch("d0", roles("p"))
            await first
            deployment.fleet.kill("d0")
            with pytest.raises(UnavailableError, match="being started again"):
                await switch("d0", roles("p"))

    asyncio.run(run())


def test_merged_roles_are_taken_apart_and_put_together(
    checkpoints: dict[str, Path], questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "2e2pd1p1d") as deployment:
            for worker, letters in (("pd0", "d"), ("e0", "pd"), ("pd1", "e"), ("d0", "pd")):
                asking = asyncio.create_task(deployment.ask_all(questions))
                await asyncio.sleep(0.05)
                await deployment.service.switch_roles(worker, roles(letters))
                assert [answer.tokens for answer in await asking] == expected
            await deployment.settle()
            assert (await deployment.service.status()).topology == "2e1p2pd1d"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("topology", "steps"),
    [
        ("1e1p1ed", (("p0", "ep"), ("p0", "p"), ("p0", "ep"), ("e0", "d"), ("ed0", "d"), ("e0", "ed"))),
        ("1epd1d", (("epd0", "ep"), ("epd0", "epd"), ("d0", "ep"))),
    ],
)
def test_roles_are_added_to_others_and_their_memory_freed(
    topology: str,
    steps: tuple[tuple[str, str], ...],
    checkpoints: dict[str, Path],
    questions: list[Question],
    expected: list[tuple[int, ...]],
) -> None:
    """A worker of some roles has the same memory, whatever it had before."""

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], topology) as deployment:
            used = {core.name: {core.roles: core.load().memory} for core in deployment.cores()}
            for worker, letters in steps:
                asking = asyncio.create_task(deployment.ask_all(questions))
                while not any(each.is_placed for each in deployment.service.attempts.values()):
                    await asyncio.sleep(0.002)
                await deployment.service.switch_roles(worker, roles(letters))
                assert [answer.tokens for answer in await asking] == expected
                await deployment.settle()
                core = core_of(deployment.fleet, worker)
                assert set(core.hosted) == stages_of(roles(letters))
                memory = core.load().memory
                assert used[worker].setdefault(core.roles, memory) == memory
                has_encoder, has_language = "e" in letters, letters != "e"
                assert bool(memory.kv_bytes) == has_language
                assert bool(memory.embedding_bytes) == (has_encoder or "p" in letters)
            assert [answer.tokens for answer in await deployment.ask_all(questions)] == expected
            counters = (await deployment.service.status()).counters
            assert counters.get("retries", 0) == counters["refused"] == 0

    asyncio.run(run())


def test_roles_that_stay_but_change_their_stage_are_closed_meanwhile() -> None:
    for before, after, closed in (
        ("e", "p", "e"),
        ("ep", "p", "e"),
        ("pd", "p", "d"),
        ("pd", "d", "pd"),
        ("d", "pd", "d"),
        ("ed", "epd", "d"),
    ):
        assert closed_roles(roles(before), roles(after)) == roles(closed), (before, after)
