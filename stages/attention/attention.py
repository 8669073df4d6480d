"""Computes attention over a paged KV cache for a packed pass: the chunks of several requests in sequence.

    T new tokens of the pass, S segments (one per request), Hq / Hkv query and KV heads, D head_dim

    packed queries     | s0 s0 s0 | s1 | s2 s2 |            query_starts 0 3 4 6
    keys of segment s  [ 0 ........... context_lens[s] )    the new tokens are the last ones
    row i of q new     [ 0 ... context - q + i ]            attended, in the order of the block table
    with a window of w     [ ... w tokens ... ]             of these the last w
    both ways              [ 0 ... i ]   j    k ]           and later new ones, if row and key say so

Source of the layout: Kwon et al. 2023, "Efficient Memory Management for LLM Serving with PagedAttention".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from epd.encoders.checkpoint import published
from epd.encoders.kernels.dispatch import uses_kernels
from epd.stages import kernels
from epd.stages.attention.device import DeviceHeads, DevicePlan
from epd.stages.attention.host import HostPlan
from epd.stages.attention.pieces import is_one_piece
from epd.stages.attention.support import check_arguments
from epd.stages.kernels.scaled_values import is_scaled, scaled
from epd.stages.kernels.tiling import MOST_SHORT
from epd.stages.reduction.pruning import PrunedRows
from epd.stages.reduction.question_views import ViewedRows
from epd.types import BoolArray, Int32Array, Int64Array, ceil_div

# Long enough that a GPU's keys are cut for a single segment, whose parts are merged then.
_LONG_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Describes one forward pass over one layer group, on the host.

    query_starts: int32 [S + 1], segment s has the packed rows [query_starts[s], query_starts[s + 1]).
    context_lens: int32 [S], keys of each segment in all, the new ones included.
    block_tables: int32 [S, max_blocks], what lies past a segment's last block is not read.
    slot_mapping: int64 [T], where each new token goes: block * block_size + place in the block.
    block_size: tokens.
    window: tokens that one attends, itself included, and none before; None for all. What a table has before
    the first of these is not read.
    both_ways: bool [T], new tokens that attend also those of their segment that come later, if these are
    such tokens too; None for none.
    """

    query_starts: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    slot_mapping: Int64Array
    block_size: int
    window: int | None = None
    both_ways: BoolArray | None = None

    def __post_init__(self) -> None:
        num_segments = len(self.context_lens)
        if len(self.query_starts) != num_segments + 1 or len(self.block_tables) != num_segments:
            raise ValueError(
                f"{num_segments} context lengths need as many block tables and one more query start, got "
                f"{len(self.block_tables)} and {len(self.query_starts)}"
            )
        if self.query_starts[-1] != len(self.slot_mapping):
            raise ValueError(
                f"{self.query_starts[-1]} packed tokens need as many slots, got {len(self.slot_mapping)}"
            )
        if self.both_ways is not None and len(self.both_ways) != len(self.slot_mapping):
            raise ValueError(
                f"{len(self.slot_mapping)} packed tokens need as many marks, got {len(self.both_ways)}"
            )
        lens = np.diff(self.query_starts)
        if (lens < 1).any() or (self.context_lens < lens).any():
            raise ValueError(
                f"every segment needs a new token and a context that holds the new ones, got {lens} of "
                f"{self.context_lens}"
            )
        if self.context_lens.max(initial=0) > self.block_tables.shape[1] * self.block_size:
            raise ValueError(
                f"a context of {self.context_lens.max()} tokens does not fit {self.block_tables.shape[1]} "
                f"blocks of {self.block_size}; allocate first"
            )

    @property
    def marks_some(self) -> bool:
        """Reports whether `both_ways` has some of a segment's new tokens, and not all."""
        if self.both_ways is None:
            return False
        counts = np.add.reduceat(self.both_ways.astype(np.int64), self.query_starts[:-1])
        return bool(((counts > 0) & (counts < np.diff(self.query_starts))).any())


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Holds what every layer of a pass shares. slot_mapping: int64 [T], on the device.

    attention: of the segments of the pass: on the host in pieces, on a GPU by kernels.
    pruned, viewed: rows that do not keep or do not read everything.
    """

    slot_mapping: Tensor
    attention: HostPlan | DevicePlan
    pruned: tuple[PrunedRows, ...] = ()
    viewed: tuple[ViewedRows, ...] = ()

    @classmethod
    def build(
        cls,
        batch: AttentionBatch,
        device: torch.device | str = "cpu",
        heads: DeviceHeads | None = None,
    ) -> AttentionPlan:
        """Builds a plan.

        device: the caches'; on a GPU the kernels attend, on a CPU their plain twin.
        heads: that the kernels are launched for.
        """
        device = torch.device(device)
        if device.type == "cuda":
            if heads is None:
                raise ValueError(f"a plan for {device} needs the heads that attend; use DeviceHeads.of")
            on_device = DevicePlan.build(batch, device, heads)
            return cls(on_device.slot_mapping, on_device)
        return cls(torch.from_numpy(batch.slot_mapping), HostPlan.build(batch))


def write_kv(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Writes keys and values [T, Hkv, D] to slots, int64 [T], of caches [num_blocks, block_size, Hkv, D].

    Blocks may lie apart in memory, the tokens of a block may not. A cache of values may have scaled rows.
    """
    if uses_kernels(keys):
        kernels.write_slots(keys, values, key_cache, value_cache, slot_mapping)
        return
    if is_scaled(value_cache):
        values = scaled(values)
    if is_one_piece(key_cache):
        key_cache.view(-1, *keys.shape[1:]).index_copy_(0, slot_mapping, keys)
        value_cache.view(-1, *values.shape[1:]).index_copy_(0, slot_mapping, values)
        return
    block_size = key_cache.shape[1]
    places = slot_mapping // block_size, slot_mapping % block_size
    key_cache.index_put_(places, keys)
    value_cache.index_put_(places, values)


