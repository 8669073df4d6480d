"""Says how many media and lines a batch asks about at once, by the workers that answer."""

from __future__ import annotations

import math

from epd.client.endpoint import Endpoint, get
from epd.errors import EPDError

# Media of a server or worker at once, where the lines of each are many.
MAX_TASKS = 4
# Lines of a server or worker: at least, and those that fill the passes of an engine.
MAX_REQUESTS, _FULL_REQUESTS = 16, 32
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
    return max(MAX_REQUESTS, min(_FULL_REQUESTS, _MAX_WAITING // num_workers))


def media_at_once(num_lines: int, lines_per_medium: float) -> int:
    """Returns how many media keep so many lines in flight. Some, since their first lines go alone."""
    return max(MAX_TASKS, math.ceil(num_lines / lines_per_medium))
