"""Stores keys and values: the memory behind a `KVCacheManager`, which alone knows what is where.

One pool per layer group. storage: [num_blocks, num_layers, 2, block_size, Hkv, D], keys before values. What
lies side by side in memory is up to its `StorageOrder`; who copies or attends sees strides alone. Values in 8
bits are apart from their keys, a second tensor of the same shape but for the 2 and the D.
A *slot* is where one token lies: block * block_size + place in the block.

    block table of a request   |   7    |   3    |   4    |      block_size 4
    its tokens                  0 1 2 3  4 5 6 7  8 9
    their slots                28 ... 31 12 .. 15 16 17
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy as shallow_copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from epd.kv.block_pool import BlockCopy
from epd.kv.kv_room import SCALE_BYTES
from epd.stages.attention.support import layer_windows, lenders, state_layers
from epd.stages.engine.pool_memory import pool_memory
from epd.stages.engine.slot_copies import copy_runs, copy_slots, slot_runs, token_slots
from epd.stages.engine.state_pool import StateLayout, StatePool, StatesShape
from epd.stages.rank import ALONE, Rank
from epd.transfer.connectors import KVChunk, KVSpan, KVTicket
from epd.types import ceil_div

# What lies in one piece of memory: a block with all its layers, which is copied at once to and from a GPU and
# into messages; or a head of a layer with all its blocks, of which a CPU attends in place.
StorageOrder = Literal["blocks", "heads"]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Describes a token's keys and values in a layer group, for each of its layers.

    int8_values: whether keys alone have this dtype, and values have scaled rows: see `scaled`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    int8_values: bool = False

    @property
    def planes(self) -> tuple[tuple[int, int, torch.dtype], ...]:
        """Returns what lies apart: how many of keys and values, numbers of a head's row, and their type."""
        if not self.int8_values:
            return ((2, self.head_dim, self.dtype),)
        return (1, self.head_dim, self.dtype), (1, self.head_dim + SCALE_BYTES, torch.int8)

    @property
    def bytes_per_token(self) -> int:
        row_bytes = sum(count * width * dtype.itemsize for count, width, dtype in self.planes)
        return self.num_layers * self.num_kv_heads * row_bytes


