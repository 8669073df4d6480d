"""Sends workers messages about attempts: to take one, to reserve room, to hand one over to another.

    prefill worker has it   ->  `redirect`, `redirect_once`: it sends everything to another decode worker
    decode worker runs it   ->  `move`: pause, reserve elsewhere, send its keys and values

A worker that is lost meanwhile has not answered. A request that finds no other decode worker stays where it
is, or is retried.

Before a prompt is sent where it may have to wait, the room of decode workers is estimated:

    tokens of the cache   | in use, by the last report | asked for since | the prompt at hand | spare share |

An estimate may be wrong, and the worker decides: see `RequestPlacer`. It is worth a message more only where
the worker's answers take long, as those between captured passes do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from epd.control.placement import PlacementPolicy
from epd.errors import EPDError, UnavailableError
from epd.kv.prefix_cache import TokenIdentity
from epd.serve_app.fleet import WorkerLostError
from epd.serve_app.messages import Abort, Message, Prefill, Redirect, ReplyT, Reserve, WorkerLoad, endpoint
from epd.serve_app.orchestration.requests import Attempt, Outcome, Shared
from epd.serve_app.role_messages import Move, Pause, Resume
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage
from epd.transfer.connectors import KVTicket

_SPARE_SHARE = 0.2  # of the cache: into which answers grow
_SLOW_S = 0.005  # until a worker answers: a prompt that need not wait for it is worth a message more
_LAST_SHARE = 0.3  # of the last answer, in the mean of the seconds that a worker takes
_POLL_S = 0.5
# Which workers an attempt may go to, of some for a stage.
Allowed = Callable[[Attempt, Stage, Sequence[str]], list[str]]


@dataclass(slots=True)
class RequestedRoom:
    """Room that a worker was asked for.

    start_s: when, on the caller's clock
    answered_by: the worker's last report when it had answered; None before
    """

    num_tokens: int
    num_seqs: int
    start_s: float
    answered_by: WorkerLoad | None = None


class DecodeCapacity:
    """Counts what decode workers were asked for and have not reported, and how long they take to answer."""

    def __init__(self, loads: Mapping[str, WorkerLoad], clock: Callable[[], float]) -> None:
        """Starts empty. loads: the last report of each worker. clock: seconds."""
        self._loads = loads
        self._clock = clock
        self._seconds: dict[str, float] = {}  # until an answer, a moving mean
        self._asked: dict[str, list[RequestedRoom]] = {}
        self._refused_by: dict[str, WorkerLoad] = {}

    def is_slow(self, worker: str) -> bool:
        """Returns whether a worker has taken long to answer lately."""
        return self._seconds.get(worker, 0.0) > _SLOW_S

    def has_room(self, worker: str, num_tokens: int, num_seqs: int) -> bool:
        """Returns whether a worker seems to have room for a prompt and as many answers to it."""
        load = self._loads.get(worker)
        if load is None or load.memory is None or load.kv_usage is None or load.seq_usage is None:
            return False
        if self._refused_by.get(worker) is load:
            return False
        asked = self._unreported(worker, load)
        capacity = load.memory.num_kv_tokens
        used_tokens = load.kv_usage * capacity + sum(each.num_tokens for each in asked)
        used_seqs = load.seq_usage * load.max_num_seqs + sum(each.num_seqs for each in asked)
        has_tokens = used_tokens + num_tokens <= (1 - _SPARE_SHARE) * capacity
        return has_tokens and used_seqs + num_seqs <= load.max_num_seqs

    def ask(self, worker: str, num_tokens: int, num_seqs: int) -> RequestedRoom:
        """Notes that a worker is asked for room."""
        asked, load = RequestedRoom(num_tokens, num_seqs, self._clock()), self._loads.get(worker)
        open_ = self._asked.setdefault(worker, []) if load is None else self._unreported(worker, load)
        open_.append(asked)
        return asked

    def answer(self, worker: str, asked: RequestedRoom, *, is_taken: bool) -> None:
        """Notes the answer: room that was given counts until the next report, which will count it."""
        load, seconds = self._loads.get(worker), self._clock() - asked.start_s
        mean_s = self._seconds.get(worker, seconds)
        self._seconds[worker] = mean_s + _LAST_SHARE * (seconds - mean_s)
        if is_taken and load is not None:
            asked.answered_by = load
            return
        self._asked[worker].remove(asked)
        if load is not None:
            self._refused_by[worker] = load

    def _unreported(self, worker: str, load: WorkerLoad) -> list[RequestedRoom]:
        asked = self._asked.get(worker, [])
        self._asked[worker] = [each for each in asked if each.answered_by is None or each.answered_by is load]
        return self._asked[worker]


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
        attempt.is_withdrawn = is_taken is None
        return bool(is_taken)

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
        self, attempt: Attempt, stage: Stage, worker: str, message: Redirect | Move, reserved_at: str
    ) -> bool | None:
        """Asks as `ask` does. If it is unknown whether the message was handled, the request is retried.

        Then what was reserved is given back: an attempt that had ended before has been aborted before.
        """
        try:
            return await self.ask(attempt, stage, worker, message)
        except EPDError:
            attempt.end(Outcome.TAKEN_BACK)
            await self.abort(attempt, reserved_at)
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

        Returns False if none has room, or the prefill worker is kept for another one: it must be retried.
        """
        if not self._allowed(attempt, "prefill", [attempt.prefill_worker]):
            return False
        attempt.is_handed_over = False
        with self._shared.requests.redirected(attempt):
            is_redirected = await self._redirect(attempt)
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
        if not self._allowed(attempt, "decode", [worker]):  # by now
            return None
        attempt.placement.move_decode(worker)
        seen = self._calls.seen(attempt)
        ticket = await self._calls.reserve(attempt, worker)
        if ticket is None:
            return None
        message = Redirect(attempt.id, ticket, seen[1].incarnation)
        if not attempt.has_ended and await self._calls.give(attempt, message, seen):
            return True
        # Room that it leaves is freed with the attempt, which ends, or is lost with the worker.
        prefill_worker, decode_worker = self._calls.seen(attempt)
        is_lost_alone = decode_worker != seen[1] and prefill_worker == seen[0]
        return None if is_lost_alone and not attempt.is_withdrawn else False

    async def redirect_once(self, attempt: Attempt) -> bool:
        """Has the prefill worker hand a request over to another decode worker.

        The former decode worker discards what had arrived. Returns False if nothing has changed. If the one
        that has it then was lost meanwhile, the request is retried.
        """
        requests, seen = self._shared.requests, self._calls.seen(attempt)
        if attempt.id in requests.redirecting:
            return False
        with requests.redirected(attempt):
            room = await self._redirect_once(attempt)
        if room is not None:
            seen[1] = SeenWorker(is_alive=True, incarnation=room.incarnation)
        if self._calls.seen(attempt) != seen:
            attempt.end(Outcome.LOST)
        return room is not None

    async def _redirect_once(self, attempt: Attempt) -> _Room | None:
        """Returns the room that it goes to; None if nothing has changed."""
        former, prefiller = attempt.decode_worker, attempt.prefill_worker
        room = await self._other_decoder(attempt, self._calls.reservation(attempt))
        if room is None:
            return None
        message = Redirect(attempt.id, room.ticket, room.incarnation)
        is_taken = await self._calls.ask_or_redo(attempt, "prefill", prefiller, message, room.worker)
        if is_taken and attempt.decode_worker == former:
            attempt.placement.move_decode(room.worker)
            await self._calls.abort(attempt, former)
            return room
        await self._calls.abort(attempt, room.worker)
        return None

    async def move(self, attempt: Attempt) -> bool:
        """Begins to move a running request to another decode worker. Must not be cancelled.

        The move is complete when that worker reports it: see `Attempt.arrive`. Returns False if it stays.
        """
        former = attempt.decode_worker
        is_moving = False
        try:
            paused = await self._calls.ask(attempt, "decode", former, Pause(attempt.id))
            is_moving = paused is not None and await self._move(attempt, former, *paused)
        finally:
            if not is_moving:
                await self._calls.ask(attempt, "decode", former, Resume(attempt.id))
        return is_moving

    async def _move(
        self, attempt: Attempt, former: str, identity: TokenIdentity, num_output_tokens: int
    ) -> bool:
        message = self._calls.reservation_from(attempt, former, "decode", identity)
        message = replace(message, num_output_tokens=num_output_tokens)
        room = await self._other_decoder(attempt, message)
        if room is None:
            return False
        attempt.moving_to = room.worker
        moving = Move(attempt.id, room.ticket, room.incarnation)
        is_taken = await self._calls.ask_or_redo(attempt, "decode", former, moving, room.worker)
        if is_taken or attempt.decode_worker == room.worker:  # it may be there before the reply, or without
            return True
        attempt.moving_to = ""
        await self._calls.abort(attempt, room.worker)
        return False

    async def _other_decoder(self, attempt: Attempt, message: Reserve) -> _Room | None:
        """Finds a decode worker that takes new work and has room for what another one has."""
        for worker in self._policy.decoders(partial(self._allowed, attempt)):
            if worker == attempt.decode_worker or not self._allowed(attempt, "decode", [worker]):
                continue  # it leaves no more, or is kept for a suspect by now
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
