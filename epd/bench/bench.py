"""Runs a workload on endpoints: warm-up, then rounds in alternating order, each with new content.

Requests are sent at their times, independent of the others: an open loop. The only bound is the stated
maximum in flight. A request that exceeds it waits, in order; that and every other delay of the sender is its
lateness, which the report shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

from epd.bench.body import NEW_LIMIT, OLD_LIMIT, chat_body
from epd.bench.client import ChatClient, ChatReply
from epd.bench.media import MediaLibrary, media_keys
from epd.client.body import Body
from epd.client.endpoint import Endpoint
from epd.errors import RequestError
from epd.workload.metrics import SLO, ClientRecord, Ratio, RunReport, ratios, report_of
from epd.workload.requests import PlannedRequest, Workload

# Time for the first request's task to exist before it is due.
_LEAD_S = 0.05


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Plans a benchmark.

    warmup: requests sent to each endpoint before its first round, one at a time, not counted.
    extra: fields added to every request's body.
    max_in_flight: of one endpoint.
    limit_field: the name of the answer's length, unless the warm-up shows that a server wants the other.
    """

    workload: Workload
    endpoints: tuple[Endpoint, ...]
    slo: SLO = field(default_factory=SLO)
    rounds: int = 1
    warmup: int = 1
    seed: int = 0
    max_in_flight: int = 512
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    limit_field: str = OLD_LIMIT

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise RequestError("no endpoint is given; name at least one with --url http://HOST:PORT")
        for name, least in (("rounds", 1), ("warmup", 0), ("max_in_flight", 1)):
            if getattr(self, name) < least:
                raise RequestError(f"{name} is {getattr(self, name)}, it must be at least {least}")
        if not self.timeout_s > 0:
            raise RequestError(f"timeout is {self.timeout_s} s, it must be above 0; try 600")

    def order(self, round_index: int) -> list[int]:
        """Returns places of the endpoints in the order of a round: forward and backward in turn."""
        places = list(range(len(self.endpoints)))
        return places if round_index % 2 == 0 else places[::-1]

    def requests(self, round_index: int, place: int) -> list[PlannedRequest]:
        """Returns one endpoint's requests of a round.

        Endpoints get the same requests, so that rounds compare; an endpoint that is listed twice gets other
        content the second time, as its caches would know the first.
        """
        url = self.endpoints[place].url
        copy = sum(endpoint.url == url for endpoint in self.endpoints[:place])
        return list(self.workload.requests(self.seed, round_index, copy))

    def warmup_requests(self, place: int) -> list[PlannedRequest]:
        """Returns requests of a round that is never run."""
        return list(islice(self.requests(self.rounds, place), self.warmup))

    def all_requests(self) -> Iterator[PlannedRequest]:
        """Yields every request to any endpoint."""
        for place in range(len(self.endpoints)):
            yield from self.warmup_requests(place)
            for round_index in range(self.rounds):
                yield from self.requests(round_index, place)


