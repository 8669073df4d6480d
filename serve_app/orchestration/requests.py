"""Attempts at answering requests: which workers have each, how it ended, and all that have not ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from epd.control.admission import AdmissionQueue
from epd.control.placement import Placement
from epd.control.recent import Pace
from epd.control.routing import Router
from epd.errors import EPDError
from epd.machine import steady_time_s
from epd.serve_app.fleet import Fleet, WorkerLostError
from epd.serve_app.messages import WorkerLoad, attempt_id
from epd.serve_app.orchestration.config import OrchestratorConfig
from epd.serve_app.orchestration.encode_dispatcher import EncodeDispatcher
from epd.serve_app.orchestration.live_answer import LiveAnswer
from epd.serve_app.task_group import Loops, Tasks
from epd.serve_app.worker.peer_losses import NamedPeer
from epd.stages.engine.generation import TokenOutput
from epd.transfer.transfers import Grant
from epd.types import RequestStatus

NUM_FIRST = 8  # requests that look for room concurrently


class Outcome(StrEnum):
    """Lists how an attempt can end without an error."""

    COMPLETE = "complete"
    LOST = "lost"  # with a worker: the request is retried
    TAKEN_BACK = "taken back"  # from a worker that changes its roles or has lost its groups: others get it


class Attempt:
    """Represents one attempt, known to the workers by its id.

    placement: its workers, and what it uses of them in the router's counts
    readers: of its readings of several groups, by name, the encoder that gets all groups of the reading, so
        that it can drop tokens before they are sent
    is_placed: whether its workers have taken it
    is_withdrawn: whether its prefill worker may have had it and has it no longer. What that worker granted
        may still come, so another worker gets it under another id
    is_handed_over: whether decode continues alone
    moving_to: another decode worker that its answer is being moved to, if any
    started_s: when its workers were asked, Unix time
    failures: how often each group was not encoded
    asking: messages about it that a worker has not answered
    lost_with: workers that were lost before they answered one, until that is counted
    event_s: when it last made progress, or began, Unix time
    num_tokens: tokens that have come in this attempt
    isolated_at: places at which it may put no other request at risk
    undecided_until_s: until when no worker may be put at risk by it: whether it is to blame is not known yet
    at_risk_until: tokens after which it is no longer at risk; see `epd.control.loss_policy`
    reserved_at: the decode worker that has room for it, until it is placed
    may_look: set when it should look for room again
    on_grant: takes what its prefill worker grants
    """

    def __init__(self, number: int, answer: LiveAnswer, router: Router, owner: str = "") -> None:
        """Starts without workers. number: unique to its owner. owner: the orchestrator's id."""
        self.id = attempt_id(owner, answer.request.request_id, number)
        self.answer = answer
        self.placement = Placement(router, len(answer.plan.prompt))
        self.readers: dict[str, NamedPeer] = {}
        self.is_placed = False
        self.is_withdrawn = False
        self.is_handed_over = False
        self.moving_to = ""
        self.started_s = 0.0
        self.failures: Counter[int] = Counter()
        self.asking: Counter[str] = Counter()
        self.lost_with: set[str] = set()
        self.event_s = 0.0
        self.num_tokens = 0
        self.isolated_at: frozenset[Hashable] = frozenset()
        self.at_risk_until = 0
        self.undecided_until_s = 0.0
        self.reserved_at = ""
        self.may_look = asyncio.Event()
        self.on_grant: Callable[[Grant], None] = lambda _: None
        self._ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    # State

    @property
    def prefill_worker(self) -> str:
        return self.placement.prefill_worker

    @property
    def decode_worker(self) -> str:
        return self.placement.decode_worker

    @property
    def workers(self) -> frozenset[str]:
        """Returns the workers that have it, as far as chosen; prefill releases it at the hand-over."""
        return frozenset({self.decode_worker} | (set() if self.is_handed_over else {self.prefill_worker}))

    def is_at(self, worker: str) -> bool:
        """Returns whether a worker has it, or is being asked to take it."""
        has_it = worker in self.workers if self.is_placed else worker == self.reserved_at
        return has_it or self.asking[worker] > 0

    @property
    def is_at_risk(self) -> bool:
        """Returns whether it has not yet passed the point where it was lost before.

        Its first token may come from its prefill worker before its decode worker has reserved room.
        """
        return not self.is_placed or self.num_tokens <= self.at_risk_until

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    @property
    def status(self) -> RequestStatus:
        """Returns the status of the request, as far as this attempt goes."""
        if not self.has_ended:
            return self.answer.status if self.is_placed else RequestStatus.WAITING
        if self._ended.exception() is not None:
            return RequestStatus.FINISHED_ERROR
        is_complete = self._ended.result() is Outcome.COMPLETE
        return self.answer.status if is_complete else RequestStatus.FINISHED_ABORTED

    # Placement

    def place(self, since_s: float) -> None:
        """Notes that its workers have taken it. since_s: when it began to wait for them, Unix time."""
        self.answer.queued.prefill_s += self.started_s - since_s
        self.is_placed = True

    # Progress

    def arrive(self, worker: str) -> None:
        """Notes that a decode worker has received all of it."""
        self.is_handed_over = True
        if worker == self.moving_to:
            self.moving_to = ""
            self.placement.move_decode(worker)

    def take(self, outputs: Sequence[TokenOutput], now_s: float) -> bool:
        """Takes tokens. Returns whether its prompt is computed with them: each choice has begun."""
        self.event_s = now_s
        self.num_tokens += len(outputs)
        self.answer.take(outputs)
        is_computed = self.answer.has_begun and self.placement.end_prefill()
        if self.answer.is_complete:
            self.end(Outcome.COMPLETE)
        return is_computed

    def fail_group(self, group: int) -> int:
        """Notes that a group was not encoded. Returns how often that was so."""
        if self.readers:  # one of them may have read the group, and reads none twice
            self.end(Outcome.TAKEN_BACK)
        self.failures[group] += 1
        return self.failures[group]

    # End

    async def wait(self) -> Outcome:
        """Returns how it ended. Raises the error that ended it, if a retry could not help."""
        return await self._ended

    def end(self, outcome: Outcome) -> None:
        """Ends the attempt, unless it has already ended."""
        if not self._ended.done():
            self._ended.set_result(outcome)

    def fail(self, error: EPDError) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # it may never be waited for


