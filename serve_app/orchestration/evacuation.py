"""Takes requests away from stages that a worker gives up: each orchestrator does so for its own.

not begun           other workers get it
arriving at decode  its prefill worker redirects it
answers             move to other decode workers with their keys and values, as far as there is room
late                the rest is retried elsewhere, its repeated tokens dropped by their index
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from epd.control.routing import InFlight
from epd.serve_app.orchestration.requests import Attempt, Outcome, Shared
from epd.serve_app.orchestration.worker_calls import DecodeMoves
from epd.serve_app.role_messages import AskRemaining, RemainingWork
from epd.serve_app.task_group import Tasks
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage

logger = logging.getLogger(__name__)

_FOLLOW_S = 0.02  # between looks at a worker that others, or itself, make leave
_RETRY_MOVE_S = 0.25  # until another attempt to move an answer that no worker had room for
_MAX_AT_ONCE = 8  # requests moved at a time


@dataclass(slots=True)
class Evacuation:
    """Takes one orchestrator's requests away from stages of one worker.

    leaving: the stages that it gives up
    num_handed_on, num_moved, num_redone: requests and groups, by what was done with them
    """

    shared: Shared
    moves: DecodeMoves
    worker: str
    leaving: frozenset[Stage]
    num_handed_on: int = field(default=0, init=False)
    num_moved: int = field(default=0, init=False)
    num_redone: int = field(default=0, init=False)
    _move_after_s: dict[str, float] = field(default_factory=dict, init=False)

    async def step(self, left: RemainingWork, *, is_late: bool) -> None:
        """Takes away what can be taken now. left: the worker's remaining work, also that of others.

        is_late: whether what is running is retried elsewhere instead of moved
        """
        await self.hand_on(left)
        if is_late:
            await self._redo()
        else:
            await self._move([each for each in left.running if self._may_move(each)])

    async def hand_on(self, left: RemainingWork) -> None:
        """Gives other workers what this one has not begun."""
        for attempt in self.shared.requests.placed(left.waiting):
            attempt.end(Outcome.TAKEN_BACK)
            self.num_handed_on += 1
        self.num_handed_on += await self.shared.dispatcher.take_back(self.worker, left.waiting)
        done = await _gathered(
            [self.moves.redirect_once(attempt) for attempt in self.shared.requests.placed(left.arriving)]
        )
        self.num_handed_on += sum(done)

    async def _move(self, request_ids: Sequence[str]) -> None:
        """Moves answers to other decode workers, as far as they have room; merged ones stay."""
        if "decode" not in self.leaving:
            return
        placed = self.shared.requests.placed(request_ids)
        mine = [each for each in placed if each.decode_worker == self.worker]
        attempts = [each for each in mine if not each.placement.is_merged]
        done = await _gathered([self.moves.move(attempt) for attempt in attempts])
        self.num_moved += sum(done)
        for attempt in attempts:
            self._move_after_s[attempt.id] = time.monotonic() + _RETRY_MOVE_S

    def _may_move(self, request_id: str) -> bool:
        return time.monotonic() >= self._move_after_s.get(request_id, 0.0)

    async def _redo(self) -> None:
        """Retries elsewhere what the worker has not completed."""
        for attempt in list(self.shared.requests.attempts.values()):
            if attempt.is_placed and not attempt.has_ended and self._has(attempt):
                attempt.end(Outcome.TAKEN_BACK)
                self.num_redone += 1
        if "encode" in self.leaving:
            self.num_redone += await self.shared.dispatcher.take_back(self.worker)

    def _has(self, attempt: Attempt) -> bool:
        """Returns whether a stage that the worker gives up has the request."""
        if attempt.is_handed_over:
            return "decode" in self.leaving and attempt.decode_worker == self.worker
        is_prompt = attempt.prefill_worker == self.worker and "prefill" in self.leaving
        return is_prompt or (attempt.decode_worker == self.worker and "decode" in self.leaving)


class Evacuations:
    """Evacuates every worker that leaves stages, but for those that this orchestrator switches itself.

    on_leaving: called for each of them, once it begins to leave
    """

    def __init__(self, shared: Shared, moves: DecodeMoves, on_leaving: Callable[[], None]) -> None:
        """Starts without workers that leave. moves: changes the decode workers of attempts."""
        self._on_leaving = on_leaving
        self._shared = shared
        self._moves = moves
        self._running: set[str] = set()
        self._tasks = Tasks()

    def changed(self, worker: str) -> None:
        """Begins to evacuate a worker if it leaves stages now."""
        info = self._shared.fleet.workers.get(worker)
        if info is not None and "video" in info.roles:
            return  # it keeps what it has until that is read
        is_known = worker in self._shared.requests.switching or worker in self._running
        if info is not None and info.leaving and not is_known:
            self._running.add(worker)
            self._tasks.spawn(self._run(info))
            self._on_leaving()

    async def close(self) -> None:
        self._tasks.cancel()
        await self._tasks.wait()

    async def _run(self, first: WorkerInfo) -> None:
        """Evacuates a worker until it stays, with these roles or others, or has ended."""
        evacuation = Evacuation(self._shared, self._moves, first.name, first.leaving)
        limits = self._shared.config.switching
        late_s = time.monotonic() + (limits.leave_s if first.is_draining else limits.drain_s)
        try:
            while (info := self._leaving_now(first)) is not None:
                evacuation.leaving = info.leaving
                try:
                    await self._look(evacuation, info, is_late=time.monotonic() >= late_s)
                except Exception:  # any error: requests must not be left at a worker that ends
                    logger.warning("worker %s is not evacuated yet", first.name, exc_info=True)
                await asyncio.sleep(_FOLLOW_S)
        finally:
            self._running.discard(first.name)
            self._shared.router.forget(first.name)
            self._shared.wake()
            self._shared.dispatcher.encoders.wake()

    def _leaving_now(self, first: WorkerInfo) -> WorkerInfo | None:
        info = self._shared.fleet.workers.get(first.name)
        is_same = info is not None and info.is_alive and info.incarnation == first.incarnation
        return info if is_same and info is not None and info.leaving else None

    async def _look(self, evacuation: Evacuation, info: WorkerInfo, *, is_late: bool) -> None:
        """Takes away what is there; all of it stays while no other worker takes such work."""
        is_here = self._shared.router.in_flight(info.name) != InFlight()
        if is_here and all(self._is_taken_elsewhere(stage, info) for stage in info.closed):
            left = await self._shared.fleet.send(min(info.roles), info.name, AskRemaining(info.leaving))
            await evacuation.step(left, is_late=is_late)

    def _is_taken_elsewhere(self, stage: Stage, info: WorkerInfo) -> bool:
        workers = self._shared.fleet.workers.values()
        return any(each.name != info.name and each.takes(stage) for each in workers)


async def _gathered(work: Sequence[Coroutine[Any, Any, bool]]) -> list[bool]:
    """Gathers results, a few at a time. An error is raised once all have ended."""
    gate = asyncio.Semaphore(_MAX_AT_ONCE)

    async def gated(one: Coroutine[Any, Any, bool]) -> bool:
        async with gate:
            return await one

    results = await asyncio.gather(*(gated(one) for one in work), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [bool(result) for result in results]
