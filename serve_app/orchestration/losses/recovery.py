"""Recovers the attempts of a lost worker: they are redirected where that is enough, else retried."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from epd.control.routing import Router
from epd.errors import InternalError
from epd.serve_app.fleet import Fleet, WorkerLost, send_surely
from epd.serve_app.messages import PeerLost
from epd.serve_app.orchestration.attempt import Attempt, Ending
from epd.serve_app.orchestration.encode_dispatcher import EncodeDispatcher
from epd.serve_app.orchestration.placement import RequestPlacer
from epd.serve_app.task_group import Tasks
from epd.topology import Stage

logger = logging.getLogger(__name__)

# The requests that a worker reports as lost with a peer, once it has answered; None if it is lost too.
_Replies = Mapping[str, "asyncio.Task[frozenset[str] | None]"]


class Recovery:
    """Handles every loss of a worker. attempts: all attempts in flight, by id."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        dispatcher: EncodeDispatcher,
        placement: RequestPlacer,
        attempts: Mapping[str, Attempt],
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._dispatcher = dispatcher
        self._placement = placement
        self._attempts = attempts
        self.tasks = Tasks()

    def lose(self, loss: WorkerLost) -> None:
        """Handles a lost worker. Each attempt continues once the worker that matters to it has answered."""
        name, message = loss.name, PeerLost(loss.name, loss.incarnation)
        ending = Ending.TAKEN_BACK if loss.is_planned else Ending.LOST
        self._router.forget(name)
        replies = {
            info.name: asyncio.create_task(self._send_loss(info.name, info.roles, message))
            for info in self._fleet.workers.values()
            if info.is_alive and info.name != name and "video" not in info.roles
        }
        self.tasks.spawn(self._dispatcher.lost(name))
        for attempt in list(self._attempts.values()):
            # Attempts that are being placed detect the loss themselves.
            if attempt.is_placed and name in (attempt.prefill_worker, attempt.decode_worker):
                self.tasks.spawn(self._recover(attempt, name, replies, ending))

    async def _send_loss(self, worker: str, roles: frozenset[Stage], lost: PeerLost) -> frozenset[str] | None:
        stage = next(iter(sorted(roles)))
        lost_ids = await send_surely(self._fleet, stage, worker, lost)
        return None if lost_ids is None else frozenset(lost_ids)

    async def _recover(self, attempt: Attempt, name: str, replies: _Replies, ending: Ending) -> None:
        """Saves an attempt, or ends it so that it is retried."""
        try:
            if not await self._is_saved(attempt, name, replies):
                attempt.end(ending)
        except Exception as error:  # any error: nothing else ends the attempt
            logger.exception("an attempt was not saved from a loss")
            attempt.fail(InternalError.of(error))

    async def _is_saved(self, attempt: Attempt, name: str, replies: _Replies) -> bool:
        """Returns whether an attempt continues without the lost worker."""
        if attempt.placement.is_merged:
            return False
        if name == attempt.prefill_worker:
            return await self._is_at_decode(attempt, replies)
        return await self._is_redirected(attempt, replies)

    async def _is_at_decode(self, attempt: Attempt, replies: _Replies) -> bool:
        """Returns whether the decode worker has all of it and the first tokens came before the loss."""
        lost = await _reply(attempt.decode_worker, replies)
        return lost is not None and attempt.id not in lost and attempt.answer.has_begun

    async def _is_redirected(self, attempt: Attempt, replies: _Replies) -> bool:
        """Returns whether the prefill worker still had it and another decode worker takes it."""
        lost = await _reply(attempt.prefill_worker, replies)
        if lost is None or attempt.id not in lost:
            return False
        return await self._placement.moves.redirect(attempt)


async def _reply(worker: str, replies: _Replies) -> frozenset[str] | None:
    return await replies[worker] if worker in replies else None
