"""Messages that come in the middle of a pass: answered and told before it ends, where the pass allows it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from epd.sampling_params import SamplingParams
from epd.serve_app.local.fleet import LocalTransport
from epd.serve_app.messages import Abort, EncodeGroup, Message, Prefill, Reserve, SpanDone, endpoint
from epd.serve_app.worker.worker_core import WorkerCore
from epd.serve_app.worker.worker_roles import EncodeRole
from epd.serve_app.worker.worker_thread import Call
from epd.stages.decoder.decoder import FusedDecoder
from epd.topology import Stage
from epd.transfer.transfers import Grant
from tests.serve_app.deployments import Question
from tests.serve_app.worker.bench import Bench
from tests.serve_app.worker.threads import KeepingThread

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
SOON_S = 60.0
MERGED: frozenset[Stage] = frozenset({"encode", "prefill", "decode"})


@dataclass
class Gate:
    """Holds a pass before its first layer, and before its last one, until it is told to go on."""

    is_shut: bool = False
    first: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    last: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    reached: threading.Event = field(default_factory=threading.Event)

    def attend(self, index: int, num_layers: int) -> None:
        """Is called where the layer's attention begins, after messages were taken."""
        if self.is_shut and index == 0:
            self.reached.set()
            assert self.first.acquire(timeout=SOON_S)
        if self.is_shut and index == num_layers - 1:
            assert self.last.acquire(timeout=SOON_S)

    def open(self) -> None:
        self.is_shut = False
        self.first.release()
        self.last.release()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, attend = Gate(), FusedDecoder._attend

    def held(decoder: FusedDecoder, index: int, *more: Any) -> Any:
        gate.attend(index, decoder.num_layers)
        return attend(decoder, index, *more)

    monkeypatch.setattr(FusedDecoder, "_attend", held)
    yield gate
    gate.open()


class Paused:
    """A worker thread that is in the middle of a pass over a text."""

    def __init__(self, thread: KeepingThread, bench: Bench, gate: Gate) -> None:
        self.thread, self.bench, self.gate = thread, bench, gate
        self.events: list[Any] = []
        self.tokens: dict[str, list[int]] = {}
        self._ended: set[str] = set()

    def put(self, message: Message[Any], bulk: Any = None) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.thread.put(Call(message, bulk, reply))
        return reply

    async def reply(self, message: Message[Any], bulk: Any = None) -> Any:
        return await asyncio.wait_for(self.put(message, bulk), SOON_S)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not condition():
                for report in await self.thread.take_reports(SOON_S):
                    self.events += report.events
                    for output in report.outputs:
                        self.tokens.setdefault(output.request_id, []).append(output.token.token_id)
                        self._ended |= {output.request_id} if output.finish_reason else set()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def has_ended(self, name: str) -> bool:
        return name in self._ended


@asynccontextmanager
async def paused(bench: Bench, gate: Gate, roles: frozenset[Stage]) -> AsyncIterator[Paused]:
    thread = KeepingThread("w0", roles, bench.worker_settings, LocalTransport())
    await thread.start()
    assert isinstance(thread.core, WorkerCore)
    worker = Paused(thread, bench, gate)
    try:
        text = bench.plan(Question((), sampling=SamplingParams(max_tokens=8, ignore_eos=True)))
        gate.is_shut = True
        assert await worker.reply(Prefill(text.generate_request("text"), text.groups, None))
        assert await asyncio.to_thread(gate.reached.wait, SOON_S)
        yield worker
    finally:
        gate.open()
        thread.stop()
        await asyncio.to_thread(thread.join, SOON_S)


@pytest.fixture
def merged_bench(checkpoints: dict[str, Path]) -> Bench:
    return Bench(checkpoints["qwen2_5_vl"], "1epd")


def test_a_prompt_is_granted_and_encoded_before_the_pass_ends(
    merged_bench: Bench, question: Question, media: dict[str, Path], gate: Gate
) -> None:
    """And the tokens are those of a worker that takes it between its turns."""
    question = Question((media["image"],))
    plan = merged_bench.plan(question)

    async def run() -> dict[str, list[int]]:
        async with paused(merged_bench, gate, MERGED) as worker:
            taken = worker.put(Prefill(plan.generate_request("media"), plan.groups, None))
            gate.first.release()
            assert await asyncio.wait_for(taken, SOON_S)
            await worker.until(lambda: bool(worker.of(Grant)))
            assert "text" not in worker.tokens, "the pass has ended"
            assert worker.thread.core is not None
            gate.open()
            for granted in worker.of(Grant):
                group = plan.groups[granted.group]
                message = EncodeGroup("media", granted.ticket, group)
                assert await worker.reply(message, merged_bench.pixels(question, group))
            await worker.until(lambda: worker.has_ended("media") and worker.has_ended("text"))
            return worker.tokens

    tokens = asyncio.run(run())
    assert merged_bench.submit("media", plan, "epd0")
    merged_bench.finish({"media": (question, plan)}, "epd0")
    assert tokens["media"] == merged_bench.tokens("media")
    assert len(tokens["text"]) == 8


