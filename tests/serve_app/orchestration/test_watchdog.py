"""Messages between workers that get lost as by a bug: the request is done again and answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd.machine import steady_time_s
from epd.sampling_params import SamplingParams
from epd.serve_app.messages import WorkerLoad, WorkerReport
from epd.serve_app.orchestration import watchdog
from epd.serve_app.orchestration.requests import Outcome
from epd.serve_app.orchestration.watchdog import Watchdog
from epd.serve_app.worker import worker_thread
from epd.stages.connectors.mailbox import InProcessConnector
from epd.transfer.connectors import Offer
from epd.types import RequestStatus
from tests.serve_app.deployments import NEVER_S, Question, deployed, undisturbed
from tests.serve_app.orchestration.parts import shared_parts
from tests.serve_app.worker.threads import KeepingThread

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

LONG = SamplingParams(max_tokens=20, ignore_eos=True)


def losing_first(is_lost: Callable[[str, Any], bool], put: Callable[..., None]) -> Callable[..., None]:
    """A `put` of connectors that loses the first message of a kind."""
    lost: list[Any] = []

    def tampered(connector: Any, name: str, message: Any) -> None:
        if not lost and is_lost(name, message):
            lost.append(message)
        else:
            put(connector, name, message)

    return tampered


@pytest.mark.parametrize("receiver", ["prefill", "decode"])
def test_a_request_whose_offer_is_lost_is_done_again(
    receiver: str,
    checkpoints: dict[str, Path],
    media: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says before that what it waits for."""
    monkeypatch.setattr(watchdog, "_SAY_AFTER_S", NEVER_S)
    question = Question((media["image"],), sampling=LONG)
    expected = undisturbed(checkpoints["qwen2_5_vl"], [question])

    def is_lost(name: str, message: Any) -> bool:
        if not isinstance(message, Offer) or not name.endswith(receiver):
            return False
        monkeypatch.setattr(watchdog, "_SAY_AFTER_S", 1.0)  # from now on nothing gets on
        return True

    monkeypatch.setattr(InProcessConnector, "put", losing_first(is_lost, InProcessConnector.put))

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d", stall_timeout_s=5.0) as deployment:
            start_s, asking = steady_time_s(), asyncio.create_task(deployment.ask(question))
            while not deployment.service.attempts:
                await asyncio.sleep(0.01)
            assert all(each.event_s > start_s for each in deployment.service.attempts.values())
            counted = deployment.service.requests.counters
            while not counted["stalls"]:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(watchdog, "_SAY_AFTER_S", NEVER_S)
            monkeypatch.setattr(watchdog, "stalled", lambda *_: ())  # the next one may be slow
            answer = await asking
            assert answer.tokens == expected[0]
            assert answer.end is not None
            assert answer.end.num_retries == 1
            counters = (await deployment.service.status()).counters
            assert (counters["stalls"], counters.get("workers_lost", 0)) == (1, 0)
            # Not settled: the sender keeps what it offered until it is answered, which never comes here.

    asyncio.run(run())
    said = [text for text in caplog.messages if text.startswith("requests without progress")]
    awaited = "1 for groups at e0" if receiver == "prefill" else "1 for the prompt at p0"
    assert said
    assert all(awaited in text for text in said), said


class EndedError(Exception):
    """Ends a loop that has no end."""


class BusyCore:
    """A worker that computes a long prompt: it gets on with every step, and has nothing to tell."""

    name = "p0"

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self) -> bool:
        self.num_steps += 1
        return True

    def take_report(self) -> None: ...

    def load(self) -> WorkerLoad:
        return WorkerLoad(counters={"computed_tokens": self.num_steps})


def test_a_worker_that_computes_without_an_event_shows_that_it_gets_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        thread = KeepingThread("p0", frozenset(), None, None)  # type: ignore[arg-type]
        core: Any = BusyCore()
        monkeypatch.setattr(worker_thread, "_MAX_SILENCE_S", 0.0)
        thread.turn(core)
        assert len(await thread.take_reports(0.0)) == 1
        monkeypatch.setattr(worker_thread, "_MAX_SILENCE_S", NEVER_S)
        thread.turn(core)
        assert await thread.take_reports(0.0) == []  # it has just said so
        monkeypatch.setattr(worker_thread, "_MAX_SILENCE_S", 0.0)
        thread.turn(core)
        (report,) = await thread.take_reports(0.1)
        assert report.load.counters == {"computed_tokens": 3}

    asyncio.run(run())


