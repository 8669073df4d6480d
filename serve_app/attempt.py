"""One try at answering a request: which workers have it, the groups on their way, how it ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from enum import StrEnum

from epd.errors import EPDError
from epd.routing import Router
from serve_app.live_answer import LiveAnswer


class Ending(StrEnum):
    """How a try ends, if not by an error."""

    COMPLETE = "complete"
    LOST = "lost"  # with a worker: the request is to be done again
    TAKEN_BACK = "taken back"  # from a worker that changes its roles: it is given to others


class Attempt:
    """A try. id: what workers know the request by.

    prefill_worker, decode_worker: chosen, and the same one where roles are merged. touched: all workers that
    were ever told of it. is_placed: whether both have taken it. is_handed_over: whether decode goes on alone.
    moving_to: another decode worker that its answer is being moved to, if any.
    started_s: when its workers were asked, Unix time. failures: of a group, how often it was not encoded.
    """

    def __init__(self, number: int, answer: LiveAnswer, router: Router) -> None:
        self.id = f"{answer.request.request_id}#{number}"
        self.answer = answer
        self.prefill_worker = ""
        self.decode_worker = ""
        self.touched: set[str] = set()
        self.is_placed = False
        self.is_handed_over = False
        self.moving_to = ""
        self.started_s = 0.0
        self.failures: Counter[int] = Counter()
        self._router = router
        self._is_prefilling = False
        self._is_decoding = False
        self._ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    @property
    def is_merged(self) -> bool:
        return self.prefill_worker == self.decode_worker

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    async def wait(self) -> Ending:
        """How it ended. Raises what made it end, if that cannot be mended by another try."""
        return await self._ended

    def end(self, ending: Ending) -> None:
        """The first ending counts."""
        if not self._ended.done():
            self._ended.set_result(ending)

    def fail(self, error: EPDError) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # it may never be waited for

    # What is booked at the router

    def book(self, prefill_worker: str, decode_worker: str) -> None:
        """Chooses workers; what was booked before is unbooked."""
        self.unbook()
        self.prefill_worker, self.decode_worker = prefill_worker, decode_worker
        self.touched |= {prefill_worker, decode_worker}
        books = self._router.books(prefill_worker)
        books.num_prefills += 1
        books.prefill_tokens += len(self.answer.plan.prompt)
        self._router.books(decode_worker).num_decodes += 1
        self._is_prefilling = self._is_decoding = True

    def arrive(self, worker: str) -> None:
        """A decode worker has all of it."""
        self.is_handed_over = True
        if worker == self.moving_to:
            self.moving_to = ""
            self.rebook_decode(worker)

    def rebook_decode(self, worker: str) -> None:
        """Another decode worker takes it."""
        if self._is_decoding:
            self._router.books(self.decode_worker).num_decodes -= 1
        self.decode_worker = worker
        self.touched.add(worker)
        self._router.books(worker).num_decodes += 1
        self._is_decoding = True

    def unbook_prefill(self) -> bool:
        """The prompt is computed. Returns whether that is new."""
        if not self._is_prefilling:
            return False
        self._is_prefilling = False
        books = self._router.books(self.prefill_worker)
        books.num_prefills -= 1
        books.prefill_tokens -= len(self.answer.plan.prompt)
        return True

    def unbook(self) -> None:
        """Nothing of it is left at any worker."""
        self.unbook_prefill()
        if self._is_decoding:
            self._is_decoding = False
            self._router.books(self.decode_worker).num_decodes -= 1
