"""Prefill and decode workers without a model: what lies in a slot tells which tokens led up to it.

Two layer groups of different width, and other block sizes on each side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from epd.kv.kv_cache import KVCacheManager
from epd.kv.kv_room import KVCacheSpec
from epd.kv.prefix_cache import TokenIdentity, token_identity
from epd.sampling_params import SamplingParams
from epd.stages.connectors.mailbox import MailboxConnector
from epd.stages.engine.kv_pool import KVGroupShape, KVLayout, KVPools, KVPoolsShape
from epd.stages.engine.slot_copies import token_slots
from epd.stages.engine.state_pool import StateLayout, StatesShape
from epd.transfer.connectors import FirstToken, HandoverState, KVTicket
from epd.transfer.handover import DecodeReception, HandoverEnd, KVOutbox
from tests.stages.kv_values import put_tokens, tokens_at

LAYOUTS = (KVLayout(1, 2, 2, torch.float32), KVLayout(2, 1, 1, torch.float32))


STATE = StateLayout(1, 2, 3, 2, 2, 2, torch.float32)


def pools_shape(num_blocks: int, block_size: int, num_states: int = 0) -> KVPoolsShape:
    states = StatesShape(num_states, STATE) if num_states else None
    groups = tuple(KVGroupShape(num_blocks, layout) for layout in LAYOUTS)
    return KVPoolsShape(groups, block_size, states=states)


def new_cache(pools: KVPools) -> KVCacheManager:
    shape = pools.shape
    num_states = 0 if shape.states is None else shape.states.num_states
    num_blocks = tuple(group.num_blocks for group in shape.groups)
    return KVCacheManager(KVCacheSpec(num_blocks, shape.block_size, num_states))


def write_state(pools: KVPools, slot: int | None, token_ids: Sequence[int]) -> None:
    """Recurrent states of tokens: exact, and of all of them."""
    if pools.states is not None:
        assert slot is not None
        pools.states.tails[slot] = sum(token_ids)
        pools.states.matrices[slot] = sum(token_ids) + 0.5


def holds_state(pools: KVPools, slot: int | None, token_ids: Sequence[int]) -> bool:
    if pools.states is None or slot is None:
        return pools.states is None and slot is None
    tails, matrices = pools.states.tails[slot], pools.states.matrices[slot]
    return bool((tails == sum(token_ids)).all() and (matrices == sum(token_ids) + 0.5).all())


def kv_of(token_ids: Sequence[int], group: int) -> Tensor:
    """Keys and values of a prompt, [num_layers, 2, T, Hkv, D]: exact, and of a token by all before it."""
    layout = LAYOUTS[group]
    so_far = torch.tensor(token_ids, dtype=torch.float32).cumsum(0)
    layers = torch.arange(1, 2 * layout.num_layers + 1).view(layout.num_layers, 2, 1, 1, 1)
    return (so_far[None, None, :, None, None] * layers).expand(
        -1, -1, -1, layout.num_kv_heads, layout.head_dim
    )


def state_of(request_id: str, token_ids: Sequence[int]) -> HandoverState:
    first = (FirstToken(sum(token_ids) % 97, -0.5),)
    ids = np.array(token_ids, np.int64)
    return HandoverState(request_id, ids, first, len(ids), 1, SamplingParams(temperature=0.5), seed=7)


class PrefillWorker:
    """Computes prompts, as many tokens at a time as it is told."""

    def __init__(self, pools: KVPools, connector: MailboxConnector) -> None:
        self.name = connector.name
        self.pools = pools
        self.cache = new_cache(pools)
        self.outbox = KVOutbox(self.cache, connector)
        self.prompts: dict[str, tuple[list[int], TokenIdentity]] = {}

    def start(self, request_id: str, token_ids: Sequence[int], *, is_shareable: bool = True) -> bool:
        """Makes room for a prompt; whether there was any."""
        identity = token_identity(token_ids)
        copies = self.cache.open(
            request_id, identity, max_cached=len(token_ids) - 1, is_shareable=is_shareable
        )
        self.pools.copy_blocks(copies)
        self.cache.copied(copies)
        if not self.cache.can_allocate(request_id, len(token_ids)):
            self.cache.free(request_id)
            return False
        self.cache.allocate(request_id, len(token_ids))
        self.prompts[request_id] = list(token_ids), identity
        return True

    def compute(self, request_id: str, num_tokens: int = 1000) -> None:
        """The next tokens, offered at once where a hand-over is open; the state comes with the last."""
        token_ids, identity = self.prompts[request_id]
        start = self.cache.num_tokens(request_id)
        stop = min(start + num_tokens, len(token_ids))
        if not self.cache.can_allocate(request_id, stop):  # no slot for its next state
            return
        self.cache.allocate(request_id, stop)
        if start:
            assert holds_state(self.pools, self.cache.current_state(request_id), token_ids[:start])
        write_state(self.pools, self.cache.next_state(request_id), token_ids[:stop])
        for group, pool in enumerate(self.pools.groups):
            at = self.cache.num_tokens(request_id, group)  # less than `start` where layers were pruned
            table = self.cache.block_table(request_id, group)
            slots = token_slots(table, at, at + stop - start, self.pools.block_size)
            put_tokens(pool, slots, kv_of(token_ids, group)[:, :, start:stop])
        self.cache.commit(request_id, identity, stop)
        if self.outbox.is_open(request_id):
            self.send(request_id)

    def send(self, request_id: str) -> None:
        token_ids, _ = self.prompts[request_id]
        is_done = self.cache.num_tokens(request_id) == len(token_ids)
        self.outbox.send(request_id, state_of(request_id, token_ids) if is_done else None)

    def free_if_settled(self, request_id: str) -> bool:
        """Ends a request; its blocks are overwritten at once, as another's would be."""
        if not self.outbox.is_settled(request_id):
            return False
        del self.prompts[request_id]
        self.cache.free(request_id)
        self.cache.clear_idle()
        for group, pool in enumerate(self.pools.groups):
            held = {block for other in self.prompts for block in self.cache.block_table(other, group)}
            pool.storage[[b for b in range(pool.num_blocks) if b not in held]] = -1.0
        if self.pools.states is not None:
            held = {self.cache.current_state(other) for other in self.prompts}
            for slot in set(range(self.pools.states.shape.num_states)) - held:
                self.pools.states.matrices[slot] = -1.0
        return True

    def check(self) -> None:
        self.cache.check_integrity()
        self.outbox.check_integrity()


