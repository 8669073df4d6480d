"""Runs one seed and says what was wrong at its end.

Each answer has the tokens of the undisturbed run, or a stated error; nothing is left of any request; every
request ends in time; a request that is not poisoned is not blamed; blocks are conserved.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from unittest import mock

from epd.errors import EPDError, InternalError, PoisonedRequestError, WorkerFaultError
from epd.serve_app.messages import Message
from epd.serve_app.network import worker_server
from epd.serve_app.network.media_server import MediaServer
from epd.topology import Stage
from tests.faults.plan import Fault, FaultPlan
from tests.faults.pool import Pool, PoolQuestion
from tests.faults.virtual_time import Clock, NothingLeftError, VirtualLoop, decided
from tests.faults.world import Part, Trace, World, simulated_thread
from tests.serve_app.deployments import Answered, Question
from tests.serve_app.media_fleet import reference_to

_MAX_ANSWER_S = 400.0  # virtual time of one request, whatever is lost
_MAX_SETTLE_S = 120.0
_MAX_CLOSE_S = 5.0
_NEVER = ("loop_failures", "event_failures", "stalls")  # counters of a front that stay at zero
_OTHER_STRUCK = 0.4  # share of strikes that meet another worker
_SILENT_S = 3.0  # a machine that is lost for longer says nothing more
_MUTE_S = 1.0  # after its end
_MUTE_SHARE = 0.5  # of strikes before which the worker reaches no other worker
_CLOCK_JUMPS_S = (-7200.0, -200.0, 200.0, 7200.0)
_SWITCHED: tuple[frozenset[Stage], ...] = (
    frozenset({"encode"}),
    frozenset({"prefill"}),
    frozenset({"decode"}),
    frozenset({"encode", "prefill"}),
    frozenset({"prefill", "decode"}),
)


@dataclass
class Result:
    """What came of one seed.

    findings: what was wrong; none if all is well
    counts: of kills, answers and errors by their names
    virtual_s: simulated seconds
    """

    plan: FaultPlan
    findings: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    digest: str = ""
    virtual_s: float = 0.0


class _Run:
    """One run of a plan."""

    def __init__(self, plan: FaultPlan, pool: Sequence[PoolQuestion], world: World, result: Result) -> None:
        self.plan, self.pool, self.world, self.result = plan, pool, world, result
        self.clients: dict[int, asyncio.Task[None]] = {}
        self._switches: list[asyncio.Task[Any]] = []
        self._turns: Counter[str] = Counter()  # by kind

    def found(self, text: str) -> None:
        self.world.trace.note("FOUND", text[:120])
        self.result.findings.append(text)

    async def run(self) -> None:
        world, plan = self.world, self.plan
        world.network.slowness = plan.slowness
        world.is_deadly, world.on_turn = self._is_deadly, self._strike
        await world.start(plan.topology, plan.num_fronts, plan.num_media, max_waiting=1000, max_wait_s=1e6)
        faults = [fault for fault in plan.faults if fault.kind != "strike"]
        harm = [asyncio.create_task(self._harm(fault)) for fault in faults]
        for index in range(len(plan.asked)):
            self.clients[index] = asyncio.create_task(self._client(index))
        await asyncio.gather(*harm, *self.clients.values(), return_exceptions=True)
        for task in (*harm, *self.clients.values(), *self._switches):
            if task.done() and not task.cancelled() and task.exception() is not None:
                self.found("".join(traceback.format_exception(task.exception()))[-1500:])
        await self._settle()
        self.result.counts.update(world.counts)

    async def _settle(self) -> None:
        """Waits until nothing is left, and checks what each worker has."""
        world = self.world
        end_s = world.loop.time() + _MAX_SETTLE_S
        while (left := world.leftovers()) and world.loop.time() < end_s:
            await asyncio.sleep(0.1)
        if left:
            await world.collect()
            left = world.leftovers()
        if left:
            self.found(f"left behind: {left}")
        for core in world.cores():
            try:
                core.check_integrity()
            except AssertionError as error:
                self.found(f"the state of {core.name} is inconsistent: {error}")
        for part in world.fronts:
            counters = part.front.requests.counters if part.front is not None else Counter[str]()
            wrong = {name: counters[name] for name in _NEVER if counters[name]}
            self.result.counts["retries"] += counters["retries"]
            self.result.counts["redirects"] += counters["redirects"]
            self.result.counts["stalls"] += counters["stalls"]
            if wrong:
                self.found(f"{part.process.name} counts {wrong}")

    # Clients

    async def _client(self, index: int) -> None:
        """Asks one question, and judges what comes of it."""
        world, asked = self.world, self.plan.asked[index]
        await asyncio.sleep(asked.at_s)
        while not (fronts := [part for part in world.fronts if not part.process.is_frozen]):
            await asyncio.sleep(0.1)
        part = fronts[int(asked.front * len(fronts))]
        pooled, answered = self.pool[asked.number], Answered()
        asking = part.process.spawn(self._ask(part, index, pooled.question, answered))
        began_s = world.loop.time()
        died = asyncio.create_task(part.died.wait())
        try:
            async with asyncio.timeout(_MAX_ANSWER_S):
                await asyncio.wait([asking, died], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            self.result.counts["hung"] += 1
            self.found(f"request {index} has not ended after {_MAX_ANSWER_S:.0f} s")
        except asyncio.CancelledError:
            part.process.context.copy().run(world.loop.call_soon, asking.cancel)
            self.result.counts["left"] += 1
            return
        finally:
            died.cancel()
        late_s = world.loop.time() - began_s
        world.trace.note("ended", index, f"{late_s:.4f}", answered.tokens[:3])
        if asking.done():
            self._judge(index, asking, answered, pooled.tokens)
        elif part.process.is_dead:
            self.result.counts["cut off by a lost front"] += 1

    async def _ask(self, part: Part, index: int, question: Question, answered: Answered) -> None:
        front = part.front
        assert front is not None
        references = tuple(map(reference_to, question.media))
        async with front.media.sources(f"m{index}", references) as sources:
            request = replace(question.request(sources), request_id=f"ask{index}")
            async with aclosing(front.answer(request)) as answer:
                async for items in answer:
                    answered.take_all(items)

    def _judge(
        self, index: int, asking: asyncio.Task[None], answered: Answered, tokens: tuple[int, ...]
    ) -> None:
        counts, is_poisoned = self.result.counts, index in self.plan.poisoned
        error = None if asking.cancelled() else asking.exception()
        if answered.tokens != tokens[: len(answered.tokens)]:
            counts["wrong"] += 1
            self.found(f"request {index} got {answered.tokens[:12]}, undisturbed {tokens[:12]}")
        if error is None:
            counts["answered"] += 1
            if answered.tokens != tokens:
                counts["wrong"] += 1
                self.found(f"request {index} got {len(answered.tokens)} of {len(tokens)} tokens")
            return
        counts[type(error).__name__] += 1
        self.world.trace.note(index, type(error).__name__, error)
        if isinstance(error, PoisonedRequestError) and not is_poisoned:
            counts["blamed"] += 1
        if not isinstance(error, EPDError) or isinstance(error, InternalError | WorkerFaultError):
            self.found(f"request {index}: {''.join(traceback.format_exception(error))[-1500:]}")

    def _is_deadly(self, message: Message[Any]) -> bool:
        """Returns whether a message is of a poisoned request, and of the kind that ends workers."""
        kind = type(message).__name__
        deadly = [index for index, at in self.plan.poisoned.items() if at == kind]
        if not deadly:
            return False
        text = str(getattr(message, "stream_id", "") or getattr(message, "request_id", ""))
        text = text or str(getattr(getattr(message, "request", None), "request_id", ""))
        return any(f"/ask{index}#" in text or f"/ask{index}/" in text for index in deadly)

    # Faults

    async def _harm(self, fault: Fault) -> None:
        world = self.world
        await asyncio.sleep(fault.at_s)
        world.trace.note("fault", fault)
        workers = [*world.workers(), *world.workers(MediaServer)]
        self.result.counts[fault.kind] += 1
        if fault.kind == "leave":
            self.clients[fault.question].cancel()
        elif fault.kind == "clock":
            world.clock.jump_s += _CLOCK_JUMPS_S[int(fault.other * len(_CLOCK_JUMPS_S))]
        elif fault.kind == "board":
            world.kill_board()
        elif fault.kind == "front" and len(world.fronts) > 1:
            world.kill(_chosen(world.fronts, fault.target), "killed")
        elif fault.kind in ("kill", "machine", "freeze", "cut", "drain") and workers:
            await self._harm_worker(fault, workers)
        elif fault.kind == "switch" and world.workers() and world.fronts:
            self._switch(fault)

    def _strike(self, part: Part, kind: str) -> None:
        """Ends the worker that has handled, or reported, what a strike is for; or another one."""
        kinds = (kind, f"{kind} after a loss") if self._turns["PeerLost"] else (kind,)
        self._turns.update(kinds)
        for fault in self.plan.faults:
            is_kind = fault.kind == "strike" and fault.struck_at in kinds
            if is_kind and fault.question == self._turns[fault.struck_at]:
                others = [each for each in self.world.workers() if each is not part]
                is_other = fault.target < _OTHER_STRUCK and others
                struck = _chosen(others, fault.target / _OTHER_STRUCK) if is_other else part
                self.result.counts["strike"] += 1
                if fault.target * 1000 % 1 < _MUTE_SHARE:
                    self._mute(struck, fault.lasts_s)
                self.world.strike(struck, fault.lasts_s)

    def _mute(self, part: Part, lasts_s: float) -> None:
        """Holds back what a worker sends to other workers, receipts above all; fronts get what it reports."""
        names = [each.process.name for each in self.world.workers() if each is not part]
        end_s = self.world.loop.time() + lasts_s + _MUTE_S
        self.world.network.cut_until_s.update({(part.process.name, name): end_s for name in names})

    async def _harm_worker(self, fault: Fault, workers: Sequence[Part]) -> None:
        world, part = self.world, _chosen(workers, fault.target)
        if fault.kind == "kill":
            world.kill(part, "killed")
        elif fault.kind == "machine":
            others = [each for each in workers if each is not part]
            for each in [part, *([_chosen(others, fault.other)] if others else [])]:
                world.kill(each, "its machine is lost", with_machine=fault.lasts_s > _SILENT_S)
        elif fault.kind == "freeze":
            part = _chosen([*workers, *world.fronts], fault.target)
            part.process.freeze()
            world.loop.call_later(fault.lasts_s, part.process.thaw)
        elif fault.kind == "cut":
            names = [each.process.name for each in world.parts if each is not part] + ["board"]
            other = names[int(fault.other * len(names))]
            way = (part.process.name, other) if fault.other * 1000 % 2 < 1 else (other, part.process.name)
            world.network.cut_until_s[way] = world.loop.time() + fault.lasts_s
        else:
            await self._drain(part)

    async def _drain(self, part: Part) -> None:
        """Scales down by one worker; another comes when it has left."""
        world = self.world
        draining = part.process.spawn(part.server.drain(20.0))
        died = asyncio.create_task(part.died.wait())
        await asyncio.wait([draining, died], return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        world.kill(part, "drained")

    def _switch(self, fault: Fault) -> None:
        world = self.world
        part, worker = _chosen(world.fronts, fault.other), _chosen(world.workers(), fault.target)
        roles = _SWITCHED[int(fault.other * 1000) % len(_SWITCHED)]
        front = part.front
        assert front is not None

        async def switch() -> None:
            try:
                await front.switch_roles(worker.name, roles)
                self.result.counts["switched"] += 1
            except InternalError:
                raise
            except EPDError as error:
                world.trace.note("no switch", error)

        self._switches.append(part.process.spawn(switch()))


def _chosen(parts: Sequence[Part], drawn: float) -> Part:
    return parts[int(drawn * len(parts))]


class _Errors(logging.Handler):
    """Notes what the application logs; an error is a finding."""

    def __init__(self, result: Result, trace: Trace) -> None:
        super().__init__()
        self._result, self._trace = result, trace
        self.is_over = False

    def emit(self, record: logging.LogRecord) -> None:
        if self.is_over:
            return
        text = record.getMessage()
        self._trace.note("log", text[:200])
        if record.levelno < logging.ERROR or record.name == "asyncio":
            return
        error = record.exc_info[1] if record.exc_info else None
        more = "".join(traceback.format_exception(error))[-1500:] if error is not None else ""
        self._result.findings.append(f"log: {text[:300]} {more}")


@contextmanager
def _collector_off() -> Iterator[None]:
    """Keeps the collector from running at times that no seed decides, since it frees frames."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _logged(handler: logging.Handler) -> Iterator[None]:
    root = logging.getLogger()
    before, root.handlers[:] = list(root.handlers), [handler]
    try:
        yield
    finally:
        root.handlers[:] = before


