"""What is around the front of `front_streams`: workers that compute nothing, and a client.

    python -m benchmarks.front.front_streams_peers workers KEY NUM_WORKERS RATE       prints addresses by name
    python -m benchmarks.front.front_streams_peers client PORT       reads orders, a JSON object a line

Orders: {"streams": 500} opens or closes streams until there are so many, {"seconds": 6} counts what comes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.front.front_cost import QUESTION
from epd.serve_app.messages import Abort, Admitted, DropOwner, Prefill, WorkerReport, owner_of
from epd.serve_app.network.calls import Answer, Channel
from epd.serve_app.network.link import Link, listen
from epd.serve_app.network.members import Hello
from epd.serve_app.network.wire import WorkerCall
from epd.stages.engine.generation import TokenOutput
from epd.stages.sampling.sampler import SampledToken

HOST = "127.0.0.1"
MARK = b"~"  # before the time in each token
SETTLE_S, OPENED_S = 3.0, 60.0
NUM_AT_ONCE, PAUSE_S = 10, 0.05  # streams are opened so many at a time
SAMPLED = 10  # one stream of so many has its delays recorded
MAX_TOKENS = 3000


@dataclass
class PacedWorker:
    """A stage worker that admits every prompt at once and gives each a token at every step."""

    name: str
    streams: dict[str, int] = field(default_factory=dict)
    channels: dict[str, Channel] = field(default_factory=dict)

    def accept(self, link: Link) -> None:
        channel = Channel(link)
        channel.on_push = lambda hello: self._greet(channel, hello)
        channel.on_call = lambda call, answer: self._take(channel, call, answer)

    def _greet(self, channel: Channel, hello: Any) -> None:
        if isinstance(hello, Hello):
            self.channels[hello.epoch] = channel

    def _take(self, channel: Channel, call: WorkerCall, answer: Answer) -> None:
        message = call.message
        answer(True if isinstance(message, Prefill) else None)
        if isinstance(message, Prefill):
            request_id = message.request.request_id
            self.streams[request_id] = 0
            channel.push(WorkerReport(self.name, (Admitted(request_id, 0),)))
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self.streams.pop(request_id, None)
        elif isinstance(message, DropOwner):
            self.streams.clear()

    def step(self) -> None:
        text = f"{MARK.decode()}{time.monotonic():.4f} "
        outputs: dict[str, list[TokenOutput]] = {}
        for request_id, index in self.streams.items():
            token = TokenOutput(request_id, 0, index, SampledToken(index % 100), text)
            outputs.setdefault(owner_of(request_id), []).append(token)
            self.streams[request_id] = index + 1
        for owner, tokens in outputs.items():
            self.channels[owner].push(WorkerReport(self.name, (), tuple(tokens)))

    async def run(self, rate: float, phase: float) -> None:
        """Steps `rate` times a second; a step that is late is not made up for. phase: of a step, 0 to 1."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + phase / rate
        while True:
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            self.step()
            due_s = max(due_s + 1 / rate, loop.time())


async def run_workers(key: bytes, num_workers: int, rate: float) -> None:
    names = ["v0", *(f"epd{number}" for number in range(num_workers))]
    workers = [PacedWorker(name) for name in names]
    listeners = [await listen(HOST, key, worker.accept) for worker in workers]
    addresses = [(each.address.host, each.address.port) for each in listeners]
    print(json.dumps(dict(zip(names, addresses, strict=True))), flush=True)
    pacing = [
        asyncio.create_task(worker.run(rate, number / num_workers)) for number, worker in enumerate(workers)
    ]
    await asyncio.to_thread(sys.stdin.read)
    for task in pacing:
        task.cancel()


class Stream(asyncio.Protocol):
    """One connection, and what came over it. delays_s: where they are recorded."""

    def __init__(self, request: bytes, delays_s: list[float] | None) -> None:
        self.num_tokens = 0
        self.error = ""
        self._request = request
        self._delays_s = delays_s
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        number = data.count(MARK)
        self.num_tokens += number
        if number and self._delays_s is not None:
            now_s = time.monotonic()
            self._delays_s.extend(now_s - float(each.split(b" ", 1)[0]) for each in data.split(MARK)[1:])
        elif not self.num_tokens and b" 200 " not in data[:20] and data.startswith(b"HTTP"):
            self.error = data[:300].decode(errors="replace")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self.error = f"the connection ended: {exc}"

    def close(self) -> None:
        assert self._transport is not None
        self._transport.abort()


class Client:
    """Keeps a number of streams open."""

    def __init__(self, port: int) -> None:
        body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True}
        data = json.dumps({**body, "ignore_eos": True, "max_tokens": MAX_TOKENS}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
        )
        self._request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        self._port = port
        self._streams: list[Stream] = []
        self._delays_s: list[float] = []

    async def set_number(self, number: int) -> int:
        """Returns when all streams have had tokens for a while."""
        for stream in self._streams:
            stream.close()
        await asyncio.sleep(1.0)
        self._streams = []
        loop = asyncio.get_running_loop()
        for count in range(number):
            delays_s = self._delays_s if count % SAMPLED == 0 else None
            stream = Stream(self._request, delays_s)
            self._streams.append(stream)
            await loop.create_connection(lambda stream=stream: stream, HOST, self._port)  # type: ignore[misc]
            await asyncio.sleep(0 if (count + 1) % NUM_AT_ONCE else PAUSE_S)
        async with asyncio.timeout(OPENED_S):
            while not all(stream.num_tokens for stream in self._streams):
                self._check()
                await asyncio.sleep(0.1)
        await asyncio.sleep(SETTLE_S if number else 0.0)
        return number

    async def count(self, seconds: float) -> dict[str, float]:
        """Returns the tokens of so many seconds, and what they were late by."""
        self._delays_s.clear()
        before, start_s = self._num_tokens, time.monotonic()
        await asyncio.sleep(seconds)
        num_tokens, took_s = self._num_tokens - before, time.monotonic() - start_s
        self._check()
        p50, p99 = np.percentile(self._delays_s, [50, 99])
        delays = {"delay_p50_ms": 1e3 * float(p50), "delay_p99_ms": 1e3 * float(p99)}
        return {"num_tokens": num_tokens, "seconds": took_s, **delays}

    @property
    def _num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self._streams)

    def _check(self) -> None:
        for stream in self._streams:
            if stream.error:
                raise SystemExit(f"a stream broke: {stream.error}")


async def run_client(port: int) -> None:
    client = Client(port)
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        if "streams" in order:
            print(json.dumps(await client.set_number(order["streams"])), flush=True)
        else:
            print(json.dumps(await client.count(order["seconds"])), flush=True)


def main(kind: str, *arguments: str) -> None:
    if kind == "workers":
        asyncio.run(run_workers(bytes.fromhex(arguments[0]), int(arguments[1]), float(arguments[2])))
    else:
        asyncio.run(run_client(int(arguments[0])))


if __name__ == "__main__":
    main(*sys.argv[1:])
