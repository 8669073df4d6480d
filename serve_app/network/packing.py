"""Copies what an offer offers out of its pool, in parts, for receivers that cannot reach the pool.

Blocks of a part become a small pool of exactly their number, and are renumbered in its offer:

    pool of the sender   | . | a | . | b | c |      source: blocks (1, 3, 4)
    first part           | a | b |                  source: blocks (0, 1)
    second part          | c |                      source: blocks (0)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from epd.encode.encoder_cache import CachedGroup
from epd.stages.encode.encoder_pool import EncoderPool, EncoderPoolShape
from epd.stages.engine.kv_pool import KVGroupShape, KVPools, KVPoolsShape
from epd.stages.engine.state_pool import StatesShape
from epd.transfer.connectors import AnySource, KVChunk, KVSpan
from epd.types import UInt8Array

AnyShape = EncoderPoolShape | KVPoolsShape
AnyPool = EncoderPool | KVPools


@dataclass(frozen=True, slots=True)
class Part:
    """Describes a part of an offer, and the small pool that it is copied to.

    source: the part of what is offered, with the blocks of the small pool
    blocks: of each layer group, or of the one pool of embeddings, those of the sender, in that order
    state_slot: of the sender, where a recurrent state is; None for a part without
    """

    shape: AnyShape
    source: AnySource
    blocks: tuple[tuple[int, ...], ...]
    state_slot: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.shape.num_bytes

    def copy(self, pool: AnyPool, memory: Tensor) -> None:
        """Copies the part's blocks from the pool to memory of the host, uint8 [num_bytes].

        From a GPU, the copies are queued, and not waited for if the memory is pinned.
        """
        if not self.num_bytes:
            return
        target = self.shape.over(memory)
        if isinstance(pool, EncoderPool) and isinstance(target, EncoderPool):
            target.fill(pool, self.blocks[0])
        elif isinstance(pool, KVPools) and isinstance(target, KVPools):
            pool.copy_whole(target, self.blocks, self.state_slot)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A part in transit. contents: uint8 [n], the memory of its small pool."""

    shape: AnyShape
    contents: UInt8Array


def parts_of(pool: Any, source: Any, max_bytes: int) -> list[Part]:
    """Cuts what is offered at `source` in an EncoderPool or KVPools into parts of at most max_bytes.

    Only whole blocks are cut off, and a group of embeddings is never cut: such a part may be larger.
    """
    if isinstance(pool, EncoderPool) and isinstance(source, CachedGroup):
        return [_embeddings(pool, source)]
    if isinstance(pool, KVPools) and isinstance(source, KVChunk):
        bites = list(_bites(pool, source, max_bytes)) or [[]]
        chunks = [KVChunk(tuple(spans)) for spans in bites[:-1]]
        return [_keys_and_values(pool, each) for each in (*chunks, replace(source, spans=tuple(bites[-1])))]
    raise TypeError(f"cannot pack {type(source).__name__} of {type(pool).__name__}")


def pack(pool: AnyPool, part: Part) -> Packed:
    """Copies a part to memory of its own, pinned if the pool is a GPU's: the copy is not waited for then."""
    memory = torch.empty(part.num_bytes, dtype=torch.uint8, pin_memory=pool.device.type != "cpu")
    part.copy(pool, memory)
    return Packed(part.shape, memory.numpy())


def unpack(packed: Packed, device: torch.device) -> AnyPool:
    """Returns the small pool of a part, on a device."""
    if not packed.contents.size:  # torch cannot view an empty array as another type
        return packed.shape.over(torch.empty(0, dtype=torch.uint8, device=device))
    return opened(packed.shape, torch.from_numpy(packed.contents), device)


def opened(shape: AnyShape, memory: Tensor, device: torch.device) -> AnyPool:
    """Returns the pool in memory of the host, which is copied as it is if the pool is to be on a GPU."""
    return shape.over(memory.to(device, non_blocking=True))


def _embeddings(pool: EncoderPool, source: CachedGroup) -> Part:
    num_blocks = len(source.block_ids)
    shape = EncoderPoolShape(num_blocks, pool.block_size, pool.layout)
    place = replace(source, block_ids=tuple(range(num_blocks)))
    return Part(shape, place, (tuple(source.block_ids),))


def _keys_and_values(pool: KVPools, source: KVChunk) -> Part:
    blocks: list[list[int]] = [[] for _ in pool.groups]
    spans: list[KVSpan] = []
    for span in source.spans:
        ids = blocks[span.layer_group]
        spans.append(replace(span, blocks=tuple(range(len(ids), len(ids) + len(span.blocks)))))
        ids += span.blocks
    shape = KVPoolsShape(
        tuple(KVGroupShape(len(ids), each) for ids, each in zip(blocks, pool.shape.layouts, strict=True)),
        pool.block_size,
        states=_states_of(pool, source),
    )
    slot = None if source.state_slot is None else 0
    packed = replace(source, spans=tuple(spans), state_slot=slot)
    return Part(shape, packed, tuple(map(tuple, blocks)), source.state_slot)


def _states_of(pool: KVPools, source: KVChunk) -> StatesShape | None:
    """Returns the room of a part for the recurrent state that comes with the last one."""
    layout = pool.shape.state_layout
    return None if layout is None else StatesShape(int(source.state_slot is not None), layout)


def _bites(pool: KVPools, source: KVChunk, max_bytes: int) -> Iterator[list[KVSpan]]:
    """Yields the spans of each part: as many blocks as max_bytes allow, and one at least."""
    left, spans = max_bytes, list[KVSpan]()
    for span in source.spans:
        block_bytes = pool.block_size * pool.shape.layouts[span.layer_group].bytes_per_token
        rest: KVSpan | None = span
        while rest is not None:
            num_blocks = max(0, left // block_bytes) or (0 if spans else 1)
            if num_blocks:
                head, rest = _cut(rest, num_blocks, pool.block_size)
                spans.append(head)
                left -= len(head.blocks) * block_bytes
            else:
                yield spans
                left, spans = max_bytes, []
    if spans:
        yield spans


def _cut(span: KVSpan, num_blocks: int, block_size: int) -> tuple[KVSpan, KVSpan | None]:
    """Cuts a span after that many of its blocks."""
    if num_blocks >= len(span.blocks):
        return span, None
    at = (span.start // block_size + num_blocks) * block_size
    head = replace(span, stop=at, blocks=span.blocks[:num_blocks])
    return head, replace(span, start=at, blocks=span.blocks[num_blocks:])
