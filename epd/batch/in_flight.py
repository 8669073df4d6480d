"""Says how many media and lines a batch asks about at once, by the workers that answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from epd.client.endpoint import Endpoint, get
from epd.errors import EPDError

# Media of a server or worker at once, where the lines of each are many.
MAX_TASKS = 4
# Lines of a server or worker: at least, and those that fill the passes of an engine, 64 by default.
MAX_REQUESTS, FULL_REQUESTS = 16, 64
# In one process some more: planned, with their images decoded, they take the places of those that end.
# A server refuses those that wait too long, and has other users.
OWN_REQUESTS = FULL_REQUESTS + 16
# That wait at a server. It refuses more.
_MAX_WAITING = 256


def num_workers(endpoint: Endpoint) -> int:
    """Returns how many workers of a server prefill: 1 where it does not say, or does not answer."""
    try:
        workers = get(endpoint, "/v1/epd/status", "ask again").json()["workers"]
        return max(1, sum("p" in each["roles"] for each in workers))
    except (EPDError, ValueError, LookupError, TypeError):
        return 1


def lines_at_once(num_workers: int) -> int:
    """Returns how many lines each of a server's workers is asked at once, fewer of many workers."""
    return max(MAX_REQUESTS, min(FULL_REQUESTS, _MAX_WAITING // num_workers))


def media_at_once(num_lines: int, lines_per_medium: float) -> int:
    """Returns how many media keep so many lines in flight. Some, since their first lines go alone."""
    return max(MAX_TASKS, math.ceil(num_lines / lines_per_medium))


@dataclass(frozen=True, slots=True)
class InFlight:
    """Says how many media and lines are asked about at once, at all servers.

    num_workers: of each server, where places follow them.
    media_of_worker, lines_of_worker: for each worker that joins a server.
    """

    media: int
    lines: int
    num_workers: tuple[int, ...] = ()
    media_of_worker: int = 0
    lines_of_worker: int = 0

    @classmethod
    def at(cls, endpoints: Sequence[Endpoint], lines_per_medium: float, media: int | None) -> Self:
        """Looks at the workers of servers. lines_per_medium: mean of the input.

        media: instead, which then stays.
        """
        workers = tuple(map(num_workers, endpoints))
        num_lines = lines_at_once(math.ceil(sum(workers) / len(endpoints)))
        lines = num_lines * sum(workers)
        if media is not None:
            return cls(media, max(media, lines))
        of_worker = media_at_once(num_lines, lines_per_medium)
        return cls(of_worker * sum(workers), lines, workers, of_worker, num_lines)
