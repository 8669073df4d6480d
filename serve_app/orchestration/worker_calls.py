"""Sends workers messages about attempts: to take one, to reserve room, to hand one over to another.

    prefill worker has it   ->  `redirect`, `redirect_once`: it sends everything to another decode worker
    decode worker runs it   ->  `move`: pause, reserve elsewhere, send its keys and values

A worker that is lost meanwhile has not answered. A request that finds no other decode worker stays where it
is, or is retried.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from epd.control.placement import PlacementPolicy
from epd.errors import EPDError, UnavailableError
from epd.kv.kv_identity import TokenIdentity
from epd.serve_app.fleet import WorkerLostError
from epd.serve_app.messages import Abort, Message, Prefill, Redirect, ReplyT, Reserve, endpoint
from epd.serve_app.orchestration.decode_capacity import DecodeCapacity
from epd.serve_app.orchestration.requests import Attempt, Outcome, Shared
from epd.serve_app.role_messages import Move, Pause, Resume
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage
from epd.transfer.connectors import KVTicket

_POLL_S = 0.5
# Which workers an attempt may go to, of some for a stage.
Allowed = Callable[[Attempt, Stage, Sequence[str]], list[str]]


class SeenWorker(NamedTuple):
    """Says of a worker what a loss would change."""

    is_alive: bool
    incarnation: int


Seen = list[SeenWorker]


class WorkerCalls:
    """Sends messages about attempts. capacity: the room that decode workers seem to have."""

    def __init__(self, shared: Shared, asking: Counter[str]) -> None:
        """Starts without messages. asking: counts those that a worker has not answered yet."""
        self.capacity = DecodeCapacity(shared.requests.loads, shared.requests.clock)
        self._shared = shared
        self._asking = asking

    async def give(self, attempt: Attempt, message: Prefill | Redirect, seen: Seen) -> bool:
        """Hands an attempt to its prefill worker, unless one of its workers has been lost or restarted.

        A message that names a lost decode worker must not come after `PeerLost`, which cleans up for that
        worker; and nothing else would detect a loss while the message is in transit.
        """
        if self.seen(attempt) != seen:
            return False
        is_taken = await self.ask(attempt, "prefill", attempt.prefill_worker, message)
        if is_taken and self.seen(attempt) != seen:
            await self.abort(attempt, attempt.prefill_worker)
            is_taken = None
        return attempt.given(is_taken)

    async def reserve(self, attempt: Attempt, worker: str) -> KVTicket | None:
        """Reserves room for what the attempt's prefill worker computes; None where there is none."""
        asked = self.capacity.ask(worker, num_held_tokens(attempt), attempt.answer.plan.sampling.n)
        ticket: KVTicket | None = None
        try:
            ticket = await self.ask(attempt, "decode", worker, self.reservation(attempt))
            return ticket
        finally:
            self.capacity.answer(worker, asked, is_taken=ticket is not None)

    def reservation(self, attempt: Attempt) -> Reserve:
        """Returns the message that reserves room for what the attempt's prefill worker computes."""
        identity = attempt.answer.plan.identity
        return self.reservation_from(attempt, attempt.prefill_worker, "prefill", identity)

    def reservation_from(
        self, attempt: Attempt, worker: str, stage: Stage, identity: TokenIdentity
    ) -> Reserve:
        plan, incarnation = attempt.answer.plan, self.info(worker).incarnation
        return Reserve(
            attempt.id, endpoint(worker, stage), identity, plan.sampling, incarnation, plan.prompt.num_dropped
        )

    async def ask(
        self, attempt: Attempt, stage: Stage, worker: str, message: Message[ReplyT]
    ) -> ReplyT | None:
        """Returns a worker's reply; None from a lost worker."""
        self._asking[worker] += 1
        try:
            with self._shared.asking(attempt, worker):
                return await self._shared.fleet.send(stage, worker, message)
        except WorkerLostError:
            return None
        finally:
            self._asking[worker] -= 1

    async def is_there(self, attempt: Attempt, stage: Stage, worker: str) -> bool:
        """Returns whether a worker answers, which is asked of those that get a request that was lost before.

        One that was lost at the same time, with its machine, does not: its loss is not the request's.
        """
        if not attempt.answer.num_losses:
            return True
        self._asking[worker] += 1
        try:
            await self._shared.fleet.send(stage, worker, Abort(()))
        except UnavailableError:
            return False
        finally:
            self._asking[worker] -= 1
        return True

    async def abort(self, attempt: Attempt, worker: str) -> None:
        try:
            await self._shared.fleet.send("decode", worker, Abort((attempt.id,)))
        except WorkerLostError:
            return

    def seen(self, attempt: Attempt) -> Seen:
        """Returns its two workers, prefill first, as far as a loss would change them."""
        infos = [self.info(name) for name in (attempt.prefill_worker, attempt.decode_worker)]
        return [SeenWorker(info.is_alive, info.incarnation) for info in infos]

    def info(self, worker: str) -> WorkerInfo:
        return self._shared.fleet.workers.get(worker) or WorkerInfo(worker, frozenset(), is_alive=False)

    async def ask_or_redo(
        self, attempt: Attempt, stage: Stage, worker: str, message: Message[bool]
    ) -> bool | None:
        """Asks as `ask` does. If it is unknown whether the message was handled, the request is retried."""
        try:
            return await self.ask(attempt, stage, worker, message)
        except EPDError:
            attempt.end(Outcome.TAKEN_BACK)
            raise


