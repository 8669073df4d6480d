"""Keeps the keys and values of one rank where ranks of other workers can read them.

each rank   has the pools of its heads, and says where they are
a receiver  opens those whose heads are its own too, when it first reads them
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from epd.stages.connectors.gpu_memory import CudaMemory, HandleError
from epd.stages.connectors.mailbox import SourceLostError
from epd.stages.connectors.shared_memory import MemoryPlace, SharedMemory
from epd.stages.engine.kv_pool import KVPools, KVPoolsShape
from epd.stages.engine.pool_memory import pool_memory
from epd.stages.rank import Collectives
from epd.transfer.connectors import KVChunk, KVTicket

logger = logging.getLogger(__name__)
_GPU = CudaMemory()
_here: WeakValueDictionary[str, SharedPools] = WeakValueDictionary()  # of this process, by name


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Says where the pools of one rank are.

    shape: whose rank says which heads they have.
    memory: of a CPU, theirs; of a GPU, a byte that is there as long as they are.
    handles: of a GPU, one for each process that opens them.
    """

    shape: KVPoolsShape
    memory: MemoryPlace
    handles: tuple[bytes, ...] = ()


class SharedPools(KVPools):
    """Holds the pools of one rank, and reads those of others. memory: of the host, given or its own."""

    def __init__(
        self, shape: KVPoolsShape, device: torch.device | str = "cpu", memory: MemoryPlace | None = None
    ) -> None:
        is_host = torch.device(device).type == "cpu"
        self._own = None if memory is not None else SharedMemory(shape.num_bytes if is_host else 1)
        self._memory = memory or self._own.place  # type: ignore[union-attr] # one of them is there
        mapped = pool_memory(shape.num_bytes, Path(self._memory.path)) if is_host else None
        super().__init__(shape, device=device, memory=mapped)
        self._opened: dict[MemoryPlace, KVPools] = {}
        _here[self._memory.name] = self

    def place(self, num_readers: int) -> PoolPlace:
        """Returns where the pools are, for so many other processes."""
        is_gpu = self.device.type != "cpu"
        handles = [_GPU.export(self.memory) for _ in range(num_readers)] if is_gpu else []
        return PoolPlace(self.shape, self._memory, tuple(handles))

    def copy_from(self, ticket: KVTicket, source: KVChunk, places: Sequence[PoolPlace]) -> None:
        """Copies the heads of this rank out of the pools of the sender's ranks.

        Raises SourceLostError for pools that are gone, HandleError and OSError for those that this process
        cannot open, and ValueError as `KVPools.receive` does.
        """
        for place in places:
            if self._has_heads_of(place.shape):
                super().receive(ticket, source, self._open(place))

    def _has_heads_of(self, shape: KVPoolsShape) -> bool:
        ours, theirs = self.shape.rank, shape.rank
        return ours.index * theirs.size < (theirs.index + 1) * ours.size and (
            theirs.index * ours.size < (ours.index + 1) * theirs.size
        )

    def _open(self, place: PoolPlace) -> KVPools:
        """Returns pools that are there; new ones take the place of those whose processes have ended.

        Memory of a GPU is not read when its process has ended: CUDA does not define that.
        """
        pools = self._opened.get(place.memory)
        if pools is None or place.handles:
            if not place.memory.is_there():
                raise SourceLostError
            self._opened = {each: opened for each, opened in self._opened.items() if each.is_there()}
            pools = pools or self._opened_anew(place)
            self._opened[place.memory] = pools
        return pools

    def _opened_anew(self, place: PoolPlace) -> KVPools:
        if place.handles:
            own = _here.get(place.memory.name)
            if own is not None:  # a handle does not open in the process that has made it
                return own
            return place.shape.over(_GPU.open(place.handles[self.shape.rank.index]))
        descriptor = place.memory.open()
        if descriptor is None:
            raise SourceLostError
        try:
            path = Path(f"/proc/self/fd/{descriptor}")
            return place.shape.over(pool_memory(place.shape.num_bytes, path))
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class SharePools:
    """Asks a rank where its pools are, for so many processes that will read them."""

    num_readers: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Has all that the ranks have written come before what rank 0 queues next."""


@dataclass(frozen=True, slots=True)
class ReceiveTokens:
    """Copies a chunk of a hand-over, each rank its heads. places: of the sender's ranks."""

    ticket: KVTicket
    source: KVChunk
    places: tuple[PoolPlace, ...]


def meet(ranks: Collectives, device: torch.device) -> None:
    """Lets what this rank queues next on its device wait for what all ranks have queued so far."""
    ranks.add_up(torch.zeros(1, device=device))


def receive_together(ranks: Collectives | None, pools: SharedPools, step: ReceiveTokens) -> Tensor:
    """Copies this rank's part, and meets the others.

    Returns how many ranks have found pools gone, and how many cannot open them: float32 [2].
    """
    failed = torch.zeros(2, device=pools.device)
    try:
        pools.copy_from(step.ticket, step.source, step.places)
    except SourceLostError:
        failed[0] = 1
    except (HandleError, OSError) as error:
        logger.warning("a rank cannot open the pools of '%s': %s", step.ticket.sender, error)
        failed[1] = 1
    if ranks is not None:
        ranks.add_up(failed)
    return failed
