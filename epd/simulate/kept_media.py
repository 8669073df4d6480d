"""Simulates a disk that keeps what was made of media: prompts come back the cheapest way.

    a request whose media are kept  ->  keys and values of its first groups are read, into the prefix cache
                                    ->  of the others embeddings are read, or frames are decoded and encoded

The choice is that of the live workers, `epd.control.way_back`, by the costs of a profile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from epd.control.way_back import PartCosts
from epd.profiles.profile import Profile
from epd.simulate.clock import EventPriority, EventQueue, seconds_of, ticks_of
from epd.simulate.requests import RequestState

Way = Literal["kv", "embeddings", "media"]
WAYS: tuple[Way, ...] = ("kv", "embeddings", "media")


@dataclass(frozen=True, slots=True)
class KeptMedia:
    """Describes the disk.

    bytes_per_s: that it reads, for all workers together
    ways: that are open; of one alone nothing is chosen
    has_all: an earlier life had all media; else it has those whose prompts were computed
    """

    bytes_per_s: float
    ways: tuple[Way, ...] = WAYS
    has_all: bool = True

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.ways or not set(self.ways) <= set(WAYS):
            raise ValueError(f"a disk reads above 0 bytes a second, and a way is one of {WAYS}, got {self}")

    def seconds(self, way: Way, num_bytes: int) -> float:
        return num_bytes / self.bytes_per_s if way in self.ways else math.inf


class Disk:
    """Reads one thing after another. It has room for all that is written."""

    def __init__(self, events: EventQueue, kept: KeptMedia) -> None:
        self._events = events
        self._kept = kept
        self._free = 0  # tick
        self._written: set[int] = set()  # keys of media

    def __contains__(self, media_key: int) -> bool:
        return self._kept.has_all or media_key in self._written

    def add(self, media_key: int) -> None:
        """Keeps the media of a prompt that has been computed."""
        self._written.add(media_key)

    def read(self, num_bytes: int, then: Callable[[], None]) -> None:
        """Calls a function once that number of bytes has been read."""
        ticks = ticks_of(num_bytes / self._kept.bytes_per_s)
        self._free = max(self._free, self._events.now) + ticks
        self._events.push(self._free, EventPriority.END, then)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Describes what computes a prompt.

    num_encoders: that encode its groups at once
    batch_patches: of a full batch of the tower; chunk_tokens: of a pass of prefill
    """

    num_encoders: int
    batch_patches: int
    chunk_tokens: int


def part_costs(
    profile: Profile, fleet: Fleet, kept: KeptMedia, state: RequestState, groups: Sequence[int]
) -> Iterator[PartCosts]:
    """Yields the costs of groups of a request, in order."""
    memory, encode, prefill = profile.memory, profile.encode.cost, profile.prefill.cost
    for group in groups:
        work = state.job.groups[group]
        start, num_tokens = state.starts[group], work.media.num_tokens
        share = min(1.0, work.media.num_patches / fleet.batch_patches)  # of the batch that it is in
        encode_s = encode.per_unit_s * work.media.num_patches + encode.per_item_s + encode.fixed_s * share
        chunks = num_tokens / fleet.chunk_tokens
        num_pairs = num_tokens * start + num_tokens * (num_tokens + 1) / 2
        weights_s = max((prefill.floor_s + prefill.experts_s) * chunks, prefill.per_unit_s * num_tokens)
        yield PartCosts(
            kept.seconds("kv", memory.sequence_bytes(num_tokens)),
            kept.seconds("embeddings", num_tokens * memory.embedding_bytes_per_token),
            seconds_of(work.decode_ticks),
            encode_s / fleet.num_encoders if "media" in kept.ways else math.inf,
            prefill.fixed_s * chunks + weights_s + prefill.per_item_s * num_pairs,
        )