def test_a_group_that_comes_in_a_pass_is_encoded_beside_it(
    merged_bench: Bench, media: dict[str, Path], gate: Gate
) -> None:
    question = Question((media["image"],))
    plan = merged_bench.plan(question)

    async def run() -> None:
        async with paused(merged_bench, gate, MERGED) as worker:
            granted = worker.put(Prefill(plan.generate_request("media"), plan.groups, None))
            gate.first.release()
            assert await asyncio.wait_for(granted, SOON_S)
            await worker.until(lambda: bool(worker.of(Grant)))
            group = plan.groups[worker.of(Grant)[0].group]
            gate.reached.clear()
            gate.last.release()  # the next pass is held, too
            assert await asyncio.to_thread(gate.reached.wait, SOON_S)
            message = EncodeGroup("media", worker.of(Grant)[0].ticket, group)
            taken = worker.put(message, merged_bench.pixels(question, group))
            gate.first.release()
            assert await asyncio.wait_for(taken, SOON_S)
            assert worker.thread.core is not None
            role = worker.thread.core.hosted["encode"]
            assert isinstance(role, EncodeRole)
            async with asyncio.timeout(SOON_S):  # the reply comes first
                while not (role.stage.is_encoding or role.stage.counts.num_groups):
                    await asyncio.sleep(0.01)
            gate.open()
            await worker.until(lambda: bool(worker.of(SpanDone)))

    asyncio.run(run())


def test_room_is_reserved_before_the_pass_of_a_decode_worker_ends(bench: Bench, gate: Gate) -> None:
    plan = bench.plan(Question(()))

    async def run() -> None:
        async with paused(bench, gate, frozenset({"prefill", "decode"})) as worker:
            core = worker.thread.core
            assert core is not None
            reserve = Reserve("r", endpoint("p0", "prefill"), plan.identity, plan.sampling)
            taken = worker.put(reserve)
            gate.first.release()
            assert await asyncio.wait_for(taken, SOON_S) is None, "a worker that prefills too takes none"
            assert not worker.tokens

    asyncio.run(run())


def test_what_would_change_the_pass_waits_for_its_end_and_so_does_all_behind_it(
    merged_bench: Bench, gate: Gate
) -> None:
    plan = merged_bench.plan(Question(()))

    async def run() -> None:
        async with paused(merged_bench, gate, MERGED) as worker:
            aborted = worker.put(Abort(("text",)))
            taken = worker.put(Prefill(plan.generate_request("later"), plan.groups, None))
            gate.first.release()
            await asyncio.sleep(0.05)
            assert not aborted.done()
            assert not taken.done()
            gate.open()
            assert await asyncio.wait_for(taken, SOON_S)
            await worker.until(lambda: worker.has_ended("later"))
            assert len(worker.tokens.get("text", [])) < 8

    asyncio.run(run())


def test_a_message_that_raises_in_a_pass_costs_its_sender_alone(
    merged_bench: Bench, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = merged_bench.plan(Question(()))

    async def run() -> None:
        async with paused(merged_bench, gate, MERGED) as worker:
            with monkeypatch.context() as patch:
                patch.setattr(WorkerCore, "_submit", raise_bug)
                failed = worker.put(Prefill(plan.generate_request("bad"), plan.groups, None))
                gate.first.release()
                with pytest.raises(Exception, match="ZeroDivisionError"):
                    await asyncio.wait_for(failed, SOON_S)
                assert not worker.tokens
            gate.open()
            await worker.until(lambda: worker.has_ended("text"))
            assert len(worker.tokens["text"]) == 8
            assert worker.thread.failure == ""

    asyncio.run(run())


def test_what_raises_between_layers_for_no_message_ends_the_worker_after_the_pass(
    merged_bench: Bench, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for a fault of the requests that the pass computes."""
    plan = merged_bench.plan(Question(()))
    monkeypatch.setattr(WorkerCore, "step_within", raise_bug)

    async def run() -> None:
        async with paused(merged_bench, gate, MERGED) as worker:
            worker.put(Prefill(plan.generate_request("r"), plan.groups, None))
            gate.open()
            await worker.until(lambda: bool(worker.thread.failure))
            assert worker.thread.failure == "ZeroDivisionError: a bug"

    asyncio.run(run())


def raise_bug(*_: Any) -> None:
    raise ZeroDivisionError("a bug")
