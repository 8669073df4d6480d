"""Hands keys and values over between workers of several ranks: rank 0 offers and answers, all ranks copy.

sender      all ranks have written | offer                                   receipt | blocks are free
receiver                             tell | each rank copies its heads | meet
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epd.stages.connectors.mailbox import SourceLostError
from epd.stages.connectors.shared_memory import MemoryPlace
from epd.stages.engine.kv_pool import KVPools, KVPoolsShape
from epd.stages.rank import RankGroup
from epd.stages.ranks.shared_pools import (
    Fence,
    PoolPlace,
    ReceiveTokens,
    SharedPools,
    SharePools,
    meet,
    receive_together,
)
from epd.transfer.connectors import KVChunk, KVTicket
from epd.transfer.transfers import TransferIds


@dataclass(frozen=True, slots=True)
class PoolSharing:
    """Says that workers have pools in parts. ranks: of this worker; None for one process.

    max_ranks: of any worker that may read them.
    """

    ranks: RankGroup | None
    max_ranks: int


@dataclass(frozen=True, slots=True)
class PlacedPools:
    """Stands for the pools of all ranks of a worker of another process. places: of its ranks, in order."""

    places: tuple[PoolPlace, ...]

    def places_for(self, transfer_id: str) -> tuple[PoolPlace, ...]:  # noqa: ARG002 - it has one reader
        return self.places


class GroupPools(SharedPools):
    """Holds rank 0's pools. What it receives, all ranks receive; a worker of one process receives alone."""

    def __init__(
        self,
        shape: KVPoolsShape,
        sharing: PoolSharing,
        device: torch.device | str = "cpu",
        memory: MemoryPlace | None = None,
    ) -> None:
        self._ranks, self._max_ranks = sharing.ranks, sharing.max_ranks
        if self._ranks is not None:
            shape = replace(shape, rank=self._ranks.rank)
        super().__init__(shape, device, memory)
        self._places: dict[str, tuple[PoolPlace, ...]] = {}  # as told to each receiver
        self._known: set[tuple[PoolPlace, ...]] = set()  # that all ranks have opened

    def places_for(self, transfer_id: str) -> tuple[PoolPlace, ...]:
        """Returns where the pools of all ranks are, after `publish` to the receiver of the transfer."""
        return self._places.get(TransferIds.receiver_of(transfer_id), ())

    def publish(self, ticket: KVTicket) -> None:
        """Waits, on the device, until all ranks have written what they were told to. Raises RankLostError."""
        self._places_of(TransferIds.receiver_of(ticket.transfer_id))
        if self._ranks is not None:
            self._ranks.tell(Fence())
            with self._ranks.computing():
                meet(self._ranks, self.device)

    def _places_of(self, receiver: str) -> tuple[PoolPlace, ...]:
        """Returns where the pools of all ranks are, for one receiver that opens them."""
        if receiver not in self._places:
            others = [] if self._ranks is None else self._ranks.ask(SharePools(self._max_ranks))
            self._places[receiver] = (self.place(self._max_ranks), *others)
        return self._places[receiver]

    def copy_whole(
        self, target: KVPools, blocks: Sequence[Sequence[int]], state_slot: int | None = None
    ) -> None:
        """Copies the heads of all ranks, from pools that rank 0 opens."""
        own, *others = self._places_of("")
        for shape, pools in ((own.shape, self), *((each.shape, self._open(each)) for each in others)):
            for number, block_ids in enumerate(blocks):
                heads = target.groups[number].heads(*shape.heads(number))
                heads.fill(pools.groups[number], block_ids)
            target.copy_state(pools, 0, state_slot)

    def receive(self, ticket: KVTicket, source: KVChunk, source_pool: KVPools | PlacedPools) -> None:
        """Copies a chunk as `KVPools.receive` does, on all ranks. Also raises RankLostError.

        source_pool: of a worker of several ranks; or in host memory, with the heads of all of them.
        """
        if isinstance(source_pool, (GroupPools, PlacedPools)):
            self._receive(ticket, source, source_pool.places_for(ticket.transfer_id))
        elif self._ranks is None or _is_empty(source):
            super().receive(ticket, source, source_pool)
        else:
            copied = SharedPools(source_pool.shape)
            copied.memory.copy_(source_pool.memory)
            self._receive(ticket, source, (copied.place(0),))

    def _receive(self, ticket: KVTicket, source: KVChunk, places: tuple[PoolPlace, ...]) -> None:
        if not places or not all(place.memory.is_there() for place in places):
            raise SourceLostError
        self.copies(ticket, source, places[0].shape)  # raises before any rank is told
        if _is_empty(source):
            return
        step = ReceiveTokens(ticket, replace(source, state=None), places)
        if self._ranks is None:
            self._check(receive_together(None, self, step), step)
            return
        self._ranks.tell(step)
        with self._ranks.computing():
            failed = receive_together(self._ranks, self, step)
        self._check(failed, step)

    def _check(self, failed: Tensor, step: ReceiveTokens) -> None:
        """Raises SourceLostError or ValueError if a rank could not read. Waits for a GPU once a sender."""
        if self.device.type != "cpu" and step.places in self._known:
            return
        num_lost, num_unreadable = failed.tolist()
        if num_lost:
            raise SourceLostError
        if num_unreadable:
            raise ValueError(
                f"{num_unreadable:.0f} of the processes of '{step.ticket.receiver}' cannot open the memory "
                f"of '{step.ticket.sender}'; start both on one machine, where they see each other's GPUs"
            )
        if self.device.type != "cpu":
            self._known.add(step.places)


def _is_empty(source: KVChunk) -> bool:
    """Reports whether there is nothing to copy: an answer's state alone may be sent."""
    return not source.spans and source.state_slot is None
