"""Decides which request is to blame for a lost worker, and how long it is refused. No I/O.

    lost with a, b and c    each of them has one loss more at that stage; nobody is blamed
    lost twice              its next attempts are isolated: placed where no other request is at risk
    lost again, alone       blamed: PoisonedRequestError for the same request from any client, for a while

A request that is alone at the worker both times is blamed after two losses, one among others after three.
Losses at different stages, or at different places of an answer, are not added up: a request that ends a
worker does so at the same place again, random kills do not. A request that was answered is forgotten.

Several fronts over the same workers give each other what they have recorded, and count all of it: a request
is refused wherever its losses were, and is alone only if it was so at all fronts.

Requests are known by a fingerprint of their content. Time is passed in, seconds on one clock: who passes a
report to another front shifts its times.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf

from epd.errors import PoisonedRequestError

# Bounds of a report, which every front gets from every other one.
_MAX_REPORTED_LOSSES = 16
_MAX_REPORTED_SUSPECTS = 8  # of one loss
_MAX_REPORTED_ANSWERS = 32
_MAX_FRONTS = 64


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
class Loss:
    """Records what one front had at a worker when that was lost.

    worker: its name and incarnation, so that fronts know that they record the same loss
    is_at_risk: whether the suspects were at risk, not merely present
    has_more: whether there were more suspects than are listed
    """

    worker: str
    at_s: float
    suspects: tuple[Suspect, ...]
    is_at_risk: bool = True
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class LossReport:
    """Holds what a front gives to others. answered: fingerprints of suspects that were answered, and when."""

    losses: tuple[Loss, ...] = ()
    answered: tuple[tuple[str, float], ...] = ()

    def shifted(self, by_s: float) -> LossReport:
        """Returns it with times on another clock, which is ahead by so many seconds."""
        losses = tuple(replace(each, at_s=each.at_s + by_s) for each in self.losses)
        return LossReport(losses, tuple((key, at_s + by_s) for key, at_s in self.answered))


@dataclass(frozen=True, slots=True)
class LossLimits:
    """Limits losses and the memory of them.

    max_losses: at one place, before a request is isolated, or blamed if it was alone
    refuse_s: time for which a blamed request is refused, and losses are remembered
    max_remembered: losses that are remembered
    max_suspects: requests that are remembered of one loss
    num_slack_tokens: tolerance between reports of one place
    settle_s: time that others have to report what they had at a lost worker, before anybody is blamed
    """

    max_losses: int = 2
    refuse_s: float = 600.0
    max_remembered: int = 128
    max_suspects: int = 64
    num_slack_tokens: int = 8
    settle_s: float = 2.0


@dataclass(slots=True)
class _Losses:
    num_losses: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class _Case:
    """Holds a request's losses.

    at_s: of the last one
    blamed_s: of the last one that it is blamed for
    places: losses at each
    """

    num_losses: int = 0
    at_s: float = 0.0
    blamed_s: float | None = None
    places: dict[Hashable, _Losses] = field(default_factory=dict)


class LossLedger:
    """Counts losses by fingerprint, in bounded tables that drop the oldest first."""

    def __init__(self, limits: LossLimits | None = None) -> None:
        self.limits = limits or LossLimits()
        self.is_shared = False
        self._own: list[Loss] = []
        self._answered: dict[str, float] = {}
        self._others: dict[str, LossReport] = {}
        self._cases: dict[str, _Case] = {}

    def __len__(self) -> int:
        """Returns the number of requests with remembered losses."""
        return len(self._cases)

    # What was recorded

    def record(
        self, suspects: Collection[Suspect], now_s: float, worker: str, *, is_at_risk: bool = True
    ) -> None:
        """Records the loss of a worker with these suspects. worker, is_at_risk: see `Loss`."""
        unique = _unique(suspects)
        listed = unique[: self.limits.max_suspects]
        has_more = len(listed) < len(unique)
        self._own.append(Loss(worker, now_s, listed, is_at_risk, has_more))
        self._count(now_s)

    def forget(self, fingerprint: str, now_s: float) -> bool:
        """Forgets a request that was answered and so was not to blame. Returns whether it was known."""
        case = self._cases.get(fingerprint)
        if case is None:
            return False
        self._answered[fingerprint] = now_s
        if case.at_s < now_s:  # the answer came after all its losses, and others' cases do not depend on it
            del self._cases[fingerprint]
        else:
            self._count(now_s)
        return True

    def report(self) -> LossReport:
        """Returns the latest of what was recorded here, for other fronts."""
        return LossReport(
            tuple(map(_shortened, self._own[-_MAX_REPORTED_LOSSES:])),
            tuple(self._answered.items())[-_MAX_REPORTED_ANSWERS:],
        )

    def follow(self, reports: Mapping[str, LossReport], now_s: float) -> bool:
        """Takes the latest reports of other fronts; those of fronts that are gone stay until they are old.

        Returns whether anything is new.
        """
        current = {front: _newer(report, now_s - self.limits.refuse_s) for front, report in reports.items()}
        if all(self._others.get(front, LossReport()) == report for front, report in current.items()):
            return False
        self._others |= current
        self._count(now_s)
        return True

    def _count(self, now_s: float) -> None:
        """Counts anew what is not old yet."""
        self._forget_old(now_s - self.limits.refuse_s)
        reports = self._others.values()
        answered = dict(self._answered)
        for fingerprint, at_s in chain.from_iterable(each.answered for each in reports):
            answered[fingerprint] = max(at_s, answered.get(fingerprint, -inf))
        self._cases = {}
        for losses in _by_worker(chain(self._own, *(each.losses for each in reports))):
            self._add(losses, answered)

    def _forget_old(self, before_s: float) -> None:
        self._own = [each for each in self._own if each.at_s > before_s][-self.limits.max_remembered :]
        self._answered = {key: at_s for key, at_s in self._answered.items() if at_s > before_s}
        kept = {front: _newer(report, before_s) for front, report in self._others.items()}
        self._others = dict(
            [(front, report) for front, report in kept.items() if report != LossReport()][-_MAX_FRONTS:]
        )

    def _add(self, losses: Collection[Loss], answered: Mapping[str, float]) -> None:
        """Counts what all fronts have recorded of one lost worker."""
        losses = [each for each in losses if each.is_at_risk] or losses
        at_s = max(each.at_s for each in losses)
        present = _unique(chain.from_iterable(loss.suspects for loss in losses))
        is_alone = len({each.fingerprint for each in present}) == 1 and not any(
            each.has_more for each in losses
        )
        suspects = [each for each in present if answered.get(each.fingerprint, -inf) < at_s]
        fingerprints = {each.fingerprint for each in suspects}
        for fingerprint in fingerprints:
            case = self._cases.setdefault(fingerprint, _Case())
            case.num_losses += 1
            case.at_s = max(case.at_s, at_s)
        for suspect in suspects:
            case = self._cases[suspect.fingerprint]
            if self._is_again(case, suspect) and is_alone:
                case.blamed_s = at_s

    def _is_again(self, case: _Case, suspect: Suspect) -> bool:
        """Counts a loss at its place, anew if the request got further. Returns whether that is too often."""
        losses = case.places.setdefault(suspect.place, _Losses())
        if suspect.num_tokens > losses.num_tokens + self.limits.num_slack_tokens:
            losses.num_losses = 0
        losses.num_losses += 1
        losses.num_tokens = max(losses.num_tokens, suspect.num_tokens)
        return losses.num_losses >= self.limits.max_losses

    # What follows

    def check(self, fingerprint: str, now_s: float) -> None:
        """Raises PoisonedRequestError for a request that is to blame."""
        case = self._case(fingerprint, now_s)
        if case is not None and case.blamed_s is not None and self.undecided_s(fingerprint, now_s) <= 0:
            raise PoisonedRequestError(
                f"workers were lost {case.num_losses} times with this request, the last time with no other; "
                f"it is refused for the next {case.at_s + self.limits.refuse_s - now_s:.0f} s; change it, or "
                "report it with the server's log"
            )

    def undecided_s(self, fingerprint: str, now_s: float) -> float:
        """Returns the seconds until all fronts may have reported what decides on the blame of a request."""
        case = self._case(fingerprint, now_s)
        if case is None or case.blamed_s is None or not self.is_shared:
            return 0.0
        return max(0.0, case.blamed_s + self.limits.settle_s - now_s)

    def suspected_at(self, fingerprint: str, now_s: float) -> frozenset[Hashable]:
        """Returns the places at which its next attempt must be isolated."""
        case = self._case(fingerprint, now_s)
        places = case.places if case is not None else {}
        return frozenset(place for place, each in places.items() if each.num_losses >= self.limits.max_losses)

    def furthest(self, fingerprint: str, now_s: float) -> int:
        """Returns the answer tokens after which an attempt has got further than the lost ones."""
        case = self._case(fingerprint, now_s)
        return max((each.num_tokens for each in case.places.values()), default=0) if case is not None else 0

    def _case(self, fingerprint: str, now_s: float) -> _Case | None:
        case = self._cases.get(fingerprint)
        if case is not None and now_s >= case.at_s + self.limits.refuse_s:
            del self._cases[fingerprint]
            return None
        return case


def _unique(suspects: Iterable[Suspect]) -> tuple[Suspect, ...]:
    """Returns each request once for each place, as far as it got: copies of a request are one suspect."""
    found: dict[tuple[str, Hashable], Suspect] = {}
    for suspect in suspects:
        key = (suspect.fingerprint, suspect.place)
        if key not in found or suspect.num_tokens > found[key].num_tokens:
            found[key] = suspect
    return tuple(found.values())


def _by_worker(losses: Iterable[Loss]) -> list[list[Loss]]:
    """Returns what several fronts have recorded of the same losses, the oldest first."""
    found: dict[str, list[Loss]] = {}
    for loss in sorted(losses, key=lambda each: each.at_s):
        found.setdefault(loss.worker, []).append(loss)
    return list(found.values())


def _shortened(loss: Loss) -> Loss:
    if len(loss.suspects) <= _MAX_REPORTED_SUSPECTS:
        return loss
    return replace(loss, suspects=loss.suspects[:_MAX_REPORTED_SUSPECTS], has_more=True)


def _newer(report: LossReport, before_s: float) -> LossReport:
    return LossReport(
        tuple(each for each in report.losses if each.at_s > before_s),
        tuple((key, at_s) for key, at_s in report.answered if at_s > before_s),
    )
