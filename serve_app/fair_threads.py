"""Gives owners their turns, in one event loop: of anything, or of threads for blocking work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from epd.control.fair_share import FairShare

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    owner: object
    begins: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairTurns:
    """Lets owners do something at most so often at once, and each at most `max_per_owner` times."""

    def __init__(self, num_slots: int, max_per_owner: int) -> None:
        self._share: FairShare[object, _Turn] = FairShare(num_slots, max_per_owner)

    @contextlib.asynccontextmanager
    async def turn(self, owner: object) -> AsyncIterator[None]:
        """Waits for a turn of the owner, which lasts while the block runs."""
        await self.take(owner)
        try:
            yield
        finally:
            self.release(owner)

    async def take(self, owner: object) -> None:
        """Waits for a turn, which lasts until `release`."""
        turn = _Turn(owner)
        self._share.ask(owner, turn)
        self._admit()
        try:
            await turn.begins
        except asyncio.CancelledError:
            if turn.begins.cancelled():
                with contextlib.suppress(ValueError):  # it was admitted meanwhile, and `_admit` has seen it
                    self._share.leave(owner, turn)
            else:
                self.release(owner)
            raise

    def release(self, owner: object) -> None:
        self._share.release(owner)
        self._admit()

    def _admit(self) -> None:
        while turns := self._share.admit():
            for turn in turns:
                if turn.begins.cancelled():
                    self._share.release(turn.owner)
                else:
                    turn.begins.set_result(None)

    @property
    def num_held(self) -> int:
        return self._share.num_held


class FairThreads:
    """Runs work of each owner in at most `max_per_owner` threads. Used from one event loop."""

    def __init__(self, name: str, num_threads: int, max_per_owner: int) -> None:
        self._turns = FairTurns(num_threads, max_per_owner)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(
        self, owner: object, work: Callable[[], ResultT], cancel: Callable[[], None] | None = None
    ) -> ResultT:
        """Runs `work` in a thread once it is the owner's turn. Returns its result, or raises what it raises.

        cancel: makes the work end early, from another thread; called if the caller is cancelled. The thread
        still counts as busy until the work has ended.
        """
        await self._turns.take(owner)
        done = asyncio.wrap_future(self._threads.submit(work))
        done.add_done_callback(lambda _: self._ended(owner, done))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if cancel is not None:
                cancel()
            raise

    def _ended(self, owner: object, done: asyncio.Future[ResultT]) -> None:
        if not done.cancelled():
            done.exception()  # of work whose caller was cancelled, which is not read otherwise
        self._turns.release(owner)

    @property
    def num_busy(self) -> int:
        """Returns the number of busy threads."""
        return self._turns.num_held

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
