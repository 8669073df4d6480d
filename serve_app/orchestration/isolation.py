"""Keeps requests that may be to blame for lost workers apart from others, see `epd.control.loss_policy`.

A suspect goes to a worker where no other request is at risk. No other request is placed there until the
suspect gets further than where it was lost, or some time has passed. It claims only that one worker.

Several fronts exchange their claims, and send nothing new to workers that another one has claimed.
A suspect goes there once they know of it and what they had there is done, as far as reports show it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from epd.serve_app.orchestration.requests import Attempt, Shared

_MAX_CLAIM_S = 30.0  # the longest that other requests are kept away from a worker
_KNOWN_S = 1.0  # until other fronts know of a claim


@dataclass(slots=True)
class _Claim:
    """A worker that is kept for one suspect, since a time. is_used: whether it was allowed to go there."""

    attempt: Attempt
    place: Hashable
    since_s: float
    is_used: bool = False


class Isolation:
    """Decides where attempts may be placed.

    on_claimed: called when the claims have changed
    """

    def __init__(self, shared: Shared, owner: str = "") -> None:
        """Starts without claims and other fronts. owner: the id of this front."""
        self._owner = owner
        self.on_claimed: Callable[[], None] = lambda: None
        self._shared = shared
        self._attempts = shared.requests.attempts
        self._clock = shared.requests.clock
        self._claims: dict[str, _Claim] = {}
        self._others: dict[tuple[str, str], float] = {}  # by front and worker, since when it is known here
        self._is_shared = False

    @property
    def claims(self) -> tuple[str, ...]:
        """Returns the workers that are kept for suspects of this front."""
        now_s = self._clock()
        return tuple(worker for worker in self._claims if not self._is_over(worker, now_s))

    def share(self, claims: Mapping[str, Collection[str]] | None) -> None:
        """Takes the claims of the other fronts, by their ids; None if there are none."""
        self._is_shared = claims is not None
        keys = [(front, worker) for front, workers in (claims or {}).items() for worker in workers]
        now_s = self._clock()
        self._others = {key: self._others.get(key, now_s) for key in keys}

    def allowed(self, attempt: Attempt, place: Hashable, workers: Sequence[str]) -> list[str]:
        """Returns the workers that an attempt may go to, in their order. place: see `loss_policy`."""
        now_s, before = self._clock(), self.claims
        for worker in [worker for worker in self._claims if self._is_over(worker, now_s)]:
            del self._claims[worker]
        if now_s < attempt.undecided_until_s:
            return []
        free = [each for each in workers if not self._is_kept_elsewhere(each, now_s)]
        if place not in attempt.isolated_at:
            return [each for each in free if self._claimant(each) in (None, attempt)]
        mine = [each for each in free if self._claimant(each) is attempt]
        mine = mine or [each for each in free if self._claimant(each) is None][:1]
        for worker in mine:
            self._claims.setdefault(worker, _Claim(attempt, place, now_s))
        if self.claims != before:
            self.on_claimed()
        alone = [worker for worker in mine if not self._has_others(attempt, place, worker)]
        for worker in alone:
            self._claims[worker].is_used = True
        return alone

    def _is_kept_elsewhere(self, worker: str, now_s: float) -> bool:
        """Returns whether another front keeps a worker for a suspect of its own.

        Two fronts claim the same worker only if neither knew of the other's claim: the lesser id has it. No
        suspect is there before both know.
        """
        fronts = [
            front
            for (front, claimed), since_s in self._others.items()
            if claimed == worker and since_s > now_s - _MAX_CLAIM_S
        ]
        return bool(fronts) and (worker not in self._claims or min(fronts) < self._owner)

    def _claimant(self, worker: str) -> Attempt | None:
        return self._claims[worker].attempt if worker in self._claims else None

    def _is_over(self, worker: str, now_s: float) -> bool:
        claim = self._claims[worker]
        attempt = claim.attempt
        if (
            now_s >= claim.since_s + _MAX_CLAIM_S
            or attempt.id not in self._attempts
            or claim.place not in attempt.isolated_at
        ):
            return True
        if _is_group(claim.place):
            return claim.is_used and attempt.id not in self._having_groups(worker)
        return not attempt.is_at_risk

    def _has_others(self, attempt: Attempt, place: Hashable, worker: str) -> bool:
        """Returns whether another request is at risk at a worker, or may be one of another front."""
        is_shared = self._is_shared and self._has_others_elsewhere(place, worker)
        return is_shared or self._has_others_here(attempt, place, worker)

    def _has_others_here(self, attempt: Attempt, place: Hashable, worker: str) -> bool:
        """Returns whether another request of this front is at risk at a worker."""
        if _is_group(place):
            return bool(self._having_groups(worker) - {attempt.id})
        others = (each for each in self._attempts.values() if each is not attempt)
        return any(each.is_at_risk and each.is_at(worker) for each in others)

    def _has_others_elsewhere(self, place: Hashable, worker: str) -> bool:
        """Of decodes it is not known which are at risk; most have tokens."""
        others = self._shared.router.others_at(worker)
        is_busy = others.encode_patches > 0 if _is_group(place) else others.num_prefills > 0
        return is_busy or self._clock() < self._claims[worker].since_s + _KNOWN_S

    def _having_groups(self, worker: str) -> set[str]:
        return {attempt_id for attempt_id, _ in self._shared.dispatcher.groups_at(worker)}


def _is_group(place: Hashable) -> bool:
    return isinstance(place, tuple)
