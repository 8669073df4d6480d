"""Servers of a batch in virtual time: the real driver and HTTP backend run without sockets and without waits.

    read ──> encode ──> language      some media are read at once, the other stages do one after the other

A server keeps the media that it has encoded. A lost one ends what it works on, and forgets them.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx

import epd.batch.http_backend as http_backend
from epd.batch.http_backend import HttpBackend
from epd.client.endpoint import parse_endpoints
from tests.batch.fakes import completion
from tests.faults.virtual_time import Clock, VirtualLoop


class _Loop(VirtualLoop):
    """Takes no time for what is given to other threads: the driver is outside of virtual time."""

    def run_in_executor(self, _: Any, done: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        future = self.create_future()
        future.set_result(done(*args))
        return future


@dataclass(frozen=True)
class Costs:
    """Seconds of each stage: read, encode and prefill of a medium by its name, and language of a question.

    num_readers, num_encoders: media that a server reads and encodes at once.
    """

    read_s: Callable[[str], float]
    encode_s: Callable[[str], float]
    language_s: float
    num_readers: int = 1
    num_encoders: int = 1


class VirtualServer:
    """Answers questions about media by name. work_s: of each stage. ended_s: the last answer about each."""

    def __init__(self, costs: Costs, clock: Clock) -> None:
        self._costs = costs
        self._clock = clock
        self._stages = {
            "read": asyncio.Semaphore(costs.num_readers),
            "encode": asyncio.Semaphore(costs.num_encoders),
            "language": asyncio.Semaphore(1),
        }
        self._known: set[str] = set()
        self._running: set[asyncio.Task[None]] = set()
        self.is_lost = False
        self.work_s: Counter[str] = Counter()
        self.ended_s: dict[str, float] = {}

    async def answer(self, medium: str) -> None:
        """Raises HTTPError where the server is lost, or is lost meanwhile."""
        if self.is_lost:
            raise httpx.ConnectError("lost")
        task = asyncio.ensure_future(self._answered(medium))
        self._running.add(task)
        try:
            await asyncio.wait([task])
        finally:
            self._running.discard(task)
        if task.cancelled():
            raise httpx.ReadError("lost")

    async def _answered(self, medium: str) -> None:
        if medium not in self._known:
            await self._work("read", self._costs.read_s(medium))
            await self._work("encode", self._costs.encode_s(medium))
            self._known.add(medium)
        await self._work("language", self._costs.language_s)
        self.ended_s[medium] = self._clock.elapsed_s

    async def _work(self, stage: str, seconds: float) -> None:
        async with self._stages[stage]:
            await asyncio.sleep(seconds)
        self.work_s[stage] += seconds

    def lose(self) -> None:
        self.is_lost = True
        self._known.clear()
        for task in self._running:
            task.cancel()


class VirtualServers(httpx.AsyncBaseTransport):
    """Reaches servers by their number in the host. schedule: (seconds, server, whether it is lost)."""

    def __init__(self, costs: Costs, num_servers: int = 1, schedule: Any = ()) -> None:
        self.clock = Clock()
        self._loop = _Loop(self.clock, seed=0)
        self.servers = [VirtualServer(costs, self.clock) for _ in range(num_servers)]
        for at_s, number, is_lost in schedule:
            self._loop.call_later(at_s, self._change, number, is_lost)

    def _change(self, number: int, is_lost: bool) -> None:
        server = self.servers[number]
        if is_lost:
            server.lose()
        else:
            server.is_lost = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        server = self.servers[int(request.url.host.removeprefix("server"))]
        if request.method == "GET":
            return httpx.Response(200)
        video, question = json.loads(request.content)["messages"][0]["content"]
        await server.answer(video["video_url"]["url"].rpartition("/")[2])
        return httpx.Response(200, json=completion(question["text"], {"completion_tokens": 1}))

    @property
    def ended_s(self) -> dict[str, float]:
        """When the last question about each medium was answered."""
        return {name: at_s for server in self.servers for name, at_s in server.ended_s.items()}

    def work_s(self, stage: str) -> float:
        return sum(server.work_s[stage] for server in self.servers)

    @contextmanager
    def backend(self, **options: Any) -> Iterator[HttpBackend]:
        """Opens a backend whose only clock is the servers'."""
        endpoints = parse_endpoints([f"http://server{place}:1" for place in range(len(self.servers))])
        loops = SimpleNamespace(new_event_loop=lambda: self._loop)
        with (
            mock.patch.object(http_backend, "import_module", return_value=loops),
            mock.patch.object(http_backend, "time", self.clock),
        ):
            yield HttpBackend(*endpoints, transport=self, **options)
