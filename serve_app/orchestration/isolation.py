"""Keeps requests that may be to blame for lost workers apart from others, see `epd.control.loss_policy`.

A suspect goes to a worker where no other request is at risk. No other request is placed there until the
suspect gets further than where it was lost, or some time has passed. It claims only that one worker.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from serve_app.orchestration.attempt import Attempt
from serve_app.orchestration.encode_dispatcher import EncodeDispatcher

_MAX_CLAIM_S = 30.0  # the longest that other requests are kept away from a worker


@dataclass(slots=True)
class _Claim:
    """A worker that is kept for one suspect. is_used: whether the suspect was allowed to go there."""

    attempt: Attempt
    place: Hashable
    until_s: float
    is_used: bool = False


class Isolation:
    """Decides where attempts may be placed. attempts: all in flight, by id."""

    def __init__(
        self, dispatcher: EncodeDispatcher, attempts: Mapping[str, Attempt], clock: Callable[[], float]
    ) -> None:
        self._dispatcher = dispatcher
        self._attempts = attempts
        self._clock = clock
        self._claims: dict[str, _Claim] = {}

    def allowed(self, attempt: Attempt, place: Hashable, workers: Sequence[str]) -> list[str]:
        """Returns the workers that an attempt may go to, in their order. place: see `loss_policy`."""
        now_s = self._clock()
        for worker in [worker for worker in self._claims if self._is_over(worker, now_s)]:
            del self._claims[worker]
        if place not in attempt.isolated_at:
            return [each for each in workers if self._claimant(each) in (None, attempt)]
        mine = [each for each in workers if self._claimant(each) is attempt]
        mine = mine or [each for each in workers if self._claimant(each) is None][:1]
        for worker in mine:
            self._claims.setdefault(worker, _Claim(attempt, place, now_s + _MAX_CLAIM_S))
        alone = [worker for worker in mine if not self._has_others(attempt, place, worker)]
        for worker in alone:
            self._claims[worker].is_used = True
        return alone

    def _claimant(self, worker: str) -> Attempt | None:
        return self._claims[worker].attempt if worker in self._claims else None

    def _is_over(self, worker: str, now_s: float) -> bool:
        claim = self._claims[worker]
        attempt = claim.attempt
        if (
            now_s >= claim.until_s
            or attempt.id not in self._attempts
            or claim.place not in attempt.isolated_at
        ):
            return True
        if _is_group(claim.place):
            return claim.is_used and attempt.id not in self._having_groups(worker)
        return not attempt.is_at_risk

    def _has_others(self, attempt: Attempt, place: Hashable, worker: str) -> bool:
        """Returns whether another request is at risk at a worker."""
        if _is_group(place):
            return bool(self._having_groups(worker) - {attempt.id})
        others = (each for each in self._attempts.values() if each is not attempt)
        return any(each.is_at_risk and each.is_at(worker) for each in others)

    def _having_groups(self, worker: str) -> set[str]:
        return {attempt_id for attempt_id, _ in self._dispatcher.groups_at(worker)}


def _is_group(place: Hashable) -> bool:
    return isinstance(place, tuple)
