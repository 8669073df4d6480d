"""Stores embeddings: the memory behind an `EncoderCacheManager`, which alone knows what is where.

storage: [num_blocks, block_size, (1 + deepstack layers) * C]; a row holds the embedding and, beside it, its
deepstack features, so that both travel together.

What is received is placed in the prompt as soon as possible. Groups arrive in any order and are read in the
order of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from epd.encode.encoder_cache import CachedGroup, EncoderCacheManager, GroupKey, GroupSpec
from epd.encoders import Adapter, Embeddings, MediaItem, PromptPlan, concatenated
from epd.encoders.device import to_device
from epd.encoders.groups import MediaGroup
from epd.encoders.reduction import Kept, TokenReducer, kept_cells, windows_of, without_keys
from epd.reduction import KeptCells
from epd.stages.engine.pool_memory import pool_memory
from epd.stages.visual_inputs import PlacedEmbeddings
from epd.transfer.connectors import EncoderConnector, Ticket
from epd.transfer.transfers import Grant, Inbox, Reception


@dataclass(frozen=True, slots=True)
class EmbeddingLayout:
    """Describes a row. num_channels: C of the language model. num_deepstack: layers beside it."""

    num_channels: int
    dtype: torch.dtype
    num_deepstack: int = 0

    @property
    def width(self) -> int:
        """Counts the values in a row."""
        return self.num_channels * (1 + self.num_deepstack)

    @property
    def bytes_per_embedding(self) -> int:
        return self.width * self.dtype.itemsize

    def split(self, rows: Tensor) -> Embeddings:
        """Returns the embeddings that rows [V, width] hold."""
        parts = torch.split(rows, self.num_channels, dim=1)
        return Embeddings(parts[0], tuple(parts[1:]))


def joined(embeddings: Embeddings) -> Tensor:
    """Returns rows, [V, width]."""
    return torch.cat([embeddings.rows, *embeddings.deepstack], dim=1)


@dataclass(frozen=True, slots=True)
class EncoderPoolShape:
    """Describes a pool apart from its memory."""

    num_blocks: int
    block_size: int
    layout: EmbeddingLayout

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.layout.bytes_per_embedding

    def build(self, shared_file: Path | None = None, device: torch.device | str = "cpu") -> EncoderPool:
        return EncoderPool(self.num_blocks, self.block_size, self.layout, shared_file, device)

    def over(self, memory: Tensor) -> EncoderPool:
        """Returns a pool in memory that is there, uint8 [num_bytes]."""
        return EncoderPool(self.num_blocks, self.block_size, self.layout, memory=memory)


class EncoderPool:
    """Stores blocks of rows.

    With a file, the memory is shared with every process that opens the same file.

    memory: all of it, uint8
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layout: EmbeddingLayout,
        shared_file: Path | None = None,
        device: torch.device | str = "cpu",
        *,
        memory: Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.shape = EncoderPoolShape(num_blocks, block_size, layout)
        self.memory = pool_memory(self.shape.num_bytes, shared_file, device) if memory is None else memory
        self.storage = self.memory.view(layout.dtype).view(num_blocks, block_size, layout.width)

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def num_blocks(self) -> int:
        return self.storage.shape[0]

    @property
    def block_size(self) -> int:
        return self.storage.shape[1]

    def write(self, place: CachedGroup, embeddings: Embeddings) -> None:
        """Stores the rows [V, C] of one group."""
        self._write(place, joined(embeddings))

    def read(self, place: CachedGroup) -> Embeddings:
        """Copies the rows [V, C] of one group."""
        return self.layout.split(self._read(place))

    def copy(self, source: EncoderPool, from_place: CachedGroup, to_place: CachedGroup) -> None:
        """Brings one group over from another pool of the same layout; block sizes may differ."""
        if source.layout != self.layout:
            raise ValueError(f"cannot copy rows of {source.layout} into a pool of {self.layout}")
        self._write(to_place, source._read(from_place))

    def fill(self, source: EncoderPool, block_ids: Sequence[int]) -> None:
        """Copies whole blocks of another pool of the same block size to this one's blocks 0, 1, ...

        From a GPU to pinned memory, the copies are queued and not waited for.
        """
        for number, block in enumerate(block_ids):
            self.storage[number].copy_(source.storage[block], non_blocking=True)

    def publish(self, ticket: Ticket) -> None:
        """Does nothing: what is written here can be read as soon as the device has done it."""

    def receive(self, ticket: Ticket, source: CachedGroup, source_pool: EncoderPool) -> None:
        """Fills a ticket from another pool: see `copy`."""
        self.copy(source_pool, source, ticket.target)

    def _read(self, place: CachedGroup) -> Tensor:
        """Reads the stored rows, [V, width]."""
        return self.storage.index_select(0, self._ids(place)).flatten(0, 1)[: place.num_embeddings]

    def _write(self, place: CachedGroup, rows: Tensor) -> None:
        """Writes rows: [V, width]."""
        if rows.shape != (place.num_embeddings, self.layout.width):
            raise ValueError(
                f"{tuple(rows.shape)} rows do not fit {place.num_embeddings} x {self.layout.width}"
            )
        whole, rest = divmod(len(rows), self.block_size)
        rows = to_device(rows, self.device).to(self.layout.dtype)
        body = rows[: whole * self.block_size].reshape(whole, self.block_size, self.layout.width)
        self.storage.index_copy_(0, self._ids(place)[:whole], body)
        if rest:
            self.storage[place.block_ids[whole], :rest] = rows[whole * self.block_size :]

    def _ids(self, place: CachedGroup) -> Tensor:
        """Returns the blocks of a group, int64 [blocks]."""
        return to_device(torch.tensor(place.block_ids), self.device)


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
