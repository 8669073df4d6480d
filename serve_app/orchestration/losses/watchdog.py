"""Ends attempts that make no progress, so that they are retried, see `stall_policy`.

Before that, the log says what those wait for that have made none for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from epd.control.stall_policy import Watched, stalled
from epd.serve_app.messages import WorkerLoad, WorkerReport
from epd.serve_app.orchestration.attempt import Attempt, Ending
from epd.serve_app.orchestration.encode_dispatcher import EncodeDispatcher
from epd.serve_app.orchestration.losses.waits import awaited, summary

logger = logging.getLogger(__name__)

_MAX_LOOK_S = 5.0  # between looks
_SAY_AFTER_S = 30.0  # without progress, and between lines about it


class Watchdog:
    """Ends stalled attempts and counts them under "stalls".

    attempts: all attempts in flight, by id
    """

    def __init__(
        self,
        attempts: Mapping[str, Attempt],
        dispatcher: EncodeDispatcher,
        counters: Counter[str],
        clock: Callable[[], float],
        *,
        timeout_s: float,
    ) -> None:
        self._attempts = attempts
        self._dispatcher = dispatcher
        self._counters = counters
        self._clock = clock
        self._timeout_s = timeout_s
        self._progress_s: dict[str, float] = {}
        self._loads: dict[str, WorkerLoad] = {}
        self._said_s = clock()

    def reported(self, report: WorkerReport) -> None:
        """Notes the progress of a worker: an event or output it reports, or counters that have grown."""
        before = self._loads.get(report.worker)
        if report.events or report.outputs or before is None or _done(report.load) != _done(before):
            self._progress_s[report.worker] = self._clock()
        self._loads[report.worker] = report.load

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(self._timeout_s / 4, _MAX_LOOK_S))
            self.look()

    def look(self) -> None:
        """Ends stalled attempts."""
        watched = [self._watched(each) for each in self._attempts.values() if each.status.is_running]
        for attempt_id in stalled(watched, self._progress_s, self._clock(), self._timeout_s):
            attempt = self._attempts[attempt_id]
            self._counters["stalls"] += 1
            at = sorted(attempt.workers)
            logger.warning("attempt %s made no progress while %s at %s", attempt_id, attempt.status, at)
            attempt.end(Ending.LOST)
        self._say()

    def _say(self) -> None:
        """Logs what silent attempts wait for, in one line."""
        now_s = self._clock()
        if now_s < self._said_s + _SAY_AFTER_S:
            return
        silent = [each for each in self._attempts.values() if self._silent_s(each, now_s) >= _SAY_AFTER_S]
        if silent:
            self._said_s = now_s
            waits = [
                (each.id, awaited(each, self._dispatcher.encoders_of(each.id), now_s)) for each in silent
            ]
            logger.warning("requests without progress for %.0f s or more: %s", _SAY_AFTER_S, summary(waits))

    def _silent_s(self, attempt: Attempt, now_s: float) -> float:
        """Returns the time since the last event of an attempt; 0 if it has ended."""
        return 0.0 if attempt.has_ended else now_s - attempt.event_s

    def _watched(self, attempt: Attempt) -> Watched:
        encoders = self._dispatcher.encoders_of(attempt.id)
        return Watched(attempt.id, attempt.workers | encoders, max(attempt.event_s, attempt.started_s))


def _done(load: WorkerLoad) -> WorkerLoad:
    """Returns the part of a load that changes with progress alone."""
    return replace(load, kv_usage=None, encoder_cache_usage=None, seq_usage=None, work=None)