def attend(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """Attends query [T, Hq, D] over caches [num_blocks, block_size, Hkv, D] with new tokens: [T, Hq, D].

    value_cache: may have scaled rows, see `epd.stages.kernels.scaled_values`.
    """
    return plan.attention.attend(query, key_cache, value_cache, scale)


class PagedLayers(Protocol):
    """Declares what a forward pass hands to `epd_paged` as `paged`."""

    def layer(self, index: int) -> tuple[Tensor, Tensor, AttentionPlan]:
        """Returns key and value cache [num_blocks, block_size, Hkv, D] and plan of decoder layer `index`."""


def epd_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 # passed by place; the plan says who attends what
    scaling: float | None = None,
    *,
    paged: PagedLayers,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention: writes key and value [1, Hkv, T, D], attends query [1, Hq, T, D].

    Returns [1, T, Hq, D]. Raises UnsupportedModelError for an argument that would change the result.
    """
    check_arguments(module, arguments)
    key_cache, value_cache, plan = paged.layer(int(module.layer_idx))  # type: ignore[arg-type]
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    write_kv(keys, values, key_cache, value_cache, plan.slot_mapping)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries, layer = query[0].transpose(0, 1), int(module.layer_idx)  # type: ignore[arg-type]
    return attend_layer(layer, queries, keys, values, key_cache, value_cache, plan, scale)[None], None


def attend_layer(
    layer: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
) -> Tensor:
    """Attends queries [T, Hq, D] of one layer, and keeps what is kept of a window: [T, Hq, D].

    keys, values: [T, Hkv, D], which are in the caches already.
    """
    out = attend(queries, key_cache, value_cache, plan, scale)
    for rows in plan.viewed:
        rows.attend(layer, queries, key_cache, value_cache, scale, out)
    for window in plan.pruned:
        chosen = window.choose(queries, keys, key_cache, scale)
        kept_keys, kept_values, slots = window.keep(chosen, keys, values, plan.slot_mapping)
        write_kv(kept_keys, kept_values, key_cache, value_cache, slots)
    return out


def register(name: str = "epd_paged") -> None:
    """Registers `epd_paged` with transformers; a model selects it by `set_attn_implementation(name)`."""
    published().AttentionInterface.register(name, epd_paged)


def warm_up(
    key_cache: Tensor,
    value_cache: Tensor,
    num_query_heads: int,
    window: int | None = None,
    *,
    marks_some: bool = False,
) -> None:
    """Launches every kernel that passes over caches of these shapes need, so that no request waits for one.

    key_cache, value_cache: [num_blocks, block_size, Hkv, D]; what is in them stays. window: of the layers.
    marks_some: whether only some of a segment's tokens may attend each other.
    """
    block_size, head_dim = key_cache.shape[1], key_cache.shape[3]
    heads = DeviceHeads.of(key_cache, num_query_heads)
    held = key_cache[0, 0].clone(), value_cache[0, 0].clone()
    tall = MOST_SHORT + 1  # a decode step and a chunk are tiled apart
    for lens in ([1], [tall], *([[1, tall]] if marks_some else [])):
        num_new, contexts = sum(lens), np.full(len(lens), _LONG_TOKENS, np.int32)
        table = np.zeros((len(lens), ceil_div(_LONG_TOKENS, block_size)), np.int32)
        both_ways = np.arange(num_new) == num_new - 1 if len(lens) > 1 else None
        starts, slots = np.cumsum([0, *lens], dtype=np.int32), np.zeros(num_new, np.int64)
        batch = AttentionBatch(starts, contexts, table, slots, block_size, window, both_ways)
        plan = AttentionPlan.build(batch, key_cache.device, heads)
        new = key_cache.new_zeros(num_new, *key_cache.shape[2:])
        write_kv(new, new, key_cache, value_cache, plan.slot_mapping)
        query = key_cache.new_zeros(num_new, num_query_heads, head_dim)
        attend(query, key_cache, value_cache, plan, head_dim**-0.5)
    key_cache[0, 0], value_cache[0, 0] = held
