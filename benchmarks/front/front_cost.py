"""CPU milliseconds of a front per short text, per question about a known video and per streamed token.

    python -m benchmarks.front.front_cost                       this checkout, layers in process
    python -m benchmarks.front.front_cost --against PATH        beside another checkout, in turns
    python -m benchmarks.front.front_cost --layers app --against PATH

Layers:
    http           the ASGI app over a service that answers from memory: parsing, checks, events; no media
    orchestration  the orchestrator over workers that answer at once: planning, placement, tokens
    front          both together
    app            `epd serve` on Ray; of it the process of the front, and Serve's proxy, read from /proc

A text is a question of 14 words with an answer of 16 tokens, 16 in flight; a video question is about a file
that was asked about before, 8 in flight. Tokens are those of streams, after the first ones: in process all
streams get a token at once, the next when all have sent it. CPU time is user and system time of the process.
With --against, a process of each checkout stays open and they measure in turns; ratios are medians of the
ratios of the rounds. Results go to benchmarks/results/front_cost.{json,md} with --write.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reporting import RESULTS, Row, median_ratio, setting, table

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("front_cost_layers.py")
WHAT = ("text", "video", "token")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
READY_S = 180.0
QUESTION = "Which colour is the shape in the middle, and what is left of it?"
NUM_APP_TOKENS = 200
FRONT_TITLES = ("ray::ServeReplica:epd:ingress", "ray::ServeReplica:epd:Front")
PROXY_TITLE = "ray::ProxyActor"


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured. what: text, video or token. number: requests or tokens of a round."""

    layer: str
    what: str
    number: int
    at_once: int = 1

    @property
    def title(self) -> str:
        return (
            f"{self.what}, {self.at_once} at once"
            if self.what != "token"
            else f"token, {self.at_once} streams"
        )

    def order(self) -> str:
        names = {"layer": self.layer, "what": self.what, "number": self.number}
        return json.dumps({**names, "at_once": self.at_once, "streams": self.at_once})


CASES = (
    Case("http", "text", 300, 16),
    Case("http", "token", 600, 1),
    Case("http", "token", 4000, 16),
    Case("http", "token", 8000, 64),
    Case("http", "token", 10000, 500),
    Case("orchestration", "text", 150, 16),
    Case("orchestration", "token", 600, 1),
    Case("orchestration", "token", 4000, 16),
    Case("front", "text", 150, 16),
    Case("front", "video", 100, 8),
    Case("front", "token", 600, 1),
    Case("front", "token", 4000, 16),
    Case("front", "token", 6000, 100),
)
APP_CASES = (
    Case("app", "text", 200, 16),
    Case("app", "video", 80, 8),
    Case("app", "token", 400, 1),
    Case("app", "token", 3200, 16),
)


class Layers:
    """A process that measures the layers of one checkout."""

    def __init__(self, checkout: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read("ready")

    def measure(self, case: Case) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(case.order() + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self, wanted: str = "") -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if wanted in line:
                return line
        raise SystemExit(f"{CHILD.name} ended with code {self._process.wait()}; its message is above")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=READY_S)


