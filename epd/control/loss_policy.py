"""Decides which request is to blame for a lost worker, and how long it is refused. No I/O.

    lost with a, b and c    each of them has one loss more at that stage; nobody is blamed
    lost twice              its next attempts are isolated: placed where no other request is at risk
    lost again, alone       blamed: PoisonedRequestError for the same request from any client, for a while

A request that is alone at the worker both times is blamed after two losses, one among others after three.
Losses at different stages, or at different places of an answer, are not added up: a request that ends a
worker does so at the same place again, random kills do not. A request that was answered is forgotten.

Requests are known by a fingerprint of their content. Time is passed in, in seconds on any one clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from epd.errors import PoisonedRequestError


@dataclass(frozen=True, slots=True)
class Suspect:
    """Names a request that was at a worker when that was lost.

    place: why it was there: a stage, or one group at a stage
    num_tokens: of its answer so far, in this attempt
    """

    fingerprint: str
    place: Hashable
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LossLimits:
    """Limits losses and the memory of them.

    max_losses: at one place, before a request is isolated, or blamed if it was alone
    refuse_s: time for which a blamed request is refused, and losses are remembered
    max_requests: requests whose losses are remembered
    num_slack_tokens: tolerance between reports of one place
    """

    max_losses: int = 2
    refuse_s: float = 600.0
    max_requests: int = 1024
    num_slack_tokens: int = 8


@dataclass(slots=True)
class _Losses:
    num_losses: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class _Case:
    """Holds a request's losses. places: losses at each. until_s: when it is forgotten. num_losses: total."""

    until_s: float
    num_losses: int = 0
    is_blamed: bool = False
    places: dict[Hashable, _Losses] = field(default_factory=dict)


class LossLedger:
    """Counts losses by fingerprint, in a bounded table that drops the oldest loss first."""

    def __init__(self, limits: LossLimits | None = None) -> None:
        self.limits = limits or LossLimits()
        self._cases: OrderedDict[str, _Case] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of requests with remembered losses."""
        return len(self._cases)

    def record(self, suspects: Collection[Suspect], now_s: float) -> frozenset[str]:
        """Records the loss of a worker with these suspects. Returns the fingerprints that are to blame."""
        fingerprints = {suspect.fingerprint for suspect in suspects}
        for fingerprint in fingerprints:
            self._count(fingerprint, now_s)
        is_again = [self._add(suspect) >= self.limits.max_losses for suspect in suspects]
        if len(fingerprints) != 1 or not any(is_again):
            return frozenset()
        for fingerprint in fingerprints:
            self._cases[fingerprint].is_blamed = True
        return frozenset(fingerprints)

    def _count(self, fingerprint: str, now_s: float) -> None:
        case = self._case(fingerprint, now_s) or _Case(0.0)
        case.until_s = now_s + self.limits.refuse_s
        case.num_losses += 1
        self._cases[fingerprint] = case
        self._cases.move_to_end(fingerprint)
        if len(self._cases) > self.limits.max_requests:
            self._cases.popitem(last=False)

    def _add(self, suspect: Suspect) -> int:
        """Counts a loss at its place and returns the count, which restarts if the request got further."""
        case = self._cases.get(suspect.fingerprint)
        if case is None:  # more suspects than are remembered
            return 0
        losses = case.places.setdefault(suspect.place, _Losses())
        if suspect.num_tokens > losses.num_tokens + self.limits.num_slack_tokens:
            losses.num_losses = 0
        losses.num_losses += 1
        losses.num_tokens = max(losses.num_tokens, suspect.num_tokens)
        return losses.num_losses

    def check(self, fingerprint: str, now_s: float) -> None:
        """Raises PoisonedRequestError for a request that is to blame."""
        case = self._case(fingerprint, now_s)
        if case is not None and case.is_blamed:
            raise PoisonedRequestError(
                f"workers were lost {case.num_losses} times with this request, the last time with no other; "
                f"it is refused for the next {case.until_s - now_s:.0f} s; change it, or report it with the "
                "server's log"
            )

    def suspected_at(self, fingerprint: str, now_s: float) -> frozenset[Hashable]:
        """Returns the places at which its next attempt must be isolated."""
        case = self._case(fingerprint, now_s)
        places = case.places if case is not None else {}
        return frozenset(place for place, each in places.items() if each.num_losses >= self.limits.max_losses)

    def furthest(self, fingerprint: str, now_s: float) -> int:
        """Returns the answer tokens after which an attempt has got further than the lost ones."""
        case = self._case(fingerprint, now_s)
        return max((each.num_tokens for each in case.places.values()), default=0) if case is not None else 0

    def forget(self, fingerprint: str) -> None:
        """Forgets a request that was answered and so was not to blame. Unknown ones are ignored."""
        self._cases.pop(fingerprint, None)

    def _case(self, fingerprint: str, now_s: float) -> _Case | None:
        case = self._cases.get(fingerprint)
        if case is not None and now_s >= case.until_s:
            del self._cases[fingerprint]
            return None
        return case
