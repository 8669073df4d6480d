"""What a transfer offers, taken out of its pool to travel as bytes, for receivers that cannot map the pool.

Blocks named by the offer go into a pool of just their number, and the offer names them anew:

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
    """A small pool on its way. contents: uint8, of each of its storages, their last dimension in bytes."""

    shape: EncoderPoolShape | KVPoolsShape
    contents: tuple[UInt8Array, ...]


def pack(pool: Any, source: Any) -> tuple[Packed, Any]:
    """What lies at `source` in an EncoderPool or in KVPools, copied, and where it lies in the copy."""
    if isinstance(pool, EncoderPool) and isinstance(source, CachedGroup):
        return _pack_embeddings(pool, source)
    if isinstance(pool, KVPools) and isinstance(source, KVChunk):
        return _pack_kv(pool, source)
    raise TypeError(f"cannot pack {type(source).__name__} of {type(pool).__name__}")


def unpack(packed: Packed) -> EncoderPool | KVPools:
    """The pool that was packed, in memory of its own."""
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
    contents = tuple(
        _as_bytes(each.storage[:, :, ids]) for ids, each in zip(blocks, pool.groups, strict=True)
    )
    return Packed(shape, contents), replace(source, spans=tuple(spans))


def _storages(pool: EncoderPool | KVPools) -> Sequence[Tensor]:
    return [pool.storage] if isinstance(pool, EncoderPool) else [group.storage for group in pool.groups]


def _as_bytes(values: Tensor) -> UInt8Array:
    """The same memory as uint8, where it is the CPU's; a copy from another device."""
    return values.cpu().contiguous().view(torch.uint8).numpy()
