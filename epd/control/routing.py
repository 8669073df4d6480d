"""Which worker takes what: roles, loads and the choice among workers. No I/O.

Who sends a request also counts it, in `InFlight`.


prefill   the worker with the least tokens to compute until the request is done, cached ones left out
decode    the worker with the fewest requests
encode    who has the group already, else the worker with the least outstanding patches
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from epd.encode.encoder_cache import GroupKey
from epd.encode.sharding import least_loaded
from epd.errors import RequestError
from epd.reduction import METHODS, QUESTION_METHODS, ReductionPolicy
from epd.topology import Stage, topology_name


def check_reduction(policy: ReductionPolicy, workers: Collection[Collection[Stage]]) -> None:
    """Raises RequestError where decode would have to know what prefill chose, on another worker."""
    if not policy.is_by_question or all("decode" in roles for roles in workers if "prefill" in roles):
        return
    others = ", ".join(method for method in METHODS if method not in QUESTION_METHODS)
    raise RequestError(
        f"received the reduction method '{policy.method}', by which decode reads what prefill chose; allowed "
        f"in topology {topology_name(workers)}, where others decode: {others}; use one, or serve with both "
        "roles on each worker, such as --topology 1e1pd"
    )


@dataclass(slots=True)
class InFlight:
    """What has been sent to one worker and is not done.

    prefill_tokens: of prompts that are not computed yet. num_prefills, num_decodes: requests.
    encode_patches: of groups on their way.
    """

    prefill_tokens: int = 0
    num_prefills: int = 0
    num_decodes: int = 0
    encode_patches: int = 0


class _Memory:
    """Who had what last: a bounded table, the entry longest unused goes first."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[Hashable, str] = OrderedDict()

    def put(self, key: Hashable, worker: str) -> None:
        self._entries[key] = worker
        self._entries.move_to_end(key)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def get(self, key: Hashable) -> str | None:
        return self._entries.get(key)

    def forget(self, worker: str) -> None:
        for key in [key for key, owner in self._entries.items() if owner == worker]:
            del self._entries[key]


class Router:
    """Chooses workers by what has been sent to them, and remembers who has which media."""

    def __init__(self, *, max_remembered: int = 65_536) -> None:
        """max_remembered: groups, and prefixes of media, whose last worker is known."""
        self._in_flight: dict[str, InFlight] = {}
        self._prefixes = _Memory(max_remembered)
        self._groups = _Memory(max_remembered)

    def in_flight(self, worker: str) -> InFlight:
        """Of one worker; new ones are empty."""
        return self._in_flight.setdefault(worker, InFlight())

    def prefill_order(
        self, candidates: Collection[str], media: Sequence[tuple[str, int]], num_tokens: int
    ) -> list[str]:
        """Workers to ask, the best first. media: (mm_hash, visual tokens) of each item, in prompt order.

        A worker that had the media before is taken unless others would be done sooner all the same.
        """

        def cost(worker: str) -> tuple[int, int, str]:
            in_flight = self.in_flight(worker)
            tokens = in_flight.prefill_tokens + num_tokens - self._num_cached(worker, media)
            return tokens, in_flight.num_prefills + in_flight.num_decodes, worker

        return sorted(candidates, key=cost)

    def _num_cached(self, worker: str, media: Sequence[tuple[str, int]]) -> int:
        """Visual tokens of the longest run of leading items that the worker had last."""
        hashes = tuple(mm_hash for mm_hash, _ in media)
        for length in range(len(media), 0, -1):
            if self._prefixes.get(hashes[:length]) == worker:
                return sum(num_tokens for _, num_tokens in media[:length])
        return 0

    def workers_with(self, media: Sequence[tuple[str, int]]) -> set[str]:
        """Workers that had a run of leading items last."""
        hashes = tuple(mm_hash for mm_hash, _ in media)
        found = (self._prefixes.get(hashes[:length]) for length in range(1, len(media) + 1))
        return {worker for worker in found if worker is not None}

    def remember_prefix(self, worker: str, media: Sequence[tuple[str, int]]) -> None:
        """The worker has been given a prompt that begins with these media."""
        hashes = tuple(mm_hash for mm_hash, _ in media)
        for length in range(1, len(hashes) + 1):
            self._prefixes.put(hashes[:length], worker)

    def decode_order(self, candidates: Collection[str]) -> list[str]:
        """Workers to ask for room, the one with the fewest requests first."""
        return sorted(candidates, key=lambda worker: (self.in_flight(worker).num_decodes, worker))

    def encoder_with(self, candidates: Collection[str], key: GroupKey) -> str | None:
        """The candidate that has encoded the group last, which may still have it."""
        worker = self._groups.get(key)
        return worker if worker in candidates else None

    def encoder(self, candidates: Collection[str]) -> str:
        """The candidate with the least outstanding patches, the first by name of equals."""
        names = sorted(candidates)
        return names[least_loaded([self.in_flight(name).encode_patches for name in names])]

    def remember_group(self, worker: str, key: GroupKey) -> None:
        """The worker has encoded the group."""
        self._groups.put(key, worker)

    def forget(self, worker: str) -> None:
        """The worker is gone with all it had; what is booked on it is unbooked by who booked it."""
        self._prefixes.forget(worker)
        self._groups.forget(worker)
