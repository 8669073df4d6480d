"""Ends attempts that make no progress for too long, and without a good reason, so that they are retried.

    silent for timeout_s, and so are all workers that have it    stalled: a message was lost
    silent for timeout_s, but one of them does other work        it waits for its turn
    silent for MAX_TURN times timeout_s                          stalled: no turn takes that long

Before that, the log says what those wait for that have made none for a while:

    not placed     an answer of a worker that was asked, or room
    placed         groups at encoders, or what its prefill worker does, frames included
    handed over    tokens of its decode worker
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from epd.machine import Looks, excused
from epd.serve_app.messages import WorkerLoad, WorkerReport
from epd.serve_app.orchestration.requests import Attempt, Outcome, Shared

logger = logging.getLogger(__name__)

_MAX_LOOK_S = 5.0  # between looks
_SAY_AFTER_S = 30.0  # without progress, and between lines about it
_MAX_NAMED = 3  # requests that are named for each reason
MAX_TURN = 10


class Watchdog:
    """Ends stalled attempts and counts them under "stalls"."""

    def __init__(self, shared: Shared) -> None:
        """Starts without reports."""
        self._attempts = shared.requests.attempts
        self._counters = shared.requests.counters
        self._clock = shared.requests.clock
        self._dispatcher = shared.dispatcher
        self._timeout_s = shared.config.stall_timeout_s
        self._progress_s: dict[str, float] = {}
        self._loads: dict[str, WorkerLoad] = {}
        self._said_s = self._clock()

    def reported(self, report: WorkerReport) -> None:
        """Notes the progress of a worker: an event or output it reports, or counters that have grown."""
        before = self._loads.get(report.worker)
        if report.events or report.outputs or before is None or _done(report.load) != _done(before):
            self._progress_s[report.worker] = self._clock()
        self._loads[report.worker] = report.load

    async def run(self) -> None:
        every_s = min(self._timeout_s / 4, _MAX_LOOK_S)
        looks = Looks(every_s, self._clock())
        while True:
            await asyncio.sleep(every_s)
            self._excuse(looks.late_s(self._clock()))
            self.look()

    def _excuse(self, late_s: float) -> None:
        """Leaves out a time without a core, in which nothing could be heard of anybody."""
        now_s = self._clock()
        for attempt in self._attempts.values():
            attempt.event_s = excused(attempt.event_s, late_s, now_s)
        for worker, progress_s in self._progress_s.items():
            self._progress_s[worker] = excused(progress_s, late_s, now_s)

    def look(self) -> None:
        """Ends stalled attempts."""
        watched = [self._watched(each) for each in self._attempts.values() if each.status.is_running]
        for attempt_id in stalled(watched, self._progress_s, self._clock(), self._timeout_s):
            attempt = self._attempts[attempt_id]
            self._counters["stalls"] += 1
            at = sorted(attempt.workers)
            logger.warning("attempt %s made no progress while %s at %s", attempt_id, attempt.status, at)
            attempt.end(Outcome.LOST)
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
                (each.id, _awaited(each, self._dispatcher.encoders_of(each.id), now_s)) for each in silent
            ]
            logger.warning("requests without progress for %.0f s or more: %s", _SAY_AFTER_S, _summary(waits))

    def _silent_s(self, attempt: Attempt, now_s: float) -> float:
        """Returns the time since the last event of an attempt; 0 if it has ended."""
        return 0.0 if attempt.has_ended else now_s - attempt.event_s

    def _watched(self, attempt: Attempt) -> Watched:
        encoders = self._dispatcher.encoders_of(attempt.id)
        return Watched(attempt.id, attempt.workers | encoders, max(attempt.event_s, attempt.started_s))


def _done(load: WorkerLoad) -> WorkerLoad:
    """Returns the part of a load that changes with progress alone."""
    return replace(load, kv_usage=None, encoder_cache_usage=None, seq_usage=None, work=None)


def _awaited(attempt: Attempt, encoders: Iterable[str], now_s: float) -> str:
    """Returns what an attempt waits for.

    encoders: those that have groups of it. now_s: Unix time
    """
    asked = sorted(worker for worker, number in attempt.asking.items() if number)
    if asked:
        return f"an answer of {', '.join(asked)}"
    if not attempt.is_placed:
        is_undecided = now_s < attempt.undecided_until_s
        return "what other fronts lost" if is_undecided else _room(attempt)
    if attempt.moving_to:
        return f"its move from {attempt.decode_worker} to {attempt.moving_to}"
    if attempt.is_handed_over:
        return f"tokens of {attempt.decode_worker}"
    groups = sorted(encoders)
    return f"groups at {', '.join(groups)}" if groups else f"the prompt at {attempt.prefill_worker}"


def _room(attempt: Attempt) -> str:
    return "room at a worker of its own" if attempt.isolated_at else "room"


def _summary(waits: Iterable[tuple[str, str]]) -> str:
    """Returns a line about attempts: how many wait for what, with some of their ids.

    waits: an attempt's id, and what it waits for
    """
    by_reason: dict[str, list[str]] = defaultdict(list)
    for attempt_id, reason in waits:
        by_reason[reason].append(attempt_id)
    rows = sorted(by_reason.items(), key=lambda each: (-len(each[1]), each[0]))
    return "; ".join(f"{len(ids)} for {reason} ({_named(ids)})" for reason, ids in rows)


def _named(ids: list[str]) -> str:
    return ", ".join(ids[:_MAX_NAMED]) + (", ..." if len(ids) > _MAX_NAMED else "")


@dataclass(frozen=True, slots=True)
class Watched:
    """Watches an attempt that workers have. event_s: time of its last event."""

    attempt_id: str
    workers: frozenset[str]
    event_s: float


def stalled(
    attempts: Iterable[Watched], progress_s: Mapping[str, float], now_s: float, timeout_s: float
) -> list[str]:
    """Returns the ids of stalled attempts. Times in seconds on one clock.

    progress_s: time of each worker's last progress with anything.
    """

    def is_stalled(each: Watched) -> bool:
        silent_s = now_s - each.event_s
        idle_s = now_s - max(
            (progress_s.get(name, each.event_s) for name in each.workers), default=each.event_s
        )
        return silent_s > MAX_TURN * timeout_s or min(silent_s, idle_s) > timeout_s

    return [each.attempt_id for each in attempts if is_stalled(each)]
