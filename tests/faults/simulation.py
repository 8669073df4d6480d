"""Runs one seed and says what was wrong at its end.

Each answer has the tokens of the undisturbed run, or a stated error; nothing is left of any request; every
request ends in time; a request that is not poisoned is not blamed, and is answered where poison is all that
harms; a suspect that has a worker for itself puts no other request at risk; blocks are conserved; no process
is declared lost that was never silent.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from unittest import mock

from epd.errors import EPDError, InternalError, PoisonedRequestError, WorkerFaultError
from epd.serve_app.network import membership, worker_server
from epd.serve_app.network.connector import ProcessConnector
from tests.faults.exact_model import exact_model
from tests.faults.harm import Harm, index_of, index_of_id
from tests.faults.plan import FaultPlan
from tests.faults.pool import Pool, PoolQuestion
from tests.faults.virtual_time import Clock, NothingLeftError, VirtualLoop, decided
from tests.faults.workers import named_memory, no_threads
from tests.faults.world import Part, Trace, World, simulated_pool_of, simulated_thread
from tests.serve_app.deployments import Answered, Question
from tests.serve_app.media_fleet import reference_to

_MAX_ANSWER_S = 400.0  # virtual time of one request, whatever is lost
_MAX_SETTLE_S = 120.0
_NEVER = ("loop_failures", "event_failures", "stalls")  # counters of a front that stay at zero
_MIN_BLAMED_LOSSES = 2  # workers that are lost before any request is blamed


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
        self.harm = Harm(plan, world, self.clients, result.counts)

    def found(self, text: str) -> None:
        self.world.trace.note("FOUND", text[:120])
        self.result.findings.append(text)

    async def run(self) -> None:
        world, plan = self.world, self.plan
        world.network.slowness = plan.slowness
        world.is_deadly, world.on_turn = self.harm.is_deadly, self.harm.turned
        world.on_poisoned = self._check_isolated
        options = {"max_waiting": 1000, "max_wait_s": 1e6, "encode_fallback_s": plan.encode_fallback_s}
        await world.start(plan.topology, plan.num_fronts, plan.num_media, **options)
        harm = self.harm.begin()
        for index in range(len(plan.asked)):
            self.clients[index] = asyncio.create_task(self._client(index))
        await asyncio.gather(*harm, *self.clients.values(), return_exceptions=True)
        for task in (*harm, *self.clients.values(), *self.harm.switches):
            if task.done() and not task.cancelled() and task.exception() is not None:
                self.found("".join(traceback.format_exception(task.exception()))[-1500:])
        await self._settle()
        if world.ended_whole:
            self.found(f"declared lost, and nothing had happened to them: {world.ended_whole}")
        self.result.counts.update(world.counts)

    async def _settle(self) -> None:
        """Waits until nothing is left, and checks what each worker has."""
        world = self.world
        end_s = world.loop.time() + _MAX_SETTLE_S
        while not (is_over := world.is_whole and not world.leftovers()) and world.loop.time() < end_s:
            await asyncio.sleep(0.1)
        if not is_over:
            await world.collect()
        if left := world.leftovers():
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
            self.result.counts["encode fallbacks"] += counters["encode_fallbacks"]
            if wrong:
                self.found(f"{part.process.name} counts {wrong}")

    def _check_isolated(self, part: Part, message: object) -> None:
        """Checks that a suspect which ends a worker has put no other request of its front at risk there."""
        for front in (each.front for each in self.world.fronts if each.front is not None):
            claim = front.isolation._claims.get(part.name)
            if claim is None or not claim.is_used or index_of_id(claim.attempt.id) != index_of(message):
                continue
            if front.isolation._has_others_here(claim.attempt, claim.place, part.name):
                self.found(
                    f"{part.name} is kept for request {index_of(message)}, and another is at risk there"
                )

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
            tokens = pooled.tokens if self.plan.has_tensors else pooled.exact
            self._judge(index, asking, answered, tokens)
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
            is_struck = any(each.kind == "strike" for each in self.plan.faults)
            counts["blamed after strikes" if is_struck else "blamed"] += 1
            if (num_lost := self.world.num_lost) < _MIN_BLAMED_LOSSES:
                self.found(f"request {index} is blamed for {num_lost} lost workers")
        if not is_poisoned and self.plan.has_poison_alone:
            self.found(f"request {index} is not poisoned, nothing else is wrong, and it got: {error}")
        if not isinstance(error, EPDError) or isinstance(error, InternalError | WorkerFaultError):
            self.found(f"request {index}: {''.join(traceback.format_exception(error))[-1500:]}")


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


def simulate(plan: FaultPlan, pool: Pool, *, is_printed: bool = False, run: int = 0) -> Result:
    """Runs a plan. To be used within `read_once`.

    is_printed: whether its trace is printed
    run: its number; sets of tasks have another order in each
    """
    clock, result = Clock(), Result(plan)
    trace = Trace(clock, is_printed=is_printed)
    errors = _Errors(result, trace)
    model = nullcontext() if plan.has_tensors else exact_model()
    with model, decided(clock), named_memory(), no_threads(), _logged(errors), _collector_off():
        loop = VirtualLoop(clock, plan.seed, run)
        loop.set_exception_handler(lambda _loop, _context: None)  # of tasks of dead processes
        asyncio.set_event_loop(loop)
        world = World(loop, clock, plan, pool.model, trace)
        here = _Run(plan, pool.questions, world, result)
        with (
            mock.patch.object(worker_server, "WorkerThread", simulated_thread(world)),
            mock.patch.object(ProcessConnector, "pool_of", simulated_pool_of(world)),
            mock.patch.object(membership, "end_process", world.end_beside),
            mock.patch.object(membership, "start_ticks", int),
        ):
            try:
                loop.run_until_complete(here.run())
                result.digest, result.virtual_s = trace.digest, clock.elapsed_s
            except NothingLeftError:
                here.found("nothing is left to do, and something is awaited")
            except Exception as error:  # noqa: BLE001 - a finding too
                here.found(f"the simulation: {''.join(traceback.format_exception(error))[-2000:]}")
            finally:
                errors.is_over = True
                for name in _end(loop, world):  # in which workers still start
                    here.found(f"the task {name} outlives the simulation")
    return result


def _end(loop: VirtualLoop, world: World) -> list[str]:
    """Ends all that runs, so that nothing of it comes later. Returns the names of tasks that do not end."""
    for part in world.parts:
        world._free(part)
    with suppress(Exception):
        loop.end()
    asyncio.set_event_loop(None)
    return [task.get_coro().__qualname__ for task in asyncio.all_tasks(loop)]  # type: ignore[union-attr]
