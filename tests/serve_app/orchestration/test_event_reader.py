"""What the orchestrator learns from what workers report: first tokens, and losses of other workers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd.sampling_params import SamplingParams
from epd.serve_app.fleet import WorkerLost
from epd.serve_app.messages import Abort, PeerLost
from epd.serve_app.orchestration.event_reader import Recovery
from epd.serve_app.orchestration.requests import Outcome
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage
from tests.serve_app.deployments import Question, deployed, until_decoding
from tests.serve_app.orchestration.parts import shared_parts

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def test_a_first_token_is_recorded_once_and_frees_its_prefill_worker(
    checkpoints: dict[str, Path], media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission predicts TTFT from these records; while answers go on, prompts are counted no longer."""
    questions = [Question((media["image"],), f"what {number}?", LONG) for number in range(2)]

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            service, recorded = deployment.service, list[float]()
            monkeypatch.setattr(service.queue, "record_first_token", recorded.append)
            deployment.held.is_on = True
            asking = asyncio.create_task(deployment.ask_all(questions))
            await until_decoding(deployment, "d0", 2)
            assert not asking.done()
            assert (service.router.in_flight("p0").num_prefills, len(recorded)) == (0, 2)
            deployment.held.is_on = False
            answers = await asking
            await deployment.settle()
        assert [len(answer.tokens) for answer in answers] == [40, 40]
        assert len(recorded) == 2
        assert all(0 < seconds < 120 for seconds in recorded)

    asyncio.run(run())


class LossyFleet:
    """A prefill worker p0, which says what it loses with another one. sent: what else it was sent."""

    def __init__(self, lost_ids: tuple[str, ...]) -> None:
        roles: dict[str, Stage] = {"p0": "prefill", "d0": "decode", "d1": "decode"}
        self.workers = {name: WorkerInfo(name, frozenset({role})) for name, role in roles.items()}
        self.lost_ids = lost_ids
        self.sent: list[Any] = []

    async def send(self, _stage: str, target: str, message: Any) -> Any:
        if isinstance(message, PeerLost):
            return self.lost_ids if target == "p0" else ()
        self.sent.append((target, message))
        return None


class Moves:
    """Counts redirects, none of which finds room."""

    def __init__(self) -> None:
        self.num_redirects = 0

    async def redirect(self, _attempt: Any) -> bool:
        self.num_redirects += 1
        return False


def attempt_at(
    prefill_worker: str, decode_worker: str, moving_to: str = "", *, is_handed_over: bool = True
) -> Any:
    ended = list[Outcome]()
    return SimpleNamespace(
        id="me/known#1",
        is_placed=True,
        prefill_worker=prefill_worker,
        decode_worker=decode_worker,
        moving_to=moving_to,
        is_handed_over=is_handed_over,
        placement=SimpleNamespace(is_merged=False),
        answer=SimpleNamespace(has_begun=True),
        ended=ended,
        end=ended.append,
    )


async def lose(recovery: Recovery, shared: Any, worker: str) -> None:
    shared.fleet.workers[worker] = WorkerInfo(worker, frozenset({"decode"}), is_alive=False)
    recovery.lose(WorkerLost(worker, "it was killed", 1))
    await shared.requests.tasks.wait()


def test_a_prompt_whose_answer_is_over_is_not_kept_for_a_lost_decode_worker() -> None:
    """The worker answered before its receipts came: its prefill worker names a request that is over."""

    async def run() -> None:
        fleet = LossyFleet(("me/over#3", "other/over#4", "me/known#1"))
        attempt = attempt_at("p0", "d0")
        shared, moves = shared_parts(fleet, attempts={attempt.id: attempt}), Moves()
        await lose(Recovery(shared, moves, "me"), shared, "d0")  # type: ignore[arg-type]
        assert fleet.sent == [("p0", Abort(("me/over#3",)))]
        assert moves.num_redirects == 1
        assert attempt.ended == [Outcome.LOST]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("attempt_options", "is_over"),
    [
        ({}, True),
        ({"is_handed_over": False}, False),
        ({"moving_to": "d0"}, False),
        ({"moving_to": "p0"}, False),
    ],
)
def test_a_prompt_whose_answer_was_moved_is_not_kept_for_the_lost_worker_that_had_it(
    attempt_options: dict[str, Any], is_over: bool
) -> None:
    """That one moved the answer before its receipts came. Nothing else frees the prompt, and d1 goes on."""

    async def run() -> None:
        attempt = attempt_at("p0", "d1", **attempt_options)
        fleet = LossyFleet((attempt.id,))
        shared = shared_parts(fleet, attempts={attempt.id: attempt})
        await lose(Recovery(shared, Moves(), "me"), shared, "d0")  # type: ignore[arg-type]
        assert fleet.sent == ([("p0", Abort((attempt.id,)))] if is_over else [])
        assert attempt.ended == ([Outcome.LOST] if attempt.moving_to == "d0" else [])

    asyncio.run(run())


@pytest.mark.parametrize(("lost", "ended"), [("d1", []), ("p0", [Outcome.LOST])])
def test_an_attempt_that_looks_for_a_decode_worker_is_not_redirected_again(
    lost: str, ended: list[Outcome]
) -> None:
    """It detects the loss of the worker that it asks; without its prefill worker nothing is left to send."""

    async def run() -> None:
        attempt = attempt_at("p0", "d1")
        shared, moves = shared_parts(LossyFleet((attempt.id,)), attempts={attempt.id: attempt}), Moves()
        shared.requests.redirecting[attempt.id] = attempt
        await lose(Recovery(shared, moves, "me"), shared, lost)  # type: ignore[arg-type]
        assert moves.num_redirects == 0
        assert attempt.ended == ended

    asyncio.run(run())


def test_an_answer_is_retried_if_the_worker_that_it_is_moved_to_is_lost() -> None:
    """That one may have had all of it, and its former worker nothing any more."""

    async def run() -> None:
        attempt = attempt_at("p0", "d0", moving_to="d1")
        shared, moves = shared_parts(LossyFleet(()), attempts={attempt.id: attempt}), Moves()
        await lose(Recovery(shared, moves, "me"), shared, "d1")  # type: ignore[arg-type]
        assert attempt.ended == [Outcome.LOST]

    asyncio.run(run())
