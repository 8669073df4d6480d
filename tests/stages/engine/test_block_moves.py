"""Bits of tokens that no question may drop, which go where their blocks go."""

from __future__ import annotations

import numpy as np
import torch

from epd.kv.kv_cache import KVCacheManager
from epd.kv.kv_room import KVCacheSpec
from epd.kv.prefix_cache import token_identity
from epd.kv.scheduled_request import Preemption, Restore, ScheduledRequest
from epd.stages.engine.block_moves import BlockMoves
from epd.stages.engine.kv_pool import KVGroupShape, KVLayout, KVPoolsShape

BITS = np.array([False, True, True, False, False, True])


def test_they_outlast_copies_and_host_memory() -> None:
    kv = KVCacheManager(KVCacheSpec((6,), 4))
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    moves = BlockMoves(kv, KVPoolsShape((KVGroupShape(6, layout),), 4).build())
    identity = token_identity(list(range(len(BITS))), [])
    kv.open("r", identity, max_cached=0)
    kv.allocate("r", len(BITS))
    kv.commit("r", identity, len(BITS))
    moves.guarded.write(kv.block_table("r"), 0, BITS)

    moves.copy(kv.fork("r", "child"))
    assert kv.block_table("child") != kv.block_table("r")
    assert (moves.guarded.read(kv.block_table("child"), len(BITS)) == BITS).all()

    request = ScheduledRequest("r", identity, len(BITS), 10, len(BITS))
    moves.offload(Preemption(request, len(BITS), (tuple(kv.block_table("r")),)))
    kv.free("r")
    kv.open("r", identity, max_cached=0)
    kv.allocate("r", len(BITS))
    table = kv.block_table("r")
    moves.guarded.write(table, 0, ~BITS)  # others have had the blocks
    moves.restore(Restore(request, 2, len(BITS)))
    assert (moves.guarded.read(table, len(BITS))[2:] == BITS[2:]).all()

    moves.offload(Preemption(request, len(BITS), (tuple(table),)))
    moves.forget("r")
    assert not moves.offloaded
