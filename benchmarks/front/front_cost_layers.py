"""Measures the CPU time of layers of a front in this process: see `front_cost`, which starts it.

Reads cases from standard input, one JSON object a line, and answers each with CPU milliseconds, on a line.
It imports the application from PYTHONPATH, so the same file measures another checkout, also one of
the time when the HTTP server fetched media itself.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI

from epd.chat import ChatMessage, ContentPart
from epd.encoders import FrameSampling
from epd.sampling_params import SamplingParams
from epd.serve_app.http.api import ApiSettings, create_api
from epd.serve_app.messages import Admitted, Prefill, WorkerReport
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.orchestration.request_planner import RequestPlanner
from epd.serve_app.service import AnswerEnd, AnswerRequest, ModelCard, TokenDelta
from epd.serve_app.service_status import ServiceStatus
from epd.serve_app.worker_info import WorkerInfo
from epd.stages.engine.generation import TokenOutput
from epd.stages.sampling.sampler import SampledToken
from epd.types import StageTimings, Usage, content_hash
from epd.video import FetchPolicy, open_file
from epd.video.containers.look import look
from epd.video.demo_video import encode_h264

MODEL = Path("epd/models/shapes-vl")
QUESTION = "Which colour is the shape in the middle, and what is left of it?"
WORDS = ("The", " shape", " in", " the", " middle", " is", " a", " red", " circle", ".")
NUM_TEXT_TOKENS = 16
TICK_S = 0.001
NUM_FRAMES = 8
# Whether services yield together what is ready together; other checkouts may yield items.
IN_BATCHES = "Sequence" in str(inspect.signature(Orchestrator.answer))


@dataclass
class Ticker:
    """Paces streams: the next token of all is due once all have sent theirs, as in a batch of a decoder.

    step: gives every stream one token.
    """

    step: Callable[[], int] = lambda: 0
    num_sent: int = 0

    async def run(self, num_steps: int) -> int:
        num_tokens = 0
        for _ in range(num_steps):
            wanted = self.num_sent + self.step()
            num_tokens += wanted - self.num_sent
            while self.num_sent < wanted:
                await asyncio.sleep(0)
            await asyncio.sleep(TICK_S)
        return num_tokens


@dataclass
class MemoryService:
    """Answers from memory: a token of each live stream at a call of `step`, texts at once."""

    queues: dict[str, asyncio.Queue[TokenDelta | None]] = field(default_factory=dict)
    models: tuple[ModelCard, ...] = (ModelCard("shapes-vl", 1_700_000_000, 4096),)
    number: int = 0

    async def answer(self, request: AnswerRequest) -> AsyncGenerator[Any, None]:
        if not request.sampling.ignore_eos:
            for number in range(NUM_TEXT_TOKENS):
                is_last = number == NUM_TEXT_TOKENS - 1
                yield _given(TokenDelta(0, _word(number), (number,), (), "stop" if is_last else None))
        else:
            queue = self.queues[request.request_id] = asyncio.Queue()
            while (item := await queue.get()) is not None:
                yield _given(item)
        timings = StageTimings(prefill_s=0.1, decode_s=0.2, total_s=0.3)
        yield _given(AnswerEnd(Usage(0, 0, 40, 16, 0), timings))

    def step(self) -> int:
        self.number += 1
        delta = TokenDelta(0, _word(self.number), (self.number,), (), None)
        for queue in self.queues.values():
            queue.put_nowait(delta)
        return len(self.queues)

    def end(self) -> None:
        for queue in self.queues.values():
            queue.put_nowait(TokenDelta(0, "", (1,), (), "length"))
            queue.put_nowait(None)
        self.queues.clear()

    async def status(self) -> ServiceStatus:
        return ServiceStatus(True, "1epd")


def _given(item: Any) -> Any:
    return (item,) if IN_BATCHES else item


try:
    from epd.serve_app import media_messages as worker_messages
except ImportError:  # another checkout
    from epd.serve_app import messages as worker_messages  # type: ignore[no-redef]
_FETCH: Any = getattr(worker_messages, "FetchMedia", ())
_FETCHED: Any = getattr(worker_messages, "FetchedItem", ())


class MemoryFleet:
    """Workers that take everything at once: texts are answered, streams get a token at a call of `step`."""

    def __init__(self, folder: Path) -> None:
        """Knows one video. folder: gets it."""
        self.video = write_video(folder / "video.mp4")
        roles = {"v0": frozenset({"video"}), "w0": frozenset({"encode", "prefill", "decode"})}
        self.workers: Mapping[str, WorkerInfo] = {
            name: WorkerInfo(name, each) for name, each in roles.items()
        }
        self.streams: dict[str, int] = {}
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        if _FETCH:
            with open_file(self.video, "the video") as file:
                item = _FETCHED(look(file.source), content_hash(file.source), file.identity.num_bytes)
            self._fetched = (item,)

    async def start(self) -> None:
        """Does nothing."""

    async def close(self) -> None:
        self._events.put_nowait(None)

    async def send(self, stage: str, target: str, message: Any, bulk: Any = None) -> Any:  # noqa: ARG002
        if isinstance(message, _FETCH):
            return self._fetched
        if not isinstance(message, Prefill):
            return None
        await asyncio.sleep(0)
        request_id = message.request.request_id
        self._events.put_nowait(WorkerReport("w0", (Admitted(request_id, 0),)))
        if message.request.sampling.ignore_eos:
            self.streams[request_id] = 0
        else:
            for number in range(NUM_TEXT_TOKENS):
                self._report([_output(request_id, number, NUM_TEXT_TOKENS)])
        return True

    async def fetch(self, stage: str, target: str, message: Any) -> Any:
        raise NotImplementedError

    async def events(self) -> AsyncIterator[Any]:
        while (event := await self._events.get()) is not None:
            yield event

    def _report(self, outputs: list[TokenOutput]) -> None:
        self._events.put_nowait(WorkerReport("w0", (), tuple(outputs)))

    def step(self) -> int:
        self._report([_output(request_id, number) for request_id, number in self.streams.items()])
        self.streams = {request_id: number + 1 for request_id, number in self.streams.items()}
        return len(self.streams)

    def end(self) -> None:
        self._report([_output(one, number, number + 1) for one, number in self.streams.items()])
        self.streams.clear()


def _word(number: int) -> str:
    return WORDS[number % len(WORDS)]


def _output(request_id: str, number: int, length: int = 0) -> TokenOutput:
    reason = "length" if number == length - 1 else None
    return TokenOutput(request_id, 0, number, SampledToken(number % 100), _word(number), reason)


def api_over(service: Any, folder: Path, max_requests: int = 2000) -> FastAPI:
    """The HTTP app over a service; media are kept by the service if it can, or in a folder."""
    if "media" in inspect.signature(create_api).parameters:
        return create_api(
            service, getattr(service, "media", None) or NoMedia(), ApiSettings(max_requests=max_requests)
        )
    options: Any = {"spool_folder": folder, "fetch": FetchPolicy(media_folder=folder)}
    return create_api(service, ApiSettings(max_requests=max_requests, **options))  # type: ignore[call-arg]


class NoMedia:
    """Keeps no media."""

    num_spooled_bytes = num_downloads = 0

    @asynccontextmanager
    async def sources(self, request_id: str, references: Any) -> AsyncIterator[tuple[()]]:  # noqa: ARG002
        yield ()


class HttpLayer:
    """The ASGI app without a socket, over a service; with an orchestrator, the whole front."""

    def __init__(self, service: Any, source: Any, folder: Path) -> None:
        self._app = api_over(service, folder)
        self._video = folder / "video.mp4"
        self.ticker = Ticker(source.step)

    async def close(self) -> None:
        self._app.state.server.close()

    async def text(self) -> None:
        await self._post({"messages": [{"role": "user", "content": QUESTION}], "max_tokens": NUM_TEXT_TOKENS})

    async def video(self) -> None:
        parts = [
            {"type": "video_url", "video_url": {"url": self._video.as_uri()}},
            {"type": "text", "text": QUESTION},
        ]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": NUM_TEXT_TOKENS}
        await self._post({**body, "mm_processor_kwargs": {"num_frames": NUM_FRAMES}})

    async def stream(self) -> None:
        message = {"role": "user", "content": QUESTION}
        await self._post({"messages": [message], "stream": True, "ignore_eos": True, "max_tokens": 2000})

    async def _post(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        messages = [{"type": "http.request", "body": data, "more_body": False}]
        gone: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def receive() -> Any:
            return messages.pop() if messages else await gone

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                self.ticker.num_sent += message["body"].count(b'"content":"')
            elif message["status"] != 200:
                raise RuntimeError(message)

        await self._app(_scope(data), receive, send)


def _scope(data: bytes) -> dict[str, Any]:
    headers = [
        (b"host", b"127.0.0.1:8000"),
        (b"accept", b"*/*"),
        (b"accept-encoding", b"gzip, deflate"),
        (b"connection", b"keep-alive"),
        (b"user-agent", b"python-httpx/0.28.1"),
        (b"content-length", str(len(data)).encode()),
        (b"content-type", b"application/json"),
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }


class OrchestrationLayer:
    """The orchestrator over workers in memory, its answers read by nobody else."""

    def __init__(self, service: Orchestrator, source: MemoryFleet) -> None:
        self._service = service
        self._number = 0
        self.ticker = Ticker(source.step)

    async def close(self) -> None:
        """Does nothing."""

    async def text(self) -> None:
        await self._ask(SamplingParams(max_tokens=NUM_TEXT_TOKENS))

    async def stream(self) -> None:
        await self._ask(SamplingParams(max_tokens=2000, ignore_eos=True))

    async def _ask(self, sampling: SamplingParams) -> None:
        self._number += 1
        message = ChatMessage("user", (ContentPart("text", QUESTION),))
        request = AnswerRequest(
            f"r{self._number}", "shapes-vl", (message,), (), sampling, FrameSampling(), arrival_s=time.time()
        )
        async with aclosing(self._service.answer(request)) as answer:
            async for items in answer:
                for item in items if IN_BATCHES else (items,):
                    self.ticker.num_sent += isinstance(item, TokenDelta)


def write_video(path: Path) -> Path:
    frames = (np.full((112, 112, 3), 10 * number, np.uint8) for number in range(20))
    encode_h264(path, frames, fps=Fraction(10), height=112, width=112)
    return path


async def requests_ms(ask: Callable[[], Awaitable[None]], num_requests: int, num_at_once: int) -> float:
    """CPU milliseconds of one request, `num_at_once` in flight."""
    left = Counter(requests=num_requests)

    async def some() -> None:
        while left["requests"] > 0:
            left["requests"] -= 1
            await ask()

    start = time.process_time()
    await asyncio.gather(*(some() for _ in range(num_at_once)))
    return 1e3 * (time.process_time() - start) / num_requests


async def tokens_ms(layer: Any, source: Any, num_streams: int, num_tokens: int) -> float:
    """CPU milliseconds of one token, after the first ones."""
    streams = [asyncio.ensure_future(layer.stream()) for _ in range(num_streams)]
    while _num_live(source) < num_streams:  # workers begin few prompts at a time: until their first tokens
        await layer.ticker.run(1)
    await layer.ticker.run(2)
    start = time.process_time()
    num_sent = await layer.ticker.run(max(2, num_tokens // num_streams))
    cost_ms = 1e3 * (time.process_time() - start) / num_sent
    source.end()
    await asyncio.gather(*streams)
    return cost_ms


def _num_live(source: MemoryService | MemoryFleet) -> int:
    return len(source.queues if isinstance(source, MemoryService) else source.streams)


async def serve_cases(folder: Path, cases: asyncio.Queue[str]) -> None:
    memory, fleet, whole_fleet = MemoryService(), MemoryFleet(folder), MemoryFleet(folder)
    services = [Orchestrator(each, RequestPlanner(MODEL.resolve())) for each in (fleet, whole_fleet)]
    for service in services:
        await service.start()
    layers: dict[str, tuple[Any, Any]] = {
        "http": (HttpLayer(memory, memory, folder), memory),
        "orchestration": (OrchestrationLayer(services[0], fleet), fleet),
        "front": (HttpLayer(services[1], whole_fleet, folder), whole_fleet),
    }
    print("ready", flush=True)
    while line := await cases.get():
        case = json.loads(line)
        layer, source = layers[case["layer"]]
        if case["what"] == "token":
            cost_ms = await tokens_ms(layer, source, case["streams"], case["number"])
        else:
            cost_ms = await requests_ms(getattr(layer, case["what"]), case["number"], case["at_once"])
        print(json.dumps(cost_ms), flush=True)
    for layer, _ in layers.values():
        await layer.close()
    for service in services:
        await service.close()


async def main() -> None:
    # The line of each finished request is formatted and written, to nowhere.
    logging.basicConfig(level=logging.INFO, filename="/dev/null")
    loop, cases = asyncio.get_running_loop(), asyncio.Queue[str]()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(cases.put_nowait, line)
        loop.call_soon_threadsafe(cases.put_nowait, "")

    threading.Thread(target=read, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="front-cost-") as folder:
        await serve_cases(Path(folder), cases)


if __name__ == "__main__":
    asyncio.run(main())
