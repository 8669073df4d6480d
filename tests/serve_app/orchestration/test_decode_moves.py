"""Requests change their decode workers while one of these, or a reply, is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from epd.kv.prefix_cache import token_identity
from epd.serve_app.fleet import WorkerLostError
from epd.serve_app.messages import Abort, Message, Redirect, Reserve
from epd.serve_app.orchestration.requests import Attempt, Outcome
from epd.serve_app.role_messages import Move, Pause, Resume
from tests.serve_app.orchestration.test_forwarding import Bench
from tests.serve_app.orchestration.test_worker_calls import JoiningFleet


@dataclass
class MovingFleet(JoiningFleet):
    """Moves answers too. on: called with each message of a kind before it is handled."""

    on: dict[type, Callable[[], None]] = field(default_factory=dict)

    async def send(self, stage: Any, target: str, message: Message[Any], bulk: Any = None) -> Any:
        self.on.get(type(message), lambda: None)()
        if target in self.lost:
            raise WorkerLostError(f"worker '{target}' is gone")
        if isinstance(message, Pause | Move | Resume):
            self.asked.append((target, type(message)))
            return (token_identity([1, 2, 3]), 1) if isinstance(message, Pause) else True
        return await super().send(stage, target, message, bulk)


async def placed_at(bench: Bench, *workers: str) -> Attempt:
    attempt = bench.attempt("r")
    attempt.placement.take(*workers)
    attempt.place(0.0)
    return attempt


def test_an_answer_that_has_moved_stays_although_its_former_worker_is_lost_before_it_says_so() -> None:
    async def run() -> None:
        fleet = MovingFleet({"p0": 1, "d0": 1, "d1": 1})
        bench = Bench(fleet.room, fleet)
        attempt = await placed_at(bench, "p0", "d0")
        bench.placement.moves._policy.router.add("d0", num_decodes=1)  # so that d1 is asked first

        def arrives_and_is_lost() -> None:
            attempt.arrive("d1")
            fleet.lost.add("d0")

        fleet.on[Move] = arrives_and_is_lost
        assert await bench.placement.moves.move(attempt)
        assert attempt.decode_worker == "d1"
        assert ("d1", Abort) not in fleet.asked

    asyncio.run(run())


def test_a_prompt_looks_for_one_other_decode_worker_at_a_time() -> None:
    async def run() -> None:
        fleet = MovingFleet({"p0": 1, "d0": 1, "d1": 1})
        bench = Bench(fleet.room, fleet)
        attempt, redirecting = await placed_at(bench, "p0", "d0"), bench.shared.requests.redirecting
        is_looking = list[bool]()
        fleet.on[Reserve] = lambda: is_looking.append(attempt.id in redirecting)
        bench.placement.moves._policy.router.add("d0", num_decodes=1)
        assert await bench.placement.moves.redirect_once(attempt)
        assert attempt.decode_worker == "d1"
        assert is_looking == [True]
        assert not redirecting
        redirecting[attempt.id] = attempt
        fleet.asked.clear()
        assert not await bench.placement.moves.redirect_once(attempt)
        assert fleet.asked == []
        assert redirecting == {attempt.id: attempt}

    asyncio.run(run())


@pytest.mark.parametrize("claims", ["first", "later"])
def test_nothing_changes_to_a_decode_worker_that_is_kept_for_a_suspect(claims: str) -> None:
    """Nor to one that was claimed while the one before it was asked for room."""

    async def run() -> None:
        fleet = MovingFleet({"p0": 1, "d0": 1, "d1": 0, "d2": 1})
        bench = Bench(fleet.room, fleet)
        attempt, suspect = await placed_at(bench, "p0", "d0"), bench.attempt("s")
        suspect.isolated_at = frozenset({"decode"})
        moves = bench.placement.moves
        moves._policy.router.add("d2", num_decodes=1)

        def claim() -> None:
            assert moves._allowed(suspect, "decode", ["d2"]) == ["d2"]

        if claims == "first":
            claim()
        fleet.on[Reserve] = claim
        assert not await moves.redirect_once(attempt)
        assert not await moves.move(attempt)
        assert {target for target, kind in fleet.asked if kind is Reserve} == {"d1"}

    asyncio.run(run())


def test_a_prompt_is_retried_if_its_decode_worker_is_lost_and_no_other_has_room() -> None:
    """Nobody else handles the loss while it looks."""

    async def run() -> None:
        fleet = MovingFleet({"p0": 1, "d0": 0, "d1": 0})
        bench = Bench(fleet.room, fleet)
        attempt = await placed_at(bench, "p0", "d0")
        assert not await bench.placement.moves.redirect_once(attempt)
        assert len(bench.shared.requests.placed([attempt.id])) == 1, "it stays where it is"
        fleet.on[Reserve] = lambda: fleet.lost.add("d0")
        assert not await bench.placement.moves.redirect_once(attempt)
        assert await attempt.wait() is Outcome.LOST
        assert ("p0", Redirect) not in fleet.asked

    asyncio.run(run())


def test_a_prompt_is_retried_if_its_next_decode_worker_is_lost_before_the_prompt_is_counted_there() -> None:
    """Who handles the loss finds it at its former worker."""

    async def run() -> None:
        fleet = MovingFleet({"p0": 1, "d0": 1, "d1": 1})
        bench = Bench(fleet.room, fleet)
        attempt = await placed_at(bench, "p0", "d0")
        bench.placement.moves._policy.router.add("d0", num_decodes=1)
        fleet.on[Redirect] = lambda: fleet.lost.add("d1")
        assert await bench.placement.moves.redirect_once(attempt)
        assert attempt.decode_worker == "d1"
        assert await attempt.wait() is Outcome.LOST

    asyncio.run(run())


def test_a_prompt_that_is_redirected_is_at_its_prefill_worker_again() -> None:
    """Its answer had begun elsewhere. It is retried instead where that worker is kept for a suspect."""

    async def run() -> None:
        fleet = MovingFleet({"p0": 1, "d0": 1, "d1": 1})
        bench = Bench(fleet.room, fleet)
        moves, attempt = bench.placement.moves, await placed_at(bench, "p0", "d0")
        attempt.arrive("d0")
        allowed, moves._allowed = moves._allowed, lambda _, stage, workers: workers * (stage != "prefill")
        assert not await moves.redirect(attempt)
        assert fleet.asked == []
        moves._allowed, is_there = allowed, list[bool]()
        fleet.on[Reserve] = lambda: is_there.append(attempt.is_at("p0"))
        assert await moves.redirect(attempt)
        assert is_there == [True]

    asyncio.run(run())
