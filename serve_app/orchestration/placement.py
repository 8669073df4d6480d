"""Places requests at the workers that `PlacementPolicy` selects; requests that find no room wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from epd.control.admission import AdmissionQueue
from epd.control.placement import Candidates, PlacementPolicy, Step
from epd.control.routing import Router
from epd.errors import EPDError
from epd.kv.kv_identity import TokenIdentity
from epd.topology import Stage
from epd.transfer.connectors import KVTicket
from serve_app.fleet import Fleet, WorkerLostError
from serve_app.messages import (
    Abort,
    Message,
    Prefill,
    Redirect,
    ReplyT,
    Reserve,
    WorkerLoad,
    endpoint,
)
from serve_app.orchestration.attempt import Attempt, Ending
from serve_app.orchestration.losses.isolation import Isolation
from serve_app.orchestration.losses.loss_counter import LossCounter
from serve_app.orchestration.room_books import RoomBooks
from serve_app.role_messages import Move, Pause, Resume
from serve_app.worker.peer_losses import NamedPeer
from serve_app.worker_info import WorkerInfo

_NUM_FIRST = 8  # requests that look for room concurrently
_POLL_S = 0.5


class _SeenWorker(NamedTuple):
    is_alive: bool
    incarnation: int


_Seen = list[_SeenWorker]


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    """Limits the work that workers are given.

    max_prefills: requests whose prompt one worker computes at a time
    unavailable_s: how long a request waits for a role that no worker has
    """

    max_prefills: int
    unavailable_s: float


@dataclass(frozen=True, slots=True)
class _Room:
    """Room that a decode worker has reserved. incarnation: of that worker."""

    worker: str
    ticket: KVTicket
    incarnation: int


class _Round:
    """One round of messages to workers about an attempt.

    ticket: of the room that was reserved last
    reserving: gives it, if it is reserved while the prompt is submitted
    seen: the workers of the attempt as they were when they were chosen
    """

    def __init__(self) -> None:
        self.ticket: KVTicket | None = None
        self.reserving: asyncio.Task[KVTicket | None] | None = None
        self.seen: _Seen = []

    async def settle(self) -> None:
        """Waits until it is known what was reserved. Raises EPDError."""
        if self.reserving is not None:
            self.ticket = await self.reserving
            self.reserving = None

    def close(self) -> None:
        """Waits for no answer any more: what was reserved is for the caller to drop."""
        if self.reserving is not None and not self.reserving.cancel() and not self.reserving.cancelled():
            self.reserving.exception()  # so that it counts as looked at


class RequestPlacer:
    """Places attempts at workers. clock: Unix time, seconds."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        queue: AdmissionQueue,
        limits: PlacementLimits,
        losses: LossCounter,
        isolation: Isolation,
        clock: Callable[[], float],
        sole_encoder: Callable[[Attempt], NamedPeer | None] = lambda _: None,
        loads: Mapping[str, WorkerLoad] | None = None,
    ) -> None:
        """Starts without requests.

        sole_encoder: of an attempt with a prefill worker: see `Attempt`
        loads: the last report of each worker, to estimate its room; None to ask for it first
        """
        self._fleet = fleet
        self._listed: tuple[WorkerInfo, ...] = ()
        self._candidates = Candidates(())
        self._policy = PlacementPolicy(router, self._current, max_prefills=limits.max_prefills)
        self._queue = queue
        self._unavailable_s = limits.unavailable_s
        self._losses = losses
        self._isolation = isolation
        self._sole_encoder = sole_encoder
        self._books = RoomBooks({} if loads is None else loads, clock)
        self._clock = clock
        self._waiting: dict[str, asyncio.Event] = {}  # by attempt, set when it should look again
        self._redirecting: set[str] = set()

    def _current(self) -> Candidates:
        """Returns the workers that take new work: the same object while none of them has changed."""
        workers = tuple(self._fleet.workers.values())
        if workers != self._listed:
            self._listed, self._candidates = workers, Candidates(workers)
        return self._candidates

    def wake(self) -> None:
        """Lets the first requests of the queue look for room again, as some may have been freed."""
        for attempt_id in (*self._queue.first(_NUM_FIRST), *self._redirecting):
            self._waiting[attempt_id].set()

    async def place(self, attempt: Attempt, deadline_s: float, *, is_new: bool) -> None:
        """Returns once workers have taken the attempt or it has ended. Raises EPDError if none can."""
        priority = attempt.answer.request.priority
        self._queue.enter(attempt.id, self._clock(), deadline_s, is_new=is_new, priority=priority)
        start_s = self._clock()
        self._waiting[attempt.id] = asyncio.Event()
        try:
            while not await self._is_taken(attempt):
                if attempt.has_ended:
                    return
                self._queue.check_deadline(attempt.id, self._clock())
                self._policy.check_roles(self._clock() - start_s, self._unavailable_s)
                await self._changed(attempt)
            self._queue.place(attempt.id, self._clock())
        finally:
            self._queue.leave(attempt.id)
            del self._waiting[attempt.id]
            self.wake()
        attempt.answer.queued.prefill_s += attempt.started_s - start_s
        attempt.is_placed = True

    async def _is_taken(self, attempt: Attempt) -> bool:
        if attempt.has_ended or not self._queue.is_turn(attempt.id, _NUM_FIRST, self._clock()):
            return False
        # Most of those that wait are woken in vain: that is to cost little.
        return self._policy.can_ask() and await self._ask_workers(attempt)

    async def _ask_workers(self, attempt: Attempt) -> bool:
        """Asks workers once. Returns whether they have taken the attempt."""
        attempt.started_s = self._clock()
        allowed = partial(self._isolation.allowed, attempt)
        media, round_ = attempt.answer.plan.visual_tokens, _Round()
        with closing(round_), closing(self._policy.place(attempt.placement, media, allowed)) as steps:
            try:
                step = next(steps)
                while not (attempt.lost_with or attempt.is_withdrawn) or step == "release":
                    step = steps.send(await self._take_step(attempt, step, round_))
            except StopIteration as end:
                return bool(end.value)
        # A loss is counted before another worker is put at risk.
        if attempt.is_withdrawn and not attempt.lost_with:
            attempt.end(Ending.TAKEN_BACK)
        return False

    async def _take_step(self, attempt: Attempt, step: Step, round_: _Round) -> bool:
        if step != "release" and not self._is_allowed(attempt, step):
            return False
        match step:
            case "reserve":
                round_.seen = self._seen(attempt)
                seems_to_have_room = self._seems_to_have_room(attempt)
                round_.reserving = asyncio.ensure_future(self._reserve(attempt, attempt.decode_worker))
                if seems_to_have_room:
                    return True
                await round_.settle()
                return round_.ticket is not None
            case "submit":
                if attempt.placement.is_merged:
                    round_.ticket, round_.seen = None, self._seen(attempt)
                plan = attempt.answer.plan
                request, incarnation = plan.generate_request(attempt.id), round_.seen[1].incarnation
                attempt.sole_encoder = self._sole_encoder(attempt)
                wants_kept = attempt.sole_encoder is not None
                awaits_ticket = round_.reserving is not None
                ticket = None if awaits_ticket else round_.ticket
                prefill = Prefill(request, plan.groups, ticket, incarnation, wants_kept, awaits_ticket)
                is_taken = await self._give(attempt, prefill, round_.seen)
                return is_taken and (not awaits_ticket or await self._is_joined(attempt, round_))
            case "release":
                await round_.settle()
                await self._abort(attempt, attempt.decode_worker)
        return True

    def _seems_to_have_room(self, attempt: Attempt) -> bool:
        """Returns whether the prompt may be submitted before the decode worker has said that it has room.

        Not of a request that was lost with a worker: one worker after the other is put at risk by it.
        """
        if attempt.isolated_at or not self._books.is_slow(attempt.decode_worker):
            return False
        return self._books.has_room(
            attempt.decode_worker, _num_tokens(attempt), attempt.answer.plan.sampling.n
        )

    async def _is_joined(self, attempt: Attempt, round_: _Round) -> bool:
        """Brings the ticket to the prompt that a prefill worker has taken meanwhile.

        Without one, that worker forgets the prompt; what it granted may still come, so the attempt ends.
        """
        await round_.settle()
        if round_.ticket is not None:
            message = Redirect(attempt.id, round_.ticket, round_.seen[1].incarnation)
            if await self._give(attempt, message, round_.seen):
                return True
            if not attempt.is_withdrawn and self._seen(attempt) == round_.seen:  # it is over there
                await self._abort(attempt, attempt.decode_worker)
                return True
        await self._abort(attempt, attempt.prefill_worker)
        attempt.is_withdrawn = True
        return False

    def _is_allowed(self, attempt: Attempt, step: Step) -> bool:
        """Checks again what was checked when the worker was chosen: others were asked questions since."""
        stage: Stage = "decode" if step == "reserve" else "prefill"
        worker = attempt.decode_worker if step == "reserve" else attempt.prefill_worker
        return bool(self._isolation.allowed(attempt, stage, [worker]))

    # Leaving a lost decode worker

    async def redirect(self, attempt: Attempt) -> bool:
        """Finds another decode worker for a request that its prefill worker still has.

        Returns False if none has room: the request must be retried.
        """
        self._redirecting.add(attempt.id)
        self._waiting[attempt.id] = asyncio.Event()
        try:
            return await self._redirect(attempt)
        finally:
            self._redirecting.remove(attempt.id)
            del self._waiting[attempt.id]

    async def _redirect(self, attempt: Attempt) -> bool:
        end_s = self._clock() + self._unavailable_s
        while not attempt.has_ended and self._clock() < end_s:
            for worker in self._policy.decoders(partial(self._isolation.allowed, attempt)):
                attempt.placement.move_decode(worker)
                seen = self._seen(attempt)
                ticket = await self._reserve(attempt, worker)
                if ticket is not None:
                    return await self._give(attempt, Redirect(attempt.id, ticket, seen[1].incarnation), seen)
            await self._changed(attempt)
        return False

    # Leaving a decode worker that takes no more work

    async def redirect_once(self, attempt: Attempt) -> bool:
        """Has the prefill worker hand a request over to another decode worker.

        The former decode worker discards what had arrived. Returns False if nothing has changed.
        """
        former, prefiller = attempt.decode_worker, attempt.prefill_worker
        room = await self._other_decoder(attempt, self._reservation(attempt))
        if room is None:
            return False
        message = Redirect(attempt.id, room.ticket, room.incarnation)
        is_taken = await self._ask_or_redo(attempt, "prefill", prefiller, message)
        if is_taken and attempt.decode_worker == former:
            attempt.placement.move_decode(room.worker)
            await self._abort(attempt, former)
            return True
        await self._abort(attempt, room.worker)
        return False

    async def move(self, attempt: Attempt) -> bool:
        """Begins to move a running answer to another decode worker. Must not be cancelled.

        The move is complete when that worker reports it: see `Attempt.arrive`. Returns False if it stays.
        """
        former = attempt.decode_worker
        is_moving = False
        try:
            identity = await self._ask(attempt, "decode", former, Pause(attempt.id))
            is_moving = identity is not None and await self._move(attempt, former, identity)
        finally:
            if not is_moving:
                await self._ask(attempt, "decode", former, Resume(attempt.id))
        return is_moving

    async def _move(self, attempt: Attempt, former: str, identity: TokenIdentity) -> bool:
        message = self._reservation_from(attempt, former, "decode", identity)
        room = await self._other_decoder(attempt, message)
        if room is None:
            return False
        attempt.moving_to = room.worker
        moving = Move(attempt.id, room.ticket, room.incarnation)
        if await self._ask_or_redo(attempt, "decode", former, moving):
            return True
        attempt.moving_to = ""
        await self._abort(attempt, room.worker)
        return False

    async def _other_decoder(self, attempt: Attempt, message: Reserve) -> _Room | None:
        """Finds a decode worker that takes new work and has room for what another one has."""
        for worker in list(self._policy.router.decode_order(self._policy.candidates().decoders())):
            attempt.placement.touched.add(worker)
            incarnation = self._info(worker).incarnation
            ticket = await self._ask(attempt, "decode", worker, message)
            if ticket is not None:
                return _Room(worker, ticket, incarnation)
        return None

    async def _ask_or_redo(
        self, attempt: Attempt, stage: Stage, worker: str, message: Message[bool]
    ) -> bool | None:
        """Asks as `_ask` does. If it is unknown whether the message was handled, the request is retried."""
        try:
            return await self._ask(attempt, stage, worker, message)
        except EPDError:
            attempt.end(Ending.TAKEN_BACK)
            raise

    # Messages

    async def _give(self, attempt: Attempt, message: Prefill | Redirect, seen: _Seen) -> bool:
        """Hands an attempt to its prefill worker, unless one of its workers has been lost or restarted.

        A message that names a lost decode worker must not come after `PeerLost`, which cleans up for that
        worker; and nothing else would detect a loss while the message is in transit.
        """
        if self._seen(attempt) != seen:
            return False
        is_taken = await self._ask(attempt, "prefill", attempt.prefill_worker, message)
        if is_taken and self._seen(attempt) != seen:
            await self._abort(attempt, attempt.prefill_worker)
            is_taken = None
        attempt.is_withdrawn = is_taken is None
        return bool(is_taken)

    async def _reserve(self, attempt: Attempt, worker: str) -> KVTicket | None:
        asked = self._books.ask(worker, _num_tokens(attempt), attempt.answer.plan.sampling.n)
        ticket: KVTicket | None = None
        try:
            ticket = await self._ask(attempt, "decode", worker, self._reservation(attempt))
            return ticket
        finally:
            self._books.answer(worker, asked, is_taken=ticket is not None)

    def _reservation(self, attempt: Attempt) -> Reserve:
        """Returns the message that reserves room for what the attempt's prefill worker computes."""
        identity = attempt.answer.plan.identity
        return self._reservation_from(attempt, attempt.prefill_worker, "prefill", identity)

    def _reservation_from(
        self, attempt: Attempt, worker: str, stage: Stage, identity: TokenIdentity
    ) -> Reserve:
        plan, incarnation = attempt.answer.plan, self._info(worker).incarnation
        return Reserve(
            attempt.id, endpoint(worker, stage), identity, plan.sampling, incarnation, plan.prompt.num_dropped
        )

    async def _ask(
        self, attempt: Attempt, stage: Stage, worker: str, message: Message[ReplyT]
    ) -> ReplyT | None:
        """Returns a worker's reply; None from a lost worker."""
        self._policy.asking[worker] += 1
        try:
            with self._losses.asking(attempt, worker):
                return await self._fleet.send(stage, worker, message)
        except WorkerLostError:
            return None
        finally:
            self._policy.asking[worker] -= 1

    async def _abort(self, attempt: Attempt, worker: str) -> None:
        try:
            await self._fleet.send("decode", worker, Abort((attempt.id,)))
        except WorkerLostError:
            return

    def _seen(self, attempt: Attempt) -> _Seen:
        """Returns its two workers, prefill first, as far as a loss would change them."""
        infos = [self._info(name) for name in (attempt.prefill_worker, attempt.decode_worker)]
        return [_SeenWorker(info.is_alive, info.incarnation) for info in infos]

    def _info(self, worker: str) -> WorkerInfo:
        return self._fleet.workers.get(worker) or WorkerInfo(worker, frozenset(), is_alive=False)

    async def _changed(self, attempt: Attempt) -> None:
        """Waits until there is reason to look for room again, or to check the time."""
        change = self._waiting[attempt.id]
        try:
            async with asyncio.timeout(_POLL_S):  # wait_for may swallow a cancellation
                await change.wait()
        except TimeoutError:
            return
        finally:
            change.clear()


def _num_tokens(attempt: Attempt) -> int:
    """Returns the tokens that a decode worker holds of a prompt."""
    prompt = attempt.answer.plan.prompt
    return len(prompt) - prompt.num_dropped
