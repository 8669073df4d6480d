"""Reads the reports of workers and passes them to the attempts concerned: the only reader of fleet events.

An event that cannot be handled fails the attempt that it is about, and no other.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from epd.control.admission import AdmissionQueue
from epd.errors import EncodeError, InternalError
from epd.serve_app.fleet import Fleet, FleetBroken, FleetEvent, WorkerBack, WorkerChanged, WorkerLost
from epd.serve_app.messages import (
    Admitted,
    GroupFailed,
    GroupsArrived,
    HandedOver,
    RequestFailed,
    SpanDone,
    WorkerEvent,
    WorkerLoad,
    WorkerReport,
)
from epd.serve_app.orchestration.attempt import Attempt, Ending
from epd.serve_app.orchestration.encode_dispatcher import EncodeDispatcher
from epd.serve_app.orchestration.evacuation import Evacuations
from epd.serve_app.orchestration.group_feed import GroupFeed
from epd.serve_app.orchestration.losses.loss_counter import LossCounter
from epd.serve_app.orchestration.losses.recovery import Recovery
from epd.serve_app.orchestration.losses.watchdog import Watchdog
from epd.serve_app.orchestration.placement import RequestPlacer
from epd.serve_app.orchestration.retention import LoadRetention
from epd.serve_app.orchestration.shared_load import SharedLoad
from epd.serve_app.task_group import Loops, Tasks
from epd.stages.engine.generation import TokenOutput
from epd.transfer.reception import Grant

logger = logging.getLogger(__name__)

_MAX_GROUP_FAILURES = 3


@dataclass(frozen=True, slots=True)
class EventReader:
    """Reads the events of a fleet.

    attempts, feeds: all in flight, by id
    loads: the last report of each worker
    """

    fleet: Fleet
    dispatcher: EncodeDispatcher
    placement: RequestPlacer
    recovery: Recovery
    evacuations: Evacuations
    losses: LossCounter
    watchdog: Watchdog
    shared: SharedLoad
    queue: AdmissionQueue
    retention: LoadRetention
    attempts: Mapping[str, Attempt]
    feeds: Mapping[str, GroupFeed]
    loads: MutableMapping[str, WorkerLoad]
    counters: Counter[str]
    loops: Loops
    tasks: Tasks

    async def follow(self) -> None:
        """Handles events until the fleet is closed."""
        async for event in self.fleet.events():
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
                self.dispatcher.wake()
                self.placement.wake()
            case FleetBroken():
                self.loops.gone.append(event.loop)

    def _take_loss(self, loss: WorkerLost) -> None:
        self.counters["workers_lost"] += not loss.is_planned
        self.queue.interrupt()
        self.loads.pop(loss.name, None)
        # Lost attempts are retried in any case, even if they could not be counted.
        try:
            self.losses.lose(loss.name, loss.incarnation, is_planned=loss.is_planned)
        finally:
            self.recovery.lose(loss)
            self.placement.wake()

    def _take_report(self, report: WorkerReport) -> None:
        self.watchdog.reported(report)
        before = self.loads.get(report.worker)
        self.loads[report.worker] = report.load
        for event in report.events:
            self._guarded(_request_id(event), self._take_event, report.worker, event)
        by_request: dict[str, list[TokenOutput]] = {}
        for output in report.outputs:
            by_request.setdefault(output.request_id, []).append(output)
        for request_id, outputs in by_request.items():
            self._guarded(request_id, self._take_tokens, request_id, outputs)
        self.shared.reported(report, before)

    def _guarded(self, request_id: str, take: Callable[..., None], *arguments: object) -> None:
        try:
            take(*arguments)
        except Exception as error:  # noqa: BLE001 - logged; fails this attempt alone
            self._failed(arguments[-1])
            if request_id in self.attempts:
                self.attempts[request_id].fail(InternalError.of(error))

    def _failed(self, event: object) -> None:
        self.counters["event_failures"] += 1
        logger.exception("an event was not taken: %s", type(event).__name__)

    def _take_event(self, worker: str, event: WorkerEvent) -> None:
        if isinstance(event, GroupsArrived):
            self.dispatcher.arrived(event.transfer_ids)
        elif isinstance(event, GroupFailed):
            self._take_failure(worker, event)
        elif event.request_id in self.attempts:
            self._take_progress(worker, self.attempts[event.request_id], event)

    def _take_progress(
        self, worker: str, attempt: Attempt, event: Admitted | Grant | HandedOver | RequestFailed | SpanDone
    ) -> None:
        attempt.event_s = time.time()
        match event:
            case Admitted():
                attempt.answer.cached_tokens = event.num_cached
            case Grant():
                self.feeds[attempt.id].grant(event)
            case HandedOver():
                attempt.arrive(worker)
            case SpanDone():
                attempt.answer.note(event)
            case RequestFailed(is_final=True):
                attempt.fail(event.error)
            case RequestFailed():
                attempt.end(Ending.LOST)

    def _take_failure(self, worker: str, event: GroupFailed) -> None:
        attempt = self.attempts.get(event.request_id)
        if attempt is not None:
            if attempt.sole_encoder is not None:  # it may have read the group, and reads none twice
                attempt.end(Ending.TAKEN_BACK)
            attempt.failures[event.group] += 1
            if attempt.failures[event.group] > _MAX_GROUP_FAILURES:
                attempt.fail(EncodeError(f"a group could not be encoded: {event.error}; send it again"))
                return
        self.tasks.spawn(self.dispatcher.reissue(worker, [event.transfer_id]))

    def _take_tokens(self, request_id: str, outputs: Sequence[TokenOutput]) -> None:
        attempt = self.attempts.get(request_id)
        if attempt is None:
            return
        attempt.event_s = time.time()
        attempt.num_tokens += len(outputs)
        attempt.answer.take(outputs)
        if attempt.answer.has_begun and attempt.placement.end_prefill():
            self.queue.record_first_token(time.time() - attempt.started_s)
            self.retention.first_token(attempt)
            self.placement.wake()
        if attempt.answer.is_complete:
            attempt.end(Ending.COMPLETE)


def _request_id(event: WorkerEvent) -> str:
    return "" if isinstance(event, GroupsArrived) else event.request_id