def simulate(plan: FaultPlan, pool: Pool, *, is_printed: bool = False) -> Result:
    """Runs a plan. is_printed: whether its trace is printed. To be used within `read_once`."""
    clock, result = Clock(), Result(plan)
    trace = Trace(clock, is_printed=is_printed)
    rng = Random(f"{plan.seed} names")
    errors = _Errors(result, trace)
    with decided(clock, rng), _logged(errors), _collector_off():
        loop = VirtualLoop(clock, Random(f"{plan.seed} executor"))
        loop.set_exception_handler(lambda _loop, _context: None)  # of tasks of dead processes
        asyncio.set_event_loop(loop)
        world = World(loop, clock, plan.seed, pool.model, trace)
        run = _Run(plan, pool.questions, world, result)
        try:
            with mock.patch.object(worker_server, "WorkerThread", simulated_thread(world)):
                loop.run_until_complete(run.run())
                result.digest, result.virtual_s = trace.digest, clock.elapsed_s
        except NothingLeftError:
            run.found("nothing is left to do, and something is awaited")
        except Exception as error:  # noqa: BLE001 - a finding too
            run.found(f"the simulation: {''.join(traceback.format_exception(error))[-2000:]}")
        finally:
            errors.is_over = True
            _end(loop, world)
    return result


def _end(loop: VirtualLoop, world: World) -> None:
    """Ends all that runs, so that nothing of it comes later."""
    with suppress(Exception):
        # No longer: what waits for a dead process would wait for ever.
        loop.run_until_complete(asyncio.wait([loop.create_task(world.close())], timeout=_MAX_CLOSE_S))
    for part in world.parts:
        world._free(part)
    with suppress(Exception):
        loop.end()
    asyncio.set_event_loop(None)