class App:
    """`epd serve` of one checkout on Ray."""

    def __init__(self, checkout: Path, folder: Path, options: Sequence[str]) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        program = [sys.executable, "-m", "epd"]
        command = [*program, "serve", "--port", str(self.port), *options]
        self._process = subprocess.Popen(
            [*command, "--allowed-media-path", str(folder)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._wait()
        self.front = pid_of(FRONT_TITLES)
        self.proxy = found_pid((PROXY_TITLE,))  # a front that listens itself has none

    def _wait(self) -> None:
        end_s = time.monotonic() + READY_S
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as sent:
                sent.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                if b" 200 " in sent.recv(64):
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.3)
        raise SystemExit("epd serve did not start; run it yourself to see why")

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=READY_S)

    def measure(self, case: Case) -> tuple[float, float]:
        """CPU milliseconds of the front and of the proxy for one request or token."""
        before = cpu_s(self.front), cpu_s(self.proxy)
        count = asyncio.run(self._tokens(case) if case.what == "token" else self._requests(case))
        after = cpu_s(self.front), cpu_s(self.proxy)
        front, proxy = (1e3 * (end - start) / count for start, end in zip(before, after, strict=True))
        return front, proxy

    async def _requests(self, case: Case) -> int:
        left = list(range(case.number))
        body = _text(16) if case.what == "text" else _video(self.folder / "video.mp4")

        async def some() -> None:
            while left:
                left.pop()
                await ask(self.port, body)

        await asyncio.gather(*(some() for _ in range(case.at_once)))
        return case.number

    async def _tokens(self, case: Case) -> int:
        """Streams; their start costs as much as a text and is part of the figure."""
        body = {**_text(NUM_APP_TOKENS), "stream": True, "ignore_eos": True}
        num_rounds = max(1, case.number // (NUM_APP_TOKENS * case.at_once))
        for _ in range(num_rounds):
            await asyncio.gather(*(ask(self.port, body) for _ in range(case.at_once)))
        return num_rounds * NUM_APP_TOKENS * case.at_once


def _text(max_tokens: int) -> Row:
    return {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": max_tokens}


def _video(path: Path) -> Row:
    parts = [{"type": "video_url", "video_url": {"url": path.as_uri()}}, {"type": "text", "text": QUESTION}]
    frames = {"mm_processor_kwargs": {"num_frames": 8}}
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 16, **frames}


async def ask(port: int, body: Row) -> bytes:
    """Sends a chat request over a connection of its own. Returns what came back; raises unless it is 200."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    reply = await reader.read()
    writer.close()
    if b" 200 " not in reply[:20]:
        raise SystemExit(f"the server replied {reply[:500]!r}")
    return reply


def found_pid(titles: Sequence[str]) -> int | None:
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (each / "cmdline").read_bytes().decode(errors="replace")
            if line.startswith(tuple(titles)):
                return int(each.name)
    return None


def pid_of(titles: Sequence[str]) -> int:
    pid = found_pid(titles)
    if pid is None:
        raise SystemExit(f"no process is called {' or '.join(titles)}; is another kind of server running?")
    return pid


def cpu_s(pid: int | None) -> float:
    """CPU seconds that a process has used; none without one."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def write_video(path: Path) -> None:
    """Writes a clip of two seconds, by a process that imports what draws it."""
    code = (
        "import sys; from pathlib import Path; from benchmarks.front.front_cost_layers import write_video; "
        "write_video(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, cwd=ROOT)


def show(text: str) -> None:
    """Shows progress on one line."""
    print(f"\r{text:70}", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def running(checkouts: Sequence[Path]) -> Iterator[list[Layers]]:
    with contextlib.ExitStack() as held:
        yield [held.enter_context(contextlib.closing(Layers(each))) for each in checkouts]


def measure_layers(checkouts: Sequence[Path], cases: Sequence[Case], rounds: int) -> list[Row]:
    """Measures cases in process, in turns between the checkouts."""
    rows = []
    with running(checkouts) as children:
        for number, case in enumerate(cases, start=1):
            taken: list[list[float]] = [[] for _ in children]
            for one in range(rounds + 1):
                show(f"{number}/{len(cases)} {case.layer}: {case.title}, round {one}")
                for child, figures in zip(children, taken, strict=True):
                    figures.append(child.measure(case))
            rows.append(_row(case, [each[1:] for each in taken]))  # the first round warms up
    print(file=sys.stderr)
    return rows


def measure_app(checkouts: Sequence[Path], rounds: int, options: Sequence[str]) -> list[Row]:
    """Measures the application, started for each checkout in each round."""
    taken: dict[tuple[Case, str], list[list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="front-cost-") as folder:
        write_video(Path(folder) / "video.mp4")
        for one in range(rounds):
            for place, checkout in enumerate(checkouts):
                show(f"app: round {one + 1}/{rounds}, {checkout}")
                with contextlib.closing(App(checkout, Path(folder), options)) as app:
                    for case in APP_CASES:
                        app.measure(Case("app", case.what, case.at_once, case.at_once))  # warms up
                        for part, cost in zip(("front", "proxy"), app.measure(case), strict=True):
                            lists = taken.setdefault((case, part), [[] for _ in checkouts])
                            lists[place].append(cost)
    print(file=sys.stderr)
    return [_row(case, figures, f"app, {part}") for (case, part), figures in taken.items()]


def _row(case: Case, taken: Sequence[Sequence[float]], layer: str = "") -> Row:
    row: Row = {"layer": layer or case.layer, "case": case.title}
    row["ms"] = round(statistics.median(taken[0]), 4)
    if len(taken) > 1:
        row["other_ms"] = round(statistics.median(taken[1]), 4)
        row["ratio"] = round(median_ratio(taken[0], taken[1]), 3) if min(taken[1]) > 0 else "-"
    return row


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def write(rows: Sequence[Row], about: Row, command: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "front_cost.json").write_text(json.dumps({"setting": about, "rows": rows}, indent=1) + "\n")
    lines = ["# CPU time of a front", "", f"`{command}`", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    lines += ["", "CPU milliseconds; `other` is the checkout of --against.", "", table(rows)]
    (RESULTS / "front_cost.md").write_text("\n".join(lines) + "\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    names = ("http", "orchestration", "front", "app")
    parser.add_argument("--layers", nargs="+", choices=names, default=names[:3], help="what to measure")
    parser.add_argument("--what", nargs="+", choices=WHAT, default=WHAT, help="of these, which cases")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; medians are reported")
    parser.add_argument("--serve-options", default="--topology 1e1p1d", help="options of epd serve")
    parser.add_argument("--write", action="store_true", help="write the results")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    checkouts = [ROOT, *([args.against.resolve()] if args.against else [])]
    rows: list[Row] = []
    cases = [case for case in CASES if case.layer in args.layers and case.what in args.what]
    if cases:
        rows += measure_layers(checkouts, cases, args.rounds)
    if "app" in args.layers:
        rows += measure_app(checkouts, args.rounds, args.serve_options.split())
    print(table(rows))
    if args.write:
        write(
            rows,
            setting(("fastapi", "pydantic", "ray"), rounds=args.rounds),
            "python -m benchmarks.front.front_cost",
        )


if __name__ == "__main__":
    main()
