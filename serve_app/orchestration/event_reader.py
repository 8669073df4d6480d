"""Reads the reports of workers and passes them to the attempts concerned: the only reader of fleet events.

An event that cannot be handled fails the attempt that it is about, and no other. The attempts of a lost
worker are redirected where that is enough, else retried.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from epd.errors import EncodeError, InternalError
from epd.serve_app.fleet import (
    FleetBroken,
    FleetEvent,
    WorkerBack,
    WorkerChanged,
    WorkerLost,
    send_surely,
)
from epd.serve_app.messages import (
    Abort,
    Admitted,
    EmbeddingsReused,
    GroupFailed,
    GroupsArrived,
    HandedOver,
    PeerLost,
    RequestFailed,
    SpanDone,
    WorkerEvent,
    WorkerLoad,
    WorkerReport,
    owner_of,
)
from epd.serve_app.orchestration.evacuation import Evacuations
from epd.serve_app.orchestration.loss_counter import LossCounter
from epd.serve_app.orchestration.replacement import Replacement
from epd.serve_app.orchestration.requests import Attempt, Outcome, Shared
from epd.serve_app.orchestration.retention import LoadRetention
from epd.serve_app.orchestration.watchdog import Watchdog
from epd.serve_app.orchestration.worker_calls import DecodeMoves
from epd.stages.engine.generation import TokenOutput
from epd.topology import Stage
from epd.transfer.transfers import Grant

logger = logging.getLogger(__name__)

_MAX_GROUP_FAILURES = 3


# The requests that a worker reports as lost with a peer, once it has answered; None if it is lost too.
_Replies = Mapping[str, "asyncio.Task[frozenset[str] | None]"]


class Recovery:
    """Saves or ends the attempts of lost workers."""

    def __init__(self, shared: Shared, moves: DecodeMoves, owner: str) -> None:
        """Starts without losses. moves: changes the decode workers of attempts. owner: of the attempts."""
        self._owner = owner
        self._shared = shared
        self._moves = moves

    def lose(self, loss: WorkerLost) -> None:
        """Handles a lost worker. Each attempt continues once the worker that matters to it has answered."""
        name, message = loss.name, PeerLost(loss.name, loss.incarnation)
        outcome = Outcome.TAKEN_BACK if loss.is_planned else Outcome.LOST
        tasks = self._shared.requests.tasks
        self._shared.router.forget(name)
        replies = {
            info.name: asyncio.create_task(self._send_loss(info.name, info.roles, message))
            for info in self._shared.fleet.workers.values()
            if info.is_alive and info.name != name and "video" not in info.roles
        }
        tasks.spawn(self._shared.dispatcher.lost(name))
        for attempt in list(self._shared.requests.attempts.values()):
            # Attempts that are being placed detect the loss themselves.
            if attempt.is_placed and name in (
                attempt.prefill_worker,
                attempt.decode_worker,
                attempt.moving_to,
            ):
                tasks.spawn(self._recover(attempt, name, replies, outcome))

    async def _send_loss(self, worker: str, roles: frozenset[Stage], lost: PeerLost) -> frozenset[str] | None:
        stage = next(iter(sorted(roles)))
        lost_ids = await send_surely(self._shared.fleet, stage, worker, lost)
        if lost_ids is None:
            return None
        mine = (each for each in lost_ids if owner_of(each) == self._owner)
        over = tuple(each for each in mine if self._is_over(each, worker, lost.name))
        if over:
            self._shared.requests.tasks.spawn(send_surely(self._shared.fleet, stage, worker, Abort(over)))
        return frozenset(lost_ids)

    def _is_over(self, attempt_id: str, worker: str, lost: str) -> bool:
        """Returns whether what a worker had handed to the lost one is needed no more.

        That one had all of it before its receipts came, and has answered it, or moved the answer elsewhere.
        """
        attempt = self._shared.requests.attempts.get(attempt_id)
        if attempt is None or attempt_id in self._shared.requests.redirecting:
            return attempt is None
        decodes = attempt.decode_worker, attempt.moving_to
        return attempt.is_handed_over and lost not in decodes and worker not in decodes

    async def _recover(self, attempt: Attempt, name: str, replies: _Replies, outcome: Outcome) -> None:
        """Saves an attempt, or ends it so that it is retried."""
        try:
            if not await self._is_saved(attempt, name, replies):
                attempt.end(outcome)
        except Exception as error:  # any error: nothing else ends the attempt
            logger.exception("an attempt was not saved from a loss")
            attempt.fail(InternalError.of(error))

    async def _is_saved(self, attempt: Attempt, name: str, replies: _Replies) -> bool:
        """Returns whether an attempt continues without the lost worker."""
        if attempt.placement.is_merged or name == attempt.moving_to:  # that one may have had all of it
            return False
        if attempt.id in self._shared.requests.redirecting:  # it detects the loss of the worker it asks
            return name != attempt.prefill_worker
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
        return await self._moves.redirect(attempt)


@dataclass(frozen=True, slots=True)
class EventReader:
    """Reads the events of a fleet. retention: None if it does not follow the load."""

    shared: Shared
    losses: LossCounter
    watchdog: Watchdog
    recovery: Recovery
    evacuations: Evacuations
    replacement: Replacement
    retention: LoadRetention | None

    async def follow(self) -> None:
        """Handles events until the fleet is closed."""
        async for event in self.shared.fleet.events():
            try:
                self._take(event)
            except Exception:  # noqa: BLE001 - logged; the next event is about others
                self._failed(event)

    def _take(self, event: FleetEvent) -> None:
        match event:
            case WorkerReport():
                self._take_report(event)
            case WorkerLost():
                self._take_loss(event)
            case WorkerBack() | WorkerChanged():
                self.evacuations.changed(event.name)
                self.replacement.look()
                self.shared.dispatcher.encoders.wake()
                self.shared.wake()
            case FleetBroken():
                self.shared.requests.loops.gone.append(event.loop)

    def _take_loss(self, loss: WorkerLost) -> None:
        requests = self.shared.requests
        requests.counters["workers_lost"] += not loss.is_planned
        self.shared.queue.interrupt()
        requests.loads.pop(loss.name, None)
        # Lost attempts are retried in any case, even if they could not be counted.
        try:
            self.losses.lose(loss.name, loss.incarnation, is_planned=loss.is_planned)
        finally:
            self.recovery.lose(loss)
            self.replacement.look()
            self.shared.wake()

    def _take_report(self, report: WorkerReport) -> None:
        self.watchdog.reported(report)
        loads = self.shared.requests.loads
        before = loads.get(report.worker)
        loads[report.worker] = report.load
        for event in report.events:
            self._guarded(_request_id(event), self._take_event, report.worker, event)
        by_request: dict[str, list[TokenOutput]] = {}
        for output in report.outputs:
            by_request.setdefault(output.request_id, []).append(output)
        for request_id, outputs in by_request.items():
            self._guarded(request_id, self._take_tokens, request_id, outputs)
        if (speeds := self.shared.router.speeds) is not None:
            for stage, done in report.load.stages.items():
                # A pass over more answers takes hardly longer: of decode, passes are counted.
                units = done.num_rounds if stage == "decode" else done.done_units
                speeds.add(report.worker, stage, units, done.busy_s)
        if self.shared.queue.others is not None:
            self._count_others(report, before)

    def _count_others(self, report: WorkerReport, before: WorkerLoad | None) -> None:
        """Counts the work of other fronts at a worker. before: its load in the last report."""
        if report.load.work is not None:
            self.shared.router.set_reported(report.worker, report.load.work)
        if before is None or has_freed(before, report.load):
            self.shared.wake()
            self.shared.dispatcher.encoders.wake()

    def _guarded(self, request_id: str, take: Callable[..., None], *arguments: object) -> None:
        try:
            take(*arguments)
        except Exception as error:  # noqa: BLE001 - logged; fails this attempt alone
            self._failed(arguments[-1])
            if request_id in self.shared.requests.attempts:
                self.shared.requests.attempts[request_id].fail(InternalError.of(error))

    def _failed(self, event: object) -> None:
        self.shared.requests.counters["event_failures"] += 1
        logger.exception("an event was not taken: %s", type(event).__name__)

    def _take_event(self, worker: str, event: WorkerEvent) -> None:
        if isinstance(event, GroupsArrived):
            self.shared.dispatcher.arrived(event.transfer_ids)
        elif isinstance(event, GroupFailed):
            self._take_failure(worker, event)
        elif event.request_id in self.shared.requests.attempts:
            self._take_progress(worker, self.shared.requests.attempts[event.request_id], event)

    def _take_progress(
        self,
        worker: str,
        attempt: Attempt,
        event: Admitted | EmbeddingsReused | Grant | HandedOver | RequestFailed | SpanDone,
    ) -> None:
        attempt.event_s = self.shared.requests.clock()
        match event:
            case Admitted():
                attempt.answer.cached_tokens = event.num_cached
                if attempt.answer.reuses is not None:
                    attempt.answer.reuses.admitted(event)
            case EmbeddingsReused():
                if attempt.answer.reuses is not None:
                    attempt.answer.reuses.embeddings(event)
            case Grant():
                attempt.on_grant(event)
            case HandedOver():
                attempt.arrive(worker)
            case SpanDone():
                attempt.answer.note(event)
            case RequestFailed(is_final=True):
                attempt.fail(event.error)
            case RequestFailed():
                attempt.end(Outcome.LOST)

    def _take_failure(self, worker: str, event: GroupFailed) -> None:
        attempt = self.shared.requests.attempts.get(event.request_id)
        if attempt is not None and attempt.fail_group(event.group) > _MAX_GROUP_FAILURES:
            attempt.fail(EncodeError(f"a group could not be encoded: {event.error}; send it again"))
            return
        self.shared.requests.tasks.spawn(self.shared.dispatcher.reissue(worker, [event.transfer_id]))

    def _take_tokens(self, request_id: str, outputs: Sequence[TokenOutput]) -> None:
        attempt, now_s = self.shared.requests.attempts.get(request_id), self.shared.requests.clock()
        if attempt is None or not attempt.take(outputs, now_s):
            return
        self.shared.queue.record_first_token(now_s - attempt.started_s)
        if self.retention is not None:
            self.retention.first_token(attempt)
        self.shared.wake()


def _request_id(event: WorkerEvent) -> str:
    return "" if isinstance(event, GroupsArrived) else event.request_id


async def _reply(worker: str, replies: _Replies) -> frozenset[str] | None:
    return await replies[worker] if worker in replies else None


def has_freed(before: WorkerLoad, now: WorkerLoad) -> bool:
    """Returns whether a worker has less of anything than before, so that there may be room."""
    usages = ((before.kv_usage, now.kv_usage), (before.seq_usage, now.seq_usage))
    works = zip(before.work or (), now.work or (), strict=False)
    return any((new or 0) < (old or 0) for old, new in (*usages, *works))
