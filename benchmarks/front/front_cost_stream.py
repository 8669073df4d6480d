"""CPU time of a front's process on Ray Serve, over a service in memory: what Serve's ways to a replica cost.

    python -m benchmarks.front.front_cost_stream --modes proxy direct --streams 100 500

Modes:
    proxy         Serve's proxy passes requests on to the replica, as by default
    proxy-loop    the same, the application in the event loop of the replica
    direct        the replica listens itself (RAY_SERVE_ENABLE_DIRECT_INGRESS)
    direct-loop   both (with RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0)
    haproxy       HAProxy passes requests on to a replica that listens itself (RAY_SERVE_ENABLE_HA_PROXY)
    listen        the application listens at an address of its own, as fronts of `epd serve` do

Each stream gets 20 tokens a second. Printed: the tokens that arrive, and the CPU milliseconds of a token and
of a short text in the front and in the proxy, read from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.front.front_cost import PROXY_TITLE, QUESTION, Row, ask, cpu_s, found_pid, pid_of
from benchmarks.reporting import table

MODES: dict[str, dict[str, str]] = {
    "proxy": {},
    "proxy-loop": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"},
    "direct": {"RAY_SERVE_ENABLE_DIRECT_INGRESS": "1"},
    "direct-loop": {
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    },
    "haproxy": {"RAY_SERVE_ENABLE_HA_PROXY": "1"},
    "listen": {},
}
DIRECT_PORTS = range(30000, 31000)
FRONT_TITLE = "ray::ServeReplica:cost:front"
HAPROXY = "haproxy"  # the program, which the actor starts
LISTENS = "0A"  # the state in /proc/net/tcp
RATE = 20
SETTLE_S, MEASURE_S, END_S = 3.0, 6.0, 90.0
BODY = {"messages": [{"role": "user", "content": QUESTION}]}


@contextmanager
def served(mode: str) -> Iterator[tuple[int, tuple[int | None, ...]]]:
    """Runs the application. Yields the port to ask, and the processes of the front and the proxy."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.front.front_cost_serve", "127.0.0.1", str(port)]
    command += ["--listen"] if mode == "listen" else []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, env={**os.environ, **MODES[mode]}, text=True, **pipes)  # type: ignore[call-overload]
    try:
        if not any("ready" in line for line in server.stdout):
            raise SystemExit(
                "the application did not start; run benchmarks.front.front_cost_serve to see why"
            )
        processes = pid_of((FRONT_TITLE,)), haproxy_pid() if mode == "haproxy" else found_pid((PROXY_TITLE,))
        yield direct_port() if mode.startswith("direct") else port, processes
    finally:
        server.stdin.close()
        server.wait(END_S)


def haproxy_pid() -> int:
    """The worker of HAProxy: of its processes the one that has used most CPU."""
    names = [each for each in Path("/proc").glob("[0-9]*/comm") if each.read_text().strip() == HAPROXY]
    return max((int(each.parent.name) for each in names), key=cpu_s)


def direct_port() -> int:
    """The first port of direct ingress on which something listens."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    open_ports = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENS}
    return min(open_ports.intersection(DIRECT_PORTS))


def measure(mode: str, counts: list[int], num_texts: int) -> list[Row]:
    with served(mode) as (port, processes):
        asyncio.run(texts(port, num_texts // 4))
        before = [cpu_s(pid) for pid in processes]
        asyncio.run(texts(port, num_texts))
        rows = [_row(mode, "text, 16 at once", processes, before, num_texts)]
        return rows + [asyncio.run(streams(mode, port, processes, count)) for count in counts]


async def texts(port: int, number: int) -> None:
    left = list(range(number))

    async def some() -> None:
        while left:
            left.pop()
            await ask(port, {**BODY, "max_tokens": 16})

    await asyncio.gather(*(some() for _ in range(16)))


async def streams(mode: str, port: int, processes: tuple[int | None, ...], number: int) -> Row:
    counted: Counter[str] = Counter()
    tasks = []
    for each in range(number):
        tasks.append(asyncio.create_task(stream(port, counted)))
        await asyncio.sleep(0.05 if each % 20 == 0 else 0)
    await asyncio.sleep(SETTLE_S)
    before, tokens, start_s = [cpu_s(pid) for pid in processes], counted["tokens"], time.monotonic()
    await asyncio.sleep(MEASURE_S)
    num_tokens, seconds = counted["tokens"] - tokens, time.monotonic() - start_s
    row = _row(mode, f"token, {number} streams", processes, before, max(1, num_tokens))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {**row, "tokens_per_s": round(num_tokens / seconds), "wanted": number * RATE}


async def stream(port: int, counted: Counter[str]) -> None:
    """Counts the tokens of one stream until it is cancelled."""
    data = json.dumps({**BODY, "stream": True, "ignore_eos": True, "max_tokens": 2000}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    try:
        while chunk := await reader.read(1 << 16):
            counted["tokens"] += chunk.count(b'"content":"')
    finally:
        with suppress(OSError):
            writer.close()


def _row(mode: str, case: str, processes: tuple[int | None, ...], before: list[float], number: int) -> Row:
    front, proxy = (
        round(1e3 * (cpu_s(pid) - start) / number, 4) for pid, start in zip(processes, before, strict=True)
    )
    return {
        "mode": mode,
        "case": case,
        "front_ms": front,
        "proxy_ms": proxy,
        "tokens_per_s": "",
        "wanted": "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--streams", nargs="+", type=int, default=[100, 500], help="numbers of streams")
    parser.add_argument("--texts", type=int, default=300, help="short texts")
    args = parser.parse_args()
    rows: list[Row] = []
    for number, mode in enumerate(args.modes, start=1):
        print(f"{number}/{len(args.modes)} {mode}", file=sys.stderr, flush=True)
        rows += measure(mode, args.streams, args.texts)
    print(table(rows))


if __name__ == "__main__":
    main()
