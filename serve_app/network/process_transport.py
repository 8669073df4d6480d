"""Holds the ends of one worker, with the memory that others reach: its pools, and parts that are staged."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from epd.serve_app.network.connector import (
    Envelope,
    Kind,
    Means,
    ProcessConnector,
    StagingSegment,
    TransportConfig,
    worker_of,
)
from epd.serve_app.network.memory import PoolFiles, check_kept
from epd.serve_app.network.packing import AnyPool, AnyShape, Packed
from epd.serve_app.network.routes import OpenedPools, PeerPlace, Registered, Route
from epd.stages.connectors.gpu_memory import CudaMemory, GpuMemory
from epd.stages.connectors.nixl import NixlAgent
from epd.stages.encode.encoder_pool import EncoderPool, EncoderPoolShape
from epd.stages.engine.kv_pool import KVPools, KVPoolsShape
from epd.stages.engine.pool_memory import pool_memory
from epd.stages.loading.weight_files import num_weight_bytes, write_weights
from epd.stages.placement import Placement
from epd.stages.ranks.group_pools import GroupPools, PoolSharing
from epd.transfer.connectors import EncoderConnector, KVConnector, Offer, Receipt, TransferOutcome
from epd.types import UInt8Array

logger = logging.getLogger(__name__)
_CPU = torch.device("cpu")


class ProcessTransport:
    """Holds the ends of one worker. Only `deliver` may be called from other threads."""

    def __init__(
        self,
        post: Callable[[str, Envelope], None],
        find: Callable[[str], PeerPlace | None],
        files: PoolFiles,
        here: PeerPlace,
        *,
        gpu_memory: GpuMemory | None = None,
        config: TransportConfig | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Creates a transport without ends.

        post: passes an envelope to a worker by name, without waiting
        find: says where a worker is; None if it is not known
        files: creates the files of pools
        here: where this worker is
        wake: called by another thread when what NIXL has read was delivered
        """
        gpu_memory = gpu_memory or CudaMemory()
        opened = OpenedPools(gpu_memory, self._own_pool)
        self._means = Means(post, find, here, gpu_memory, opened, config or TransportConfig())
        self._files = files
        self._wake = wake
        self._nixl: NixlAgent | None = None  # while there are ends
        self._ends: dict[tuple[str, Kind], ProcessConnector] = {}

    def embeddings(
        self, name: str, shape: EncoderPoolShape, device: torch.device = _CPU
    ) -> tuple[EncoderPool, EncoderConnector]:
        end = self._open(name, "embeddings", shape, device)
        assert isinstance(end.pool, EncoderPool)
        return end.pool, end

    def kv(
        self,
        name: str,
        shape: KVPoolsShape,
        device: torch.device = _CPU,
        sharing: PoolSharing | None = None,
    ) -> tuple[KVPools, KVConnector]:
        end = self._open(name, "kv", shape, device, sharing)
        assert isinstance(end.pool, KVPools)
        return end.pool, end

    def weights(self, path: Path, placement: Placement) -> Path | None:
        """Returns the file of weights, written by the machine's first worker.

        None without room for it, which is told, and for weights that each quantises. For GPUs, which have
        copies, it lies in memory and takes no more than `KEPT_SHARE` of what is free.
        """
        if placement.quantization is not None:
            return None
        dtype, name = placement.dtype, f"weights-{placement.dtype}"
        num_bytes = num_weight_bytes(path, dtype)

        def write(target: Path) -> None:
            if placement.is_cuda:
                check_kept(target, num_bytes)
            write_weights(path, dtype, target)

        try:
            return self._files.shared(name, num_bytes, write)
        except OSError as error:
            size, reason = num_bytes / 1e9, error.strerror
            logger.warning(
                "no room for %.2f GB of shared weights, each worker reads its own: %s", size, reason
            )
            return None

    def routes(self) -> Mapping[str, str]:
        """Returns the way that data last took to each worker that is known: see `Route`."""
        return {name: str(route) for name, route in self._means.routes.items() if self._means.find(name)}

    def close(self, name: str) -> None:
        """Closes the ends of one name. What was offered to them and not copied is answered: see `deliver`."""
        for key in [key for key in self._ends if key[0] == name]:
            end = self._ends.pop(key)
            for offer in (*end.close(), *end.unread_offers()):
                self._refuse(end.kind, offer)
            self._files.remove(Path(end.pool_id))
            if end.segment is not None:
                self._files.remove(end.segment.path)
                if end.segment.nixl is not None:
                    end.segment.nixl.deregister(end.segment.memory)
        if not self._ends:
            self._means.opened.close()
            nixl, self._nixl = self._nixl, None
            if nixl is not None:
                nixl.close()

    def deliver(self, envelope: Envelope) -> None:
        """Delivers a message to one of the ends. If that is closed, with its pool, an offer is answered.

        So the sender's memory is free again after one message, even if whoever closed the end is lost
        before the sender hears of it. Everything else for a closed end is dropped.
        """
        nixl, access = self._nixl, envelope.access
        if nixl is None or not isinstance(access, Registered):
            self._deliver(envelope)
            return
        sender = worker_of(envelope.message.sender) if isinstance(envelope.message, Offer) else ""
        there = self._means.find(sender)
        nixl.read(
            access.place,
            lambda: there is not None and self._means.find(sender) == there,
            partial(self._deliver_read, envelope, access.shape),
        )

    def _deliver_read(self, envelope: Envelope, shape: AnyShape, contents: UInt8Array | None) -> None:
        """Delivers an offer with what NIXL has read of it; as it came if that could not be read."""
        read = envelope if contents is None else replace(envelope, access=Packed(shape, contents))
        self._deliver(read)
        self._wake()

    def _deliver(self, envelope: Envelope) -> None:
        end = self._ends.get((envelope.receiver, envelope.kind))
        if end is not None:
            end.inbox.append(envelope)
            if self._ends.get((envelope.receiver, envelope.kind)) is end:
                return
            for offer in end.unread_offers():  # closed meanwhile, by the worker's thread
                self._refuse(end.kind, offer)
        elif isinstance(envelope.message, Offer):
            self._refuse(envelope.kind, envelope.message)

    def _refuse(self, kind: Kind, offer: Offer[Any]) -> None:
        receipt = Receipt(offer.transfer_id, offer.number, TransferOutcome.CANCELLED)
        self._means.post(worker_of(offer.sender), Envelope(offer.sender, kind, receipt))

    def _own_pool(self, pool_id: str) -> AnyPool | None:
        return next((end.pool for end in self._ends.values() if end.pool_id == pool_id), None)

    def _open(
        self,
        name: str,
        kind: Kind,
        shape: AnyShape,
        device: torch.device,
        sharing: PoolSharing | None = None,
    ) -> ProcessConnector:
        """Opens an end. A pool of the CPU is a file that others map; one of a GPU has its segment's name."""
        if not self._means.gpu_memory.holds(device):
            path = self._files.create(f"{name}-{kind}", shape.num_bytes)
            pool = self._new_pool(shape, device, sharing, path)
            config = self._means.config
            is_staged = config.is_staged or config.between_machines is Route.NIXL
            segment = self._new_segment(name, kind) if is_staged else None
        else:
            pool = self._new_pool(shape, device, sharing)
            segment = self._new_segment(name, kind)
            path = segment.path
        end = ProcessConnector(name, kind, pool, str(path), self._means, segment)
        self._ends[name, kind] = end
        return end

    def _new_pool(
        self, shape: AnyShape, device: torch.device, sharing: PoolSharing | None, path: Path | None = None
    ) -> AnyPool:
        """Builds a pool. path: of the memory it lies in, of a CPU's."""
        if sharing is None:
            return shape.build(path, device)
        assert isinstance(shape, KVPoolsShape)
        return GroupPools(shape, sharing, device, None if path is None else self._files.place(path))

    def _new_segment(self, name: str, kind: Kind) -> StagingSegment:
        num_bytes = self._means.config.staging_bytes
        path = self._files.create(f"{name}-{kind}-staging", num_bytes)
        memory = pool_memory(num_bytes, path)
        if self._means.config.between_machines is not Route.NIXL:
            return StagingSegment(path, memory)
        if self._nixl is None:
            self._nixl = NixlAgent(f"{self._means.here.epoch}-{secrets.token_hex(4)}", self._is_read)
        self._nixl.register(memory)
        return StagingSegment(path, memory, self._nixl)

    def _is_read(self) -> bool:
        """Returns whether others may be reading parts. Called by the thread of NIXL."""
        return any(end.is_read for end in list(self._ends.values()))
