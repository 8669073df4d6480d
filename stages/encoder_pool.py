"""Where embeddings lie: the memory behind an `EncoderCacheManager`, which alone knows what is where.

storage: [num_blocks, block_size, (1 + deepstack layers) * C]; a row holds the embedding and, beside it, its
deepstack features, so that both travel together.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from encoders.adapter import Embeddings
from epd.encoder_cache import CachedGroup


@dataclass(frozen=True, slots=True)
class EmbeddingLayout:
    """What a row is made of. num_channels: C of the language model. num_deepstack: layers beside it."""

    num_channels: int
    dtype: torch.dtype
    num_deepstack: int = 0

    @property
    def width(self) -> int:
        """Values in a row."""
        return self.num_channels * (1 + self.num_deepstack)

    @property
    def bytes_per_embedding(self) -> int:
        return self.width * self.dtype.itemsize


class EncoderPool:
    """Blocks of rows. With a file, the memory is shared with every process that opens the same file."""

    def __init__(
        self, num_blocks: int, block_size: int, layout: EmbeddingLayout, shared_file: Path | None = None
    ) -> None:
        self.layout = layout
        self.shared_file = shared_file
        shape = (num_blocks, block_size, layout.width)
        if shared_file is None:
            self.storage = torch.empty(shape, dtype=layout.dtype)
        else:
            size = num_blocks * block_size * layout.width
            mapped = torch.from_file(str(shared_file), shared=True, size=size, dtype=layout.dtype)
            self.storage = mapped.reshape(shape)

    @property
    def num_blocks(self) -> int:
        return self.storage.shape[0]

    @property
    def block_size(self) -> int:
        return self.storage.shape[1]

    def write(self, place: CachedGroup, embeddings: Embeddings) -> None:
        """Stores the rows [V, C] of one group."""
        self._write(place, torch.cat([embeddings.rows, *embeddings.deepstack], dim=1))

    def read(self, place: CachedGroup) -> Embeddings:
        """The rows [V, C] of one group, copied."""
        parts = torch.split(self._read(place), self.layout.num_channels, dim=1)
        return Embeddings(parts[0], tuple(parts[1:]))

    def copy(self, source: EncoderPool, from_place: CachedGroup, to_place: CachedGroup) -> None:
        """Brings one group over from another pool of the same layout; block sizes may differ."""
        if source.layout != self.layout:
            raise ValueError(f"cannot copy rows of {source.layout} into a pool of {self.layout}")
        self._write(to_place, source._read(from_place))

    def _read(self, place: CachedGroup) -> Tensor:
        """[V, width]."""
        return self.storage[list(place.block_ids)].flatten(0, 1)[: place.num_embeddings]

    def _write(self, place: CachedGroup, rows: Tensor) -> None:
        """rows: [V, width]."""
        if rows.shape != (place.num_embeddings, self.layout.width):
            raise ValueError(
                f"{tuple(rows.shape)} rows do not fit {place.num_embeddings} x {self.layout.width}"
            )
        whole, rest = divmod(len(rows), self.block_size)
        ids = list(place.block_ids)
        body = rows[: whole * self.block_size].to(self.layout.dtype)
        self.storage[ids[:whole]] = body.reshape(whole, self.block_size, self.layout.width)
        if rest:
            self.storage[ids[whole], :rest] = rows[whole * self.block_size :].to(self.layout.dtype)
