"""An engine for a loaded model, with room for keys and values."""

from __future__ import annotations

from typing import Any

from encoders import Adapter
from epd.kv.scheduling import SchedulerConfig
from epd.machine import memory_limit_bytes
from stages.engine.engine import LanguageEngine
from stages.engine.generation import GenerationSettings
from stages.engine.kv_pool import KVGroupShape, KVPoolsShape
from stages.engine.model_runner import ModelRunner, kv_layout

BLOCK_SIZE = 16
# KV caches take together at most this share of the memory, and each no more tokens than this.
_KV_MEMORY_SHARE = 0.25
_MAX_KV_TOKENS = 2**18


def build_engine(
    model: Any,
    adapter: Adapter,
    settings: GenerationSettings,
    *,
    config: SchedulerConfig | None = None,
    num_kv_tokens: int | None = None,
    block_size: int = BLOCK_SIZE,
    enable_prefix_caching: bool = False,
    max_draft: int = 0,
) -> LanguageEngine:
    """An engine with pools of its own. num_kv_tokens: their room; by default `default_kv_tokens`."""
    layout = kv_layout(model)
    num_blocks = (num_kv_tokens or default_kv_tokens(layout.bytes_per_token)) // block_size
    pools = KVPoolsShape((KVGroupShape(num_blocks, layout),), block_size).build()
    runner = ModelRunner(model, adapter, pools)
    return LanguageEngine(
        runner,
        adapter.tokenizer,
        settings.eos_ids,
        config or SchedulerConfig(),
        enable_prefix_caching=enable_prefix_caching,
        max_draft=max_draft,
    )


def default_kv_tokens(bytes_per_token: int, num_pools: int = 1) -> int:
    """What one of num_pools pools, which share a quarter of the memory that we may use, holds, or less."""
    share_bytes = int(memory_limit_bytes() * _KV_MEMORY_SHARE) // num_pools
    return min(share_bytes // bytes_per_token, _MAX_KV_TOKENS)
