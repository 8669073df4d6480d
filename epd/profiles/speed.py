"""Measures the current speed of a core: the same small work repeatedly, by the CPU time that it takes.

Cores of rented machines share hardware with other tenants. Their use is in no load average, but the same
work takes up to half as long again meanwhile. A profile keeps the speed that it was measured at.
"""

from __future__ import annotations

import threading
import time
from typing import Self

_PIECE, _PAUSE_S = 20_000, 0.02


def _piece_s() -> float:
    """Returns the CPU seconds of a piece of work, on this thread."""
    start_s = time.thread_time()
    sum(range(_PIECE))
    return time.thread_time() - start_s


def core_speed(seconds: float) -> float:
    """Measures pieces of work per CPU second, for the given number of seconds."""
    end_s, taken = time.perf_counter() + seconds, [_piece_s()]
    while time.perf_counter() < end_s:
        taken.append(_piece_s())
    return len(taken) / sum(taken)


class SpeedSampler:
    """Measures the same on a thread of its own while other work runs: 1 or 2 % of a core."""

    def __init__(self) -> None:
        self._taken: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="core-speed", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._taken or not self._is_over.wait(_PAUSE_S):
            self._taken.append(_piece_s())

    @property
    def core_speed(self) -> float:
        """Returns the speed, once entered and left."""
        return len(self._taken) / sum(self._taken)
