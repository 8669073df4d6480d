"""Gives owners their turns, in one event loop: of anything, or of threads for blocking work.

Each owner of slots has a limit, and the owner with the fewest is next, in turn:

slots  [ a ][ a ][ b ]        waiting   a: 5 more   b: 1   c: 2        next: c, which has none
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

OwnerT = TypeVar("OwnerT", bound=Hashable)
TicketT = TypeVar("TicketT", bound=Hashable)
ResultT = TypeVar("ResultT")


class FairShare(Generic[OwnerT, TicketT]):
    """Queues tickets of owners for slots; owners take turns, those with the fewest slots first."""

    def __init__(self, num_slots: int, max_per_owner: int) -> None:
        self._num_free = num_slots
        self._max_per_owner = max_per_owner
        self._waiting: OrderedDict[OwnerT, deque[TicketT]] = OrderedDict()
        self._held: Counter[OwnerT] = Counter()

    def ask(self, owner: OwnerT, ticket: TicketT) -> None:
        """Queues a ticket behind those of the same owner."""
        self._waiting.setdefault(owner, deque()).append(ticket)

    def leave(self, owner: OwnerT, ticket: TicketT) -> None:
        """Forgets a ticket that waits. Raises ValueError for any other."""
        tickets = self._waiting.get(owner, deque())
        tickets.remove(ticket)
        if not tickets:
            del self._waiting[owner]

    def release(self, owner: OwnerT) -> None:
        """Frees a slot of the owner."""
        self._num_free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]

    def admit(self) -> list[TicketT]:
        """Gives free slots to waiting tickets. Returns those that now have one, in order."""
        admitted = []
        while self._num_free and (owner := self._next()) is not None:
            admitted.append(self._waiting[owner].popleft())
            self._held[owner] += 1
            self._num_free -= 1
            self._waiting.move_to_end(owner)
            if not self._waiting[owner]:
                del self._waiting[owner]
        return admitted

    def _next(self) -> OwnerT | None:
        ready = [owner for owner in self._waiting if self._held[owner] < self._max_per_owner]
        return min(ready, key=lambda owner: self._held[owner], default=None)

    @property
    def num_held(self) -> int:
        """Returns the number of slots in use."""
        return self._held.total()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))


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


class LoopTurns(FairTurns):
    """Begins at most `num_slots` things in a turn of the event loop; all else that is ready goes first."""

    def __init__(self, num_slots: int, max_per_owner: int) -> None:
        super().__init__(num_slots, max_per_owner)
        self._loop: asyncio.AbstractEventLoop | None = None  # that is to admit in its next turn

    def _admit(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._admit_now)

    def _admit_now(self) -> None:
        self._loop = None
        super()._admit()


_ANY = 2**31  # slots


class FairThreads:
    """Runs work of each owner in at most `max_per_owner` threads. Used from one event loop.

    Where owners are requests, their clients take turns, and no client has the last threads:

    client a: request 1 [2 of its 9]  request 2 [1]    client b: request 3 [1]        next: b, then a
    """

    def __init__(self, name: str, num_threads: int, max_per_owner: int, num_for_others: int = 0) -> None:
        """num_for_others: threads that one client cannot have."""
        self._own = FairTurns(_ANY, max_per_owner)
        self._turns = FairTurns(num_threads, num_threads - num_for_others)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(
        self,
        owner: object,
        work: Callable[[], ResultT],
        cancel: Callable[[], None] | None = None,
        client: str = "",
    ) -> ResultT:
        """Runs `work` in a thread once it is the owner's turn. Returns its result, or raises what it raises.

        client: of the owner; empty where owners have none
        cancel: makes the work end early, from another thread; called if the caller is cancelled. The thread
        still counts as busy until the work has ended.
        """
        whose = client or owner
        await self._own.take(owner)
        try:
            await self._turns.take(whose)
        except BaseException:
            self._own.release(owner)
            raise
        done = asyncio.wrap_future(self._threads.submit(work))
        done.add_done_callback(lambda _: self._ended(owner, whose, done))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if cancel is not None:
                cancel()
            raise

    def _ended(self, owner: object, whose: object, done: asyncio.Future[ResultT]) -> None:
        if not done.cancelled():
            done.exception()  # of work whose caller was cancelled, which is not read otherwise
        self._turns.release(whose)
        self._own.release(owner)

    @property
    def num_busy(self) -> int:
        """Returns the number of busy threads."""
        return self._turns.num_held

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
