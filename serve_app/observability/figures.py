"""Sums up what a server did between two scrapes of its metrics: for its log, and for `epd status --watch`."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from epd.serve_app.observability.logs import operation, with_fields

_SAMPLE = re.compile(r"^(epd_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_BOUND = re.compile(r'\ble="([^"]+)"')
_FRONT = re.compile(r'\bfront="([^"]+)"')
_TTFT, _TPOT = "epd_time_to_first_token_seconds_bucket", "epd_time_per_output_token_seconds_bucket"
# Upper bound and cumulative count of a bucket.
Bucket = tuple[float, float]


class Scrape:
    """Holds the samples of one scrape. at_s: of its reader's clock. front: the label of all its samples."""

    def __init__(self, text: str, at_s: float | None = None) -> None:
        """Reads text of Prometheus's format."""
        self.at_s = time.monotonic() if at_s is None else at_s
        self.front = found[1] if (found := _FRONT.search(text)) else ""
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._highest: dict[str, float] = {}
        self._buckets: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
        for name, labels, shown in _SAMPLE.findall(text):
            value = float(shown)
            if bound := _BOUND.search(labels):
                self._buckets[name][float(bound[1])] += value
            self._sums[name] += value
            self._highest[name] = max(value, self._highest.get(name, value))

    def sum(self, name: str) -> float:
        """Returns the sum of a metric over all labels, 0 if it is not shown."""
        return self._sums.get(name, 0.0)

    def sums(self, prefix: str) -> dict[str, float]:
        """Returns the sums of the metrics whose names begin so, by the rest of their names."""
        return {
            name.removeprefix(prefix): total for name, total in self._sums.items() if name.startswith(prefix)
        }

    def highest(self, name: str) -> float | None:
        """Returns the highest sample of a metric, None if it is not shown."""
        return self._highest.get(name)

    def buckets_since(self, before: Scrape, name: str) -> list[Bucket]:
        """Returns the buckets of what a histogram observed since another scrape, the lowest first."""
        old: Mapping[float, float] = before._buckets.get(name, {})
        return sorted((bound, count - old.get(bound, 0.0)) for bound, count in self._buckets[name].items())


def quantile(buckets: Sequence[Bucket], share: float) -> float | None:
    """Returns a quantile as Prometheus's histogram_quantile does; None without an observation.

    It lies between the bounds of its bucket, in proportion; above the last bound it is that bound.
    """
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = share * buckets[-1][1]
    low_bound = low_count = 0.0
    for bound, count in buckets:
        if count >= rank and count > low_count:
            part = (rank - low_count) / (count - low_count)
            return low_bound if math.isinf(bound) else low_bound + part * (bound - low_bound)
        low_bound, low_count = bound, count
    return low_bound


@dataclass(frozen=True, slots=True)
class Figures:
    """What a server did in an interval. Tokens of prompts and latencies: of requests that ended in it.

    kv_usage: share of the KV blocks in use at the worker that uses the most
    """

    num_running: int
    num_waiting: int
    requests_per_s: float
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    kv_usage: float | None

    @classmethod
    def between(cls, before: Scrape, now: Scrape) -> Figures:
        """Sums up an interval. before, now: scrapes of the same front."""
        seconds = max(now.at_s - before.at_s, 1e-3)

        def rate(name: str) -> float:  # a worker that was lost takes its counts along
            return round(max(0.0, now.sum(name) - before.sum(name)) / seconds, 3)

        in_flight = round(now.sum("epd_requests_in_flight"))
        waiting = min(round(now.sum("epd_queue_length")), in_flight)
        ttft = now.buckets_since(before, _TTFT)
        return cls(
            num_running=in_flight - waiting,
            num_waiting=waiting,
            requests_per_s=rate("epd_requests_total"),
            prompt_tokens_per_s=rate("epd_prompt_tokens_total"),
            generation_tokens_per_s=rate("epd_generated_tokens_total"),
            ttft_p50_s=quantile(ttft, 0.5),
            ttft_p99_s=quantile(ttft, 0.99),
            tpot_p50_s=quantile(now.buckets_since(before, _TPOT), 0.5),
            kv_usage=now.highest("epd_worker_kv_usage"),
        )

    @property
    def is_busy(self) -> bool:
        return bool(self.num_running or self.num_waiting or self.requests_per_s)

    def line(self) -> str:
        """Returns the figures as one line for people."""
        usage = "-" if self.kv_usage is None else f"{self.kv_usage:.1%}"
        return (
            f"{self.num_running} requests running, {self.num_waiting} waiting, {self.requests_per_s:.2f} "
            f"ended/s; tokens/s: prompt {self.prompt_tokens_per_s:,.1f}, generation "
            f"{self.generation_tokens_per_s:,.1f}; TTFT p50 {_seconds(self.ttft_p50_s)}, p99 "
            f"{_seconds(self.ttft_p99_s)}; TPOT p50 {_seconds(self.tpot_p50_s)}; KV use {usage}"
        )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


async def log_figures(render: Callable[[], Awaitable[bytes]], interval_s: float) -> None:
    """Logs a line for each interval in which requests ran, waited or ended, until it is cancelled.

    render: returns the metrics as Prometheus scrapes them
    """
    before = Scrape((await render()).decode())
    while True:
        await asyncio.sleep(interval_s)
        now = Scrape((await render()).decode())
        figures = Figures.between(before, now)
        if figures.is_busy:
            operation.info(figures.line(), extra=with_fields("figures", asdict(figures)))
        before = now
