"""Speeds of the links between two workers, with a raw socket beside them, and what they cost of the CPU.

    python -m benchmarks.front.links [--rounds N] [--tokens N]

A prompt's keys and values, with the bytes of Qwen2.5-VL-7B, go from one process to another on this machine:
from pool to pool by each route, and by a plain blocking socket from buffer to buffer. All processes live for
the whole time, and the ways take turns. CPU seconds are of both processes, threads included. What needs NIXL
is left out where that is not installed.
Results go to benchmarks/results/links.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvloop

from benchmarks.reporting import Row, Section, run_sections, setting
from epd.serve_app.network.calls import Channel
from epd.serve_app.network.connector import Envelope, TransportConfig
from epd.serve_app.network.link import Address, Link, connect, listen
from epd.serve_app.network.memory import PoolFiles, new_fleet_id
from epd.serve_app.network.process_transport import ProcessTransport
from epd.serve_app.network.routes import PeerPlace, Route
from epd.stages.engine.kv_pool import KVGroupShape, KVLayout, KVPoolsShape
from epd.transfer.connectors import KVChunk, KVSpan, KVTicket
from epd.types import ceil_div

HOST = "127.0.0.1"
KEY = b"the key of a benchmark, which is not one"
LAYOUT, BLOCK_SIZE = KVLayout(28, 4, 128, torch.bfloat16), 16
SENDER, RECEIVER = "p0.prefill", "d0.decode"
SWITCH_S = 0.0005  # as workers set it
_IDLE_S = 0.01  # as workers look that are not woken
_NEVER_S = 600.0


@dataclass(frozen=True, slots=True)
class Way:
    """A way between the two. loop: of events. num_streams: TCP connections. ucx_tls: what UCX may use."""

    name: str
    route: Route | None = None
    loop: str = "uvloop"
    num_streams: int = 1
    ucx_tls: str = ""


WAYS = (
    Way("raw socket"),
    Way("shared memory", Route.SHARED_MEMORY),
    Way("staging", Route.STAGING),
    Way("link, asyncio", Route.LINK, "asyncio"),
    Way("link, uvloop", Route.LINK),
    Way("link, uvloop, 2 streams", Route.LINK, num_streams=2),
    Way("link, uvloop, 4 streams", Route.LINK, num_streams=4),
    Way("nixl, TCP", Route.NIXL, ucx_tls="tcp,self"),
    Way("nixl, TCP and kernel copies", Route.NIXL, ucx_tls="tcp,shm,self"),
)


@dataclass
class Side:
    """One of the two workers: a thread of events, and this thread for its connector."""

    name: str
    way: Way
    fleet_id: str
    num_tokens: int
    channels: list[Channel] = field(default_factory=list)

    def __post_init__(self) -> None:
        here, there = ("a", "b") if self.way.route in (Route.LINK, Route.NIXL) else ("a", "a")
        self._places = {"p0": PeerPlace("p0 1", here), "d0": PeerPlace("d0 1", there)}
        between = self.way.route if self.way.route in (Route.LINK, Route.NIXL) else Route.LINK
        config = TransportConfig(is_staged=self.way.route is Route.STAGING, between_machines=between)
        self.woken = threading.Event()
        self.files = PoolFiles(self.fleet_id)
        self.files.hold()
        self.transport = ProcessTransport(
            self._post, self._places.get, self.files, self._places[self.name[:2]], config=config,
            wake=self.woken.set,
        )  # fmt: skip
        shape = KVPoolsShape((KVGroupShape(ceil_div(self.num_tokens, BLOCK_SIZE), LAYOUT),), BLOCK_SIZE)
        self.pools, self.end = self.transport.kv(self.name, shape)
        self.pools.memory.fill_(1)
        self._loop = uvloop.new_event_loop() if self.way.loop == "uvloop" else asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_NEVER_S)

    def add(self, link: Link) -> None:
        channel = Channel(link)
        channel.on_push = self._take
        self.channels.append(channel)
        self._next = cycle(self.channels)

    def _take(self, envelope: Envelope) -> None:
        self.transport.deliver(envelope)
        self.woken.set()

    def _post(self, _worker: str, envelope: Envelope) -> None:
        self._loop.call_soon_threadsafe(lambda: next(self._next).push(envelope))

    def until(self, is_done: Callable[[], bool]) -> None:
        """Does as a worker's thread does that has nothing to compute."""
        while not is_done():
            self.woken.wait(_IDLE_S)
            self.woken.clear()

    @property
    def ticket(self) -> KVTicket:
        blocks = tuple(range(ceil_div(self.num_tokens, BLOCK_SIZE)))
        return KVTicket("t", RECEIVER, SENDER, "r", 0, self.num_tokens, (blocks[::-1],))

    def send(self) -> None:
        (blocks,) = self.ticket.block_tables
        self.end.send(self.ticket, KVChunk((KVSpan(0, 0, self.num_tokens, blocks),)))
        self.until(lambda: bool(self.end.poll()))

    def receive(self) -> None:
        """Takes all parts of one prompt, and answers them."""
        left = self.num_tokens

        def poll() -> bool:
            nonlocal left
            for offer in self.end.recv():
                assert offer.source is not None, offer.error
                left -= sum(span.stop - span.start for span in offer.source.spans)
            self.end.poll()
            return left == 0

        self.until(poll)


