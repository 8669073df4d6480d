"""Workers of one machine: each pool is a file in memory that the others map, messages go through queues."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from types import TracebackType
from typing import Protocol

from epd.connectors import Offer
from stages.connectors.mailbox import MailboxConnector, Message
from stages.encoder_pool import EmbeddingLayout, EncoderPool

_MEMORY_FOLDER = Path("/dev/shm")


class MessageQueue(Protocol):
    """What is used of `multiprocessing.Queue`."""

    def put(self, obj: Message) -> None: ...

    def get_nowait(self) -> Message: ...


@dataclass(frozen=True, slots=True)
class SharedPoolFile:
    """A pool that any process of this machine can map: its file and its shape."""

    path: Path
    num_blocks: int
    block_size: int
    layout: EmbeddingLayout

    @classmethod
    def create(cls, num_blocks: int, block_size: int, layout: EmbeddingLayout) -> SharedPoolFile:
        """A new file, in memory where the system has a folder for that. Remove it with `with` or `unlink`."""
        folder = _MEMORY_FOLDER if _MEMORY_FOLDER.is_dir() else None
        descriptor, path = tempfile.mkstemp(prefix="epd-embeddings-", dir=folder)
        os.ftruncate(descriptor, num_blocks * block_size * layout.bytes_per_embedding)
        os.close(descriptor)
        return cls(Path(path), num_blocks, block_size, layout)

    def map(self) -> EncoderPool:
        return EncoderPool(self.num_blocks, self.block_size, self.layout, self.path)

    def unlink(self) -> None:
        """Removes the name; who has mapped it keeps the memory."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> SharedPoolFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unlink()


class SharedMemoryConnector(MailboxConnector):
    """queues, pools: of every worker by name, this one included; the same in every process."""

    def __init__(
        self, name: str, queues: Mapping[str, MessageQueue], pools: Mapping[str, SharedPoolFile]
    ) -> None:
        super().__init__(name, pools[name].map())
        self._queues = queues
        self._files = pools
        self._mapped: dict[str, EncoderPool] = {}

    def put(self, name: str, message: Message) -> None:
        self._queues[name].put(message)

    def messages(self) -> Iterator[Message]:
        while True:
            try:
                yield self._queues[self.name].get_nowait()
            except Empty:
                return

    def pool_of(self, offer: Offer) -> EncoderPool | None:
        file = self._files[offer.sender]
        if offer.sender not in self._mapped:
            if not file.path.is_file():  # removed: its owner is gone; mapping it would make a new, empty one
                return None
            self._mapped[offer.sender] = file.map()
        return self._mapped[offer.sender]
