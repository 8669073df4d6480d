"""Measures transfers between two processes, by each way that the program itself would take.

this process: sends, until the receipt  --envelopes, a pipe-->  a child: receives, copies, answers
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.gpu.setup import Setup
from benchmarks.reporting import Row
from epd.encode.encoder_cache import CachedGroup, GroupKey
from epd.serve_app.network.connector import Envelope, TransportConfig
from epd.serve_app.network.memory import PoolFiles, new_fleet_id
from epd.serve_app.network.packing import AnyShape
from epd.serve_app.network.process_transport import ProcessTransport
from epd.serve_app.network.routes import PeerPlace
from epd.stages.connectors.gpu_memory import CudaMemory
from epd.stages.encode.encoder_pool import EmbeddingLayout, EncoderPoolShape
from epd.stages.engine.kv_pool import KVGroupShape, KVLayout, KVPoolsShape
from epd.transfer.connectors import KVChunk, KVSpan, KVTicket, Ticket, TransferOutcome
from epd.types import ceil_div

_BLOCK_SIZE = 16
_SENDER, _RECEIVER = "p0.prefill", "d0.decode"
_CHILD_S, _TRANSFER_S = 60.0, 20.0  # until it is ready, and until a receipt
_IDLE_S = 0.0001


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two processes: what makes its transport and pool. shape: of the pool."""

    name: str
    fleet_id: str
    shape: AnyShape
    device: str
    is_staged: bool


class _End:
    """A pool with its connector, and the pipe to the other process."""

    def __init__(self, side: Side, pipe: Connection) -> None:
        self.pipe = pipe
        gpus = CudaMemory().visible()
        self._places = {name: PeerPlace(name, "here", gpus) for name in ("p0", "d0")}
        config = TransportConfig(is_staged=side.is_staged)
        here = self._places[side.name.partition(".")[0]]
        self._files = PoolFiles(side.fleet_id)
        self._files.hold()
        self.transport = ProcessTransport(self._post, self._places.get, self._files, here, config=config)
        make: Any = self.transport.kv if isinstance(side.shape, KVPoolsShape) else self.transport.embeddings
        self.pool, self.connector = make(side.name, side.shape, torch.device(side.device))

    def serve(self) -> bool:
        """Takes tickets and envelopes that have come, and copies what was offered. False after "close"."""
        while self.pipe.poll():
            message = self.pipe.recv()
            if message == "close":
                return False
            if isinstance(message, Envelope):
                self.transport.deliver(message)
            else:
                self.connector.expect(message)
        self.connector.recv()
        self.connector.poll()
        return True

    def _post(self, _worker: str, envelope: Envelope) -> None:
        self.pipe.send(envelope)

    def close(self, name: str) -> None:
        self.transport.close(name)
        self._files.release()


def receive(pipe: Connection) -> None:
    """Runs the child: opens the end of each `Side` that comes, and serves it until "close"; None ends it."""
    while (side := pipe.recv()) is not None:
        end = _End(side, pipe)
        pipe.send("ready")
        while end.serve():
            time.sleep(_IDLE_S)
        end.close(side.name)


class Sender:
    """This process's end. send: returns once the receiver has answered for all of an offer."""

    def __init__(self, end: _End) -> None:
        self._end = end
        self._num_sent = 0

    @property
    def route(self) -> str:
        """The way that the last transfer took."""
        return next(iter(self._end.transport.routes().values()), "")

    def send(self, ticket: KVTicket | Ticket, source: Any) -> None:
        """Raises RuntimeError if it is not delivered."""
        end, number = self._end, self._num_sent
        self._num_sent += 1
        ticket = _renamed(ticket, f"t{number}")
        end.pipe.send(ticket)
        end.connector.send(ticket, source)
        stop_s = time.monotonic() + _TRANSFER_S
        while time.monotonic() < stop_s:
            while end.pipe.poll():
                end.transport.deliver(end.pipe.recv())
            for receipt in end.connector.poll():
                if receipt.outcome is not TransferOutcome.DELIVERED:
                    raise RuntimeError(f"not delivered: {receipt.error or receipt.outcome}")
                return
            time.sleep(_IDLE_S)
        raise RuntimeError(f"no receipt after {_TRANSFER_S:.0f} s")


