"""Reads request bodies within limits of size, rate and memory that no client can exhaust for others.

small bodies   use none of the memory that large ones compete for
slow bodies    are refused once they fall below the minimum rate
many at once   the oldest unfinished body is refused to make room for a new one
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epd.errors import RequestError, RequestLimitError, RequestTimeoutError
from epd.serve_app.media.spool_files import ByteBudget
from epd.serve_app.observability.record import RequestRecord, record_of

if TYPE_CHECKING:
    from fastapi import Request  # its limits are read without a web server

_JSON_TYPES = ("", "application/json")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of unfinished bodies.

    max_held_bytes: of all bodies together, beyond the first `small_bytes` of each.
    max_reading: bodies read at once.
    grace_s, min_bytes_per_s: a body has `grace_s`, and a second more for each `min_bytes_per_s` received.
    """

    max_held_bytes: int = 1 << 30
    small_bytes: int = 64 << 10
    max_reading: int = 2048
    grace_s: float = 10.0
    min_bytes_per_s: float = 100_000.0


class BodyReader:
    """Reads JSON bodies. Used from one event loop."""

    def __init__(self, limits: BodyLimits | None = None) -> None:
        self.limits = limits or BodyLimits()
        self.budget = ByteBudget(self.limits.max_held_bytes, "request bodies")
        self._unfinished: dict[asyncio.Timeout, None] = {}  # oldest first

    @property
    def num_reading(self) -> int:
        return len(self._unfinished)

    async def read(self, request: Request, max_bytes: int) -> bytearray:
        """Returns the body. Its share of the budget is noted in the request's record.

        Accepts only `application/json`, which no browser sends to another site without asking it first; a
        missing type is accepted only from clients other than browsers.
        Raises RequestError, RequestLimitError, RequestTimeoutError, OverloadedError.
        """
        _check_type(request)
        announced = request.headers.get("content-length", "0")
        _check_size(int(announced[:20]) if announced.isdecimal() else 0, max_bytes)
        try:
            async with asyncio.timeout(self.limits.grace_s) as timeout:
                with self._reading(timeout):
                    return await self._read(request.stream(), record_of(request), max_bytes, timeout)
        except TimeoutError:
            raise self._too_slow() from None

    async def chunks(self, request: Request) -> AsyncIterator[bytes]:
        """Yields a body of any type and size, which the caller limits. Raises RequestTimeoutError.

        A chunk that is there waits for no turn of the event loop.
        """
        stream = aiter(request.stream())
        clock = asyncio.get_running_loop().time
        end_s = clock() + self.limits.grace_s
        while True:
            try:
                async with asyncio.timeout_at(end_s):
                    chunk = await anext(stream, None)
            except TimeoutError:
                raise self._too_slow() from None
            if chunk is None:
                return
            received_s = clock()
            yield chunk
            # What the caller took to write it is not the client's time.
            end_s += clock() - received_s + len(chunk) / self.limits.min_bytes_per_s

    def _too_slow(self) -> RequestTimeoutError:
        return RequestTimeoutError(
            "the body came too slowly or stayed unfinished for too long; allowed: "
            f"{self.limits.grace_s:g} s and {self.limits.min_bytes_per_s / 1000:g} KB/s; send it whole"
        )

    async def _read(
        self, chunks: AsyncIterator[bytes], record: RequestRecord, max_bytes: int, timeout: asyncio.Timeout
    ) -> bytearray:
        start_s = asyncio.get_running_loop().time()
        body = bytearray()
        async for chunk in chunks:
            body += chunk
            _check_size(len(body), max_bytes)
            self._hold(record, len(body))
            if not timeout.expired():
                timeout.reschedule(start_s + self.limits.grace_s + len(body) / self.limits.min_bytes_per_s)
        return body

    def _hold(self, record: RequestRecord, num_bytes: int) -> None:
        """Takes bytes from the budget. Raises OverloadedError if large bodies together exceed it."""
        more = num_bytes - self.limits.small_bytes - record.held_bytes
        if more > 0:
            self.budget.take(more)
            record.held_bytes += more

    def hold(self, record: RequestRecord, num_bytes: int, max_bytes: int) -> None:
        """Holds a body with media that were sent before as if they had come with it.

        num_bytes: of both. Raises RequestLimitError, OverloadedError.
        """
        _check_size(num_bytes, max_bytes)
        self._hold(record, num_bytes)

    def release(self, record: RequestRecord) -> None:
        """Releases a body that is no longer needed."""
        self.budget.give_back(record.held_bytes)
        record.held_bytes = 0

    @contextmanager
    def _reading(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """Counts an unfinished body. Refuses the oldest of too many, so that a new one never waits."""
        if len(self._unfinished) >= self.limits.max_reading:
            oldest = next(iter(self._unfinished))
            del self._unfinished[oldest]
            if not oldest.expired():
                oldest.reschedule(0.0)
        self._unfinished[timeout] = None
        try:
            yield
        finally:
            self._unfinished.pop(timeout, None)


def _check_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in _JSON_TYPES or (not content_type and "origin" in request.headers):
        raise RequestError(
            f"received the content type {content_type[:50]!r}; allowed: application/json; set the header"
        )


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise RequestLimitError(
            f"the body has more than {max_bytes} bytes; allowed that many; send media by URL"
        )
