"""One attempt at answering a request: which workers have it and how it ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from enum import StrEnum

from epd.control.placement import Placement
from epd.control.routing import Router
from epd.errors import EPDError
from epd.serve_app.messages import attempt_id
from epd.serve_app.orchestration.live_answer import LiveAnswer
from epd.serve_app.worker.peer_losses import NamedPeer
from epd.types import RequestStatus


class Ending(StrEnum):
    """Lists how an attempt can end without an error."""

    COMPLETE = "complete"
    LOST = "lost"  # with a worker: the request is retried
    TAKEN_BACK = "taken back"  # from a worker that changes its roles or has lost its groups: others get it


class Attempt:
    """Represents one attempt, known to the workers by its id.

    placement: its workers, and what it uses of them in the router's counts
    sole_encoder: gets all its groups, so that it can drop tokens before they are sent; None if any may
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
    """

    def __init__(self, number: int, answer: LiveAnswer, router: Router, owner: str = "") -> None:
        """Starts without workers. number: unique to its owner. owner: the orchestrator's id."""
        self.id = attempt_id(owner, answer.request.request_id, number)
        self.answer = answer
        self.placement = Placement(router, len(answer.plan.prompt))
        self.sole_encoder: NamedPeer | None = None
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
        self._ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

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
        return self.asking[worker] > 0 or (self.is_placed and worker in self.workers)

    @property
    def is_at_risk(self) -> bool:
        """Returns whether it has not yet passed the point where it was lost before."""
        return self.num_tokens <= self.at_risk_until

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
        is_complete = self._ended.result() is Ending.COMPLETE
        return self.answer.status if is_complete else RequestStatus.FINISHED_ABORTED

    async def wait(self) -> Ending:
        """Returns how it ended. Raises the error that ended it, if a retry could not help."""
        return await self._ended

    def end(self, ending: Ending) -> None:
        """Ends the attempt, unless it has already ended."""
        if not self._ended.done():
            self._ended.set_result(ending)

    def fail(self, error: EPDError) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # it may never be waited for

    def arrive(self, worker: str) -> None:
        """Notes that a decode worker has received all of it."""
        self.is_handed_over = True
        if worker == self.moving_to:
            self.moving_to = ""
            self.placement.move_decode(worker)