class Requests:
    """Holds the requests of one orchestrator, and what its workers have reported.

    attempts: those that have not ended, by id
    loads: the last report of each worker, by name
    redirecting: attempts that look for another decode worker, by id
    switching: workers whose roles are being switched here
    clock: Unix time that no step of the wall clock moves, seconds
    """

    def __init__(self, clock: Callable[[], float] = steady_time_s) -> None:
        self.attempts: dict[str, Attempt] = {}
        self.loads: dict[str, WorkerLoad] = {}
        self.counters: Counter[str] = Counter()
        self.num_planning = 0
        self.num_lost: Counter[str] = Counter()  # losses of each worker
        self.redirecting: dict[str, Attempt] = {}
        self.switching: set[str] = set()
        self.clock = clock
        self.tasks = Tasks()
        self.loops = Loops(self.counters)

    def __len__(self) -> int:
        """Returns the number of requests that have not ended."""
        return len(self.attempts) + self.num_planning

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Counts a request while it is planned."""
        self.num_planning += 1
        try:
            yield
        finally:
            self.num_planning -= 1

    @contextmanager
    def redirected(self, attempt: Attempt) -> Iterator[None]:
        """Marks the time in which an attempt looks for another decode worker."""
        self.redirecting[attempt.id] = attempt
        try:
            yield
        finally:
            del self.redirecting[attempt.id]

    def begin(self, attempt: Attempt) -> None:
        self.attempts[attempt.id] = attempt
        attempt.event_s = self.clock()

    def leave(self, attempt: Attempt) -> None:
        """Removes an attempt that has ended, and frees what it uses of its workers in the counts."""
        del self.attempts[attempt.id]
        attempt.end(Outcome.LOST)  # unless it has: whoever still looks for workers stops
        attempt.placement.close()

    def placed(self, ids: Iterable[str]) -> list[Attempt]:
        """Returns those of the attempts that workers have taken and that have not ended."""
        found = [self.attempts.get(each) for each in ids]
        return [each for each in found if each is not None and each.is_placed and not each.has_ended]


@dataclass(frozen=True, slots=True)
class Shared:
    """Holds what all parts of an orchestrator share. reading: of the patches of groups that were read."""

    fleet: Fleet
    router: Router
    queue: AdmissionQueue
    dispatcher: EncodeDispatcher
    requests: Requests = field(default_factory=Requests)
    config: OrchestratorConfig = field(default_factory=OrchestratorConfig)
    reading: Pace = field(default_factory=Pace)

    def wake(self) -> None:
        """Lets the first requests of the queue look for room again, and those that change decode workers."""
        for name in self.queue.first(NUM_FIRST):
            self.requests.attempts[name].may_look.set()
        for attempt in self.requests.redirecting.values():
            attempt.may_look.set()

    @contextmanager
    def asking(self, attempt: Attempt, worker: str) -> Iterator[None]:
        """Marks the time in which a worker has a message about an attempt, so that its loss is counted."""
        info = self.fleet.workers.get(worker)
        num_lost = self.requests.num_lost[worker]
        if info is None or not info.is_alive:
            yield
            return
        attempt.asking[worker] += 1
        try:
            yield
        except WorkerLostError:
            if self.requests.num_lost[worker] == num_lost:  # its `WorkerLost` will come
                attempt.lost_with.add(worker)
            raise
        finally:
            attempt.asking[worker] -= 1
