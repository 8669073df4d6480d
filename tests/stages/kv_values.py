"""Reads and writes tokens of a KV pool the plain way, whatever the pool's own copies do."""

from __future__ import annotations

from torch import Tensor

from epd.stages.engine.kv_pool import KVPool


def tokens_at(pool: KVPool, slots: Tensor) -> Tensor:
    """[num_layers, 2, N, Hkv, D], copied from `slots`, int64 [N]."""
    tokens = pool.storage[slots // pool.block_size, :, :, slots % pool.block_size]
    return tokens.permute(1, 2, 0, 3, 4)


def put_tokens(pool: KVPool, slots: Tensor, values: Tensor) -> None:
    """Writes values [num_layers, 2, N, Hkv, D] to `slots`, int64 [N]."""
    at = slots // pool.block_size, slots % pool.block_size
    pool.storage[at[0], :, :, at[1]] = values.permute(2, 0, 1, 3, 4)
