"""Runs the application as a process, sends it requests, reads its log and adds up its CPU time."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from benchmarks.score.app_costs import Figures, median
from benchmarks.score.speed import SpeedSampler
from epd.bench.bench import BenchPlan, run_bench
from epd.bench.media import MediaLibrary
from epd.client.endpoint import Endpoint, find_model
from epd.errors import UnavailableError
from epd.workload.metrics import ClientRecord
from epd.workload.requests import Workload
from epd.workload.trace import MARK

_READY_S, _END_S, _POLL_S, _LOG_S = 240.0, 60.0, 0.2, 0.3
_NOTHING_MORE: Mapping[str, Any] = MappingProxyType({})
_FIELD = re.compile(r"(\w+)=(\S+)")
_LAST_FIELD = " queued_s="  # of a line of the access log


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """Holds a request's entry in the application's log. stages_s: of the work of each stage."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    stages_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class TrafficResult:
    """Holds the measurements of one run of traffic.

    served: in the order in which they ended.
    cpu_s: of the application and of this process.
    elapsed_s: of the whole run.
    core_speed: while it lasted.
    """

    records: tuple[ClientRecord, ...]
    served: tuple[ServedRequest, ...]
    cpu_s: float
    elapsed_s: float
    core_speed: float

    def figures(self, idle_cores: float) -> Figures:
        """Summarises the answered requests. idle_cores: see `LiveApp.idle_cores`."""
        records = [record for record in self.records if record.error is None]
        steps = [
            (record.end_s - record.token_times_s[0]) / (tokens - 1)
            for record in records
            if (tokens := record.completion_tokens or 0) > 1
        ]
        return Figures(
            ttft_s=median([record.token_times_s[0] - record.sent_s for record in records]),
            tpot_s=median(steps),
            encode_s=median([each.stages_s.get("encode", 0.0) for each in self.served]),
            prefill_s=median([each.stages_s.get("prefill", 0.0) for each in self.served]),
            cpu_s=max(0.0, self.cpu_s - idle_cores * self.elapsed_s) / max(1, len(records)),
            prompt_tokens=median([each.prompt_tokens for each in self.served]),
            cached_tokens=median([each.cached_tokens for each in self.served]),
        )


class LiveApp:
    """Controls a running `epd serve`."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self._process = process
        self._log = log

    def cpu_s(self) -> float:
        """Returns the CPU seconds of all of its processes, and of this one, so far."""
        own = os.times()
        return own.user + own.system + sum(map(_cpu_s, _family(self._process.pid)))

    def counter(self, name: str) -> int:
        """Returns what one of its counters shows."""
        return counted_in(httpx.get(f"{self.url}/metrics", trust_env=False).text, name)

    def idle_cores(self, seconds: float = 3.0) -> float:
        """Measures how many cores it takes while idle."""
        before = self.cpu_s()
        time.sleep(seconds)
        return (self.cpu_s() - before) / seconds

    def send(
        self,
        workload: Workload,
        library: MediaLibrary,
        *,
        seed: int,
        concurrency: int | None = None,
        extra: Mapping[str, Any] = _NOTHING_MORE,
    ) -> TrafficResult:
        """Sends a workload; answers have exactly the output tokens of the requests. extra: of each body."""
        endpoint = Endpoint("app", self.url)
        plan = BenchPlan(
            workload,
            (replace(endpoint, model=find_model(endpoint)),),
            warmup=0,
            seed=seed,
            max_in_flight=concurrency or 512,
            extra={"ignore_eos": True, **extra},
        )
        library.draw(plan.all_requests(), lambda _done, _total: None)
        offset = self._log.stat().st_size
        cpu_s, start_s = self.cpu_s(), time.perf_counter()
        with SpeedSampler() as sampler:
            result = asyncio.run(run_bench(plan, library))
        elapsed_s, cpu_s = time.perf_counter() - start_s, self.cpu_s() - cpu_s
        time.sleep(_LOG_S)
        with self._log.open("rb") as file:
            file.seek(offset)
            lines = file.read().decode("utf-8", "replace").splitlines()
        return TrafficResult(result.records(0)[0], served_in(lines), cpu_s, elapsed_s, sampler.core_speed)


@contextmanager
def live_app(options: Sequence[str], log: Path) -> Iterator[LiveApp]:
    """Runs `epd serve` with these options on a free port. Raises UnavailableError when it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [
        sys.executable,
        "-P",
        "-m",
        "epd",
        "serve",
        "--port",
        str(port),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--verbose", *options], stdout=out, stderr=subprocess.STDOUT)
    try:
        _wait_ready(process, log)
        yield LiveApp(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + _READY_S
    while b"ready in " not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > end_s:
            last = log.read_text("utf-8", "replace").strip().splitlines()[-1:]
            raise UnavailableError(f"epd serve does not start: {' '.join(last) or 'it says nothing'}")
        time.sleep(_POLL_S)


def served_in(lines: Iterable[str]) -> tuple[ServedRequest, ...]:
    """Returns answered requests of an access log, from lines that are whole.

    Ray prints the first part of a line that is being written, and the rest as another one: neither counts.
    """
    whole = (line for line in lines if MARK in line and _LAST_FIELD in line)
    return tuple(_served(line) for line in whole if "ttft_s=-" not in line)


def counted_in(metrics: str, name: str) -> int:
    """Returns what a counter shows in the text that Prometheus scrapes, added up over its labels."""
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)
    return sum(int(float(value)) for value in found)


def _served(line: str) -> ServedRequest:
    fields = dict(_FIELD.findall(line))
    parts = [part.split(":") for part in fields["stages_s"].split(",") if ":" in part]
    return ServedRequest(
        float(fields["ttft_s"]),
        int(fields["prompt_tokens"]),
        int(fields["cached_tokens"]),
        {name: float(seconds) for name, seconds in parts},
    )


def _family(pid: int) -> list[int]:
    """Returns a process and all that it and its children have started."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        one = queue.pop()
        found.append(one)
        queue += parents.get(one, [])
    return found


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name; empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0
