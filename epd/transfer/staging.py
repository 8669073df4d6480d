"""Divides a bounded piece of memory among what passes through it on its way to receivers. No tensors.

| d0 | d1 |      | d0 |         |     half of it at most for each receiver: one that hangs leaves room
"""

from __future__ import annotations

from dataclasses import dataclass

from epd.types import ceil_div

ALIGNMENT = 256  # of every offset, in bytes


@dataclass(frozen=True, slots=True)
class _Room:
    """A taken piece, [start, stop) in bytes."""

    start: int
    stop: int
    receiver: str


class StagingSpace:
    """Tracks which bytes are taken, and for whom."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._taken: list[_Room] = []  # in order of their places

    @property
    def max_bytes(self) -> int:
        """Returns the most that one receiver may have at a time; larger things do not pass."""
        return self.num_bytes // 2

    @property
    def num_taken(self) -> int:
        """Counts the bytes that are taken."""
        return sum(room.stop - room.start for room in self._taken)

    def take(self, receiver: str, num_bytes: int) -> int | None:
        """Returns the offset of a piece taken for a receiver; None while there is no room for it.

        Raises ValueError for more than `max_bytes`.
        """
        if num_bytes > self.max_bytes:
            raise ValueError(f"{num_bytes} bytes do not pass through {self.num_bytes}: make smaller parts")
        size = max(1, ceil_div(num_bytes, ALIGNMENT)) * ALIGNMENT
        held = sum(room.stop - room.start for room in self._taken if room.receiver == receiver)
        if held and held + size > self.max_bytes:
            return None
        start = 0
        for index, room in enumerate([*self._taken, _Room(self.num_bytes, self.num_bytes, "")]):
            if room.start - start >= size:
                self._taken.insert(index, _Room(start, start + size, receiver))
                return start
            start = room.stop
        return None

    def free(self, offset: int) -> None:
        """Frees the piece at an offset. Raises ValueError if none is taken there."""
        kept = [room for room in self._taken if room.start != offset]
        if len(kept) == len(self._taken):
            raise ValueError(f"nothing is taken at offset {offset}")
        self._taken = kept

    def check_integrity(self) -> None:
        """Raises AssertionError if pieces overlap or lie outside."""
        stop = 0
        for room in self._taken:
            if not stop <= room.start < room.stop <= self.num_bytes:
                raise AssertionError(
                    f"the piece {room} overlaps another, or the end of {self.num_bytes} bytes"
                )
            stop = room.stop
