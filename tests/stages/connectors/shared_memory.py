"""Workers of one machine: each pool is a file in memory that the others map, messages go through queues."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from epd.stages.connectors.mailbox import MailboxConnector, Message, Pool
from epd.transfer.connectors import AnyTicket, Offer, SourceT, TicketT

_MEMORY_FOLDER = Path("/dev/shm")

_TicketT = TypeVar("_TicketT", bound=AnyTicket, contravariant=True)
_SourceT = TypeVar("_SourceT", contravariant=True)


class MessageQueue(Protocol):
    """What is used of `multiprocessing.Queue`."""

    def put(self, obj: Message) -> None: ...

    def get_nowait(self) -> Message: ...


class PoolShape(Protocol[_TicketT, _SourceT]):
    """What a pool has to be built from, apart from its memory."""

    @property
    def num_bytes(self) -> int: ...

    def build(self, shared_file: Path | None = None) -> Pool[_TicketT, _SourceT]: ...


@dataclass(frozen=True, slots=True)
class SharedPoolFile(Generic[TicketT, SourceT]):
    """A pool that any process of this machine can map: its file and its shape."""

    path: Path
    shape: PoolShape[TicketT, SourceT]

    @classmethod
    def create(cls, shape: PoolShape[TicketT, SourceT]) -> Self:
        """A new file, in memory where the system has a folder for that. Remove it with `with` or `unlink`."""
        folder = _MEMORY_FOLDER if _MEMORY_FOLDER.is_dir() else None
        descriptor, path = tempfile.mkstemp(prefix="epd-pool-", dir=folder)
        os.ftruncate(descriptor, shape.num_bytes)
        os.close(descriptor)
        return cls(Path(path), shape)

    def map(self) -> Pool[TicketT, SourceT]:
        return self.shape.build(self.path)

    def unlink(self) -> None:
        """Removes the name; who has mapped it keeps the memory."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unlink()


class SharedMemoryConnector(MailboxConnector[TicketT, SourceT]):
    """queues, pools: of every worker by name, this one included; the same in every process.

    A worker that starts again needs a queue and a file of its own, in the place of the old ones. A process
    killed in the middle of a `multiprocessing.Queue.put` leaves that queue locked for all its writers: where
    workers are expected to be killed, give queues that have no lock between processes.
    """

    def __init__(
        self,
        name: str,
        queues: Mapping[str, MessageQueue],
        pools: Mapping[str, SharedPoolFile[TicketT, SourceT]],
    ) -> None:
        super().__init__(name, pools[name].map(), str(pools[name].path))
        self._queues = queues
        self._files = pools
        self._mapped: dict[str, tuple[str, Pool[TicketT, SourceT]]] = {}  # by worker, with the pool's id

    def put(self, name: str, message: Message) -> None:
        self._queues[name].put(message)

    def messages(self) -> Iterator[Message]:
        while True:
            try:
                yield self._queues[self.name].get_nowait()
            except Empty:
                return

    def pool_of(self, offer: Offer[SourceT]) -> Pool[TicketT, SourceT] | None:
        mapped_id, pool = self._mapped.get(offer.sender, ("", None))
        if mapped_id != offer.pool_id:
            file = self._files[offer.sender]
            # Removed: its owner is gone; mapping it would make a new, empty one.
            if str(file.path) != offer.pool_id or not file.path.is_file():
                return None
            pool = file.map()
            self._mapped[offer.sender] = offer.pool_id, pool
        return pool
