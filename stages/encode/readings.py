"""Tracks the readings of an encode worker: which tokens of reduced items it sends, group by group.

first group -> open -> next group, next group, ... -> last group: over
                  later groups that are encoded early wait for those before them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epd.encoders.adapter import Embeddings
from epd.encoders.groups import MediaGroup
from epd.encoders.reduction.reading import ItemReader, Join, Places, Reading


@dataclass(frozen=True, slots=True)
class _Open:
    reader: ItemReader
    request_id: str
    receiver: str


class Readings:
    """Holds the readings that are not over, by name. Not thread-safe."""

    def __init__(self, join: Join) -> None:
        self._join = join
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, name: str, reading: Reading, request_id: str, receiver: str) -> None:
        """Starts a reading, from its first group; the same one once more is ignored."""
        if name not in self._open:
            self._open[name] = _Open(ItemReader(self._join, reading), request_id, receiver)

    def has_turn(self, name: str, group: MediaGroup) -> bool:
        """Returns whether no earlier group has to be read first. One that was read has its turn: it fails."""
        return name in self._open and group.index <= self._open[name].reader.num_read

    def read(self, name: str, group: MediaGroup, embeddings: Embeddings) -> tuple[Embeddings, Places]:
        """Reads a group: see `ItemReader.read`. Raises ValueError for one that was read before."""
        reader = self._open[name].reader
        kept = reader.read(group, embeddings)
        if reader.num_read == reader.num_groups:
            del self._open[name]
        return kept

    def drop_requests(self, is_over: Callable[[str], bool]) -> None:
        """Forgets the readings of requests that are over. is_over: asked with each's id."""
        self._open = {name: each for name, each in self._open.items() if not is_over(each.request_id)}

    def drop_receiver(self, receiver: str) -> None:
        """Forgets the readings for a receiver that is gone."""
        self._open = {name: each for name, each in self._open.items() if each.receiver != receiver}
