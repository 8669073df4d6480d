"""Shares the process's decoding threads among all requests, ordered by deadline.

A task is done in short steps. After each it goes back into the queue, so that a more urgent one may pass; a
task that has to wait for its consumer is parked and holds no thread.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import os
import threading
import time
from functools import cache
from typing import Literal, Protocol

from epd.machine import usable_cpus

StepResult = Literal["again", "parked", "done"]
EXIT_WAIT_S = 2.0


class Task(Protocol):
    """Work that is done in steps."""

    @property
    def deadline_s(self) -> float:
        """When the result of the next step is needed, on the monotonic clock; the earliest goes first."""

    def step(self) -> StepResult:
        """Work for some milliseconds; the code that wakes a parked task submits it again. Never raises."""


class DecodePool:
    """Threads that take the most urgent task, do one step of it, and look again."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.busy_s = 0.0  # of all threads together
        self._queue: list[tuple[float, int, Task]] = []
        self._order = itertools.count()
        self._ready = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._is_closed = False

    def submit(self, task: Task) -> None:
        """Queue a task; a thread is started if none is free."""
        with self._ready:
            heapq.heappush(self._queue, (task.deadline_s, next(self._order), task))
            if len(self._queue) > self._num_idle and len(self._threads) < self.num_threads:
                self._start_thread()
            self._ready.notify()

    def close(self) -> None:
        """Stop the threads after the step each of them is in."""
        with self._ready:
            self._is_closed = True
            self._queue.clear()
            self._ready.notify_all()
        for thread in self._threads:
            thread.join(EXIT_WAIT_S)

    def _start_thread(self) -> None:
        name = f"video-decode-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (task := self._take()) is not None:
            start_s = time.monotonic()
            result = task.step()
            with self._ready:
                self.busy_s += time.monotonic() - start_s
            if result == "again":
                self.submit(task)

    def _take(self) -> Task | None:
        with self._ready:
            while not self._queue and not self._is_closed:
                self._num_idle += 1
                self._ready.wait()
                self._num_idle -= 1
            return None if self._is_closed else heapq.heappop(self._queue)[2]


@cache
def num_decode_threads() -> int:
    """Returns the CPUs that this process may use; a media child knows what its parent had looked up."""
    return usable_cpus()


_pool: DecodePool | None = None
_pool_lock = threading.Lock()


def shared_pool() -> DecodePool:
    """Returns the pool of this process, with one thread for each CPU it may use."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = DecodePool(num_decode_threads())
        return _pool


def _close_shared_pool() -> None:
    if _pool is not None:
        _pool.close()


def _forget_after_fork() -> None:
    """Drops the pool in a forked child, which has none of the threads and makes its own."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


atexit.register(_close_shared_pool)
os.register_at_fork(after_in_child=_forget_after_fork)
