"""The choices of the live `Router`, without sorting a thousand workers for every request.

heap of (load, name)      an entry is stale once the load has changed; whoever in_flight says so, and a fresh
                          entry is pushed, so that the first one that is not stale is the least loaded
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from epd.control.routing import InFlight, Router

Load = tuple[int, ...]
# Entries for each candidate, the stale ones with them, before all are thrown away.
_MOST_STALE = 8
LoadOf = Callable[[InFlight], Load]


class LeastLoaded:
    """Candidates in order of load, then of name, as `sorted` would have them."""

    def __init__(self, router: Router, load_of: LoadOf) -> None:
        self._router = router
        self._load_of = load_of
        self._candidates: Sequence[str] = ()
        self._names: frozenset[str] = frozenset()
        self._heap: list[tuple[Load, str]] = []

    def set_candidates(self, candidates: Sequence[str]) -> None:
        """From now on these. The same list is not looked at again: it must not change."""
        if candidates is self._candidates:
            return
        self._candidates, self._names = candidates, frozenset(candidates)
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(self._load(name), name) for name in self._names]
        heapify(self._heap)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def _load(self, name: str) -> Load:
        return self._load_of(self._router.in_flight(name))

    def changed(self, name: str) -> None:
        """The counts of a worker have changed."""
        if name not in self._names:
            return
        heappush(self._heap, (self._load(name), name))
        if len(self._heap) > _MOST_STALE * len(self._names):
            self._rebuild()

    def first(self) -> str:
        """Raises IndexError where there is no candidate."""
        heap = self._heap
        while heap[0][0] != self._load(heap[0][1]):
            heappop(heap)
        return heap[0][1]

    def in_order(self) -> Iterator[str]:
        """The candidates. Most often only the first is asked for, so the others are sorted after it."""
        if self._candidates:
            first = self.first()
            yield first
            yield from (name for name in sorted(self._names, key=self._key) if name != first)

    def _key(self, name: str) -> tuple[Load, str]:
        return self._load(name), name


class Chooser:
    """is_plain: ask the router itself, the slow twin.

    Books are changed by `book`, so that what is known of the order stays true.
    """

    def __init__(self, router: Router, *, is_plain: bool) -> None:
        self.router = router
        self._is_plain = is_plain
        self._prefill = LeastLoaded(
            router, lambda in_flight: (in_flight.prefill_tokens, _num_requests(in_flight))
        )
        self._decode = LeastLoaded(router, lambda in_flight: (in_flight.num_decodes,))
        self._encode = LeastLoaded(router, lambda in_flight: (in_flight.encode_patches,))

    def book(
        self,
        worker: str,
        *,
        prefill_tokens: int = 0,
        num_prefills: int = 0,
        num_decodes: int = 0,
        encode_patches: int = 0,
    ) -> None:
        """Adds to the counts of a worker; what is done has a minus."""
        in_flight = self.router.in_flight(worker)
        if encode_patches:
            in_flight.encode_patches += encode_patches
            self._encode.changed(worker)
        if num_decodes:
            in_flight.num_decodes += num_decodes
            self._decode.changed(worker)
        if num_prefills:
            in_flight.num_prefills += num_prefills
            in_flight.prefill_tokens += prefill_tokens
        if num_decodes or num_prefills:
            self._prefill.changed(worker)

    def prefill(self, candidates: Sequence[str], media: Sequence[tuple[str, int]], num_tokens: int) -> str:
        """The first of `Router.prefill_order`. Only workers that had the media before may beat the least
        loaded."""
        if self._is_plain:
            return self.router.prefill_order(candidates, media, num_tokens)[0]
        self._prefill.set_candidates(candidates)
        first = self._prefill.first()
        had = self.router.workers_with(media)
        if not had:
            return first
        known = {first, *(worker for worker in had if worker in self._prefill)}
        return self.router.prefill_order(known, media, num_tokens)[0]

    def decode_order(self, candidates: Sequence[str]) -> Iterator[str]:
        if self._is_plain:
            yield from self.router.decode_order(candidates)
            return
        self._decode.set_candidates(candidates)
        yield from self._decode.in_order()

    def encoder(self, candidates: Sequence[str]) -> str:
        if self._is_plain:
            return self.router.encoder(candidates)
        self._encode.set_candidates(candidates)
        return self._encode.first()


def _num_requests(in_flight: InFlight) -> int:
    return in_flight.num_prefills + in_flight.num_decodes
