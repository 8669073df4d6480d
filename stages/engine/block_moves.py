"""Moves blocks before a step's pass: to host memory, within the pools, and back.

The tokens that a question may not drop, the key set of MustDrop, are a bit for each slot:

    block     |  7              |  3              |      of layer group 0, as in the block tables
    bits      |  0  1  0  0     |  1  0  0  0     |      written when a token is computed

A later question about the same video finds keys and values alone, and reads the bits where these lie. So
they go wherever a block goes: shared with the prefix cache, copied, to host memory and back. They stay on the
host, which learns them with the embeddings. What is sent to other workers has been chosen, and needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from epd.encoders.device import to_device
from epd.kv.block_pool import FREED, BlockCopy
from epd.kv.kv_cache import KVCacheManager
from epd.kv.scheduled_request import Preemption, Restore
from epd.stages.engine.kv_pool import KVPool, KVPools
from epd.stages.engine.slot_copies import token_slots
from epd.stages.engine.state_pool import StatePool
from epd.stages.rank import RankGroup
from epd.types import BoolArray, Int64Array, ceil_div


class KeySetTokens:
    """Holds the bits of one worker's blocks, and of requests in host memory."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._bits: BoolArray = np.zeros((num_blocks, block_size), dtype=bool)
        self._offloaded: dict[str, BoolArray] = {}

    def write(self, block_table: Sequence[int], start: int, bits: BoolArray) -> None:
        """Notes the bits of tokens [start, start + len(bits)), whatever was in their slots."""
        self._bits[self._slots(block_table, start, start + len(bits))] = bits

    def read(self, block_table: Sequence[int], num_tokens: int) -> BoolArray:
        """Returns the bits of the first tokens, bool [num_tokens]."""
        return self._bits[self._slots(block_table, 0, num_tokens)]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Carries out copy-on-write, in order."""
        for copy in copies:
            if copy.layer_group == 0:
                self._bits[copy.target, : copy.num_tokens] = self._bits[copy.source, : copy.num_tokens]

    def offload(self, request_id: str, block_table: Sequence[int], num_tokens: int) -> None:
        """Keeps the bits of a request's first tokens, whose blocks it gives up."""
        self._offloaded[request_id] = self.read(block_table, num_tokens)

    def restore(self, request_id: str, block_table: Sequence[int], start: int, stop: int) -> None:
        """Puts those of tokens [start, stop) into its new blocks, and forgets all that was kept."""
        self.write(block_table, start, self._offloaded.pop(request_id)[start:stop])

    def forget(self, request_id: str) -> None:
        """Drops what is kept of a request."""
        self._offloaded.pop(request_id, None)

    def _slots(self, block_table: Sequence[int], start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        at, size = np.arange(start, stop), self._bits.shape[1]
        blocks = np.asarray(block_table[start // size : (stop + size - 1) // size], dtype=np.int64)
        return blocks[at // size - start // size], at % size


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copies blocks within the pools."""

    copies: tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True)
class OffloadTokens:
    """Keeps a request's first tokens in host memory.

    block_tables: of each layer group. state: the slot of their recurrent state; None without any.
    """

    request_id: str
    block_tables: tuple[tuple[int, ...], ...]
    num_tokens: int
    state: int | None = None


@dataclass(frozen=True, slots=True)
class RestoreTokens:
    """Puts tokens [start, stop) of a request into its new blocks, and forgets all that was kept.

    state: the slot that their recurrent state goes to; None without any.
    """

    request_id: str
    block_tables: tuple[tuple[int, ...], ...]
    start: int
    stop: int
    state: int | None = None


@dataclass(frozen=True, slots=True)
class ForgetTokens:
    """Drops what is kept of a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class CopyBehind:
    """Copies some of a request's tokens to the blocks behind the written ones.

    block_tables: of each layer group. num_tokens: written ones of each.
    tokens: int64 [k], the same of every group, where they are needed.
    """

    block_tables: tuple[tuple[int, ...], ...]
    num_tokens: tuple[int, ...]
    tokens: Tensor | Int64Array


PoolMove = CopyBlocks | OffloadTokens | RestoreTokens | ForgetTokens | CopyBehind


class PoolMoves:
    """Carries out moves on the pools of one rank; keeps what is in host memory."""

    def __init__(self, pools: KVPools) -> None:
        self._pools = pools
        self.offloaded: dict[str, list[tuple[KVPool, int]]] = {}  # of each layer group, and the first token
        self._offloaded_states: dict[str, StatePool] = {}

    def carry_out(self, move: PoolMove) -> None:
        match move:
            case CopyBlocks(copies):
                self._pools.copy_blocks(copies)
            case OffloadTokens(request_id, tables, num_tokens, state):
                self.offloaded[request_id] = [
                    _offloaded(pool, table, num_tokens)
                    for pool, table in zip(self._pools.groups, tables, strict=True)
                ]
                if self._pools.states is not None and state is not None:
                    self._offloaded_states[request_id] = self._pools.states.to_host(state)
            case RestoreTokens():
                self._restore(move)
            case ForgetTokens(request_id):
                self.offloaded.pop(request_id, None)
                self._offloaded_states.pop(request_id, None)
            case CopyBehind(tables, lengths, tokens):
                chosen = torch.as_tensor(tokens, device=self._pools.device)
                for pool, table, num_tokens in zip(self._pools.groups, tables, lengths, strict=True):
                    first = ceil_div(num_tokens, pool.block_size) * pool.block_size
                    slots = token_slots(table, 0, first + len(chosen), pool.block_size)
                    slots = to_device(slots, chosen.device)
                    pool.move(slots[chosen], slots[first:])

    def _restore(self, move: RestoreTokens) -> None:
        kept = self.offloaded.pop(move.request_id)
        for pool, table, (host, first) in zip(self._pools.groups, move.block_tables, kept, strict=True):
            start = max(move.start, first)
            slots = token_slots(table, start, move.stop, pool.block_size)
            pool.copy(host, torch.arange(start - first, move.stop - first), slots)
        state = self._offloaded_states.pop(move.request_id, None)
        if self._pools.states is not None and state is not None and move.state is not None:
            self._pools.states.copy(state, 0, move.state)


def _offloaded(pool: KVPool, table: Sequence[int], num_tokens: int) -> tuple[KVPool, int]:
    """Returns a copy of a request's tokens in host memory, and which is the first: that of its window."""
    num_freed = table.count(FREED)
    first = num_freed * pool.block_size
    return pool.to_host(table[num_freed:], num_tokens - first), first


class BlockMoves:
    """Carries out what a scheduler decides, on the pools of one worker, which may have several ranks."""

    def __init__(self, kv: KVCacheManager, pools: KVPools, ranks: RankGroup | None = None) -> None:
        self._kv = kv
        self._pools = pools
        self._moves = PoolMoves(pools)
        self._ranks = ranks
        self.guarded = KeySetTokens(kv.spec.num_blocks[0], kv.block_size)

    @property
    def offloaded(self) -> frozenset[str]:
        """Lists the requests with tokens in host memory."""
        return frozenset(self._moves.offloaded)

    def _carry_out(self, move: PoolMove) -> None:
        if self._ranks is not None:
            self._ranks.tell(move)
        self._moves.carry_out(move)

    def offload(self, preemption: Preemption) -> None:
        """Keeps the request's tokens; to be called before its blocks are written by others."""
        tables = tuple(tuple(table) for table in preemption.block_tables)
        request_id, num_tokens = preemption.request.request_id, preemption.num_tokens
        self._carry_out(OffloadTokens(request_id, tables, num_tokens, preemption.state))
        self.guarded.offload(request_id, tables[0], num_tokens)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            self._carry_out(CopyBlocks(tuple(copies)))
            self.guarded.copy(copies)
        self._kv.copied(copies)

    def copy_behind(self, request_id: str, tokens: Tensor) -> None:
        """Copies some of a request's tokens, int64 [k] on the device, to the blocks behind the written ones.

        In every layer group the same tokens. Only other ranks, which are told them, wait for the device.
        """
        groups = range(len(self._pools.groups))
        tables = tuple(tuple(self._kv.block_table(request_id, group)) for group in groups)
        lengths = tuple(self._kv.num_tokens(request_id, group) for group in groups)
        if self._ranks is not None:
            self._ranks.tell(CopyBehind(tables, lengths, tokens.cpu().numpy()))
        self._moves.carry_out(CopyBehind(tables, lengths, tokens))

    def restore(self, restore: Restore) -> None:
        """Puts the request's tokens into its new blocks."""
        request_id = restore.request.request_id
        groups = range(len(self._pools.groups))
        tables = tuple(tuple(self._kv.block_table(request_id, group)) for group in groups)
        state = self._kv.next_state(request_id)
        self._carry_out(RestoreTokens(request_id, tables, restore.start, restore.stop, state))
        self.guarded.restore(request_id, tables[0], restore.start, restore.stop)

    def forget(self, request_id: str) -> None:
        """Drops what is kept of a request. Unknown ids are ignored."""
        if request_id in self._moves.offloaded:
            self._carry_out(ForgetTokens(request_id))
            self.guarded.forget(request_id)
