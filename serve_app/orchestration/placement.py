"""Places requests at the workers that `PlacementPolicy` selects; requests that find no room wait."""

from __future__ import annotations

import asyncio
from contextlib import closing
from functools import partial

from epd.control.placement import Candidates, PlacementPolicy, Step
from epd.serve_app.messages import Prefill, Redirect
from epd.serve_app.orchestration.isolation import Isolation
from epd.serve_app.orchestration.requests import NUM_FIRST, Attempt, Outcome, Shared
from epd.serve_app.orchestration.worker_calls import DecodeMoves, Seen, WorkerCalls, changed, num_held_tokens
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage
from epd.transfer.connectors import KVTicket


class _Round:
    """One round of messages to workers about an attempt.

    ticket: of the room that was reserved last
    reserving: gives it, if it is reserved while the prompt is submitted
    seen: the workers of the attempt as they were when they were chosen
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.ticket: KVTicket | None = None
        self.reserving: asyncio.Task[KVTicket | None] | None = None
        self.seen: Seen = []

    def reserve(self, calls: WorkerCalls) -> None:
        """Begins to reserve room. The attempt is at the worker from now on, unless there is none."""
        self._attempt.reserved_at = self._attempt.decode_worker
        self.reserving = asyncio.ensure_future(calls.reserve(self._attempt, self._attempt.decode_worker))

    async def settle(self) -> None:
        """Waits until it is known what was reserved. Raises EPDError."""
        if self.reserving is not None:
            self.ticket = await self.reserving
            self.reserving = None
            if self.ticket is None:
                self._attempt.reserved_at = ""

    def close(self) -> None:
        """Waits for no answer any more: what was reserved is for the caller to drop."""
        self._attempt.reserved_at = ""
        if self.reserving is not None and not self.reserving.cancel() and not self.reserving.cancelled():
            self.reserving.exception()  # so that it counts as looked at


class RequestPlacer:
    """Places attempts at workers. moves: changes the decode workers of those that were placed."""

    def __init__(self, shared: Shared, isolation: Isolation) -> None:
        """Starts without requests."""
        self._shared = shared
        self._queue = shared.queue
        self._clock = shared.requests.clock
        self._isolation = isolation
        self._listed: tuple[WorkerInfo, ...] = ()
        self._candidates = Candidates(())
        self._policy = PlacementPolicy(shared.router, self._current, max_prefills=shared.config.max_prefills)
        self.calls = WorkerCalls(shared, self._policy.asking)
        self.moves = DecodeMoves(shared, self.calls, self._policy, isolation.allowed)

    def _current(self) -> Candidates:
        """Returns the workers that take new work: the same object while none of them has changed."""
        workers = tuple(self._shared.fleet.workers.values())
        if workers != self._listed:
            self._listed, self._candidates = workers, Candidates(workers)
        return self._candidates

    async def place(self, attempt: Attempt, deadline_s: float, *, is_new: bool) -> None:
        """Returns once workers have taken the attempt or it has ended. Raises EPDError if none can."""
        request = attempt.answer.request
        self._queue.enter(
            attempt.id,
            self._clock(),
            deadline_s,
            is_new=is_new,
            priority=request.priority,
            client=request.client,
            weight=request.weight,
        )
        start_s = complete_s = self._clock()
        unavailable_s = self._shared.config.unavailable_s
        try:
            while not await self._is_taken(attempt):
                if attempt.has_ended:
                    return
                self._queue.check_deadline(attempt.id, self._clock())
                complete_s = self._policy.check_roles(complete_s, self._clock(), unavailable_s)
                await changed(attempt.may_look)
            self._queue.place(attempt.id, self._clock())
        finally:
            self._queue.leave(attempt.id)
            self._shared.wake()
        attempt.place(start_s)

    async def _is_taken(self, attempt: Attempt) -> bool:
        if attempt.has_ended or not self._queue.is_turn(attempt.id, NUM_FIRST, self._clock()):
            return False
        # Most of those that wait are woken in vain: that is to cost little.
        return self._policy.can_ask() and await self._ask_workers(attempt)

    async def _ask_workers(self, attempt: Attempt) -> bool:
        """Asks workers once. Returns whether they have taken the attempt."""
        attempt.started_s = self._clock()
        allowed = partial(self._isolation.allowed, attempt)
        media, round_ = attempt.answer.plan.visual_tokens, _Round(attempt)
        with closing(round_), closing(self._policy.place(attempt.placement, media, allowed)) as steps:
            try:
                step = next(steps)
                while not (attempt.lost_with or attempt.is_withdrawn) or step == "release":
                    step = steps.send(await self._take_step(attempt, step, round_))
            except StopIteration as end:
                if end.value:
                    return True
        # A loss is counted before another worker is put at risk.
        if attempt.is_withdrawn and not attempt.lost_with:
            attempt.end(Outcome.TAKEN_BACK)
        return False

    async def _take_step(self, attempt: Attempt, step: Step, round_: _Round) -> bool:
        if step != "release" and not await self._may_ask(attempt, step):
            return False
        match step:
            case "reserve":
                round_.seen = self.calls.seen(attempt)
                seems_to_have_room = self._seems_to_have_room(attempt)
                round_.reserve(self.calls)
                if seems_to_have_room:
                    return True
                await round_.settle()
                return round_.ticket is not None
            case "submit":
                if attempt.placement.is_merged:
                    round_.ticket, round_.seen = None, self.calls.seen(attempt)
                plan = attempt.answer.plan
                request, incarnation = plan.generate_request(attempt.id), round_.seen[1].incarnation
                wants_kept = self._wants_kept(attempt)
                awaits_ticket = round_.reserving is not None
                ticket = None if awaits_ticket else round_.ticket
                prefill = Prefill(request, plan.groups, ticket, incarnation, wants_kept, awaits_ticket)
                is_taken = await self.calls.give(attempt, prefill, round_.seen)
                return is_taken and (not awaits_ticket or await self._is_joined(attempt, round_))
            case "release":
                await round_.settle()
                await self.calls.abort(attempt, attempt.decode_worker)
                attempt.reserved_at = ""
        return True

    def _wants_kept(self, attempt: Attempt) -> bool:
        """Returns whether encoders drop tokens of a request before they are sent; retries send all tokens."""
        config = self._shared.config
        if attempt.answer.num_retries or attempt.answer.plan.prompt.reduction is None:
            return False
        return self._shared.dispatcher.encoders.sends_groups(config.sharding, attempt.prefill_worker)

    def _seems_to_have_room(self, attempt: Attempt) -> bool:
        """Returns whether the prompt may be submitted before the decode worker has said that it has room.

        Not of a request that was lost with a worker: one worker after the other is put at risk by it.
        """
        if attempt.isolated_at or not self.calls.capacity.is_slow(attempt.decode_worker):
            return False
        return self.calls.capacity.has_room(
            attempt.decode_worker, num_held_tokens(attempt), attempt.answer.plan.sampling.n
        )

    async def _is_joined(self, attempt: Attempt, round_: _Round) -> bool:
        """Brings the ticket to the prompt that a prefill worker has taken meanwhile.

        Without one, that worker forgets the prompt; what it granted may still come, so the attempt ends.
        """
        await round_.settle()
        if round_.ticket is not None:
            message = Redirect(attempt.id, round_.ticket, round_.seen[1].incarnation)
            if await self.calls.give(attempt, message, round_.seen):
                return True
            if not attempt.is_withdrawn and self.calls.seen(attempt) == round_.seen:  # it is over there
                await self.calls.abort(attempt, attempt.decode_worker)
                if self.calls.seen(attempt) == round_.seen:  # nobody else handles a loss before it is placed
                    return True
        await self.calls.abort(attempt, attempt.prefill_worker)
        attempt.is_withdrawn = True
        return False

    async def _may_ask(self, attempt: Attempt, step: Step) -> bool:
        """Checks again what was checked when the worker was chosen: others were asked questions since."""
        stage: Stage = "decode" if step == "reserve" else "prefill"
        worker = attempt.decode_worker if step == "reserve" else attempt.prefill_worker
        is_there = await self.calls.is_there(attempt, stage, worker)
        return is_there and bool(self._isolation.allowed(attempt, stage, [worker]))
