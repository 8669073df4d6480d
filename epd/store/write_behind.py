"""Writes pieces in a thread, so that disks hold up nobody. What waits is bounded, and can be read."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from epd.store.piece_files import PieceFiles
from epd.types import Tier

logger = logging.getLogger(__name__)

# Bytes that wait to be written; what comes on top is not kept.
_MOST_WAITING = 1 << 28
_NUM_FLIGHTS = 64


class WriteBehind:
    """Writes to the files of one namespace, in order.

    kind: of what is written, for people. is_open: whether the disk takes more.
    """

    def __init__(self, files: PieceFiles, kind: str) -> None:
        self.files = files
        self.is_open = True
        self.counts = files.counts
        self._kind = kind
        self._waiting: dict[str, memoryview] = {}
        self._num_waiting = 0  # bytes
        self._lock = Lock()
        self._flights = [Lock() for _ in range(_NUM_FLIGHTS)]  # by key: each piece is read once at a time
        self._thread = ThreadPoolExecutor(1, f"write-{kind}")

    def __contains__(self, key: str) -> bool:
        return key in self._waiting or key in self.files

    def add(self, key: str, index: int, payload: memoryview) -> bool:
        """Queues a payload, bytes in one dimension. Returns whether it is kept, or will be.

        index: see `PieceFiles.read`.
        """
        with self._lock:
            if not self.is_open or self._num_waiting + len(payload) > _MOST_WAITING:
                return False
            if key not in self._waiting:
                self._waiting[key] = payload
                self._num_waiting += len(payload)
                self._thread.submit(self._write, key, index, payload)
        return True

    def _write(self, key: str, index: int, payload: memoryview) -> None:
        try:
            self.counts.written_bytes += self.files.write(key, index, payload)
        except OSError as error:
            if self.is_open:
                folder = self.files.folder
                logger.warning("%s are kept in %s no longer: %s", self._kind, folder, error.strerror)
            self.is_open = False
        finally:
            with self._lock:
                del self._waiting[key]
                self._num_waiting -= len(payload)

    def read(self, key: str, index: int, payload: memoryview) -> Tier | None:
        """Fills a payload: see `PieceFiles.read`. What waits to be written is read from memory.

        One from an object store is written to the disk: it is not written to meanwhile.
        """
        with self._flights[hash(key) % _NUM_FLIGHTS]:
            waiting = self._waiting.get(key)
            if waiting is not None and len(waiting) == len(payload):
                payload[:] = waiting
                return "memory"
            tier = self.files.read(key, index, payload)
            if tier == "objects":
                self.add(key, index, payload)
            return tier

    def close(self) -> None:
        """Ends the thread, once what waits is written."""
        self._thread.shutdown()
        self.files.close()
