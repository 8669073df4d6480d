"""A prompt goes to its prefill worker while a decode worker that seems to have room is asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from epd.errors import InfeasibleError
from epd.serve_app.messages import Abort, Message, Prefill, Redirect, Reserve, WorkerLoad
from epd.serve_app.orchestration.placement import _Round
from epd.serve_app.orchestration.requests import Attempt, Outcome
from epd.serve_app.orchestration.worker_calls import DecodeCapacity
from epd.serve_app.worker_info import MemoryUse, WorkerInfo
from tests.serve_app.deployments import NEVER_S
from tests.serve_app.orchestration.test_forwarding import Bench, ScriptedFleet


def load(kv_usage: float = 0.0, seq_usage: float = 0.0, num_tokens: int = 100) -> WorkerLoad:
    memory = MemoryUse(num_kv_tokens=num_tokens)
    return WorkerLoad(kv_usage=kv_usage, seq_usage=seq_usage, memory=memory, max_num_seqs=8)


# The estimate


def test_room_is_what_the_last_report_left_but_for_a_share_into_which_answers_grow() -> None:
    loads = {"d0": load(0.5)}
    capacity = DecodeCapacity(loads, lambda: 0.0)
    assert capacity.has_room("d0", 30, 1)
    assert not capacity.has_room("d0", 31, 1)
    loads["d0"] = load(0.0, seq_usage=0.75)
    assert capacity.has_room("d0", 10, 2)
    assert not capacity.has_room("d0", 10, 3)


@pytest.mark.parametrize("said", [None, WorkerLoad(), load(num_tokens=0)])
def test_nothing_is_assumed_of_a_worker_that_has_not_said_what_it_has(said: WorkerLoad | None) -> None:
    assert not DecodeCapacity({} if said is None else {"d0": said}, lambda: 0.0).has_room("d0", 1, 1)


def test_what_was_asked_for_counts_until_a_report_counts_it() -> None:
    """A report that was on its way when the worker answered may not count it yet, the next one does."""
    loads = {"d0": load()}
    capacity = DecodeCapacity(loads, lambda: 0.0)
    asked = capacity.ask("d0", 50, 1)
    assert not capacity.has_room("d0", 40, 1)
    loads["d0"] = load()
    assert not capacity.has_room("d0", 40, 1), "it has not answered"
    capacity.answer("d0", asked, is_taken=True)
    assert not capacity.has_room("d0", 31, 1)
    assert capacity.has_room("d0", 30, 7)
    assert not capacity.has_room("d0", 30, 8), "one of 8 places is taken"
    loads["d0"] = load(0.2)
    assert capacity.has_room("d0", 40, 1)


def test_after_a_refusal_a_worker_is_asked_first_until_it_reports() -> None:
    loads = {"d0": load()}
    capacity = DecodeCapacity(loads, lambda: 0.0)
    capacity.answer("d0", capacity.ask("d0", 50, 1), is_taken=False)
    assert not capacity.has_room("d0", 1, 1)
    loads["d0"] = load()
    assert capacity.has_room("d0", 50, 1)


def test_what_reports_count_is_forgotten() -> None:
    loads = {"d0": load()}
    capacity = DecodeCapacity(loads, lambda: 0.0)
    for _ in range(9):
        capacity.answer("d0", capacity.ask("d0", 1, 1), is_taken=True)
        loads["d0"] = load()
    assert len(capacity._asked["d0"]) == 1


def test_whether_a_worker_is_slow_follows_its_last_answers() -> None:
    now_s = 0.0
    capacity = DecodeCapacity({}, lambda: now_s)
    assert not capacity.is_slow("d0")
    found = []
    for seconds in (0.025, 0.0005, *[0.0005] * 6, 0.025):
        asked = capacity.ask("d0", 1, 1)
        now_s += seconds
        capacity.answer("d0", asked, is_taken=True)
        found.append(capacity.is_slow("d0"))
    assert found == [True] * 5 + [False] * 3 + [True]


# The messages


@dataclass
class JoiningFleet(ScriptedFleet):
    """Takes tickets too. tickets: of requests. is_over: whether prompts end before their tickets come."""

    tickets: list[str] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    is_over: bool = False
    error: InfeasibleError | None = None
    lost: set[str] = field(default_factory=set)
    loses_at_abort: str = ""

    @property
    def workers(self) -> Mapping[str, WorkerInfo]:
        infos = super().workers
        return {name: replace(info, is_alive=name not in self.lost) for name, info in infos.items()}

    async def send(self, stage: Any, target: str, message: Message[Any], bulk: Any = None) -> Any:
        if isinstance(message, Reserve) and self.error is not None:
            raise self.error
        if isinstance(message, Prefill):
            self.prefills.append(message)
        if isinstance(message, Abort):
            self.lost.add(self.loses_at_abort)
        if isinstance(message, Redirect):
            self.asked.append((target, Redirect))
            self.tickets.append(message.request_id)
            return not self.is_over
        return await super().send(stage, target, message, bulk)


class JoiningBench(Bench):
    """Of workers that have reported that they have room, and that take long to answer."""

    def __init__(self, room: dict[str, int], *, is_slow: bool = True) -> None:
        self.joining = JoiningFleet(room)
        super().__init__(room, self.joining)
        self.shared.requests.loads.update({name: load() for name in room if name[0] == "d"})
        for name in room if is_slow else ():
            self.placement.calls.capacity._seconds[name] = 1.0

    @property
    def kinds(self) -> list[tuple[str, type]]:
        return self.fleet.asked


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_a_prompt_is_submitted_before_its_decode_worker_has_answered() -> None:
    async def run() -> None:
        bench = JoiningBench({"p0": 1, "d0": 1})
        gate = bench.fleet.gates["d0"] = asyncio.Event()
        placing = asyncio.create_task(bench.place("r"))
        await until(lambda: bench.fleet.held.get("p0"))
        assert [(each.ticket, each.awaits_ticket) for each in bench.joining.prefills] == [(None, True)]
        gate.set()
        attempt = await placing
        assert bench.kinds == [("p0", Prefill), ("d0", Reserve), ("p0", Redirect)]
        assert bench.joining.tickets == [attempt.id]
        assert bench.fleet.held == {"p0": {attempt.id}, "d0": {attempt.id}}
        assert attempt.is_placed

    asyncio.run(run())


def begun_round(bench: JoiningBench) -> tuple[Attempt, _Round]:
    """An attempt that has begun to ask d0 for room."""
    attempt = bench.attempt("r")
    round_ = _Round(attempt)
    attempt.placement.take("p0", "d0")
    round_.reserve(bench.placement.calls)
    return attempt, round_


def test_who_reserves_room_is_at_the_worker_from_the_first_moment_to_the_last() -> None:
    """A suspect that looked before the task had begun (seed 74760), or while the prompt was submitted after
    the room had been reserved (seed 93185), would join it."""

    async def run() -> None:
        bench = JoiningBench({"p0": 1, "d0": 1})
        attempt, round_ = begun_round(bench)
        assert attempt.is_at("d0")
        await round_.settle()
        assert attempt.is_at("d0"), "which has room for it now"
        round_.close()
        assert not attempt.is_at("d0")
        round_.reserve(bench.placement.calls)
        round_.close()
        assert not attempt.is_at("d0"), "cancelled before it has begun"

    asyncio.run(run())


def test_who_finds_no_room_is_not_at_the_worker() -> None:
    async def run() -> None:
        bench = JoiningBench({"p0": 1, "d0": 0})
        attempt, round_ = begun_round(bench)
        await round_.settle()
        assert round_.ticket is None
        assert not attempt.is_at("d0")

    asyncio.run(run())


def test_a_first_token_before_there_is_room_ends_no_risk() -> None:
    """Seed 98843: another request at the decode worker, which had no token yet, was blamed alone."""

    async def run() -> None:
        attempt = JoiningBench({"p0": 1, "d0": 1}).attempt("r")
        attempt.placement.take("p0", "d0")
        attempt.num_tokens = 1
        assert attempt.is_at_risk
        attempt.place(0.0)
        assert not attempt.is_at_risk

    asyncio.run(run())


async def ended_without_room(bench: JoiningBench) -> Attempt:
    attempt = bench.attempt("r")
    await bench.placement.place(attempt, bench._clock() + NEVER_S, is_new=True)
    return attempt


def test_where_there_is_no_room_after_all_the_prompt_is_taken_back() -> None:
    """Another attempt follows, which asks before it submits."""

    async def run() -> None:
        bench = JoiningBench({"p0": 1, "d0": 0})
        attempt = await ended_without_room(bench)
        assert await attempt.wait() is Outcome.TAKEN_BACK
        assert not any(bench.fleet.held.values())
        assert ("p0", Abort) in bench.kinds
        bench.fleet.room["d0"] = 1
        bench.fleet.asked.clear()
        await bench.place("again")
        assert bench.kinds == [("d0", Reserve), ("p0", Prefill)]

    asyncio.run(run())


def test_room_is_given_back_when_the_prefill_worker_refuses_or_has_no_use_for_it() -> None:
    """The latter has computed the whole answer by then, or has failed on the prompt, and reports that."""

    async def run() -> None:
        refusing = JoiningBench({"p0": 0, "d0": 1})
        with pytest.raises(Exception, match="no worker had room"):
            await refusing.place("r", seconds=0.05)
        assert not any(refusing.fleet.held.values())
        early = JoiningBench({"p0": 1, "d0": 1})
        early.joining.is_over = True
        attempt = await early.place("r")
        assert attempt.is_placed
        assert early.fleet.held["d0"] == set()

    asyncio.run(run())


def test_a_decode_worker_that_is_lost_before_its_ticket_is_given_back_ends_the_attempt() -> None:
    """Its prefill worker knew of the loss and refused the ticket. It is placed nowhere yet: no recovery."""

    async def run() -> None:
        bench = JoiningBench({"p0": 1, "d0": 1})
        bench.joining.is_over = True
        bench.joining.loses_at_abort = "d0"
        attempt = await ended_without_room(bench)
        assert not attempt.is_placed
        assert await attempt.wait() is Outcome.TAKEN_BACK
        assert bench.fleet.held["p0"] == set()

    asyncio.run(run())


def test_a_worker_that_answers_at_once_is_asked_first() -> None:
    """A third message would cost more than the wait."""

    async def run() -> None:
        bench = JoiningBench({"p0": 1, "d0": 1}, is_slow=False)
        await bench.place("r")
        assert bench.kinds == [("d0", Reserve), ("p0", Prefill)]

    asyncio.run(run())


def test_a_suspect_is_submitted_only_where_room_has_been_reserved() -> None:
    async def run() -> None:
        bench = JoiningBench({"p0": 1, "d0": 1})
        await bench.place("r", isolated_at="decode")
        assert bench.kinds == [("d0", Reserve), ("p0", Prefill)]

    asyncio.run(run())


def test_a_prompt_that_can_never_fit_is_refused_as_it_was() -> None:
    async def run() -> None:
        bench = JoiningBench({"p0": 1, "d0": 1})
        bench.joining.error = InfeasibleError("too long")
        with pytest.raises(InfeasibleError, match="too long"):
            await bench.place("r")

    asyncio.run(run())


def test_a_request_that_is_cancelled_waits_for_nobody() -> None:
    async def run() -> None:
        for silent in (["d0"], ["p0", "d0"]):
            bench = JoiningBench({"p0": 1, "d0": 1})
            bench.fleet.gates |= {name: asyncio.Event() for name in silent}
            placing = asyncio.create_task(bench.place("r"))
            await until(lambda bench=bench: len(bench.kinds) == 2)
            placing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await placing
            await asyncio.sleep(0)
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