@dataclass(frozen=True, slots=True)
class _Room:
    """Room that a decode worker has reserved. incarnation: of that worker."""

    worker: str
    ticket: KVTicket
    incarnation: int


class DecodeMoves:
    """Changes the decode workers of attempts."""

    def __init__(self, shared: Shared, calls: WorkerCalls, policy: PlacementPolicy, allowed: Allowed) -> None:
        """Starts without attempts. allowed: filters the workers that an attempt may go to."""
        self._shared = shared
        self._calls = calls
        self._policy = policy
        self._allowed = allowed

    async def redirect(self, attempt: Attempt) -> bool:
        """Finds another decode worker for a request that its prefill worker still has.

        Returns False if none has room: the request must be retried.
        """
        looking = self._shared.requests.redirecting
        looking[attempt.id] = attempt
        try:
            is_redirected = await self._redirect(attempt)
        finally:
            del looking[attempt.id]
        self._shared.requests.counters["redirects"] += is_redirected
        return is_redirected

    async def _redirect(self, attempt: Attempt) -> bool:
        clock = self._shared.requests.clock
        end_s = clock() + self._shared.config.unavailable_s
        while not attempt.has_ended and clock() < end_s:
            for worker in self._policy.decoders(partial(self._allowed, attempt)):
                if (is_given := await self._is_given(attempt, worker)) is not None:
                    return is_given
            await changed(attempt.may_look)
        return False

    async def _is_given(self, attempt: Attempt, worker: str) -> bool | None:
        """Returns whether the prefill worker of an attempt sends it to a decode worker.

        None: there is no room, or that worker is lost too. Another one may be asked then.
        """
        if not await self._calls.is_there(attempt, "decode", worker):
            return None
        if attempt.has_ended:
            return False
        attempt.decode_at(worker)
        seen = self._calls.seen(attempt)
        ticket = await self._calls.reserve(attempt, worker)
        if ticket is None:
            return None
        message = Redirect(attempt.id, ticket, seen[1].incarnation)
        if not attempt.has_ended and await self._calls.give(attempt, message, seen):
            return True
        await self._calls.abort(attempt, worker)
        prefill_worker, decode_worker = self._calls.seen(attempt)
        is_lost_alone = decode_worker != seen[1] and prefill_worker == seen[0]
        return None if is_lost_alone and not attempt.is_withdrawn else False

    async def redirect_once(self, attempt: Attempt) -> bool:
        """Has the prefill worker hand a request over to another decode worker.

        The former decode worker discards what had arrived. Returns False if nothing has changed.
        """
        former, prefiller = attempt.decode_worker, attempt.prefill_worker
        room = await self._other_decoder(attempt, self._calls.reservation(attempt))
        if room is None:
            return False
        message = Redirect(attempt.id, room.ticket, room.incarnation)
        is_taken = await self._calls.ask_or_redo(attempt, "prefill", prefiller, message)
        if is_taken and attempt.decode_worker == former:
            attempt.decode_at(room.worker)
            await self._calls.abort(attempt, former)
            return True
        await self._calls.abort(attempt, room.worker)
        return False

    async def move(self, attempt: Attempt) -> bool:
        """Begins to move a running answer to another decode worker. Must not be cancelled.

        The move is complete when that worker reports it: see `Attempt.arrive`. Returns False if it stays.
        """
        former = attempt.decode_worker
        is_moving = False
        try:
            identity = await self._calls.ask(attempt, "decode", former, Pause(attempt.id))
            is_moving = identity is not None and await self._move(attempt, former, identity)
        finally:
            if not is_moving:
                await self._calls.ask(attempt, "decode", former, Resume(attempt.id))
        return is_moving

    async def _move(self, attempt: Attempt, former: str, identity: TokenIdentity) -> bool:
        message = self._calls.reservation_from(attempt, former, "decode", identity)
        room = await self._other_decoder(attempt, message)
        if room is None:
            return False
        attempt.begin_move(room.worker)
        moving = Move(attempt.id, room.ticket, room.incarnation)
        if await self._calls.ask_or_redo(attempt, "decode", former, moving):
            return True
        attempt.cancel_move()
        await self._calls.abort(attempt, room.worker)
        return False

    async def _other_decoder(self, attempt: Attempt, message: Reserve) -> _Room | None:
        """Finds a decode worker that takes new work and has room for what another one has."""
        for worker in list(self._policy.router.decode_order(self._policy.candidates().decoders())):
            attempt.placement.touched.add(worker)
            incarnation = self._calls.info(worker).incarnation
            ticket = await self._calls.ask(attempt, "decode", worker, message)
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


def num_held_tokens(attempt: Attempt) -> int:
    """Returns the tokens that a decode worker holds of a prompt."""
    prompt = attempt.answer.plan.prompt
    return len(prompt) - prompt.num_dropped
