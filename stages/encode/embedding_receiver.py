"""Receives embeddings, and places groups in the prompt as soon as possible.

Groups arrive in any order and are read in the order of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from epd.encode.encoder_cache import EncoderCacheManager, GroupKey, GroupSpec
from epd.encoders import Adapter, Embeddings, MediaItem, PromptPlan, concatenated
from epd.encoders.groups import MediaGroup
from epd.encoders.reduction import Kept, TokenReducer, kept_cells, windows_of, without_keys
from epd.reduction import KeptCells
from epd.stages.encode.encoder_pool import EncoderPool
from epd.stages.visual_inputs import PlacedEmbeddings
from epd.transfer.connectors import EncoderConnector, Ticket
from epd.transfer.transfers import Grant, Inbox, Reception


class EmbeddingSplicer:
    """Takes the encoded groups of one prompt, in order; returns each at once, with two exceptions.

    An item that is spliced whole comes at its end; of a reduced one, what is kept of a window comes when the
    window is there.
    """

    def __init__(self, adapter: Adapter, prompt: PromptPlan) -> None:
        self._adapter = adapter
        self._prompt = prompt
        self._parts: list[Embeddings] = []
        self._start = 0
        self._reducer: TokenReducer | None = None
        self._cells: list[tuple[int, KeptCells]] = []

    def take_cells(self) -> list[tuple[int, KeptCells]]:
        """Returns (item, kept tokens) of videos whose tokens were chosen here since the last call."""
        taken, self._cells = self._cells, []
        return taken

    def push(self, group: MediaGroup, embeddings: Embeddings) -> PlacedEmbeddings | None:
        """Returns what the next group completes; None while more has to come."""
        item, start, stop = self._prompt.media[group.item], group.start, group.stop
        if not self._parts:
            self._start = start
        self._parts.append(embeddings)
        if item.plan.is_joined_whole and stop < item.plan.num_units:
            return None
        rows = self._adapter.join(concatenated(self._parts), item.plan, self._start, stop)
        self._parts = []
        if item.windows:
            return self._reduced(group.item, item, start, rows)
        return PlacedEmbeddings(rows, item.token_indices(self._start, stop))

    def place(self, group: MediaGroup, embeddings: Embeddings, places: tuple[int, ...]) -> PlacedEmbeddings:
        """Returns what an encoder has kept of the next group: see `ItemReducer`."""
        item = self._prompt.media[group.item]
        kept, start = [], 0
        indices, is_key = without_keys(places)
        for number in range(*windows_of(item, group)):
            stop = start + item.windows[number].num_kept
            kept.append(Kept(number, embeddings.cut(start, stop), indices[start:stop], is_key[start:stop]))
            start = stop
        return self._placed(group.item, item, kept)

    def _reduced(self, number: int, item: MediaItem, start: int, rows: Embeddings) -> PlacedEmbeddings | None:
        reduction = self._prompt.reduction
        assert reduction is not None
        if start == 0:
            self._reducer = TokenReducer(reduction.policy, item)
        assert self._reducer is not None, "the first units of a reduced item must come first"
        kept = list(self._reducer.push(rows))
        return self._placed(number, item, kept) if kept else None

    def _placed(self, number: int, item: MediaItem, kept: list[Kept]) -> PlacedEmbeddings:
        reduction = self._prompt.reduction
        assert reduction is not None
        embeddings = concatenated([each.embeddings for each in kept])
        places = item.token_indices(kept[0].window, kept[-1].window + 1)
        if item.windows[0].is_in_prefill:  # what is kept differs from layer to layer
            return PlacedEmbeddings(embeddings, places)
        if item.plan.kind == "video":
            self._cells.append((number, kept_cells(item, kept)))
        indices = np.concatenate([each.indices for each in kept])
        is_by_question = reduction.policy.is_by_question
        is_key = np.concatenate([each.is_key for each in kept]) if is_by_question else None
        return PlacedEmbeddings(embeddings, places, reduction.positions[number][:, indices], is_key)


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
