"""Writes pieces in a thread, so that disks hold up nobody. What waits is bounded, and can be read.

The pace of each tier is measured as it is read, and forgotten after a while: what was slow is tried again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from epd.control.recent import ReadPace
from epd.store.piece_files import PieceFiles
from epd.types import Tier

logger = logging.getLogger(__name__)

# Bytes that wait to be written; what comes on top is not kept.
_MOST_WAITING = 1 << 28
_NUM_FLIGHTS = 64
# Seconds after which the pace of a tier is not known any more.
_FORGET_S = 60.0


ReadPaces = Mapping[Tier, ReadPace]


def read_paces() -> ReadPaces:
    """Returns the paces of places that nobody has read from yet."""
    return {tier: ReadPace(forget_s=_FORGET_S) for tier in ("disk", "objects")}


class WriteBehind:
    """Writes to the files of one namespace, in order.

    kind: of what is written, for people. is_open: whether the disk takes more.
    """

    def __init__(self, files: PieceFiles, kind: str, paces: ReadPaces | None = None) -> None:
        """paces: of the places, shared with others that read from the same; None for its own."""
        self.files = files
        self.is_open = True
        self.counts = files.counts
        self._kind = kind
        self._waiting: dict[str, memoryview] = {}
        self._num_waiting = 0  # bytes
        self._lock = Lock()
        self._flights = [Lock() for _ in range(_NUM_FLIGHTS)]  # by key: each piece is read once at a time
        self._paces = read_paces() if paces is None else paces
        self._thread = ThreadPoolExecutor(1, f"write-{kind}")

    def __contains__(self, key: str) -> bool:
        return self.tier_of(key) is not None

    def tier_of(self, key: str) -> Tier | None:
        """Returns where a piece is; None if it is not there."""
        return "memory" if key in self._waiting else self.files.tier_of(key)

    def seconds(self, tier: Tier | None, num_bytes: float, num_reads: int = 1) -> float:
        """Returns how long reads take: 0 where nothing is known, infinite where there is nothing to read.

        num_bytes: of all of them together.
        """
        if tier is None:
            return math.inf
        pace = self._paces.get(tier)
        if pace is None or not num_reads:
            return 0.0
        return num_reads * (pace.seconds(num_bytes / num_reads, time.monotonic()) or 0.0)

    def note_read(self, tier: Tier, num_bytes: int, start_s: float) -> None:
        """Notes bytes that were read, or awaited, until now. start_s: by the monotonic clock."""
        if tier in self._paces:
            self._paces[tier].add(num_bytes, start_s, time.monotonic())

    def add(self, pieces: Mapping[str, memoryview], index: int = 0) -> bool:
        """Queues payloads by key, bytes in one dimension. Returns whether all are kept, or will be.

        index: see `PieceFiles.read`. Those after one for which there is no room are not kept.
        """
        new = dict[str, memoryview]()
        with self._lock:
            for key, payload in pieces.items():
                if not self.is_open or self._num_waiting + len(payload) > _MOST_WAITING:
                    break
                if key not in self._waiting:
                    self._waiting[key] = new[key] = payload
                    self._num_waiting += len(payload)
            if new:
                self._thread.submit(self._write, new, index)
            return all(key in self._waiting for key in pieces)

    def _write(self, pieces: Mapping[str, memoryview], index: int) -> None:
        try:
            self.counts.written_bytes += self.files.write(pieces, index)
        except OSError as error:
            if self.is_open:
                folder = self.files.folder
                logger.warning("%s are kept in %s no longer: %s", self._kind, folder, error.strerror)
            self.is_open = False
        finally:
            with self._lock:
                for key in pieces:
                    self._num_waiting -= len(self._waiting.pop(key))

    def read(self, key: str, index: int, payload: memoryview) -> Tier | None:
        """Fills a payload: see `PieceFiles.read`. What waits to be written is read from memory.

        One from an object store is written to the disk: it is not written to meanwhile.
        """
        with self._flights[hash(key) % _NUM_FLIGHTS]:
            waiting = self._waiting.get(key)
            if waiting is not None and len(waiting) == len(payload):
                payload[:] = waiting
                return "memory"
            start_s = time.monotonic()
            tier = self.files.read(key, index, payload)
            if tier is not None:
                self.note_read(tier, len(payload), start_s)
            if tier == "objects":
                self.add({key: payload}, index)
            return tier

    def close(self) -> None:
        """Ends the thread, once what waits is written."""
        self._thread.shutdown()
        self.files.close()
