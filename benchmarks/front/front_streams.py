"""How many streams of 20 tokens a second one front keeps up with, over workers that answer at that pace.

    python -m benchmarks.front.front_streams --streams 100 500 1000 --write

    front     the whole of a front without Ray: HTTP on a socket, orchestrator, links to its workers
    peers     another process (`front_streams_peers`): stage workers that compute nothing
    client    a third one: a connection for each stream

Each token has the time in it at which its worker sent it; `delay` is from there until the client has read
it, of one stream in ten. Cores are CPU seconds for each second of a process. A front keeps up if 99 % of the
tokens arrive while they are measured. With --write results go to benchmarks/results/front_streams.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.front.front_cost import cpu_s, show
from benchmarks.reporting import RESULTS, Row, setting, table
from epd.serve_app.app_args import AppArgs
from epd.serve_app.composition import create_app
from epd.serve_app.http.http_server import HttpServer
from epd.serve_app.network.link import Address
from epd.serve_app.network.members import Credentials, Member, ProcessAddress, Purpose, View
from epd.serve_app.network.remote_fleet import RemoteFleet
from epd.serve_app.worker_info import WorkerInfo

RATE = 20
NUM_WORKERS = 8
MODEL = Path("epd/models/shapes-vl").resolve()
KEPT_UP = 0.99
FOLLOW_S = 1.0
END_S = 20.0
ABOUT = (
    "A front without Ray, workers that answer at a pace, and a client, each in a process of its own. Every "
    f"stream gets {RATE} tokens a second from one of {NUM_WORKERS} workers. `delay_*_ms`: from the worker's "
    "sending until the client has read the token. `front_ms`: CPU of the front for each token."
)


class FixedBoard:
    """A board on which the workers stand from the beginning."""

    def __init__(self, credentials: Credentials, members: Sequence[Member]) -> None:
        self._credentials = credentials
        self._members = {member.epoch: member for member in members}
        self._version = 0

    async def credentials(self) -> Credentials:
        return self._credentials

    async def follow(self, member: Member, seen: int, credentials: Credentials) -> View | None:  # noqa: ARG002
        if seen >= 0 and seen == self._version and self._members.get(member.epoch) == member:
            await asyncio.sleep(FOLLOW_S)
            return None
        self._version += 1
        self._members[member.epoch] = member
        return View(self._version, dict(self._members), leader=member.epoch)

    async def leave(self, epoch: str) -> None:
        """Does nothing."""

    async def accuse(self, epoch: str, reason: str) -> None:
        raise SystemExit(f"the benchmark is broken: {epoch} {reason}")


def members_at(addresses: dict[str, tuple[str, int]]) -> list[Member]:
    """The media worker v0, and stage workers with all roles. addresses: by name."""
    return [
        Member(
            epoch=name,
            kind="media" if name == "v0" else "stage",
            address=Address(*address),
            node_id="elsewhere",
            pid=0,
            model=str(MODEL),
            info=WorkerInfo(
                name, frozenset({"video"}) if name == "v0" else frozenset({"encode", "prefill", "decode"})
            ),
            is_ready=True,
            is_known=True,
        )
        for name, address in addresses.items()
    ]


async def run_front(credentials: Credentials, addresses: dict[str, tuple[str, int]]) -> None:
    """Serves until standard input ends. Prints its port once it listens."""
    logging.basicConfig(level=logging.INFO, filename="/dev/null")  # the line of each request is formatted
    args = AppArgs(model=MODEL, topology="1epd", max_requests=4096, max_waiting=4096)
    board = FixedBoard(credentials, members_at(addresses))
    fleet = RemoteFleet(board, ProcessAddress("127.0.0.1", "here"), Purpose(str(args.model_path)))
    app = await create_app(args, fleet, fleet.owner)
    async with app.router.lifespan_context(app):
        with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
            server = HttpServer(app, drain_s=0.0)
            serving = asyncio.create_task(server.serve([listener]))
            await server.listening.wait()
            print(listener.getsockname()[1], flush=True)
            await asyncio.to_thread(sys.stdin.read)
            server.should_exit = True
            await serving


@dataclass(frozen=True, slots=True)
class Child:
    """A process that is told what to do on standard input, a line each, and answers on standard output."""

    process: subprocess.Popen[str]

    def ask(self, value: Any = None) -> Any:
        """Sends a value, if any, and returns what is answered."""
        if value is not None:
            self._pipe(self.process.stdin).write(json.dumps(value) + "\n")
            self._pipe(self.process.stdin).flush()
        line = self._pipe(self.process.stdout).readline()
        if not line:
            raise SystemExit(f"a process ended with code {self.process.wait()}; its message is above")
        return json.loads(line)

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe

    @property
    def cpu_s(self) -> float:
        return cpu_s(self.process.pid)


@contextmanager
def started(module: str, *arguments: str) -> Iterator[Child]:
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Child(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def measure(counts: Sequence[int], seconds: float, num_workers: int) -> list[Row]:
    peers_module = "benchmarks.front.front_streams_peers"
    key = secrets.token_hex(32)
    with ExitStack() as running:
        peers = running.enter_context(started(peers_module, "workers", key, str(num_workers), str(RATE)))
        addresses = json.dumps(peers.ask())
        front = running.enter_context(started("benchmarks.front.front_streams", "--front", key, addresses))
        client = running.enter_context(started(peers_module, "client", str(front.ask())))
        rows = []
        for count in (min(counts), *counts):  # the first warms up
            show(f"{count} streams")
            rows.append(_measured(count, seconds, (front, peers, client)))
        return rows[1:]


def _measured(count: int, seconds: float, processes: tuple[Child, Child, Child]) -> Row:
    client = processes[-1]
    client.ask({"streams": count})
    before, start_s = [each.cpu_s for each in processes], time.monotonic()
    seen = client.ask({"seconds": seconds})
    took_s = time.monotonic() - start_s
    cores = [(each.cpu_s - start) / took_s for each, start in zip(processes, before, strict=True)]
    client.ask({"streams": 0})
    wanted, got = count * RATE, seen["num_tokens"] / seen["seconds"]
    return {
        "streams": count,
        "wanted_tokens_per_s": wanted,
        "tokens_per_s": round(got),
        "keeps_up": got >= KEPT_UP * wanted,
        "delay_p50_ms": round(seen["delay_p50_ms"], 1),
        "delay_p99_ms": round(seen["delay_p99_ms"], 1),
        "front_cores": round(cores[0], 2),
        "front_ms": round(1e3 * cores[0] / got, 4) if got else "",
        "workers_cores": round(cores[1], 2),
        "client_cores": round(cores[2], 2),
    }


def write(rows: Sequence[Row], about: Row) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "front_streams.json").write_text(json.dumps({"setting": about, "rows": rows}, indent=1) + "\n")
    lines = ["# Streams of one front", "", "`python -m benchmarks.front.front_streams --write`", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    lines += ["", ABOUT, "", table(rows)]
    (RESULTS / "front_streams.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", nargs="+", type=int, default=[100, 250, 500, 750, 1000])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--workers", type=int, default=NUM_WORKERS, help="that streams are spread over")
    parser.add_argument("--write", action="store_true", help="write the results")
    parser.add_argument("--front", nargs=2, help=argparse.SUPPRESS)  # key and addresses: run the front
    args = parser.parse_args()
    if args.front:
        credentials = Credentials(bytes.fromhex(args.front[0]), "benchmark")
        asyncio.run(run_front(credentials, json.loads(args.front[1])))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = measure(args.streams, args.seconds, args.workers)
    print("\n" + table(rows))
    if args.write:
        write(rows, setting(("fastapi", "uvicorn"), seconds=args.seconds))


if __name__ == "__main__":
    main()
