"""Moves data between worker processes: offers and receipts are messages, bulk data bypasses them.

Workers of one machine map each other's pools. To other machines, offered data travels in the message,
over the link between them.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from epd.transfer.connectors import EncoderConnector, KVConnector, Offer, Receipt
from serve_app.network.memory import PoolFiles, open_pool
from serve_app.network.packing import Packed, pack, unpack
from stages.connectors.mailbox import MailboxConnector, Message
from stages.encode.encoder_pool import EncoderPool, EncoderPoolShape
from stages.engine.kv_pool import KVPools, KVPoolsShape
from stages.placement import Placement
from stages.weight_files import num_weight_bytes, write_weights

logger = logging.getLogger(__name__)

# An end point may have one end of each kind.
Kind = Literal["embeddings", "kv"]
AnyShape = EncoderPoolShape | KVPoolsShape
AnyPool = EncoderPool | KVPools
_CPU = torch.device("cpu")
_LOOK_EVERY_S = 2.0  # between checks for mapped pools that are gone


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message for an end of a transport.

    shape: of the pool of an offer, for receivers that map it. packed: the offered data, for others.
    """

    receiver: str
    kind: Kind
    message: Message
    shape: AnyShape | None = None
    packed: Packed | None = None


class ProcessTransport:
    """Holds the ends of one worker. Only `deliver` may be called from other threads.

    post: passes an envelope to a worker by name, without waiting
    can_map: whether that worker is on this machine and can map its files
    files: creates the files of pools
    """

    def __init__(
        self, post: Callable[[str, Envelope], None], can_map: Callable[[str], bool], files: PoolFiles
    ) -> None:
        self._post = post
        self._can_map = can_map
        self._files = files
        self._ends: dict[tuple[str, Kind], ProcessConnector] = {}

    def embeddings(
        self, name: str, shape: EncoderPoolShape, device: torch.device = _CPU
    ) -> tuple[EncoderPool, EncoderConnector]:
        end = self._open(name, "embeddings", shape, device)
        assert isinstance(end.pool, EncoderPool)
        return end.pool, end

    def kv(self, name: str, shape: KVPoolsShape, device: torch.device = _CPU) -> tuple[KVPools, KVConnector]:
        end = self._open(name, "kv", shape, device)
        assert isinstance(end.pool, KVPools)
        return end.pool, end

    def weights(self, path: Path, placement: Placement) -> Path | None:
        """Returns the file of weights, written by the machine's first worker.

        None without room for it, and for a GPU, to which each worker loads its own.
        """
        if placement.is_cuda:
            return None
        dtype = placement.dtype
        num_bytes = num_weight_bytes(path, dtype)
        try:
            return self._files.shared(f"weights-{dtype}", num_bytes, partial(write_weights, path, dtype))
        except OSError:
            logger.warning("no room for %d bytes of shared weights: each worker reads its own", num_bytes)
            return None

    def close(self, name: str) -> None:
        for key in [key for key in self._ends if key[0] == name]:
            path = Path(self._ends.pop(key).pool_id)
            if path.is_absolute():  # of a GPU's pool there is no file
                self._files.remove(path)

    def deliver(self, envelope: Envelope) -> None:
        """Delivers a message to one of the ends; it is dropped if that end, and so its pool, is closed."""
        end = self._ends.get((envelope.receiver, envelope.kind))
        if end is not None:
            end.mail.append(envelope)

    def _open(self, name: str, kind: Kind, shape: AnyShape, device: torch.device) -> ProcessConnector:
        if device.type == "cpu":
            path = self._files.create(f"{name}-{kind}", shape.num_bytes)
            pool, pool_id = shape.build(path), str(path)
            end = ProcessConnector(name, kind, shape, pool, pool_id, self._post, self._can_map)
        else:  # no other process maps it: its data travels in messages
            pool, pool_id = shape.build(device=device), f"{name}-{kind}-{secrets.token_hex(4)}"
            end = ProcessConnector(name, kind, shape, pool, pool_id, self._post, lambda _worker: False)
        self._ends[name, kind] = end
        return end


class ProcessConnector(MailboxConnector[Any, Any]):
    """Connects one end of a worker. Created by `ProcessTransport`."""

    def __init__(
        self,
        name: str,
        kind: Kind,
        shape: AnyShape,
        pool: AnyPool,
        pool_id: str,
        post: Callable[[str, Envelope], None],
        can_map: Callable[[str], bool],
    ) -> None:
        super().__init__(name, pool, pool_id)
        self.mail: deque[Envelope] = deque()
        self._kind = kind
        self._shape = shape
        self._post = post
        self._can_map = can_map
        # Shapes and contents of received, unanswered offers; pools by sender, with their ids.
        self._shapes: dict[str, AnyShape] = {}
        self._packed: dict[tuple[str, int], Packed] = {}
        self._mapped: dict[str, tuple[str, AnyPool]] = {}
        self._look_s = 0.0

    def put(self, name: str, message: Message) -> None:
        worker = name.rpartition(".")[0]
        if isinstance(message, Receipt):
            envelope = Envelope(name, self._kind, message)
        elif message.source is None or self._can_map(worker):
            envelope = Envelope(name, self._kind, message, shape=self._shape)
        else:
            packed, source = pack(self.pool, message.source)
            envelope = Envelope(name, self._kind, replace(message, source=source), packed=packed)
        self._post(worker, envelope)

    def messages(self) -> Iterator[Message]:
        while self.mail:
            envelope = self.mail.popleft()
            message = envelope.message
            if isinstance(message, Offer):
                if envelope.shape is not None:
                    self._shapes[message.pool_id] = envelope.shape
                if envelope.packed is not None:
                    self._packed[message.pool_id, message.number] = envelope.packed
            yield message

    def recv(self) -> Sequence[Offer[Any]]:
        taken = super().recv()
        # Offers that were not expected have been answered without reading what they offer.
        self._packed.clear()
        self._shapes.clear()
        self._forget_gone()
        return taken

    def _forget_gone(self) -> None:
        """Unmaps pools whose worker is gone, or has given up the role they were for."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + _LOOK_EVERY_S
        for sender in [name for name, (path, _) in self._mapped.items() if not Path(path).exists()]:
            del self._mapped[sender]

    def pool_of(self, offer: Offer[Any]) -> AnyPool | None:
        packed = self._packed.get((offer.pool_id, offer.number))
        return unpack(packed) if packed is not None else self._map(offer)

    def _map(self, offer: Offer[Any]) -> AnyPool | None:
        mapped_id, pool = self._mapped.get(offer.sender, ("", None))
        if mapped_id != offer.pool_id or pool is None:
            pool = map_pool(Path(offer.pool_id), self._shapes[offer.pool_id])
            if pool is not None:
                self._mapped[offer.sender] = offer.pool_id, pool
        return pool


def map_pool(path: Path, shape: AnyShape) -> AnyPool | None:
    """Maps the pool that another process has created; None if it is gone."""
    descriptor = open_pool(path)
    if descriptor is None:
        return None
    try:
        return shape.build(Path(f"/proc/self/fd/{descriptor}"))
    finally:
        os.close(descriptor)