def _renamed(ticket: KVTicket | Ticket, transfer_id: str) -> KVTicket | Ticket:
    if isinstance(ticket, Ticket):
        return Ticket(transfer_id, ticket.receiver, ticket.key, ticket.target)
    spans = ticket.num_cached, ticket.num_tokens, ticket.block_tables
    return KVTicket(transfer_id, ticket.receiver, ticket.sender, transfer_id, *spans)


@contextmanager
def receiving_process() -> Iterator[Connection]:
    """Starts the child."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=receive, args=(theirs,))
    child.start()
    try:
        yield ours
        ours.send(None)
        child.join(_TRANSFER_S)
    finally:
        child.kill()
        child.join()


@contextmanager
def connected(
    pipe: Connection, shape: AnyShape, device: torch.device, *, is_staged: bool
) -> Iterator[Sender]:
    """Connects two pools of the same shape on the same device, ours and the child's."""
    fleet_id = new_fleet_id()
    pipe.send(Side(_RECEIVER, fleet_id, shape, str(device), is_staged))
    end = _End(Side(_SENDER, fleet_id, shape, str(device), is_staged), pipe)
    try:
        if not pipe.poll(_CHILD_S):
            raise RuntimeError(f"the receiving process was not ready after {_CHILD_S:.0f} s")
        pipe.recv()
        yield Sender(end)
        pipe.send("close")
    finally:
        end.close(_SENDER)


def between_processes(
    setup: Setup, kv: KVLayout, embeddings: EmbeddingLayout, sizes: Sequence[int]
) -> Iterator[Row]:
    """Keys and values from P to D and embeddings from E to P, by the direct way and by staging.

    sizes: tokens that are moved at once.
    """
    num_blocks, device = ceil_div(max(sizes), _BLOCK_SIZE), setup.placement.device
    kv_shape = KVPoolsShape((KVGroupShape(num_blocks, kv),), _BLOCK_SIZE)
    shape = EncoderPoolShape(num_blocks, _BLOCK_SIZE, embeddings)
    with receiving_process() as pipe:
        for is_staged in (False, True):
            with connected(pipe, kv_shape, device, is_staged=is_staged) as sender:
                for size in sizes:
                    yield _row(
                        setup, "P to D", sender, partial(_send_kv, sender, size), kv.bytes_per_token, size
                    )
            with connected(pipe, shape, device, is_staged=is_staged) as sender:
                for size in sizes:
                    send, num_bytes = partial(_send_embeddings, sender, size), embeddings.bytes_per_embedding
                    yield _row(setup, "E to P", sender, send, num_bytes, size)


def _send_kv(sender: Sender, size: int) -> None:
    blocks = tuple(range(ceil_div(size, _BLOCK_SIZE)))
    ticket = KVTicket("", _RECEIVER, _SENDER, "", 0, size, (blocks[::-1],))
    sender.send(ticket, KVChunk((KVSpan(0, 0, size, blocks),)))


def _send_embeddings(sender: Sender, size: int) -> None:
    blocks = tuple(range(ceil_div(size, _BLOCK_SIZE)))
    key = GroupKey("", (), (0, 0), (0, 0), "")
    sender.send(Ticket("", _RECEIVER, key, CachedGroup(size, blocks[::-1])), CachedGroup(size, blocks))


def _row(
    setup: Setup, way: str, sender: Sender, send: Callable[[], None], token_bytes: int, size: int
) -> Row:
    seconds, num_bytes = setup.seconds(send), size * token_bytes
    return {
        "way": way,
        "by": sender.route,
        "tokens": size,
        "GB": round(num_bytes / 1e9, 3),
        "s": round(seconds, 4),
        "GB/s": round(num_bytes / 1e9 / seconds, 2),
    }
