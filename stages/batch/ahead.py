"""Runs the stages of a batch before the language model, each in a thread of its own.

    plan    | v0 | v1 | v2 |
    decode       | v0 g0 | v0 g1 | v1 g0 | ...
    encode               | v0 g0 | v0 g1 | v1 g0 | ...

Queues between them hold limited bytes, so that a faster stage waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, TypeVar

from epd.stages.batch.jobs import BatchJob, EmbeddingItem
from epd.stages.group_driver import GroupDriver, MediaJob
from epd.stages.media import DecodedGroup
from epd.transfer.bounded_queue import BoundedQueue, QueueClosed

T = TypeVar("T")

_MAX_PLANNED = 4
_MAX_FRAME_BYTES = 64 << 20
_MAX_EMBEDDING_BYTES = 64 << 20
JOIN_S = 30.0


class Ahead(BoundedQueue[T]):
    """Runs a stage in a thread, ahead of its reader by a limited weight of items."""

    def __init__(
        self, name: str, items: Generator[T, None, None], max_weight: int, weight: Callable[[T], int]
    ) -> None:
        """Starts the thread. items: closed by it when the reader leaves."""
        super().__init__(max_weight)
        self._stage = items
        self._weight_of = weight
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with closing(self._stage):
                for item in self._stage:
                    self.put(item, self._weight_of(item))
        except QueueClosed:
            return
        except BaseException as error:  # noqa: BLE001 - raised again where the items are read
            self._error = error
        self.end()

    def get(self, timeout_s: float | None = None) -> T | None:
        """Returns the next item; None after the timeout.

        Raises QueueClosed after the last one, or what the stage has raised.
        """
        try:
            return super().get(timeout_s)
        except QueueClosed:
            if self._error is not None:
                raise self._error from None
            raise

    def join(self) -> None:
        self._thread.join(JOIN_S)


class MediaThreads:
    """Runs a driver's stages, each ahead of the next. embeddings: what comes of them."""

    def __init__(self, driver: GroupDriver[BatchJob], jobs: Iterator[BatchJob]) -> None:
        planned = Ahead("batch-plan", driver.planned(jobs), _MAX_PLANNED, lambda _: 1)
        frames = Ahead("batch-decode", driver.decoded(planned), _MAX_FRAME_BYTES, _num_bytes)
        self.embeddings = Ahead("batch-encode", driver.encoded(frames), _MAX_EMBEDDING_BYTES, _num_bytes)
        self._stages: tuple[Ahead[Any], ...] = (planned, frames, self.embeddings)

    def close(self) -> None:
        """Ends all stages and waits for their threads."""
        for stage in self._stages:
            stage.close()
        for stage in self._stages:
            stage.join()


def _num_bytes(item: DecodedGroup | EmbeddingItem) -> int:
    """Returns the memory that an item holds."""
    if isinstance(item, MediaJob):
        return item.num_bytes
    if isinstance(item, DecodedGroup):
        return item.frames.nbytes
    if isinstance(item, tuple):
        embeddings = item[1]
        return (1 + len(embeddings.deepstack)) * embeddings.rows.nbytes
    return 0
