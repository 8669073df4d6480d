"""Remembers which other workers a worker has met: to one that it has not met, it can send nothing yet.

board --views--> fronts     a front may have seen a newer view than the worker that it sends a message to:
      --views--> workers    the message waits until the worker has met the one that it names
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

from epd.control.recent import Recent
from epd.serve_app.messages import Message
from epd.serve_app.worker.peer_losses import named_peer

_MAX_EPOCHS = 1024


class MetWorker(Protocol):
    """Names a worker in one epoch. incarnation: of the name, from 1."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def epoch(self) -> str: ...


class KnownPeers:
    """Remembers those that views have shown, also after their loss. Used from one event loop."""

    def __init__(self, patience_s: float) -> None:
        """Begins with none.

        patience_s: the longest that a message waits; a worker whose views are later than that is lost itself
        """
        self._epochs: Recent[str, bool] = Recent(_MAX_EPOCHS)
        self._incarnations: dict[str, int] = {}  # the latest, by name
        self._patience_s = patience_s
        self._changed = asyncio.Event()

    def meet(self, workers: Iterable[MetWorker]) -> None:
        """Notes the workers of a view, and this one itself."""
        for worker in workers:
            self._epochs.set(worker.epoch, True)
            latest = self._incarnations.get(worker.name, 0)
            self._incarnations[worker.name] = max(latest, worker.incarnation)
        self._changed.set()
        self._changed = asyncio.Event()

    def knows(self, epoch: str) -> bool:
        """Returns whether a worker in this epoch has been in a view."""
        return self._epochs.get(epoch) is not None

    def is_ready_for(self, message: Message[Any]) -> bool:
        """Returns whether the worker that a message names has been met, or a later one of its name."""
        named = named_peer(message)
        return named is None or named.incarnation <= self._incarnations.get(named.name, 0)

    async def wait_for(self, message: Message[Any]) -> None:
        """Returns when the worker that a message names has been met, or would have been if it were there."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                while not self.is_ready_for(message):
                    await self._changed.wait()
