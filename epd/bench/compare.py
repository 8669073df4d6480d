"""Runs a comparison of layouts: round by round, in alternating order, each with new content.

Rounds that are known already are not run again, so a comparison may be continued, and layouts that cannot run
at the same time be measured one after the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from epd.bench.bench import Client, Prepared, run_load
from epd.bench.body import chat_body
from epd.bench.client import ChatReply
from epd.bench.media import MediaLibrary, media_keys
from epd.client.body import Body
from epd.errors import RequestError
from epd.workload.comparison import Curve, Layout, Outcome, Question, Round, Traffic
from epd.workload.metrics import ClientRecord, report_of
from epd.workload.requests import PlannedRequest

FORMAT = "epd comparison, version 1"
_WARM_ROUND = 1_000_000  # whose content no round has
_Key = tuple[str, str, float, int]


class Served(Protocol):
    """A layout that runs. clients: of its servers. late_share: of passes since `begin`."""

    @property
    def clients(self) -> Sequence[tuple[str, Client]]: ...

    @property
    def late_share(self) -> float: ...

    def begin(self) -> None: ...


Serve = Callable[[Layout, Traffic], AbstractAsyncContextManager[Served]]


@dataclass(frozen=True, slots=True)
class Case:
    """One round to run."""

    traffic: Traffic
    layout: Layout
    rate: float
    index: int

    @property
    def key(self) -> _Key:
        return self.traffic.name, self.layout.name, self.rate, self.index


class Comparison:
    """Holds a question and its rounds. simulated: of the same requests, as far as there is a profile."""

    def __init__(self, question: Question, rounds: Iterable[Round] = ()) -> None:
        self.question = question
        self.layouts = question.parsed()
        self.rounds = {each.key: each for each in rounds}
        self.simulated: dict[_Key, Round] = {}

    @property
    def left_out(self) -> list[Round]:
        """Returns the rounds that do not count."""
        return [each for each in self.rounds.values() if not each.counts]

    def curve(self, traffic: Traffic, layout: Layout, *, is_simulated: bool = False) -> Curve:
        """Returns the rounds of a layout that count, or the simulator's of the same requests."""
        own = [
            each
            for key, each in self.rounds.items()
            if key[:2] == (traffic.name, layout.name) and each.counts
        ]
        if is_simulated:
            own = [self.simulated[each.key] for each in own if each.key in self.simulated]
        return Curve(traffic, layout.name, tuple(own), self.question.attainment)

    def curves(self, traffic: Traffic, *, is_simulated: bool = False) -> list[Curve]:
        return [self.curve(traffic, each, is_simulated=is_simulated) for each in self.layouts]

    def cases(self, layouts: Collection[str]) -> Iterator[Case]:
        """Yields what is to be run: rates from low to high, layouts forward and backward by turns.

        layouts: names of those to run

        A layout that a rate saturates is not run at higher ones.
        """
        own = [each for each in self.layouts if each.name in layouts]
        for index in range(self.question.rounds):
            order = own if index % 2 == 0 else own[::-1]
            for traffic in self.question.traffic:
                for rate in sorted(traffic.rates):
                    for layout in order:
                        case = Case(traffic, layout, rate, index)
                        known = self.rounds.get(case.key)
                        if (known is None or not known.counts) and not self._is_past(case):
                            yield case

    def _is_past(self, case: Case) -> bool:
        curve = self.curve(case.traffic, case.layout)
        lower = replace(curve, rounds=tuple(each for each in curve.rounds if each.rate < case.rate))
        return lower.is_saturated

    def requests(self, case: Case) -> list[PlannedRequest]:
        """Returns the requests of a round: at every rate the same, at other times."""
        workload = case.traffic.at(case.rate).resolve()
        return list(workload.requests(self.question.seed, case.index))

    def warm_requests(self, case: Case) -> list[PlannedRequest]:
        """Returns requests for each server of the layout, which no round has."""
        count = self.question.warmup * case.layout.num_copies
        if not count:
            return []
        like = case.traffic.at(case.rate).model_copy(update={"num_requests": count, "duration_s": None})
        return list(like.resolve().requests(self.question.seed, _WARM_ROUND + case.index))

    async def run(self, case: Case, serve: Serve, library: MediaLibrary) -> Round:
        """Runs one round, on a layout of its own. The library must hold the media already."""
        requests = self.requests(case)
        async with serve(case.layout, case.traffic) as served:
            turns = Turns(served.clients)
            await self._load(turns, self.warm_requests(case), library, case, in_flight=1)
            served.begin()
            records = await self._load(turns, requests, library, case, in_flight=self.question.max_in_flight)
            late_share = served.late_share
        dilate = case.traffic.dilate
        outcomes = zip(records, requests, strict=True)
        return Round(
            *case.key,
            tuple(Outcome.of(record, request.shape.kind, dilate) for record, request in outcomes),
            round(late_share, 4),
            report_of([records], case.traffic.slo).is_late,
            round(os.getloadavg()[0], 1),
        )

    async def _load(
        self,
        turns: Turns,
        requests: Sequence[PlannedRequest],
        library: MediaLibrary,
        case: Case,
        *,
        in_flight: int,
    ) -> list[ClientRecord]:
        parts = library.load(requests)
        extra = {"ignore_eos": True} if self.question.ignore_eos else {}
        prepared = [
            Prepared(
                each.index,
                each.due_s * case.traffic.dilate,
                chat_body(each, [parts[key] for key in media_keys(each)], turns.model(number), extra),
            )
            for number, each in enumerate(requests)
        ]
        turns.restart()
        return await run_load(turns, prepared, max_in_flight=in_flight, is_open_loop=in_flight > 1)


class Turns:
    """Sends requests to the servers of a layout by turns, so that each gets as many. Is a `Client`."""

    def __init__(self, clients: Sequence[tuple[str, Client]]) -> None:
        self._clients = clients
        self._next = 0

    def restart(self) -> None:
        self._next = 0

    def model(self, number: int) -> str:
        """Returns the model that the server of a request, counted from 0, is asked for."""
        return self._clients[number % len(self._clients)][0]

    def now_s(self) -> float:
        return self._clients[0][1].now_s()

    async def ask(self, body: Body) -> ChatReply:
        _, client = self._clients[self._next % len(self._clients)]
        self._next += 1
        return await client.ask(body)


def dump(comparison: Comparison, made: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Returns the file of a comparison. made: when and where. summary: its tables, for readers."""
    record = {
        "format": FORMAT,
        "question": comparison.question.model_dump(mode="json"),
        "made": dict(made),
        "summary": dict(summary),
        "rounds": list(map(asdict, comparison.rounds.values())),
        "simulated": list(map(asdict, comparison.simulated.values())),
    }
    return json.dumps(record, ensure_ascii=False) + "\n"


def load(path: Path) -> Comparison:
    """Loads the file of a comparison, or of a question alone. Raises RequestError."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("format") != FORMAT:
            raise RequestError(f"received '{path}' of another format; allowed: {FORMAT}; name such a file")
        rounds = TypeAdapter(list[Round])
        found = Comparison(
            Question.model_validate(record["question"]), rounds.validate_python(record.get("rounds", []))
        )
        found.simulated = {each.key: each for each in rounds.validate_python(record.get("simulated", []))}
        return found
    except (OSError, ValueError, KeyError, AttributeError, ValidationError) as error:
        reason = " ".join(str(error).split())[:160]
        raise RequestError(
            f"received '{path}', which is no comparison ({reason}); allowed: a file that epd bench compare "
            "--out wrote; name one"
        ) from None
