"""The status of a request from its arrival to each of its ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from epd.control.routing import Router
from epd.errors import MediaError
from epd.serve_app.orchestration.live_answer import LiveAnswer
from epd.serve_app.orchestration.requests import Attempt, Outcome
from epd.stages.engine.generation import TokenOutput
from epd.types import RequestStatus, Usage


class _Answer(LiveAnswer):
    """Of two choices, without a plan."""

    def __init__(self) -> None:
        request: Any = SimpleNamespace(request_id="q", wants_spans=False, streams=True)
        sampling = SimpleNamespace(n=2, logprobs=None)
        plan: Any = SimpleNamespace(
            plan_s=0.0, prompt=(1, 2), sampling=sampling, usage=lambda _: Usage(0, 0, 2, 0), thinks=False
        )
        super().__init__(request, plan, Any, lambda: 1.0, Any)  # type: ignore[arg-type]

    def push(self, choice: int, index: int, finish_reason: Any = None) -> None:
        token: Any = SimpleNamespace(token_id=1)
        self.take([TokenOutput("q#1", choice, index, token, "a", finish_reason)])


def attempt_of(answer: LiveAnswer) -> Attempt:
    return Attempt(1, answer, Router())


@pytest.mark.parametrize(
    ("reasons", "status"),
    [
        (("stop", "stop"), RequestStatus.FINISHED_STOPPED),
        (("stop", "length"), RequestStatus.FINISHED_LENGTH),
    ],
)
def test_from_waiting_to_the_last_token(reasons: tuple[str, str], status: RequestStatus) -> None:
    async def life() -> None:
        answer = _Answer()
        attempt = attempt_of(answer)
        assert attempt.status is RequestStatus.WAITING
        attempt.is_placed = True
        answer.push(0, 0)
        assert attempt.status is RequestStatus.PREFILLING, "one choice has no token yet"
        answer.push(1, 0)
        assert attempt.status is RequestStatus.DECODING
        assert attempt.status.is_running
        answer.push(0, 1, reasons[0])
        assert not answer.is_complete
        answer.push(1, 1, reasons[1])
        attempt.end(Outcome.COMPLETE)
        assert attempt.status is status
        assert attempt.status.is_finished
        assert not attempt.status.is_running

    asyncio.run(life())


def test_what_is_lost_or_fails_is_not_running() -> None:
    async def life() -> None:
        for outcome in (Outcome.LOST, Outcome.TAKEN_BACK):
            attempt = attempt_of(_Answer())
            attempt.is_placed = True
            attempt.end(outcome)
            assert attempt.status is RequestStatus.FINISHED_ABORTED
        attempt = attempt_of(_Answer())
        attempt.fail(MediaError("no picture"))
        attempt.end(Outcome.LOST)
        assert attempt.status is RequestStatus.FINISHED_ERROR

    asyncio.run(life())
