"""Which request is to blame when a worker is lost, and for how long it is refused. No I/O.

    lost with a, b and c    each of them has one loss more at that stage; nobody is blamed
    lost twice              from now on its attempts are isolated: placed where nobody else is at risk
    lost again, alone       blamed: PoisonedRequestError for what it asks, whoever asks it, for a while

A request that is alone at the worker both times is blamed after two losses, one among others after three.
Losses at different stages, or at different places of an answer, are not added up: what ends a worker does so
at the same place again, what is killed at random is not. A request that was answered is forgotten.

Requests are known by a fingerprint of what they ask. Time is passed in, in seconds on any one clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from epd.errors import PoisonedRequestError


@dataclass(frozen=True, slots=True)
class Suspect:
    """A request that was at a worker when that was lost.

    place: what it was there for: a stage, or one group at a stage. num_tokens: of its answer so far, in this
    attempt.
    """

    fingerprint: str
    place: Hashable
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LossLimits:
    """max_losses: at one place, after which a request is isolated, and blamed if it was lost alone.

    refuse_s: for which a request that was blamed is refused, and losses are remembered. max_requests: whose
    losses are remembered. num_slack_tokens: by which reports of one place may differ.
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
    """places: losses at each. until_s: when all of it is forgotten. num_losses: in all."""

    until_s: float
    num_losses: int = 0
    is_blamed: bool = False
    places: dict[Hashable, _Losses] = field(default_factory=dict)


class LossLedger:
    """Counts losses by fingerprint, in a bounded table: what was lost longest ago goes first."""

    def __init__(self, limits: LossLimits | None = None) -> None:
        self.limits = limits or LossLimits()
        self._cases: OrderedDict[str, _Case] = OrderedDict()

    def __len__(self) -> int:
        """Requests with losses that are remembered."""
        return len(self._cases)

    def record(self, suspects: Collection[Suspect], now_s: float) -> frozenset[str]:
        """A worker is lost with all of these at risk. Returns the fingerprints that are to blame."""
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
        """Losses at that place. One that got further than where it was lost before was not lost by itself."""
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
        """Places at which its next attempt is to be isolated."""
        case = self._case(fingerprint, now_s)
        places = case.places if case is not None else {}
        return frozenset(place for place, each in places.items() if each.num_losses >= self.limits.max_losses)

    def furthest(self, fingerprint: str, now_s: float) -> int:
        """Tokens of its answer after which an attempt has got further than those that were lost."""
        case = self._case(fingerprint, now_s)
        return max((each.num_tokens for each in case.places.values()), default=0) if case is not None else 0

    def forget(self, fingerprint: str) -> None:
        """The request was answered: it was not to blame. Unknown ones are ignored."""
        self._cases.pop(fingerprint, None)

    def _case(self, fingerprint: str, now_s: float) -> _Case | None:
        case = self._cases.get(fingerprint)
        if case is not None and now_s >= case.until_s:
            del self._cases[fingerprint]
            return None
        return case
