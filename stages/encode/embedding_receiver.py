"""Receives embeddings: groups arrive in any order and are read in the order of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from epd.encode.encoder_cache import EncoderCacheManager, GroupKey, GroupSpec
from epd.encoders.adapter import Embeddings
from epd.stages.encode.encoder_pool import EncoderPool
from epd.transfer.connectors import EncoderConnector, Ticket
from epd.transfer.reception import Grant, Reception
from epd.transfer.transfers import Inbox


class Received(NamedTuple):
    """Holds the embeddings of one group of a request, by number. places: see `CachedGroup`."""

    number: int
    embeddings: Embeddings
    places: tuple[int, ...]


class EmbeddingReceiver:
    """Receives a prefill worker's embeddings. Not thread-safe."""

    def __init__(self, cache: EncoderCacheManager, pool: EncoderPool, connector: EncoderConnector) -> None:
        self.name = connector.name
        self.cache = cache
        self.reception = Reception(cache, Inbox(cache, connector.name))
        self._pool = pool
        self._connector = connector

    def open(self, request_id: str, groups: Sequence[GroupSpec]) -> None:
        """Starts a request. Raises InfeasibleError for a group that never fits, ValueError for a known id."""
        self.reception.open(request_id, groups)

    def grant(self) -> list[Grant]:
        """Returns tickets for groups to encode, as far as there is room; cached groups need none."""
        grants = self.reception.grant()
        for grant in grants:
            self._connector.expect(grant.ticket)
        return grants

    def poll(self) -> dict[GroupKey, str]:
        """Takes what has arrived; returns the groups that their encoders could not make, and why.

        Failed groups stay pending until they are reissued, or all requests that wait for them closed.
        """
        failed = {}
        for offer in self._connector.recv():
            self._connector.cancel(offer.transfer_id)  # one offer fills a ticket
            ticket = self.reception.inbox.find(offer.transfer_id)
            if ticket is None:
                continue
            if offer.source is not None:
                self.reception.inbox.deliver(ticket, offer.source.places)
            else:
                failed[ticket.key] = offer.error
        return failed

    def take(self, request_id: str) -> list[Received]:
        """Returns newly complete groups, in order and without gaps, each once."""
        taken = self.reception.take(request_id)
        return [Received(group, self._pool.read(place), place.places) for group, place in taken]

    def release(self, request_id: str, stop: int) -> None:
        """Releases groups before `stop`, which have been used; they stay cached while there is room."""
        self.reception.release(request_id, stop)

    def close(self, request_id: str) -> list[Ticket]:
        """Ends a request, done or cancelled. Returns tickets that encoders may forget about."""
        tickets = self.reception.close(request_id)
        for ticket in tickets:
            self._connector.cancel(ticket.transfer_id)
        return tickets

    def reissue(self, key: GroupKey) -> Ticket:
        """Returns a new ticket for a group whose encoder failed or is gone; the old one is not written."""
        old, new = self.reception.inbox.reissue(key)
        self._connector.cancel(old.transfer_id)
        self._connector.expect(new)
        return new

    def check_integrity(self) -> None:
        """Raises AssertionError unless cache, tickets and requests agree."""
        self.reception.check_integrity()
