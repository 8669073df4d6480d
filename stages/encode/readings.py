"""Holds which tokens an encoder sends of reduced items: see `stages/encode/encoder.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epd.encoders.adapter import Embeddings
from epd.encoders.groups import MediaGroup
from epd.encoders.reduction.reading import ItemReducer, Join, Places

if TYPE_CHECKING:  # it has these readings
    from epd.stages.encode.encoder import EncodeJob


@dataclass(frozen=True, slots=True)
class _Open:
    reader: ItemReducer
    request_id: str
    receiver: str


class Readings:
    """Holds the readings that are not over, by name. Not thread-safe."""

    def __init__(self, join: Join) -> None:
        self._join = join
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, job: EncodeJob) -> None:
        """Starts the reading of a job, if it begins with it; the same one once more is ignored.

        One of a single group is not held: it begins and ends with the job's turn.
        """
        name, ticket = job.ticket.key.reading, job.ticket
        if job.reading is None or job.group is None or job.reading.is_of_a_group or name in self._open:
            return
        reader = ItemReducer(self._join, job.reading, job.group)
        self._open[name] = _Open(reader, job.request_id, ticket.receiver)

    def has_turn(self, job: EncodeJob, group: MediaGroup) -> bool:
        """Returns whether no earlier group has to be read first. One that was read has its turn: it fails."""
        if job.reading is not None and job.reading.is_of_a_group:
            return True
        name = job.ticket.key.reading
        return name in self._open and group.index <= self._open[name].reader.next

    def read(self, job: EncodeJob, group: MediaGroup, embeddings: Embeddings) -> tuple[Embeddings, Places]:
        """Reads a group: see `ItemReducer.read`. Raises ValueError for one that was read before."""
        if job.reading is not None and job.reading.is_of_a_group:
            return ItemReducer(self._join, job.reading, group).read(group, embeddings)
        name = job.ticket.key.reading
        reader = self._open[name].reader
        kept = reader.read(group, embeddings)
        if reader.next == reader.end:
            del self._open[name]
        return kept

    def drop_requests(self, is_over: Callable[[str], bool]) -> None:
        """Forgets the readings of requests that are over. is_over: asked with each's id."""
        self._open = {name: each for name, each in self._open.items() if not is_over(each.request_id)}

    def drop_receiver(self, receiver: str) -> None:
        """Forgets the readings for a receiver that is gone."""
        self._open = {name: each for name, each in self._open.items() if each.receiver != receiver}
