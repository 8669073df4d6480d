"""Chooses how data gets from one worker's pool to another worker, and opens the pool there by that route.

same worker                       same process     the receiver reads the pool itself
same machine, pool of the CPU     shared memory    the receiver maps the pool
same machine, pool of a GPU       cuda ipc         the receiver opens the pool, if it sees that GPU
                                  staging          through a bounded segment of host memory
another machine                   link             through messages, of bounded size and number
                                  nixl             NIXL reads a bounded segment of host memory, if wanted
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from epd.serve_app.network.memory import open_pool
from epd.serve_app.network.packing import AnyPool, AnyShape, Packed, opened, unpack
from epd.stages.connectors.gpu_memory import GpuMemory, HandleError
from epd.stages.connectors.nixl import RegisteredPlace
from epd.stages.engine.pool_memory import pool_memory
from epd.stages.ranks.group_pools import PlacedPools
from epd.stages.ranks.shared_pools import PoolPlace
from epd.transfer.connectors import AnySource, Offer

logger = logging.getLogger(__name__)
_LOOK_EVERY_S = 2.0  # between checks for pools that are gone


class Route(StrEnum):
    """Names a way, as `epd status` shows it."""

    SAME_PROCESS = "same process"
    SHARED_MEMORY = "shared memory"
    CUDA_IPC = "cuda ipc"
    STAGING = "staging"
    LINK = "link"
    NIXL = "nixl"


@dataclass(frozen=True, slots=True)
class PeerPlace:
    """Says where a worker is, as far as its pools are concerned.

    epoch: unique to its process
    node_id: of its machine, whose shared memory it sees
    gpus: ids of the GPUs whose memory it can open
    """

    epoch: str
    node_id: str
    gpus: Collection[str] = ()


def choose_route(
    gpu: str,
    here: PeerPlace,
    there: PeerPlace | None,
    *,
    is_staged: bool = False,
    may_open: bool = True,
    between_machines: Route = Route.LINK,
) -> Route:
    """Returns the route from a pool of this worker to another worker.

    gpu: that the pool is on; empty for a pool of the CPU
    there: None for a worker that is not known, which gets messages alone, if any
    is_staged: whether pools of this machine are staged although they could be reached
    may_open: False for a receiver that has failed to open the pool before
    between_machines: the link, or NIXL, while the receiver can read with it
    """
    if there is None:
        return Route.LINK
    if there.node_id != here.node_id:
        return between_machines if may_open else Route.LINK
    if there.epoch == here.epoch:
        return Route.SAME_PROCESS
    if is_staged:
        return Route.STAGING
    if not gpu:
        return Route.SHARED_MEMORY
    return Route.CUDA_IPC if may_open and gpu in there.gpus else Route.STAGING


@dataclass(frozen=True, slots=True)
class Mapped:
    """Leads to a pool of the CPU, which the receiver maps: the id of the pool is its path."""

    shape: AnyShape


@dataclass(frozen=True, slots=True)
class Exported:
    """Leads to a pool of a GPU. handle: see `GpuMemory`; empty if an earlier offer has brought it."""

    shape: AnyShape
    handle: bytes


@dataclass(frozen=True, slots=True)
class Staged:
    """Leads to a part in a segment of host memory.

    segment, segment_bytes: its path and size
    offset: of the part, in bytes
    """

    shape: AnyShape
    segment: str
    segment_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Registered:
    """Leads to a part that NIXL reads, and that is replaced by what was read."""

    shape: AnyShape
    place: RegisteredPlace


@dataclass(frozen=True, slots=True)
class InRanks:
    """Leads to the pools of the ranks of a worker, which those of the receiver open. places: of its ranks."""

    places: tuple[PoolPlace, ...]


Access = Mapped | Exported | Staged | Registered | InRanks | Packed


class OpenedPools:
    """Keeps the pools of other workers that one worker has opened, until their names are gone."""

    def __init__(self, gpu_memory: GpuMemory, own: Callable[[str], AnyPool | None]) -> None:
        """Begins empty. own: returns the pool of this process with an id, None if there is none."""
        self._gpu_memory = gpu_memory
        self._own = own
        self._pools: dict[str, AnyPool] = {}  # by id
        self._segments: dict[str, Tensor] = {}  # by path
        self._looked_s = 0.0

    def __len__(self) -> int:
        return len(self._pools) + len(self._segments)

    def open(
        self, offer: Offer[AnySource], access: Access | None, device: torch.device
    ) -> AnyPool | PlacedPools | None:
        """Returns the pool to read an offer from; None if it is gone.

        access: None for a pool of this process
        device: that staged and packed parts are read on
        Raises HandleError for a GPU's pool that cannot be opened, and a part that NIXL could not read.
        """
        match access:
            case None:
                return self._own(offer.pool_id)
            case Packed():
                return unpack(access, device)
            case Staged():
                return self._staged(access, device)
            case Mapped():
                return self._mapped(offer.pool_id, access)
            case Registered():
                raise HandleError("NIXL could not read it")
            case InRanks():
                return PlacedPools(access.places)
            case Exported():
                return self._exported(offer.pool_id)

    def take_handle(self, pool_id: str, access: Exported) -> None:
        """Opens a GPU's pool, whose handle comes once, with any offer from it."""
        try:
            self._pools[pool_id] = access.shape.over(self._gpu_memory.open(access.handle))
        except HandleError as error:
            logger.warning("the pool %s cannot be opened: %s", Path(pool_id).name, error)

    def forget_gone(self) -> None:
        """Drops pools whose worker is gone, or has given up the role they were for."""
        now_s = time.monotonic()
        if now_s < self._looked_s:
            return
        self._looked_s = now_s + _LOOK_EVERY_S
        for pool_id in [each for each in self._pools if not Path(each).exists()]:
            del self._pools[pool_id]
        for path in [each for each in self._segments if not Path(each).exists()]:
            self._gpu_memory.unpin(self._segments.pop(path))

    def close(self) -> None:
        """Drops everything."""
        self._pools.clear()
        while self._segments:
            self._gpu_memory.unpin(self._segments.popitem()[1])

    def _mapped(self, pool_id: str, access: Mapped) -> AnyPool | None:
        pool = self._pools.get(pool_id) or map_pool(Path(pool_id), access.shape)
        if pool is not None:
            self._pools[pool_id] = pool
        return pool

    def _exported(self, pool_id: str) -> AnyPool | None:
        """Returns a GPU's pool. Memory of a process that has ended is not read: CUDA does not define that."""
        if not Path(pool_id).exists():
            return None
        if pool_id not in self._pools:
            raise HandleError(f"the pool {Path(pool_id).name} is not open")
        return self._pools[pool_id]

    def _staged(self, access: Staged, device: torch.device) -> AnyPool | None:
        segment = self._segments.get(access.segment)
        if segment is None:
            segment = map_memory(Path(access.segment), access.segment_bytes)
            if segment is None:
                return None
            self._gpu_memory.pin(segment)
            self._segments[access.segment] = segment
        part = segment[access.offset : access.offset + access.shape.num_bytes]
        return opened(access.shape, part, device)


def map_memory(path: Path, num_bytes: int) -> Tensor | None:
    """Maps memory that another process has created: uint8 [num_bytes]; None if it is gone."""
    descriptor = open_pool(path)
    if descriptor is None:
        return None
    try:
        return pool_memory(num_bytes, Path(f"/proc/self/fd/{descriptor}"))
    finally:
        os.close(descriptor)


def map_pool(path: Path, shape: AnyShape) -> AnyPool | None:
    """Maps the pool that another process has created; None if it is gone."""
    memory = map_memory(path, shape.num_bytes)
    return None if memory is None else shape.over(memory)
