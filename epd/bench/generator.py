"""Sends requests at their times, independent of the others: an open loop.

The only bound is the stated maximum in flight. A request that exceeds it waits, in order; that and every
other delay of the sender is its lateness, which the report shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from epd.bench.client import ChatReply
from epd.client.body import Body
from epd.workload.metrics import ClientRecord

# Time for the first request's task to exist before it is due.
_LEAD_S = 0.05


class Client(Protocol):
    """Sends one request and reads its answer."""

    def now_s(self) -> float: ...

    async def ask(self, body: Body, /) -> ChatReply: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """Holds a request whose bytes are ready. due_s: from the start of the run."""

    index: int
    due_s: float
    body: Body


async def run_load(
    client: Client,
    requests: Sequence[Prepared],
    *,
    max_in_flight: int,
    is_open_loop: bool = True,
    on_done: Callable[[], None] = lambda: None,
) -> list[ClientRecord]:
    """Sends every request when it is due and waits for all answers; returns records in the order of sending.

    is_open_loop: False sends the next as soon as there is a place, with max_in_flight always under way.
    """
    run = _OpenLoop(
        client, asyncio.Semaphore(max_in_flight), client.now_s() + _LEAD_S * is_open_loop, on_done
    )
    tasks = []
    async with asyncio.TaskGroup() as group:
        for request in requests:
            if is_open_loop:
                await run.sleep_until(request.due_s)
            else:
                await run.places.acquire()
            tasks.append(group.create_task(run.send(request, has_place=not is_open_loop)))
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class _OpenLoop:
    """Runs one load. start_s: its zero on the client's clock."""

    client: Client
    places: asyncio.Semaphore
    start_s: float
    on_done: Callable[[], None]

    async def sleep_until(self, time_s: float) -> None:
        await asyncio.sleep(max(0.0, self.start_s + time_s - self.client.now_s()))

    async def send(self, request: Prepared, *, has_place: bool) -> ClientRecord:
        waits = not has_place and self.places.locked()
        if not has_place:
            await self.places.acquire()
        try:
            reply = await self.client.ask(request.body)
        finally:
            self.places.release()
        self.on_done()
        return self._record(request, reply, is_due_when_sent=has_place, waited=waits)

    def _record(
        self, request: Prepared, reply: ChatReply, *, is_due_when_sent: bool, waited: bool
    ) -> ClientRecord:
        sent_s = reply.sent_s - self.start_s
        return ClientRecord(
            index=request.index,
            # A timer may fire within its resolution of the time it was set for.
            due_s=sent_s if is_due_when_sent else min(request.due_s, sent_s),
            sent_s=sent_s,
            end_s=reply.end_s - self.start_s,
            token_times_s=tuple(time_s - self.start_s for time_s in reply.token_times_s),
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            error=reply.error.kind if reply.error else None,
            detail=reply.error.detail if reply.error else "",
            waited_for_place=waited,
        )