def decoding(now: list[float]) -> tuple[Any, list[Outcome]]:
    """What a watchdog of 100 s looks at: one attempt at p0. Returns also how the attempt has ended."""
    attempt: Any = SimpleNamespace(
        id="a",
        status=RequestStatus.DECODING,
        workers=frozenset({"p0"}),
        event_s=0.0,
        started_s=0.0,
        has_ended=True,
    )
    outcomes: list[Outcome] = []
    attempt.end = outcomes.append
    dispatcher: Any = SimpleNamespace(encoders_of=lambda _: frozenset())
    shared = shared_parts(
        dispatcher=dispatcher, attempts={"a": attempt}, clock=lambda: now[0], stall_timeout_s=100.0
    )
    return shared, outcomes


def test_only_work_that_was_done_counts_as_progress() -> None:
    """A usage that changes does not, nor that a worker is alive."""
    now = [0.0]
    shared, outcomes = decoding(now)
    watching = Watchdog(shared)
    for now[0], num_tokens in ((10.0, 1), (90.0, 2), (170.0, 2)):
        load = WorkerLoad(kv_usage=now[0] / 1000, counters={"computed_tokens": num_tokens})
        watching.reported(WorkerReport("p0", load=load))
    now[0] = 180.0
    watching.look()
    assert outcomes == []
    now[0] = 191.0
    watching.look()
    assert outcomes == [Outcome.LOST]


@pytest.mark.parametrize("worker_said_s", [None, 0.0])
def test_a_time_in_which_the_front_was_stopped_is_nobodys_silence(
    worker_said_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped for an hour, as by Ctrl-Z, it has heard of nobody. It looks each 5 s."""
    now, stopped_s = [0.0], {2: 3600.0}
    shared, outcomes = decoding(now)
    watching = Watchdog(shared)
    if worker_said_s is not None:
        watching.reported(WorkerReport("p0", load=WorkerLoad()))
    num_slept, ended_after = 0, []

    async def sleep(seconds: float) -> None:
        nonlocal num_slept
        num_slept += 1
        now[0] += seconds + stopped_s.get(num_slept, 0.0)
        if outcomes:
            raise EndedError
        ended_after[:] = [num_slept]

    monkeypatch.setattr(watchdog, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(EndedError):
        asyncio.run(watching.run())
    assert outcomes == [Outcome.LOST]
    assert ended_after == [21]  # 105 s without the hour: the first look after 100 s


def test_the_log_says_what_requests_without_progress_wait_for(caplog: pytest.LogCaptureFixture) -> None:
    """In one line, each 30 s, however many there are."""
    now = [0.0]

    def attempt(number: int, **changes: Any) -> Any:
        values = {
            "id": f"r{number}", "asking": {}, "is_placed": True, "is_handed_over": False, "has_ended": False,
            "prefill_worker": "p0", "decode_worker": "d0", "event_s": 0.0, "started_s": 0.0,
            "moving_to": "", "undecided_until_s": 0.0, "isolated_at": frozenset(),
            "workers": frozenset({"p0", "d0"}), "status": RequestStatus.PREFILLING,
        }  # fmt: skip
        return SimpleNamespace(**(values | changes))

    attempts = [attempt(number, is_handed_over=True) for number in range(5)]
    attempts += [
        attempt(5, is_placed=False, asking={"d1": 1, "p1": 0}),
        attempt(6, is_placed=False),
        attempt(7, is_placed=False, isolated_at=frozenset({"prefill"})),
        attempt(8, is_placed=False, undecided_until_s=1000.0),
        attempt(9),
        attempt(10),
        attempt(11, is_handed_over=True, moving_to="d1"),
        attempt(12, event_s=25.0),
        attempt(13, has_ended=True),
    ]
    dispatcher: Any = SimpleNamespace(encoders_of=lambda name: frozenset({"e0"} if name == "r9" else ()))
    by_id = {each.id: each for each in attempts}
    shared = shared_parts(dispatcher=dispatcher, attempts=by_id, clock=lambda: now[0], stall_timeout_s=1000.0)
    watching = Watchdog(shared)
    for now[0] in (20.0, 31.0, 36.0, 60.0):
        watching.look()
    assert [record.getMessage() for record in caplog.records] == [
        "requests without progress for 30 s or more: 5 for tokens of d0 (r0, r1, r2, ...); "
        "1 for an answer of d1 (r5); 1 for groups at e0 (r9); "
        "1 for its move from d0 to d1 (r11); 1 for room (r6); "
        "1 for room at a worker of its own (r7); 1 for the prompt at p0 (r10); "
        "1 for what other fronts lost (r8)"
    ]
    now[0] = 62.0
    watching.look()
    assert "r12" in caplog.records[-1].getMessage()
