"""Simulates how a prefill worker receives groups: the live reception with its cache, without embeddings.

Room is granted in order; what is cached here, or on its way for another request, needs no ticket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from epd.encode.encoder_cache import EncoderCacheManager, GroupKey, GroupSpec
from epd.simulate.requests import RequestState
from epd.transfer.connectors import Ticket
from epd.transfer.transfers import Inbox, Reception
from epd.types import ceil_div


def embedding_cache(num_embeddings: int, block_size: int) -> EncoderCacheManager:
    """Returns the cache of an encoder or a receiver."""
    return EncoderCacheManager(ceil_div(num_embeddings, block_size), block_size)


class GroupReceiver:
    """Receives the groups of one prefill worker's requests."""

    def __init__(self, name: str, num_embeddings: int, block_size: int, model: str) -> None:
        cache = embedding_cache(num_embeddings, block_size)
        self.cache = cache
        self._inbox = Inbox(cache, name)
        self._reception = Reception(cache, self._inbox)
        self._model = model
        self._tickets: dict[GroupKey, Ticket] = {}
        self._open: dict[str, tuple[RequestState, Sequence[int]]] = {}

    def key_of(self, state: RequestState, group: int) -> GroupKey:
        return group_key(state, group, self._model)

    def open(self, state: RequestState) -> None:
        """Starts waiting for the groups that the request misses. Raises InfeasibleError if one never fits."""
        groups = sorted(state.missing)
        specs = [
            GroupSpec(self.key_of(state, group), media.num_tokens, media.num_patches)
            for group in groups
            for media in [state.job.groups[group].media]
        ]
        self._reception.open(state.request_id, specs)
        self._open[state.request_id] = state, groups

    def close(self, state: RequestState) -> None:
        """Forgets a request; what is on its way for it alone is dropped. Unknown ones are ignored."""
        if self._open.pop(state.request_id, None) is not None:
            for ticket in self._reception.close(state.request_id):
                del self._tickets[ticket.key]

    def grant(self) -> list[tuple[RequestState, int]]:
        """Returns (request, group) of groups that there is room for now, and that must be brought."""
        grants = []
        for each in self._reception.grant():
            state, groups = self._open[each.request_id]
            self._tickets[each.ticket.key] = each.ticket
            grants.append((state, groups[each.group]))
        return grants

    def deliver(self, key: GroupKey) -> None:
        """Records that a group has come. One that nobody waits for any more is dropped."""
        ticket = self._tickets.pop(key, None)
        if ticket is not None:
            self._inbox.deliver(ticket)

    def taken(self) -> Iterator[tuple[RequestState, int]]:
        """Yields (request, group) of groups that have become readable, each once."""
        for request_id, (state, groups) in list(self._open.items()):
            for index, _ in self._reception.take(request_id):
                yield state, groups[index]

    def prefilled(self, state: RequestState) -> None:
        """Releases the groups that are prefilled; after the last one the request is closed."""
        if state.request_id not in self._open:
            return
        _, groups = self._open[state.request_id]
        done = sum(state.starts[group + 1] <= state.num_prefilled for group in groups)
        self._reception.release(state.request_id, done)
        if done == len(groups):
            self.close(state)

    def check_integrity(self) -> None:
        """Raises AssertionError unless tickets and requests agree."""
        self._reception.check_integrity()


def group_key(state: RequestState, group: int, model: str) -> GroupKey:
    """Returns the content of a group."""
    return GroupKey(str(state.job.media_key), (), (group, group + 1), (1, 1), model)
