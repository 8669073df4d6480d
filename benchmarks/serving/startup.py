"""What `epd serve` takes until it is ready, and the memory of each of its processes.

    python -m benchmarks.serving.startup --against CHECKOUT --rounds 2 --write

Starts the server of each checkout in turns, waits for `/health`, asks one short text, and reads the
proportional set size (PSS) of every process below it from /proc: memory that several of them share is
divided among them. The results go to benchmarks/results/startup.{json,md} with --write.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.front.front_cost import READY_S, ROOT, ask, commit_of, cpu_s, show
from benchmarks.reporting import RESULTS, Row, setting, table

MARK = "EPD_BENCHMARK_STARTUP"  # in the environment of the server's processes
POLL_S = 0.05
BODY = {"messages": [{"role": "user", "content": "What is shown?"}], "max_tokens": 16}
# The beginnings of titles of processes, and what they are called in the results.
NAMES = {
    "ray::ServeReplica:epd:ingress": "ingress",
    "ray::ServeReplica:epd:Front": "front",
    "ray::ServeReplica:epd:Media": "media worker",
    "ray::ServeReplica:epd:Stage": "stage worker",
    "ray::BoardActor": "board",
    "ray::StageActor": "stage worker",
    "ray::WorkerActor": "stage worker",
    "ray::MediaActor": "media worker",
    "ray::VideoActor": "media worker",
    "ray::ServeController": "Serve's controller",
    "ray::ProxyActor": "Serve's proxy",
    "ray::": "Ray, other",
}


@dataclass(frozen=True, slots=True)
class Started:
    """ready_s: seconds until `/health` was answered. pss_mb, cpu_s: by kind of process. num: of processes."""

    ready_s: float
    pss_mb: dict[str, float]
    cpu_s: dict[str, float]
    num: dict[str, int]


def processes(mark: str) -> Iterator[int]:
    """Yields the processes that were started with this mark in their environment."""
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (each / "environ").read_bytes():
                yield int(each.name)


def kind_of(pid: int) -> str:
    title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    for beginning, name in NAMES.items():
        if title.startswith(beginning):
            return name
    if "epd.video.children" in title:
        return "children of media workers"
    if " -m epd serve" in title:
        return "the command"
    return "Ray, other"


def pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3


def seen(mark: str, ready_s: float) -> Started:
    memory, cpu, number = Counter[str](), Counter[str](), Counter[str]()
    for pid in processes(mark):
        with suppress(OSError):  # it has just ended
            kind, pss = kind_of(pid), pss_mb(pid)
            memory[kind] += pss  # type: ignore[assignment] # counters of floats
            cpu[kind] += cpu_s(pid)  # type: ignore[assignment]
            number[kind] += 1
    return Started(ready_s, dict(memory), dict(cpu), dict(number))


@contextmanager
def served(checkout: Path, mark: str, options: Sequence[str]) -> Iterator[tuple[int, float]]:
    """Yields the port and the seconds until the server of a checkout is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = [
        sys.executable,
        "-m",
        "epd",
        "serve",
        "--port",
        str(port),
    ]
    start_s = time.monotonic()
    server = subprocess.Popen(
        [*program, *options],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), MARK: mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait(server, port)
        yield port, time.monotonic() - start_s
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(READY_S)


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s and server.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as sent:
            sent.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            if b" 200 " in sent.recv(64):
                return
        time.sleep(POLL_S)
    raise SystemExit("epd serve did not start; run it yourself to see why")


def measure(checkout: Path, options: Sequence[str]) -> Started:
    mark = secrets.token_hex(8)
    with served(checkout, mark, options) as (port, ready_s):
        asyncio.run(ask(port, BODY))
        return seen(mark, ready_s)


def summary(rounds: Sequence[Started], checkout: Path) -> Row:
    return {
        "commit": commit_of(checkout),
        "ready_s": round(statistics.median(each.ready_s for each in rounds), 1),
        "cpu_s": round(statistics.median(sum(each.cpu_s.values()) for each in rounds), 1),
        "pss_mb": round(statistics.median(sum(each.pss_mb.values()) for each in rounds)),
        "processes": max(sum(each.num.values()) for each in rounds),
    }


def by_process(rounds: Sequence[Started], checkout: Path) -> list[Row]:
    kinds = {kind for each in rounds for kind in each.pss_mb}
    rows = [
        {
            "commit": commit_of(checkout),
            "process": kind,
            "number": max(each.num.get(kind, 0) for each in rounds),
            "pss_mb": round(statistics.median(each.pss_mb.get(kind, 0.0) for each in rounds)),
            "cpu_s": round(statistics.median(each.cpu_s.get(kind, 0.0) for each in rounds), 1),
        }
        for kind in kinds
    ]
    return sorted(rows, key=lambda row: -row["pss_mb"])


def write(totals: Sequence[Row], rows: Sequence[Row], about: Row) -> None:
    RESULTS.mkdir(exist_ok=True)
    results = {"setting": about, "totals": totals, "processes": rows}
    (RESULTS / "startup.json").write_text(json.dumps(results, indent=1) + "\n")
    lines = [
        "# Start-up and memory of `epd serve`",
        "",
        "`python -m benchmarks.serving.startup --against CHECKOUT`",
        "",
    ]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    lines += [
        "",
        "Medians of the rounds, in turns; PSS after one short text, CPU of all processes until then.",
    ]
    lines += ["", table(totals), "", table(rows)]
    (RESULTS / "startup.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another checkout, started in turns with this one")
    parser.add_argument("--rounds", type=int, default=2, help="rounds; medians are reported")
    parser.add_argument("--serve-options", default="--topology 1e1p1d", help="options of epd serve")
    parser.add_argument("--write", action="store_true", help="write the results")
    args = parser.parse_args()
    checkouts = [ROOT, *([args.against.resolve()] if args.against else [])]
    taken: list[list[Started]] = [[] for _ in checkouts]
    for number in range(args.rounds):
        for place, checkout in enumerate(checkouts):
            show(f"round {number + 1}/{args.rounds}, {checkout}")
            taken[place].append(measure(checkout, args.serve_options.split()))
    totals = [summary(each, checkout) for each, checkout in zip(taken, checkouts, strict=True)]
    rows = [
        row for each, checkout in zip(taken, checkouts, strict=True) for row in by_process(each, checkout)
    ]
    print("\n" + table(totals) + "\n\n" + table(rows))
    if args.write:
        write(totals, rows, setting(("ray", "torch"), rounds=args.rounds, options=args.serve_options))


if __name__ == "__main__":
    main()
