"""Manages background tasks so that none is lost or left behind."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
_MAX_FAILURES = 8  # in a row, about 20 s
_GOOD_S = 60.0  # a loop that ran this long has its failure count reset

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Tasks:
    """Runs the tasks of one owner. Failures are logged, as tasks are not awaited."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in the order of their start

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a background task failed", exc_info=task.exception())

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def wait(self) -> None:
        """Waits until all tasks have ended, including those they start."""
        while running := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(running)


class Loops:
    """Runs essential loops. A loop that raises is restarted, after increasing pauses.

    gone: loops that failed too often in a row and are no longer restarted. Failures are counted under
    "loop_failures".
    """

    def __init__(self, counters: Counter[str], on_gone: Callable[[str], None] | None = None) -> None:
        """Starts without loops. on_gone: called with the name of a loop that is no longer restarted."""
        self.gone: list[str] = []
        self._counters = counters
        self._on_gone = on_gone
        self._tasks = Tasks()

    def start(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]], *, is_vital: bool = True
    ) -> None:
        """Runs a loop until it returns, or `close`. work: makes a new run of it.

        is_vital: whether the service depends on it, so that it is listed in `gone`
        """
        self._tasks.spawn(self._keep(name, work, is_vital=is_vital))

    async def close(self) -> None:
        self._tasks.cancel()
        await self._tasks.wait()

    async def _keep(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]], *, is_vital: bool
    ) -> None:
        num_failures = 0
        while num_failures < _MAX_FAILURES:
            start_s = time.monotonic()
            try:
                await work()
            except Exception:  # a bug in one round must not stop all later ones
                logger.exception("the loop '%s' failed; it is started again", name)
                self._counters["loop_failures"] += 1
            else:
                return
            num_failures = num_failures + 1 if time.monotonic() - start_s < _GOOD_S else 1
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2**num_failures, _MAX_PAUSE_S))
        logger.critical("the loop '%s' failed %d times in a row and is gone", name, num_failures)
        if not is_vital:
            return
        self.gone.append(name)
        if self._on_gone is not None:
            self._on_gone(name)