@dataclass(frozen=True, slots=True)
class EndpointRun:
    """Records one round at one endpoint. kinds: of each request, in the order of the records."""

    round_index: int
    place: int
    records: tuple[ClientRecord, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Holds all rounds, in the order in which they were run."""

    plan: BenchPlan
    runs: tuple[EndpointRun, ...]

    def kinds(self) -> tuple[str, ...]:
        """Returns what requests are about, by name; nothing where all are of one kind."""
        found = {kind for run in self.runs for kind in run.kinds}
        return tuple(sorted(found)) if len(found) > 1 else ()

    def records(self, place: int, kind: str | None = None) -> list[tuple[ClientRecord, ...]]:
        """Returns the rounds of one endpoint, in order; of requests of one kind, those that have any."""
        runs = sorted((run for run in self.runs if run.place == place), key=lambda run: run.round_index)
        if kind is None:
            return [run.records for run in runs]
        pairs = (zip(run.records, run.kinds, strict=True) for run in runs)
        of_kind = (tuple(record for record, its_kind in each if its_kind == kind) for each in pairs)
        return list(filter(None, of_kind))

    def reports(self, place: int, kind: str | None = None) -> list[RunReport]:
        """Returns one report for each round of an endpoint."""
        return [self._report([records]) for records in self.records(place, kind)]

    def pooled(self, place: int, kind: str | None = None) -> RunReport:
        """Returns all rounds of an endpoint together."""
        return self._report(self.records(place, kind))

    def _report(self, runs: Sequence[Sequence[ClientRecord]]) -> RunReport:
        return report_of(runs, self.plan.slo, is_open_loop=self.plan.workload.is_open_loop)

    def ratios(self, kind: str | None = None) -> list[Ratio]:
        """Returns every other endpoint against the first."""
        baseline, *others = self.plan.endpoints
        theirs = self.reports(0, kind)
        return [
            ratio
            for place, endpoint in enumerate(others, start=1)
            for ratio in ratios(
                endpoint.name, baseline.name, list(zip(self.reports(place, kind), theirs, strict=True))
            )
        ]


class ShowPart(Protocol):
    """Shows that a round or a warm-up begins; returns a function to call after each request of it."""

    def __call__(self, title: str, num_requests: int) -> Callable[[], None]: ...


def _show_nothing(title: str, num_requests: int) -> Callable[[], None]:  # noqa: ARG001 - the names of ShowPart
    return lambda: None


async def run_bench(plan: BenchPlan, library: MediaLibrary, show: ShowPart = _show_nothing) -> BenchResult:
    """Runs all rounds. The library must hold the media already: see MediaLibrary.draw.

    Raises RequestError when an endpoint answers none of its warm-up requests.
    """
    runs = []
    plans = [plan] * len(plan.endpoints)
    for round_index in range(plan.rounds):
        for place in plan.order(round_index):
            if round_index == 0:
                plans[place] = await _warmed_up(plan, place, library, show)
            runs.append(await _run_round(plans[place], round_index, place, library, show))
    return BenchResult(plan, tuple(runs))


async def _run_round(
    plan: BenchPlan, round_index: int, place: int, library: MediaLibrary, show: ShowPart
) -> EndpointRun:
    endpoint = plan.endpoints[place]
    requests = plan.requests(round_index, place)
    prepared = _prepare(plan, place, requests, library)
    on_done = show(f"round {round_index + 1}/{plan.rounds}, {endpoint.name}", len(requests))
    async with ChatClient(endpoint, timeout_s=plan.timeout_s) as client:
        records = await run_load(
            client,
            prepared,
            max_in_flight=plan.max_in_flight,
            is_open_loop=plan.workload.is_open_loop,
            on_done=on_done,
        )
    kinds = tuple(request.shape.kind for request in requests)
    return EndpointRun(round_index, place, tuple(records), kinds)


async def _warmed_up(plan: BenchPlan, place: int, library: MediaLibrary, show: ShowPart) -> BenchPlan:
    """Returns the plan for an endpoint: with the other name of the answer's length, if it wants that."""
    endpoint = plan.endpoints[place]
    prepared = _prepare(plan, place, plan.warmup_requests(place), library)
    if not prepared:
        return plan
    on_done = show(f"warm-up, {endpoint.name}", len(prepared))
    async with ChatClient(endpoint, timeout_s=plan.timeout_s) as client:
        records = await run_load(client, prepared, max_in_flight=1, is_open_loop=False, on_done=on_done)
    failed = [record for record in records if not record.is_ok]
    if len(failed) == len(records):
        if plan.limit_field == OLD_LIMIT and NEW_LIMIT in failed[0].detail:
            return await _warmed_up(replace(plan, limit_field=NEW_LIMIT), place, library, show)
        raise RequestError(
            f"{endpoint.name} ({endpoint.shown_url}) answered none of {len(records)} warm-up requests: "
            f"{failed[0].error}: {failed[0].detail}; --warmup 0 runs nevertheless"
        )
    return plan


def _prepare(
    plan: BenchPlan, place: int, requests: Sequence[PlannedRequest], library: MediaLibrary
) -> list[Prepared]:
    parts = library.load(requests)

    def body(request: PlannedRequest) -> Body:
        media = [parts[key] for key in media_keys(request)]
        return chat_body(request, media, plan.endpoints[place].model, plan.extra, plan.limit_field)

    return [Prepared(request.index, request.due_s, body(request)) for request in requests]


class Client(Protocol):
    """Sends one request and reads its answer."""

    def now_s(self) -> float: ...

    async def ask(self, body: Body, /) -> ChatReply: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """Holds a request whose bytes are ready. due_s: from the start of the run."""

    index: int
    due_s: float
    body: Body


async def run_load(
    client: Client,
    requests: Sequence[Prepared],
    *,
    max_in_flight: int,
    is_open_loop: bool = True,
    on_done: Callable[[], None] = lambda: None,
) -> list[ClientRecord]:
    """Sends every request when it is due and waits for all answers; returns records in the order of sending.

    is_open_loop: False sends the next as soon as there is a place, with max_in_flight always under way.
    """
    run = _OpenLoop(
        client, asyncio.Semaphore(max_in_flight), client.now_s() + _LEAD_S * is_open_loop, on_done
    )
    tasks = []
    async with asyncio.TaskGroup() as group:
        for request in requests:
            if is_open_loop:
                await run.sleep_until(request.due_s)
            else:
                await run.places.acquire()
            tasks.append(group.create_task(run.send(request, has_place=not is_open_loop)))
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class _OpenLoop:
    """Runs one load. start_s: its zero on the client's clock."""

    client: Client
    places: asyncio.Semaphore
    start_s: float
    on_done: Callable[[], None]

    async def sleep_until(self, time_s: float) -> None:
        await asyncio.sleep(max(0.0, self.start_s + time_s - self.client.now_s()))

    async def send(self, request: Prepared, *, has_place: bool) -> ClientRecord:
        waits = not has_place and self.places.locked()
        if not has_place:
            await self.places.acquire()
        try:
            reply = await self.client.ask(request.body)
        finally:
            self.places.release()
        self.on_done()
        return self._record(request, reply, is_due_when_sent=has_place, waited=waits)

    def _record(
        self, request: Prepared, reply: ChatReply, *, is_due_when_sent: bool, waited: bool
    ) -> ClientRecord:
        sent_s = reply.sent_s - self.start_s
        return ClientRecord(
            index=request.index,
            # A timer may fire within its resolution of the time it was set for.
            due_s=sent_s if is_due_when_sent else min(request.due_s, sent_s),
            sent_s=sent_s,
            end_s=reply.end_s - self.start_s,
            token_times_s=tuple(time_s - self.start_s for time_s in reply.token_times_s),
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            error=reply.error.kind if reply.error else None,
            detail=reply.error.detail if reply.error else "",
            waited_for_place=waited,
        )
