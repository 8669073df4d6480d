"""Chooses workers. Pure policy, the same for the server and the simulator; the caller counts what it sends.

    prefill   the worker with the fewest tokens to compute until the request is done, cached ones left out
    decode    the worker with the fewest requests
    encode    the worker that has the group already, else the one with the fewest outstanding patches
    video     the worker that reads the fewest items

Among a thousand workers the best is found without sorting them: each order is a heap.

    heap of (counts, name)    an entry is stale once its worker's counts have changed; a fresh one is pushed

Where workers are of several classes, counts are divided by measured speeds: the worker comes first that would
be done first with what it has and the new work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from epd.control.recent import Recent
from epd.control.speeds import Speeds
from epd.encode.encoder_cache import GroupKey
from epd.topology import Stage


class InFlight(NamedTuple):
    """Counts work that was sent to one worker and is not finished.

    prefill_tokens: of prompts that are not computed yet
    num_prefills, num_decodes: requests
    encode_patches: of groups that are not encoded yet
    num_videos: items whose frames the worker reads
    """

    prefill_tokens: int = 0
    num_prefills: int = 0
    num_decodes: int = 0
    encode_patches: int = 0
    num_videos: int = 0


_NOTHING = InFlight()
_MAX_MORE_VIDEOS = 4  # items that a worker which knows a medium may have beyond the least busy one
_Key = tuple[int, ...]
_MAX_STALE = 8  # heap entries per candidate, stale ones included, before the heap is rebuilt


class _LeastLoaded:
    """Orders candidates by a key of their counts, then by name, as `sorted` would."""

    def __init__(self, counts: dict[str, InFlight], key_of: Callable[[InFlight], _Key]) -> None:
        self._counts = counts
        self._key_of = key_of
        self._candidates: tuple[str, ...] = ()
        self._keys: dict[str, _Key] = {}
        self._heap: list[tuple[_Key, str]] = []

    def choose_among(self, candidates: Collection[str]) -> None:
        """Sets the candidates. The same tuple as last time is recognised by its identity."""
        candidates = tuple(candidates)
        if candidates is not self._candidates and candidates != self._candidates:
            self._candidates = candidates
            self._keys = {name: self._key_of(self._counts.get(name, _NOTHING)) for name in candidates}
            self._rebuild()

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def _rebuild(self) -> None:
        self._heap = [(key, name) for name, key in self._keys.items()]
        heapify(self._heap)

    def changed(self, name: str) -> None:
        """Updates the order after the counts of a worker have changed."""
        if name not in self._keys:
            return
        key = self._key_of(self._counts[name])
        if key != self._keys[name]:
            self._keys[name] = key
            heappush(self._heap, (key, name))
            if len(self._heap) > _MAX_STALE * len(self._keys):
                self._rebuild()

    def first(self) -> str:
        """Returns the first candidate. Raises IndexError without candidates."""
        while self._heap[0][0] != self._keys[self._heap[0][1]]:
            heappop(self._heap)
        return self._heap[0][1]

    def in_order(self) -> Iterator[str]:
        """Yields all candidates in order; most callers take only the first, so the others are sorted late."""
        keys = self._keys
        if keys:
            first = self.first()
            yield first
            yield from sorted(keys.keys() - {first}, key=lambda name: (keys[name], name))


class Contents:
    """Remembers which workers have which media.

    max_remembered bounds the groups, and prefixes of media, whose last worker is known.
    """

    def __init__(self, max_remembered: int) -> None:
        self._prefixes: Recent[Hashable, str] = Recent(max_remembered)
        self._groups: Recent[GroupKey, str] = Recent(max_remembered)

    def cached(self, media: Sequence[tuple[str, int]]) -> dict[str, int]:
        """Returns visual tokens of the longest known run of leading items, by the last worker of that run."""
        hashes = tuple(mm_hash for mm_hash, _ in media)
        cached, num_tokens = dict[str, int](), 0
        for length, (_, num_in_item) in enumerate(media, 1):
            num_tokens += num_in_item
            worker = self._prefixes.get(hashes[:length])
            if worker is not None:
                cached[worker] = num_tokens
        return cached

    def remember_prefix(self, worker: str, media: Sequence[tuple[str, int]]) -> None:
        """Remembers that the worker has a prompt that begins with these media."""
        hashes = tuple(mm_hash for mm_hash, _ in media)
        for length in range(1, len(hashes) + 1):
            self._prefixes.set(hashes[:length], worker)

    def encoder(self, candidates: Collection[str], key: GroupKey) -> str | None:
        """Returns the candidate that last encoded the group and may still have it."""
        worker = self._groups.get(key)
        return worker if worker in candidates else None

    def remember_group(self, worker: str, key: GroupKey) -> None:
        """Remembers that the worker has encoded the group."""
        self._groups.set(key, worker)

    def forget(self, worker: str) -> None:
        """Forgets what a worker had, which is lost."""
        self._prefixes.drop(worker)
        self._groups.drop(worker)


class Router:
    """Chooses workers by the work in flight at each, and by what they have of media: `contents`.

    Work of other routers that share the workers counts as far as it is reported: see `set_reported`.
    The orders are iterators: the workers after the first are sorted when the second is requested.
    """

    def __init__(self, *, max_remembered: int = 65_536, speeds: Speeds | None = None) -> None:
        """max_remembered: see `Contents`. speeds: of workers that are not equally fast; None if they are."""
        self.speeds = speeds
        self._in_flight: dict[str, InFlight] = {}  # sent from here
        self._others: dict[str, InFlight] = {}  # sent by others, as far as known
        self._loads: dict[str, InFlight] = {}  # both
        self.contents = Contents(max_remembered)
        self._prefill = _LeastLoaded(self._loads, lambda it: (it.prefill_tokens, _num_requests(it)))
        self._decode = _LeastLoaded(self._loads, lambda it: (it.num_decodes,))
        self._encode = _LeastLoaded(self._loads, lambda it: (it.encode_patches,))
        self._video = _LeastLoaded(self._loads, lambda it: (it.num_videos,))

    # Counts

    def in_flight(self, worker: str) -> InFlight:
        """Returns the counts of work in flight at one worker that was sent from here."""
        return self._in_flight.get(worker, _NOTHING)

    def load(self, worker: str) -> InFlight:
        """Returns the counts of everybody's work in flight at one worker, as far as known."""
        return self._loads.get(worker, _NOTHING)

    def set_reported(self, worker: str, reported: InFlight) -> None:
        """Sets the counts that a worker has reported, of everybody's work.

        What is more than was sent from here is the work of others, until the next report.
        """
        self._others[worker] = _more(reported, self.in_flight(worker))
        self._recount(worker)

    def others_at(self, worker: str) -> InFlight:
        """Returns the counts of work at one worker that others have sent, as far as known."""
        return self._others.get(worker, InFlight())

    def clear_reported(self) -> None:
        """Forgets the work of others: there are none."""
        for worker in list(self._others):
            del self._others[worker]
            self._recount(worker)

    def _recount(self, worker: str) -> None:
        """Updates the orders after counts of a worker have changed."""
        own, others = self.in_flight(worker), self._others.get(worker)
        self._loads[worker] = own if others is None else _sum(own, others)
        for order in (self._prefill, self._decode, self._encode, self._video):
            order.changed(worker)

    def add(
        self,
        worker: str,
        *,
        prefill_tokens: int = 0,
        num_prefills: int = 0,
        num_decodes: int = 0,
        encode_patches: int = 0,
        num_videos: int = 0,
    ) -> None:
        """Adds to the counts of a worker; finished work is negative."""
        before = self.in_flight(worker)
        self._in_flight[worker] = InFlight(
            before.prefill_tokens + prefill_tokens,
            before.num_prefills + num_prefills,
            before.num_decodes + num_decodes,
            before.encode_patches + encode_patches,
            before.num_videos + num_videos,
        )
        self._recount(worker)

    def _weighed(self, stage: Stage, worker: str, units: float) -> float:
        """Returns how much work that is for a worker, in units of the fastest one."""
        return units if self.speeds is None else units / self.speeds.relative(worker, stage)

    # Prefill and decode

    def prefill_order(
        self, candidates: Collection[str], media: Sequence[tuple[str, int]] = ()
    ) -> Iterator[str]:
        """Yields the prefill workers to ask, the best first.

        A worker that had the media before comes first unless others would finish sooner all the same.
        media: (mm_hash, visual tokens) of each item, in prompt order.
        """
        order = self._prefill
        order.choose_among(candidates)
        cached = {worker: num for worker, num in self.contents.cached(media).items() if worker in order}
        if not cached and self.speeds is None:
            yield from order.in_order()
            return
        num_new = max(1, sum(num for _, num in media)) if self.speeds is not None else 0

        def cost(worker: str) -> tuple[float, int, str]:
            counts = self.load(worker)
            num_tokens = counts.prefill_tokens + num_new - cached.get(worker, 0)
            return self._weighed("prefill", worker, num_tokens), _num_requests(counts), worker

        if self.speeds is not None:
            yield from sorted(candidates, key=cost)
            return
        # A worker that had nothing can only be the best if it is the least loaded.
        best = min({order.first(), *cached}, key=cost)
        yield best
        yield from sorted(set(candidates) - {best}, key=cost)

    def decode_order(self, candidates: Collection[str]) -> Iterator[str]:
        """Yields the decode workers to ask for room, the one with the fewest requests first."""
        if self.speeds is not None:
            costs = {
                each: self._weighed("decode", each, self.load(each).num_decodes + 1) for each in candidates
            }
            return iter(sorted(costs, key=lambda name: (costs[name], name)))
        self._decode.choose_among(candidates)
        return self._decode.in_order()

    # Encode and video

    def encoder(self, candidates: Collection[str], wanted: str | None = None, num_patches: int = 1) -> str:
        """Returns the wanted candidate, or the one with the fewest outstanding patches.

        num_patches: of the new work, which counts where speeds differ
        Raises IndexError without candidates.
        """
        if wanted is not None and wanted in candidates:
            return wanted
        if self.speeds is not None and candidates:
            return min(candidates, key=lambda name: (self.encode_backlog(name, num_patches), name))
        self._encode.choose_among(candidates)
        return self._encode.first()

    def encode_backlog(self, worker: str, num_more: int = 0) -> float:
        """Returns the patches that a worker has, or would have with more, in the time of the fastest one."""
        return self._weighed("encode", worker, self.load(worker).encode_patches + num_more)

    def video(self, candidates: Collection[str], wanted: str | None = None) -> str:
        """Returns the candidate that has the fewest items of requests in flight, or the wanted one.

        wanted: one that knows the medium; chosen unless it has many more items than the best.
        Raises IndexError without candidates.
        """
        self._video.choose_among(candidates)
        best = self._video.first()
        most = self.in_flight(best).num_videos + _MAX_MORE_VIDEOS
        is_near = wanted is not None and wanted in candidates and self.in_flight(wanted).num_videos <= most
        return wanted if is_near and wanted is not None else best

    def forget(self, worker: str) -> None:
        """Forgets what the worker had, which is lost; the caller takes back its counts."""
        self.contents.forget(worker)
        if self.speeds is not None:
            self.speeds.forget(worker)
        if self._others.pop(worker, None) is not None:
            self._recount(worker)


def _sum(first: InFlight, second: InFlight) -> InFlight:
    return InFlight(*(one + other for one, other in zip(first, second, strict=True)))


def _more(counts: InFlight, than: InFlight) -> InFlight:
    """Returns by how much each count is larger."""
    return InFlight(*(max(0, one - other) for one, other in zip(counts, than, strict=True)))


def _num_requests(counts: InFlight) -> int:
    return counts.num_prefills + counts.num_decodes
