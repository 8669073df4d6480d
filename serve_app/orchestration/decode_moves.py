"""Hands attempts over to other decode workers: after a loss, or when one takes no more work.

    prefill worker has it   ->  `redirect`, `redirect_once`: it sends everything to another decode worker
    decode worker runs it   ->  `move`: pause, reserve elsewhere, send its keys and values

A request that finds no other decode worker stays where it is, or is retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from epd.control.placement import PlacementPolicy
from epd.kv.kv_identity import TokenIdentity
from epd.serve_app.messages import Redirect, Reserve
from epd.serve_app.orchestration.attempt import Attempt
from epd.serve_app.orchestration.losses.isolation import Isolation
from epd.serve_app.orchestration.worker_questions import WorkerQuestions
from epd.serve_app.role_messages import Move, Pause, Resume
from epd.transfer.connectors import KVTicket

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class _Room:
    """Room that a decode worker has reserved. incarnation: of that worker."""

    worker: str
    ticket: KVTicket
    incarnation: int


class DecodeMoves:
    """Changes the decode workers of attempts."""

    def __init__(
        self,
        questions: WorkerQuestions,
        policy: PlacementPolicy,
        isolation: Isolation,
        unavailable_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Starts without attempts. unavailable_s: how long to look for room. clock: seconds."""
        self._questions = questions
        self._policy = policy
        self._isolation = isolation
        self._unavailable_s = unavailable_s
        self._clock = clock
        self._looking: dict[str, asyncio.Event] = {}  # by attempt, set when it should look again

    def wake(self) -> None:
        """Lets attempts look for room again."""
        for change in self._looking.values():
            change.set()

    async def redirect(self, attempt: Attempt) -> bool:
        """Finds another decode worker for a request that its prefill worker still has.

        Returns False if none has room: the request must be retried.
        """
        self._looking[attempt.id] = asyncio.Event()
        try:
            return await self._redirect(attempt)
        finally:
            del self._looking[attempt.id]

    async def _redirect(self, attempt: Attempt) -> bool:
        end_s = self._clock() + self._unavailable_s
        while not attempt.has_ended and self._clock() < end_s:
            for worker in self._policy.decoders(partial(self._isolation.allowed, attempt)):
                attempt.placement.move_decode(worker)
                seen = self._questions.seen(attempt)
                ticket = await self._questions.reserve(attempt, worker)
                if ticket is not None:
                    message = Redirect(attempt.id, ticket, seen[1].incarnation)
                    return await self._questions.give(attempt, message, seen)
            await changed(self._looking[attempt.id])
        return False

    async def redirect_once(self, attempt: Attempt) -> bool:
        """Has the prefill worker hand a request over to another decode worker.

        The former decode worker discards what had arrived. Returns False if nothing has changed.
        """
        former, prefiller = attempt.decode_worker, attempt.prefill_worker
        room = await self._other_decoder(attempt, self._questions.reservation(attempt))
        if room is None:
            return False
        message = Redirect(attempt.id, room.ticket, room.incarnation)
        is_taken = await self._questions.ask_or_redo(attempt, "prefill", prefiller, message)
        if is_taken and attempt.decode_worker == former:
            attempt.placement.move_decode(room.worker)
            await self._questions.abort(attempt, former)
            return True
        await self._questions.abort(attempt, room.worker)
        return False

    async def move(self, attempt: Attempt) -> bool:
        """Begins to move a running answer to another decode worker. Must not be cancelled.

        The move is complete when that worker reports it: see `Attempt.arrive`. Returns False if it stays.
        """
        former = attempt.decode_worker
        is_moving = False
        try:
            identity = await self._questions.ask(attempt, "decode", former, Pause(attempt.id))
            is_moving = identity is not None and await self._move(attempt, former, identity)
        finally:
            if not is_moving:
                await self._questions.ask(attempt, "decode", former, Resume(attempt.id))
        return is_moving

    async def _move(self, attempt: Attempt, former: str, identity: TokenIdentity) -> bool:
        message = self._questions.reservation_from(attempt, former, "decode", identity)
        room = await self._other_decoder(attempt, message)
        if room is None:
            return False
        attempt.moving_to = room.worker
        moving = Move(attempt.id, room.ticket, room.incarnation)
        if await self._questions.ask_or_redo(attempt, "decode", former, moving):
            return True
        attempt.moving_to = ""
        await self._questions.abort(attempt, room.worker)
        return False

    async def _other_decoder(self, attempt: Attempt, message: Reserve) -> _Room | None:
        """Finds a decode worker that takes new work and has room for what another one has."""
        for worker in list(self._policy.router.decode_order(self._policy.candidates().decoders())):
            attempt.placement.touched.add(worker)
            incarnation = self._questions.info(worker).incarnation
            ticket = await self._questions.ask(attempt, "decode", worker, message)
            if ticket is not None:
                return _Room(worker, ticket, incarnation)
        return None


async def changed(change: asyncio.Event) -> None:
    """Waits until there is reason to look for room again, or to check the time."""
    try:
        async with asyncio.timeout(_POLL_S):  # wait_for may swallow a cancellation
            await change.wait()
    except TimeoutError:
        return
    finally:
        change.clear()
