"""Connects two threads by a queue whose total weight is bounded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class QueueClosed(Exception):
    """Says that the queue has ended, or that its reader has left."""


class BoundedQueue(Generic[T]):
    """Queues items first in, first out. An item heavier than the limit enters when the queue is empty."""

    def __init__(self, max_weight: int) -> None:
        self._max_weight = max_weight
        self._items: deque[tuple[T, int]] = deque()
        self._weight = 0
        self._changed = threading.Condition()
        self._is_ended = False
        self._is_closed = False

    def put(self, item: T, weight: int = 0) -> None:
        """Waits for room. Raises QueueClosed when the queue is closed, also while waiting."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_room(weight))
            if self._is_closed:
                raise QueueClosed
            self._items.append((item, weight))
            self._weight += weight
            self._changed.notify_all()

    def _has_room(self, weight: int) -> bool:
        return not self._items or self._weight + weight <= self._max_weight

    def get(self, timeout_s: float | None = None) -> T | None:
        """Returns the oldest item; None after the timeout. Raises QueueClosed after the last one."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_ended or self._is_closed, timeout_s)
            if self._is_closed or (self._is_ended and not self._items):
                raise QueueClosed
            if not self._items:
                return None
            item, weight = self._items.popleft()
            self._weight -= weight
            self._changed.notify_all()
            return item

    def __iter__(self) -> Iterator[T]:
        """Yields everything until the end; stops at once when the queue is closed."""
        while True:
            try:
                item = self.get()
            except QueueClosed:
                return
            assert item is not None
            yield item

    def end(self) -> None:
        """Ends the queue for writers; its items can still be taken."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Drops all items and wakes all waiting threads."""
        with self._changed:
            self._is_closed = True
            self._items.clear()
            self._weight = 0
            self._changed.notify_all()
