"""Finds stalled attempts at requests: without progress for too long, and without a good reason. No I/O.

    silent for timeout_s, and so are all workers that have it    stalled: a message was lost
    silent for timeout_s, but one of them does other work        it waits for its turn
    silent for MAX_TURN times timeout_s                          stalled: no turn takes that long

Time is passed in, in seconds on any one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MAX_TURN = 10


@dataclass(frozen=True, slots=True)
class Watched:
    """Watches an attempt that workers have. event_s: time of its last event."""

    attempt_id: str
    workers: frozenset[str]
    event_s: float


def stalled(
    attempts: Iterable[Watched], progress_s: Mapping[str, float], now_s: float, timeout_s: float
) -> list[str]:
    """Returns the ids of stalled attempts. progress_s: time of each worker's last progress with anything."""

    def is_stalled(each: Watched) -> bool:
        silent_s = now_s - each.event_s
        idle_s = now_s - max(
            (progress_s.get(name, each.event_s) for name in each.workers), default=each.event_s
        )
        return silent_s > MAX_TURN * timeout_s or min(silent_s, idle_s) > timeout_s

    return [each.attempt_id for each in attempts if is_stalled(each)]
