"""Asks workers to take an attempt or to reserve room for it; one that is lost meanwhile has not answered."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from epd.errors import EPDError
from epd.kv.kv_identity import TokenIdentity
from epd.serve_app.fleet import Fleet, WorkerLostError
from epd.serve_app.messages import Abort, Message, Prefill, Redirect, ReplyT, Reserve, endpoint
from epd.serve_app.orchestration.attempt import Attempt, Ending
from epd.serve_app.orchestration.losses.loss_counter import LossCounter
from epd.serve_app.orchestration.room_books import RoomBooks
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage
from epd.transfer.connectors import KVTicket


class SeenWorker(NamedTuple):
    """Says of a worker what a loss would change."""

    is_alive: bool
    incarnation: int


Seen = list[SeenWorker]


class WorkerQuestions:
    """Sends messages about attempts. books: the room that decode workers were asked for."""

    def __init__(self, fleet: Fleet, losses: LossCounter, books: RoomBooks, asking: Counter[str]) -> None:
        """Starts without questions. asking: counts those that a worker has not answered yet."""
        self.fleet = fleet
        self.books = books
        self._losses = losses
        self._asking = asking

    async def give(self, attempt: Attempt, message: Prefill | Redirect, seen: Seen) -> bool:
        """Hands an attempt to its prefill worker, unless one of its workers has been lost or restarted.

        A message that names a lost decode worker must not come after `PeerLost`, which cleans up for that
        worker; and nothing else would detect a loss while the message is in transit.
        """
        if self.seen(attempt) != seen:
            return False
        is_taken = await self.ask(attempt, "prefill", attempt.prefill_worker, message)
        if is_taken and self.seen(attempt) != seen:
            await self.abort(attempt, attempt.prefill_worker)
            is_taken = None
        attempt.is_withdrawn = is_taken is None
        return bool(is_taken)

    async def reserve(self, attempt: Attempt, worker: str) -> KVTicket | None:
        """Reserves room for what the attempt's prefill worker computes; None where there is none."""
        asked = self.books.ask(worker, num_held_tokens(attempt), attempt.answer.plan.sampling.n)
        ticket: KVTicket | None = None
        try:
            ticket = await self.ask(attempt, "decode", worker, self.reservation(attempt))
            return ticket
        finally:
            self.books.answer(worker, asked, is_taken=ticket is not None)

    def reservation(self, attempt: Attempt) -> Reserve:
        """Returns the message that reserves room for what the attempt's prefill worker computes."""
        identity = attempt.answer.plan.identity
        return self.reservation_from(attempt, attempt.prefill_worker, "prefill", identity)

    def reservation_from(
        self, attempt: Attempt, worker: str, stage: Stage, identity: TokenIdentity
    ) -> Reserve:
        plan, incarnation = attempt.answer.plan, self.info(worker).incarnation
        return Reserve(
            attempt.id, endpoint(worker, stage), identity, plan.sampling, incarnation, plan.prompt.num_dropped
        )

    async def ask(
        self, attempt: Attempt, stage: Stage, worker: str, message: Message[ReplyT]
    ) -> ReplyT | None:
        """Returns a worker's reply; None from a lost worker."""
        self._asking[worker] += 1
        try:
            with self._losses.asking(attempt, worker):
                return await self.fleet.send(stage, worker, message)
        except WorkerLostError:
            return None
        finally:
            self._asking[worker] -= 1

    async def abort(self, attempt: Attempt, worker: str) -> None:
        try:
            await self.fleet.send("decode", worker, Abort((attempt.id,)))
        except WorkerLostError:
            return

    def seen(self, attempt: Attempt) -> Seen:
        """Returns its two workers, prefill first, as far as a loss would change them."""
        infos = [self.info(name) for name in (attempt.prefill_worker, attempt.decode_worker)]
        return [SeenWorker(info.is_alive, info.incarnation) for info in infos]

    def info(self, worker: str) -> WorkerInfo:
        return self.fleet.workers.get(worker) or WorkerInfo(worker, frozenset(), is_alive=False)

    async def ask_or_redo(
        self, attempt: Attempt, stage: Stage, worker: str, message: Message[bool]
    ) -> bool | None:
        """Asks as `ask` does. If it is unknown whether the message was handled, the request is retried."""
        try:
            return await self.ask(attempt, stage, worker, message)
        except EPDError:
            attempt.end(Ending.TAKEN_BACK)
            raise


def num_held_tokens(attempt: Attempt) -> int:
    """Returns the tokens that a decode worker holds of a prompt."""
    prompt = attempt.answer.plan.prompt
    return len(prompt) - prompt.num_dropped
