"""Counts lost workers against the requests that were at them, and ends those that are to blame.

    worker lost -> requests at risk there -> LossLedger -> requests to blame end, the others continue

A request is at risk until it gets further than any of its lost attempts: by default, until its first token.
Requests that were merely present, in the middle of their answers, are suspects if no request was at risk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from epd.control.loss_policy import LossLedger, LossReport, Suspect
from epd.errors import PoisonedRequestError
from epd.serve_app.orchestration.live_answer import fingerprint
from epd.serve_app.orchestration.requests import Attempt, Outcome, Shared
from epd.serve_app.service import AnswerRequest
from epd.topology import Stage

_LOOK_S = 0.25  # between looks at what others have reported


@dataclass(frozen=True, slots=True)
class _AtRisk:
    attempt: Attempt
    suspect: Suspect
    is_at_risk: bool


class LossCounter:
    """Counts the workers lost with each request.

    on_recorded: called when there is something new to report to other fronts
    """

    def __init__(self, shared: Shared) -> None:
        """Starts without losses."""
        self.on_recorded: Callable[[], None] = lambda: None
        self._ledger = LossLedger(shared.config.losses)
        self._shared = shared
        self._requests = shared.requests
        self._timer: asyncio.TimerHandle | None = None
        self._heard: dict[
            str, tuple[LossReport, LossReport]
        ] = {}  # of others, as sent and with times of here

    async def check(self, request: AnswerRequest) -> None:
        """Raises PoisonedRequestError for a request that is refused because of earlier lost workers.

        Waits while other fronts may still report what they had at a worker that was lost with it.
        """
        if len(self._ledger):
            asked = fingerprint(request)
            while (undecided_s := self._ledger.undecided_s(asked, self._requests.clock())) > 0:
                await asyncio.sleep(min(undecided_s, _LOOK_S))
            self._ledger.check(asked, self._requests.clock())

    def begin(self, attempt: Attempt) -> None:
        """Gives an attempt what is known from earlier attempts at its request."""
        if len(self._ledger):
            asked, now_s = attempt.answer.fingerprint, self._requests.clock()
            attempt.isolated_at = self._ledger.suspected_at(asked, now_s)
            attempt.at_risk_until = self._ledger.furthest(asked, now_s)

    def answered(self, attempt: Attempt) -> None:
        """Notes that the request was answered completely."""
        if len(self._ledger) and self._ledger.forget(attempt.answer.fingerprint, self._requests.clock()):
            self.on_recorded()

    # Other fronts

    def report(self) -> LossReport:
        """Returns what other fronts are to know of losses here, with times from now on, all of them before.

        The clocks of fronts differ.
        """
        return self._ledger.report().shifted(-self._requests.clock())

    def follow(self, reports: Mapping[str, LossReport] | None) -> None:
        """Takes the reports of other fronts, and ends what is to blame by now.

        reports: by front; None if there are none
        """
        self._ledger.is_shared = reports is not None
        heard = {front: self._heard_at(front, report) for front, report in (reports or {}).items()}
        if heard and self._ledger.follow(heard, self._requests.clock()):
            self._end_blamed()

    def _heard_at(self, front: str, report: LossReport) -> LossReport:
        """Returns a report with times of here: it was made when it was first heard, or a little before."""
        if front not in self._heard or self._heard[front][0] != report:
            self._heard[front] = report, report.shifted(self._requests.clock())
        return self._heard[front][1]

    # Losses

    def lose(self, worker: str, incarnation: int, *, is_planned: bool = False) -> None:
        """Ends the requests to blame for a lost worker, and attempts at requests that were lost too often.

        incarnation: of the lost worker
        is_planned: the worker has left by itself: nothing is counted
        """
        self._requests.num_lost[worker] += 1
        if is_planned:
            for attempt in self._requests.attempts.values():
                attempt.lost_with.discard(worker)
            return
        there = list(self._there(worker))
        for attempt in {id(each.attempt): each.attempt for each in there}.values():
            attempt.answer.num_losses += 1
        self._record(f"{worker}/{incarnation}", there)
        self._end_blamed()
        for each in there:
            self.begin(each.attempt)
            if each.attempt.answer.num_losses >= self._shared.config.max_attempts:
                each.attempt.end(Outcome.LOST)  # without a retry

    def _record(self, worker: str, there: Iterable[_AtRisk]) -> None:
        at_risk = [each.suspect for each in there if each.is_at_risk]
        suspects = at_risk or [each.suspect for each in there]
        if suspects:
            self._ledger.record(suspects, self._requests.clock(), worker, is_at_risk=bool(at_risk))
            self.on_recorded()

    def _there(self, worker: str) -> Iterable[_AtRisk]:
        """Returns what was at a worker, or on its way to it."""
        for attempt_id, group in self._shared.dispatcher.groups_at(worker):
            if attempt_id in self._requests.attempts:
                attempt = self._requests.attempts[attempt_id]
                yield _AtRisk(attempt, Suspect(attempt.answer.fingerprint, ("encode", group)), True)
        for attempt in self._requests.attempts.values():
            stage = self._stage_at(attempt, worker)
            attempt.lost_with.discard(worker)
            if stage is not None and not attempt.has_ended:
                suspect = Suspect(attempt.answer.fingerprint, stage, attempt.num_tokens)
                yield _AtRisk(attempt, suspect, attempt.is_at_risk)

    def _stage_at(self, attempt: Attempt, worker: str) -> Stage | None:
        """Returns the stage for which a worker has an attempt, or is being asked to take it."""
        if worker not in attempt.lost_with and not attempt.is_at(worker):
            return None
        info = self._shared.fleet.workers.get(worker)
        if info is not None and "video" in info.roles:
            return "video"
        return "prefill" if worker == attempt.prefill_worker else "decode"

    def _end_blamed(self) -> None:
        """Ends the attempts at requests that are to blame; where that is not known yet, they wait for it."""
        now_s = self._requests.clock()
        waits_s = [self._settle(attempt, now_s) for attempt in self._requests.attempts.values()]
        if any(waits_s) and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(max(waits_s), self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._end_blamed()

    def _settle(self, attempt: Attempt, now_s: float) -> float:
        """Ends an attempt that is to blame. Returns the seconds until that is known."""
        asked = attempt.answer.fingerprint
        undecided_s = self._ledger.undecided_s(asked, now_s)
        attempt.undecided_until_s = now_s + undecided_s
        if undecided_s > 0:
            return undecided_s
        try:
            self._ledger.check(asked, now_s)
        except PoisonedRequestError as error:
            attempt.fail(error)
        return 0.0