def run_side(pipe: Connection, way: Way, fleet_id: str, num_tokens: int, *, is_sender: bool) -> None:
    """Runs a process: at each message it moves a prompt, and tells its CPU seconds and the wall's."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_S)
    if way.ucx_tls:
        os.environ["UCX_TLS"] = way.ucx_tls
    move = (_raw if way.route is None else _routed)(pipe, way, fleet_id, num_tokens, is_sender=is_sender)
    pipe.send("ready")
    while pipe.recv():
        start_s, cpu_s = time.perf_counter(), time.process_time()
        move()
        pipe.send((time.perf_counter() - start_s, time.process_time() - cpu_s))


def _routed(
    pipe: Connection, way: Way, fleet_id: str, num_tokens: int, *, is_sender: bool
) -> Callable[[], None]:
    side = Side(SENDER if is_sender else RECEIVER, way, fleet_id, num_tokens)
    if is_sender:
        address = pipe.recv()
        for _ in range(way.num_streams):
            side.add(side.call(connect(address, KEY)))
        return side.send
    accepted = threading.Semaphore(0)

    def accept(link: Link) -> None:
        side.add(link)
        accepted.release()

    listener = side.call(listen(HOST, KEY, accept))
    pipe.send(listener.address)
    for _ in range(way.num_streams):
        accepted.acquire()
    side.end.expect(side.ticket)

    def receive() -> None:
        side.receive()
        side.end.cancel("t")
        side.end.expect(side.ticket)

    return receive


def _raw(
    pipe: Connection, _way: Way, _fleet_id: str, num_tokens: int, *, is_sender: bool
) -> Callable[[], None]:
    buffer = memoryview(bytearray(b"1") * (num_tokens * LAYOUT.bytes_per_token))
    if is_sender:
        address = pipe.recv()
        there = socket.create_connection((address.host, address.port))

        def send() -> None:
            there.sendall(buffer)
            there.recv(1)

        return send
    listener = socket.create_server((HOST, 0))
    pipe.send(Address(HOST, listener.getsockname()[1]))
    here, _ = listener.accept()

    def receive() -> None:
        num_read = 0
        while num_read < len(buffer):
            num_read += here.recv_into(buffer[num_read:])
        here.send(b"1")

    return receive


class Pair:
    """The two processes of a way."""

    def __init__(self, way: Way, num_tokens: int) -> None:
        self.way = way
        self.measured: list[tuple[float, float]] = []  # seconds, and of the CPU
        self._num_bytes = num_tokens * LAYOUT.bytes_per_token
        context, fleet_id = multiprocessing.get_context("forkserver"), new_fleet_id()
        context.set_forkserver_preload([__spec__.name])  # which imports torch once
        self._pipes: list[Connection] = []
        for is_sender in (False, True):
            ours, theirs = context.Pipe()
            arguments, keywords = (theirs, way, fleet_id, num_tokens), {"is_sender": is_sender}
            context.Process(target=run_side, args=arguments, kwargs=keywords, daemon=True).start()
            self._pipes.append(ours)
        self._pipes[1].send(self._pipes[0].recv())
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def move(self) -> None:
        for pipe in self._pipes:
            pipe.send(True)
        (_, receiver_cpu_s), (seconds, sender_cpu_s) = [pipe.recv() for pipe in self._pipes]
        self.measured.append((seconds, receiver_cpu_s + sender_cpu_s))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(False)

    def row(self) -> Row:
        """The first round is left out: connections, and pages that are touched first."""
        gigabytes = self._num_bytes / 1e9
        speeds = [gigabytes / seconds for seconds, _ in self.measured[1:]]
        cpu = [cpu_s / gigabytes for _, cpu_s in self.measured[1:]]
        return {
            "way": self.way.name,
            "GB/s, median": round(statistics.median(speeds), 2),
            "GB/s, least to most": f"{min(speeds):.2f} to {max(speeds):.2f}",
            "CPU s/GB, median": round(statistics.median(cpu), 2),
            "rounds": len(speeds),
        }


def measured(num_rounds: int, num_tokens: int) -> list[Row]:
    has_nixl = find_spec("nixl") is not None
    pairs = [Pair(way, num_tokens) for way in WAYS if has_nixl or way.route is not Route.NIXL]
    for _ in range(num_rounds + 1):
        for pair in pairs:
            pair.move()
    for pair in pairs:
        pair.close()
    return [pair.row() for pair in pairs]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--no-save", dest="save", action="store_false")
    options = parser.parse_args(arguments)
    sections = {
        "links": Section("From pool to pool", lambda: measured(options.rounds, options.tokens)),
    }
    megabytes = round(options.tokens * LAYOUT.bytes_per_token / 1e6)
    packages = ("torch", "uvloop", *(("nixl",) if find_spec("nixl") else ()))
    run_sections(
        "links", "Links between workers", sections, list(sections),
        lambda: setting(packages, megabytes_at_once=megabytes), save=options.save, module="front.links",
    )  # fmt: skip


if __name__ == "__main__":
    main()