class KVPool:
    """Stores the blocks of one layer group.

    order: what lies in one piece.
    memory: uint8, of sufficient bytes; its own if left out.
    planes: all that is stored; of values that lie apart from their keys, `storage` has the keys alone.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layout: KVLayout,
        *,
        order: StorageOrder = "blocks",
        memory: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout = layout
        self.order = order
        if memory is None:
            memory = pool_memory(num_blocks * block_size * layout.bytes_per_token, device=device)
        num_rows = num_blocks * block_size * layout.num_layers * layout.num_kv_heads
        num_bytes = [num_rows * count * width * dtype.itemsize for count, width, dtype in layout.planes]
        self.planes: tuple[Tensor, ...] = tuple(
            self._plane(part.view(dtype), num_blocks, block_size, count, width)
            for part, (count, width, dtype) in zip(torch.split(memory, num_bytes), layout.planes, strict=True)
        )

    def _plane(self, numbers: Tensor, num_blocks: int, block_size: int, count: int, width: int) -> Tensor:
        """Views numbers as [num_blocks, num_layers, count, block_size, Hkv, width]."""
        num_layers, num_heads = self.layout.num_layers, self.layout.num_kv_heads
        if self.order == "blocks":
            return numbers.view(num_blocks, num_layers, count, block_size, num_heads, width)
        by_head = numbers.view(num_layers, count, num_heads, num_blocks, block_size, width)
        return by_head.permute(3, 0, 1, 4, 2, 5)

    @property
    def storage(self) -> Tensor:
        return self.planes[0]

    @property
    def num_blocks(self) -> int:
        return self.storage.shape[0]

    @property
    def block_size(self) -> int:
        return self.storage.shape[3]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the caches of the group's layer `index`: views [num_blocks, block_size, Hkv, D].

        Scaled rows of values are wider than D.
        """
        return self.storage[:, index, 0], self.planes[-1][:, index, -1]

    def heads(self, start: int, stop: int) -> KVPool:
        """Returns a pool of the heads [start, stop), in the same memory."""
        part = shallow_copy(self)
        part.layout = replace(self.layout, num_kv_heads=stop - start)
        part.planes = tuple(plane[..., start:stop, :] for plane in self.planes)
        return part

    def to_host(self, block_table: Sequence[int], num_tokens: int) -> KVPool:
        """Copies a request's first tokens to a pool of its own in host memory, in the order of its table.

        From a GPU the copies are queued block by block, into pinned memory, and nothing waits for them.
        """
        num_blocks = ceil_div(num_tokens, self.block_size)
        num_bytes = num_blocks * self.block_size * self.layout.bytes_per_token
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.storage.is_cuda)
        host = KVPool(num_blocks, self.block_size, self.layout, order=self.order, memory=memory)
        slots = token_slots(block_table, 0, num_tokens, self.block_size)
        host.copy(self, slots, torch.arange(num_tokens))
        return host

    def copy(self, source: KVPool, source_slots: Tensor, target_slots: Tensor) -> None:
        """Copies tokens from another pool of the same layout; block sizes may differ.

        source_slots, target_slots: int64 [N], on the host; of one pool they may not overlap.
        Raises ValueError for another layout.
        """
        if source.layout != self.layout:
            raise ValueError(f"cannot copy tokens of {source.layout} into a pool of {self.layout}")
        runs = slot_runs(source_slots.numpy(), target_slots.numpy(), source.block_size, self.block_size)
        for ours, theirs in zip(self.planes, source.planes, strict=True):
            copy_runs(ours, theirs, runs)

    def move(self, source_slots: Tensor, target_slots: Tensor) -> None:
        """Copies tokens inside of the pool; int64 [N] on its device, none of them in both."""
        for plane in self.planes:
            copy_slots(plane, plane, source_slots, target_slots)

    def fill(self, source: KVPool, block_ids: Sequence[int]) -> None:
        """Copies whole blocks of another pool of the same shape of blocks to this one's blocks 0, 1, ...

        From a GPU to pinned memory, the copies are queued and not waited for.
        """
        for ours, theirs in zip(self.planes, source.planes, strict=True):
            for number, block in enumerate(block_ids):
                ours[number].copy_(theirs[block], non_blocking=True)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Carries out copy-on-write, in order: the first tokens of one block into another."""
        for copy in copies:
            for plane in self.planes:
                plane[copy.target, :, :, : copy.num_tokens] = plane[copy.source, :, :, : copy.num_tokens]


@dataclass(frozen=True, slots=True)
class KVGroupShape:
    """Describes the pool of one layer group, apart from its block size.

    window: tokens that its layers attend; None for all.
    """

    num_blocks: int
    layout: KVLayout
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVPoolsShape:
    """Describes a worker's pools: layer groups in the order of the model's layers with full attention.

    block_size: tokens. order: what lies in one piece of memory.
    rank: that has them; the heads of a layout, and of states, are its part of those that all ranks have.
    states: of the layers with a recurrent state; None for a model without any.
    """

    groups: tuple[KVGroupShape, ...]
    block_size: int
    order: StorageOrder = "blocks"
    rank: Rank = ALONE
    states: StatesShape | None = None

    @property
    def bytes_by_group(self) -> tuple[int, ...]:
        return tuple(
            group.num_blocks * self.block_size * group.layout.bytes_per_token for group in self.groups
        )

    @property
    def state_bytes(self) -> int:
        return 0 if self.states is None else self.states.num_bytes

    @property
    def state_layout(self) -> StateLayout | None:
        """Returns the layout of recurrent states that all ranks have together."""
        return None if self.states is None else self.states.layout.of_ranks(self.rank.size)

    @property
    def num_bytes(self) -> int:
        return self.state_bytes + sum(self.bytes_by_group)

    @property
    def layouts(self) -> tuple[KVLayout, ...]:
        """Lists the layouts that all ranks have together."""
        return tuple(
            replace(group.layout, num_kv_heads=group.layout.num_kv_heads * self.rank.size)
            for group in self.groups
        )

    def heads(self, group: int) -> tuple[int, int]:
        """Returns which heads of a layer group this rank has, [start, stop) of those of all ranks."""
        count = self.groups[group].layout.num_kv_heads
        return count * self.rank.index, count * (self.rank.index + 1)

    def build(self, shared_file: Path | None = None, device: torch.device | str = "cpu") -> KVPools:
        return KVPools(self, shared_file, device)

    def over(self, memory: Tensor) -> KVPools:
        """Returns pools in memory that is there, uint8 [num_bytes]."""
        return KVPools(self, memory=memory)


class KVPools:
    """Holds one worker's pools side by side in one piece of memory: recurrent states, then every layer group.

    memory: all of it, uint8
    """

    def __init__(
        self,
        shape: KVPoolsShape,
        shared_file: Path | None = None,
        device: torch.device | str = "cpu",
        *,
        memory: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.memory = pool_memory(shape.num_bytes, shared_file, device) if memory is None else memory
        states, *pieces = torch.split(self.memory, [shape.state_bytes, *shape.bytes_by_group])
        self.states = None if shape.states is None else StatePool(shape.states, states)
        self.groups = tuple(
            KVPool(group.num_blocks, shape.block_size, group.layout, order=shape.order, memory=piece)
            for group, piece in zip(shape.groups, pieces, strict=True)
        )
        # Of the model's i-th layer with full attention, its pool and its place there.
        self._layers = [(pool, index) for pool in self.groups for index in range(pool.layout.num_layers)]

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @property
    def bytes_per_token(self) -> int:
        """Counts the bytes of a token that every layer keeps."""
        return sum(group.layout.bytes_per_token for group in self.shape.groups)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the caches of the model's layer `index`: views [num_blocks, block_size, Hkv, D].

        index: among the layers with full attention.
        """
        pool, place = self._layers[index]
        return pool.layer(place)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Carries out copy-on-write, in order, each in its layer group."""
        for copy in copies:
            self.groups[copy.layer_group].copy_blocks([copy])

    def copy_whole(
        self, target: KVPools, blocks: Sequence[Sequence[int]], state_slot: int | None = None
    ) -> None:
        """Copies blocks, of each layer group, to blocks 0, 1, ... of pools with all heads: `KVPool.fill`.

        state_slot: of a recurrent state, which goes to slot 0; None without one.
        """
        for to, pool, block_ids in zip(target.groups, self.groups, blocks, strict=True):
            to.fill(pool, block_ids)
        target.copy_state(self, 0, state_slot)

    def publish(self, ticket: KVTicket) -> None:
        """Does nothing: what is written here can be read as soon as the device has done it."""

    def receive(self, ticket: KVTicket, source: KVChunk, source_pool: KVPools) -> None:
        """Copies a chunk of a hand-over to where its ticket says. Block sizes may differ.

        Of pools of several ranks, the heads that both have are copied.
        Raises ValueError, before anything is written, for tokens that the ticket has no room for or that are
        there already, and for pools of another layout.
        """
        for span, *slots in self.copies(ticket, source, source_pool.shape):
            group = span.layer_group
            (ours, our_stop), (theirs, their_stop) = self.shape.heads(group), source_pool.shape.heads(group)
            start, stop = max(ours, theirs), min(our_stop, their_stop)
            if start < stop:
                heads = source_pool.groups[group].heads(start - theirs, stop - theirs)
                self.groups[group].heads(start - ours, stop - ours).copy(heads, *slots)
        self.copy_state(source_pool, ticket.state_slot, source.state_slot)

    def copy_state(self, source: KVPools, target_slot: int | None, source_slot: int | None) -> None:
        """Copies a recurrent state from other pools of the same layout; does nothing without a slot.

        Of pools of several ranks, the heads that both have are copied.
        """
        if target_slot is None or source_slot is None:
            return
        assert self.states is not None
        assert source.states is not None
        self.states.copy(source.states, source_slot, target_slot, self.shape.rank, source.shape.rank)

    def copies(
        self, ticket: KVTicket, source: KVChunk, shape: KVPoolsShape
    ) -> list[tuple[KVSpan, Tensor, Tensor]]:
        """Returns where each span's tokens lie in pools of that shape and are to lie here; int64 [N] each.

        Raises ValueError as `receive` does.
        """
        if (shape.layouts, shape.state_layout) != (self.shape.layouts, self.shape.state_layout):
            raise ValueError(f"cannot copy from pools of {shape} into pools of {self.shape}")
        return [(span, *self._slots_of(ticket, span, shape.block_size)) for span in source.spans]

    def _slots_of(self, ticket: KVTicket, span: KVSpan, source_block_size: int) -> tuple[Tensor, Tensor]:
        """Returns where a span's tokens lie in the sender's pool and are to lie here; int64 [N] each."""
        if span.start < ticket.num_cached or span.stop > ticket.num_tokens:
            raise ValueError(
                f"tokens [{span.start}, {span.stop}) of request '{ticket.request_id}' were sent, "
                f"[{ticket.num_cached}, {ticket.num_tokens}) may be; open the ticket that belongs to them"
            )
        skipped = span.start // source_block_size * source_block_size
        there = token_slots(span.blocks, span.start - skipped, span.stop - skipped, source_block_size)
        table = ticket.block_tables[span.layer_group]
        return there, token_slots(table, span.start, span.stop, self.block_size)


def layer_places(config: Any, pools: KVPools) -> tuple[list[int], list[tuple[Tensor, Tensor]]]:
    """Returns of each layer its group, the last one for those with windows, and its part of the pools."""
    groups, caches, num_states = list[int](), list[tuple[Tensor, Tensor]](), 0
    owners = [group for group, pool in enumerate(pools.groups) for _ in range(pool.layout.num_layers)]
    windows, has_states, lent = layer_windows(config), state_layers(config), lenders(config)
    layers = [layer for layer, has_state in enumerate(has_states) if not has_state and lent[layer] == layer]
    places = {layer: place for place, layer in enumerate(sorted(layers, key=lambda each: windows[each] or 0))}
    for index, has_state in enumerate(has_states):
        if has_state and pools.states is not None:
            groups.append(0)
            caches.append(pools.states.layer(num_states))
            num_states += 1
        else:
            groups.append(owners[places[lent[index]]])
            caches.append(pools.layer(places[lent[index]]))
    return groups, caches
