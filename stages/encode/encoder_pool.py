"""Stores embeddings: the memory behind an `EncoderCacheManager`, which alone knows what is where.

storage: [num_blocks, block_size, (1 + deepstack layers) * C]; a row holds the embedding and, beside it, its
deepstack features, so that both travel together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from epd.encode.encoder_cache import CachedGroup
from epd.encoders.adapter import Embeddings
from epd.encoders.device import to_device
from epd.stages.engine.pool_memory import pool_memory
from epd.transfer.connectors import Ticket


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
