"""Says what requests wait for: for the log of a front whose requests make no progress.

not placed     an answer of a worker that was asked, or room
placed         groups at encoders, or what its prefill worker does, frames included
handed over    tokens of its decode worker
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from epd.serve_app.orchestration.attempt import Attempt

_MAX_NAMED = 3  # requests that are named for each reason


def awaited(attempt: Attempt, encoders: Iterable[str], now_s: float) -> str:
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


def summary(waits: Iterable[tuple[str, str]]) -> str:
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
