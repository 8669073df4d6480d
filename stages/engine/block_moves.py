"""Moves blocks before a step's pass: to host memory, within the pools, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from encoders.device import to_device
from epd.kv.kv_cache import BlockCopy, KVCacheManager
from epd.kv.scheduler_output import Preemption, Restore
from epd.types import ceil_div
from stages.engine.kv_pool import KVPool, KVPools, token_slots


class BlockMoves:
    """Carries out what a scheduler decides, on the pools of one worker; keeps what is in host memory."""

    def __init__(self, kv: KVCacheManager, pools: KVPools) -> None:
        self._kv = kv
        self._pools = pools
        self._offloaded: dict[str, list[KVPool]] = {}  # of each layer group

    @property
    def offloaded(self) -> frozenset[str]:
        """Lists the requests with tokens in host memory."""
        return frozenset(self._offloaded)

    def offload(self, preemption: Preemption) -> None:
        """Keeps the request's tokens; to be called before its blocks are written by others."""
        self._offloaded[preemption.request.request_id] = [
            pool.to_host(table, preemption.num_tokens)
            for pool, table in zip(self._pools.groups, preemption.block_tables, strict=True)
        ]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        self._pools.copy_blocks(copies)
        self._kv.copied(copies)

    def copy_behind(self, request_id: str, tokens: Tensor) -> None:
        """Copies some of a request's tokens, int64 [k] on the device, to the blocks behind the written ones.

        In every layer group the same tokens; nothing waits for the device.
        """
        for group, pool in enumerate(self._pools.groups):
            table, size = self._kv.block_table(request_id, group), pool.block_size
            first = ceil_div(self._kv.num_tokens(request_id, group), size) * size
            slots = to_device(token_slots(table, 0, first + len(tokens), size), tokens.device)
            pool.move(slots[tokens], slots[first:])

    def restore(self, restore: Restore) -> None:
        """Puts the request's tokens into its new blocks."""
        request_id = restore.request.request_id
        for group, kept in enumerate(self._offloaded.pop(request_id)):
            pool, table = self._pools.groups[group], self._kv.block_table(request_id, group)
            slots = token_slots(table, restore.start, restore.stop, pool.block_size)
            pool.copy(kept, torch.arange(restore.start, restore.stop), slots)

    def forget(self, request_id: str) -> None:
        """Drops what is kept of a request. Unknown ids are ignored."""
        self._offloaded.pop(request_id, None)
