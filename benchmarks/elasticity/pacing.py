"""Lets calls of a worker last as long as if it had a device of its own, for every benchmark that paces."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

Encode = Callable[[Sequence[Any]], Any]


def wait_out(start: float, seconds: float) -> bool:
    """Waits until so many seconds after the start. Returns whether it was later than that already."""
    left = seconds - (time.perf_counter() - start)
    time.sleep(max(0.0, left))
    return left < 0


def paced_tower(
    encode: Encode,
    seconds: Callable[[Sequence[Any]], float],
    wait: Callable[[float, float], object] = wait_out,
) -> Encode:
    """Returns a call of the tower that lasts longer; nobody gets its embeddings before it ends.

    seconds: by the runs of patches of a call
    wait: gets the start of a call and how long it lasts
    """

    def paced(runs: Sequence[Any]) -> Any:
        start = time.perf_counter()
        embeddings = encode(runs)
        wait(start, seconds(runs))
        return embeddings

    return paced
