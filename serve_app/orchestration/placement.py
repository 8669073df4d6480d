"""Where a request goes: room at a decode worker, then at a prefill worker, or the queue for both."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from epd.control.admission import AdmissionQueue
from epd.control.routing import Router
from epd.errors import EPDError, UnavailableError
from epd.kv.kv_identity import TokenIdentity
from epd.topology import Stage
from epd.transfer.connectors import KVTicket
from serve_app.fleet import Fleet, WorkerLostError
from serve_app.messages import (
    Abort,
    Message,
    Move,
    Pause,
    Prefill,
    Redirect,
    ReplyT,
    Reserve,
    Resume,
    endpoint,
)
from serve_app.orchestration.attempt import Attempt, Ending
from serve_app.orchestration.isolation import Isolation
from serve_app.orchestration.loss_counter import LossCounter

# Requests that look for room side by side, and that ask one worker at a time: a worker that does not
# answer holds up so many, and no others.
_NUM_FIRST = 8
_MAX_ASKING = 2
_POLL_S = 0.5
_Seen = list[tuple[bool, int]]


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    """max_prefills: requests whose prompt one worker computes at a time.

    unavailable_s: to wait for a role that no worker has.
    """

    max_prefills: int
    unavailable_s: float


class Placement:
    """Gives tries to workers. clock: Unix time, seconds."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        queue: AdmissionQueue,
        limits: PlacementLimits,
        losses: LossCounter,
        isolation: Isolation,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._queue = queue
        self._limits = limits
        self._losses = losses
        self._isolation = isolation
        self._clock = clock
        self._asking: Counter[str] = Counter()
        self._waiting: dict[str, asyncio.Event] = {}  # of tries, set when they should look again
        self._redirecting: set[str] = set()

    def wake(self) -> None:
        """There may be room now where there was none: for those whose turn it is, not for hundreds."""
        for attempt_id in (*self._queue.first(_NUM_FIRST), *self._redirecting):
            self._waiting[attempt_id].set()

    async def place(self, attempt: Attempt, deadline_s: float, *, is_new: bool) -> None:
        """Returns when workers have taken it, or it has ended. Raises EPDError when none can."""
        priority = attempt.answer.request.priority
        self._queue.enter(attempt.id, self._clock(), deadline_s, is_new=is_new, priority=priority)
        start_s = self._clock()
        self._waiting[attempt.id] = asyncio.Event()
        try:
            while not await self._is_taken(attempt):
                if attempt.has_ended:
                    return
                self._queue.check_deadline(attempt.id, self._clock())
                self._check_roles(self._clock() - start_s)
                await self._changed(attempt)
            self._queue.place(attempt.id, self._clock())
        finally:
            self._queue.leave(attempt.id)
            del self._waiting[attempt.id]
            self.wake()
        attempt.answer.queued.prefill_s += attempt.started_s - start_s
        attempt.is_placed = True

    async def _is_taken(self, attempt: Attempt) -> bool:
        if attempt.has_ended or not self._queue.is_turn(attempt.id, _NUM_FIRST):
            return False
        return await self._try(attempt)

    async def redirect(self, attempt: Attempt) -> bool:
        """Finds another decode worker for a request that its prefill worker still has; False: redo it."""
        self._redirecting.add(attempt.id)
        self._waiting[attempt.id] = asyncio.Event()
        try:
            return await self._redirect(attempt)
        finally:
            self._redirecting.remove(attempt.id)
            del self._waiting[attempt.id]

    async def _redirect(self, attempt: Attempt) -> bool:
        end_s = self._clock() + self._limits.unavailable_s
        while not attempt.has_ended and self._clock() < end_s:
            for worker in self._decoders(attempt):
                attempt.rebook_decode(worker)
                seen = self._seen(attempt)
                ticket = await self._reserve(attempt, worker)
                if ticket is not None:
                    return await self._give(attempt, Redirect(attempt.id, ticket), seen)
            await self._changed(attempt)
        return False

    # Away from a decode worker that takes nothing more

    async def redirect_once(self, attempt: Attempt) -> bool:
        """Has the prefill worker hand a request over to another decode worker; False: nothing has changed.

        What had arrived at the former one is forgotten there.
        """
        former, prefiller, plan = attempt.decode_worker, attempt.prefill_worker, attempt.answer.plan
        message = Reserve(attempt.id, endpoint(prefiller, "prefill"), plan.identity, plan.sampling)
        found = await self._other_decoder(attempt, message)
        if found is None:
            return False
        worker, ticket = found
        is_taken = await self._ask_or_redo(attempt, "prefill", prefiller, Redirect(attempt.id, ticket))
        if is_taken and attempt.decode_worker == former:
            attempt.rebook_decode(worker)
            await self._abort(attempt, former)
            return True
        await self._abort(attempt, worker)
        return False

    async def move(self, attempt: Attempt) -> bool:
        """Begins to move an answer in its middle to another decode worker; False: it goes on where it is.

        It is there when that worker tells so: see `Attempt.arrive`. Not to be cancelled.
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
        message = Reserve(attempt.id, endpoint(former, "decode"), identity, attempt.answer.plan.sampling)
        found = await self._other_decoder(attempt, message)
        if found is None:
            return False
        worker, ticket = found
        attempt.moving_to = worker
        if await self._ask_or_redo(attempt, "decode", former, Move(attempt.id, ticket)):
            return True
        attempt.moving_to = ""
        await self._abort(attempt, worker)
        return False

    async def _other_decoder(self, attempt: Attempt, message: Reserve) -> tuple[str, KVTicket] | None:
        """A decode worker that takes new work and has room for what another one has."""
        for worker in self._router.decode_order(self._split_decoders()):
            attempt.touched.add(worker)
            ticket = await self._ask(attempt, "decode", worker, message)
            if ticket is not None:
                return worker, ticket
        return None

    async def _ask_or_redo(
        self, attempt: Attempt, stage: Stage, worker: str, message: Message[bool]
    ) -> bool | None:
        """As `_ask`. Where nobody can tell whether it was acted upon, the request is done again elsewhere."""
        try:
            return await self._ask(attempt, stage, worker, message)
        except EPDError:
            attempt.end(Ending.TAKEN_BACK)
            raise

    async def _try(self, attempt: Attempt) -> bool:
        """Asks workers once. Whatever comes of it, nothing is left where it was refused."""
        attempt.started_s = self._clock()
        plan = attempt.answer.plan
        media, num_tokens = plan.visual_tokens, len(plan.prompt)
        for worker in self._router.prefill_order(self._prefillers(attempt), media, num_tokens):
            is_merged = self._fleet.workers[worker].takes("decode")
            if await (self._submit_merged if is_merged else self._submit_split)(attempt, worker):
                self._router.remember_prefix(worker, media)
                return True
            attempt.unbook()
            if attempt.lost_with:  # the loss is counted before another worker is put at risk
                return False
        return False

    async def _submit_merged(self, attempt: Attempt, worker: str) -> bool:
        attempt.book(worker, worker)
        return await self._give(attempt, self._prefill(attempt, None), self._seen(attempt))

    async def _submit_split(self, attempt: Attempt, prefiller: str) -> bool:
        for decoder in self._decoders(attempt):
            attempt.book(prefiller, decoder)
            seen = self._seen(attempt)
            ticket = await self._reserve(attempt, decoder)
            if attempt.lost_with:
                return False
            if ticket is None:
                continue
            if await self._give(attempt, self._prefill(attempt, ticket), seen):
                return True
            await self._abort(attempt, decoder)
            return False
        return False

    def _prefill(self, attempt: Attempt, ticket: KVTicket | None) -> Prefill:
        plan = attempt.answer.plan
        return Prefill(plan.generate_request(attempt.id), plan.groups, ticket)

    async def _give(self, attempt: Attempt, message: Prefill | Redirect, seen: _Seen) -> bool:
        """Hands it to the prefill worker, unless one of its workers is not the one that was seen.

        A message that speaks of a lost decode worker must not come after `PeerLost`, which would clean up
        after it; and of a loss while it was on its way nobody else would take notice.
        """
        if self._seen(attempt) != seen:
            return False
        is_taken = await self._ask(attempt, "prefill", attempt.prefill_worker, message)
        if is_taken and self._seen(attempt) != seen:
            await self._abort(attempt, attempt.prefill_worker)
            return False
        return bool(is_taken)

    async def _reserve(self, attempt: Attempt, worker: str) -> KVTicket | None:
        plan = attempt.answer.plan
        sender = endpoint(attempt.prefill_worker, "prefill")
        message = Reserve(attempt.id, sender, plan.identity, plan.sampling)
        return await self._ask(attempt, "decode", worker, message)

    async def _ask(
        self, attempt: Attempt, stage: Stage, worker: str, message: Message[ReplyT]
    ) -> ReplyT | None:
        """The reply; None from a worker that is gone."""
        self._asking[worker] += 1
        try:
            with self._losses.asking(attempt, worker):
                return await self._fleet.send(stage, worker, message)
        except WorkerLostError:
            return None
        finally:
            self._asking[worker] -= 1

    async def _abort(self, attempt: Attempt, worker: str) -> None:
        try:
            await self._fleet.send("decode", worker, Abort((attempt.id,)))
        except WorkerLostError:
            return

    def _seen(self, attempt: Attempt) -> _Seen:
        """Of both its workers, whether it lives and which incarnation it is."""
        infos = [self._fleet.workers[name] for name in (attempt.prefill_worker, attempt.decode_worker)]
        return [(info.is_alive, info.incarnation) for info in infos]

    def _prefillers(self, attempt: Attempt) -> list[str]:
        names = [
            name
            for name in self._with_role("prefill")
            if self._asking[name] < _MAX_ASKING
            and self._router.in_flight(name).num_prefills < self._limits.max_prefills
        ]
        return self._isolation.allowed(attempt, "prefill", names)

    def _decoders(self, attempt: Attempt) -> list[str]:
        """Workers that go on with what others have prefilled, the best first."""
        names = self._router.decode_order(
            [name for name in self._split_decoders() if self._asking[name] < _MAX_ASKING]
        )
        return self._isolation.allowed(attempt, "decode", names)

    def _split_decoders(self) -> list[str]:
        workers = self._fleet.workers
        return [name for name in self._with_role("decode") if "prefill" not in workers[name].roles]

    def _with_role(self, stage: Stage) -> list[str]:
        return [info.name for info in self._fleet.workers.values() if info.takes(stage)]

    def _check_roles(self, waited_s: float) -> None:
        missing: list[Stage] = [each for each in ("prefill", "decode") if not self._with_role(each)]
        if missing and waited_s > self._limits.unavailable_s:
            raise UnavailableError(
                f"no worker for {' and '.join(missing)} since {waited_s:.0f} s; see /health and try again"
            )

    async def _changed(self, attempt: Attempt) -> None:
        """Until there is reason to look again since it last did, or to look at the clock."""
        change = self._waiting[attempt.id]
        try:
            async with asyncio.timeout(_POLL_S):  # wait_for may swallow a cancellation
                await change.wait()
        except TimeoutError:
            return
        finally:
            change.clear()
