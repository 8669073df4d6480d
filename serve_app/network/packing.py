"""Packs the offer of a transfer, copied from its pool as bytes, for receivers that cannot map the pool.

Offered blocks are copied to a pool of exactly their number, and renumbered in the offer:

    pool of the sender   | . | a | . | b |      source: blocks (1, 3)
    packed               | a | b |              source: blocks (0, 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from epd.encode.encoder_cache import CachedGroup
from epd.transfer.connectors import KVChunk, KVSpan
from epd.types import UInt8Array
from stages.encode.encoder_pool import EncoderPool, EncoderPoolShape
from stages.engine.kv_pool import KVGroupShape, KVPools, KVPoolsShape


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A small pool in transit. contents: uint8, of each of its storages, their last dimension in bytes."""

    shape: EncoderPoolShape | KVPoolsShape
    contents: tuple[UInt8Array, ...]


def pack(pool: Any, source: Any) -> tuple[Packed, Any]:
    """Copies the blocks at `source` in an EncoderPool or KVPools. Returns the copy and their place in it."""
    if isinstance(pool, EncoderPool) and isinstance(source, CachedGroup):
        return _pack_embeddings(pool, source)
    if isinstance(pool, KVPools) and isinstance(source, KVChunk):
        return _pack_kv(pool, source)
    raise TypeError(f"cannot pack {type(source).__name__} of {type(pool).__name__}")


def unpack(packed: Packed) -> EncoderPool | KVPools:
    """Returns the packed pool, in new memory."""
    pool = packed.shape.build()
    for storage, content in zip(_storages(pool), packed.contents, strict=True):
        _as_bytes(storage)[...] = content
    return pool


def _pack_embeddings(pool: EncoderPool, source: CachedGroup) -> tuple[Packed, CachedGroup]:
    ids = list(source.block_ids)
    shape = EncoderPoolShape(len(ids), pool.block_size, pool.layout)
    place = CachedGroup(source.num_embeddings, tuple(range(len(ids))))
    return Packed(shape, (_as_bytes(pool.storage[ids]),)), place


def _pack_kv(pool: KVPools, source: KVChunk) -> tuple[Packed, KVChunk]:
    blocks: list[list[int]] = [[] for _ in pool.groups]
    spans: list[KVSpan] = []
    for span in source.spans:
        ids = blocks[span.layer_group]
        spans.append(replace(span, blocks=tuple(range(len(ids), len(ids) + len(span.blocks)))))
        ids += span.blocks
    shape = KVPoolsShape(
        tuple(KVGroupShape(len(ids), each.layout) for ids, each in zip(blocks, pool.groups, strict=True)),
        pool.block_size,
    )
    contents = tuple(_as_bytes(each.storage[ids]) for ids, each in zip(blocks, pool.groups, strict=True))
    return Packed(shape, contents), replace(source, spans=tuple(spans))


def _storages(pool: EncoderPool | KVPools) -> Sequence[Tensor]:
    return [pool.storage] if isinstance(pool, EncoderPool) else [group.storage for group in pool.groups]


def _as_bytes(values: Tensor) -> UInt8Array:
    """Returns a view of the same memory as uint8 on the CPU; a copy from another device."""
    return values.cpu().contiguous().view(torch.uint8).numpy()
