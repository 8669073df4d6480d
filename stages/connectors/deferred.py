"""Delays messages about memory until the device has read or written it.

launch a copy | add("it is there") |  ...  | flush: is the copy done? then it is said
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from epd.stages.completion import Completion, recorded


class Deferred:
    """Makes calls in the order in which they were added, each once everything queued before it is done.

    On a CPU, all is done when a call returns: nothing is ever delayed.
    """

    def __init__(self, device: torch.device) -> None:
        """Begins empty. device: that the work is queued on, in its current stream."""
        self._device = device
        self._calls: deque[tuple[Completion, Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Callable[[], None]) -> None:
        """Adds a call about what has been queued on the device so far, and makes those that are due."""
        self._calls.append((recorded(self._device), call))
        self.flush()

    def flush(self) -> None:
        """Makes the calls that are due."""
        while self._calls and self._calls[0][0].is_done():
            self._calls.popleft()[1]()
