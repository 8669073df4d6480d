"""Compiles the kernels of the language model before the first request comes."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from epd.stages.attention.attention import AttentionBatch, AttentionPlan, attend, write_kv
from epd.stages.attention.device import DeviceHeads
from epd.stages.kernels.tiling import MOST_SHORT
from epd.types import ceil_div

# Long enough that a GPU's keys are cut for a single segment, whose parts are merged then.
_LONG_TOKENS = 16_384


def warm_up(key_cache: Tensor, value_cache: Tensor, num_query_heads: int) -> None:
    """Launches every kernel that passes over caches of these shapes need, so that no request waits for one.

    key_cache, value_cache: [num_blocks, block_size, Hkv, D]; what is in them stays.
    """
    block_size, head_dim = key_cache.shape[1], key_cache.shape[3]
    heads = DeviceHeads.of(key_cache, num_query_heads)
    for num_new in (1, MOST_SHORT + 1):  # a decode step and a chunk are tiled apart
        starts, contexts = np.array([0, num_new], np.int32), np.array([_LONG_TOKENS], np.int32)
        table = np.zeros((1, ceil_div(_LONG_TOKENS, block_size)), np.int32)
        batch = AttentionBatch(starts, contexts, table, np.zeros(num_new, np.int64), block_size)
        plan = AttentionPlan.build(batch, key_cache.device, heads)
        keys, values = (cache[0, :1].repeat(num_new, 1, 1) for cache in (key_cache, value_cache))
        write_kv(keys, values, key_cache, value_cache, plan.slot_mapping)
        query = key_cache.new_zeros(num_new, num_query_heads, head_dim)
        attend(query, key_cache, value_cache, plan, head_dim**-0.5)