class DecodeWorker:
    """Receives prompts; what it has received can be compared with what it should be."""

    def __init__(self, pools: KVPools, connector: MailboxConnector) -> None:
        self.name = connector.name
        self.pools = pools
        self.cache = new_cache(pools)
        self.reception = DecodeReception(self.cache, connector)

    def reserve(
        self, request_id: str, sender: str, token_ids: Sequence[int], *, is_shareable: bool = True
    ) -> KVTicket | None:
        return self.reception.reserve(
            request_id, sender, token_identity(token_ids), is_shareable=is_shareable
        )

    def poll(self) -> list[HandoverEnd]:
        return self.reception.poll()

    def holds(self, request_id: str, token_ids: Sequence[int], num_tokens: Sequence[int] = ()) -> bool:
        """Whether the prompt's slots say what it should leave there; num_tokens: of each group, how far."""
        lengths = num_tokens or [len(token_ids)] * len(self.pools.groups)
        return holds_state(self.pools, self.cache.current_state(request_id), token_ids) and all(
            torch.equal(self.read(request_id, group, length), kv_of(token_ids, group)[:, :, :length])
            for group, length in enumerate(lengths)
        )

    def read(self, request_id: str, group: int, num_tokens: int) -> Tensor:
        table = self.cache.block_table(request_id, group)
        slots = token_slots(table, 0, num_tokens, self.pools.block_size)
        return tokens_at(self.pools.groups[group], slots)

    def check(self) -> None:
        self.reception.check_integrity()
