"""Computes what a server's user sees from single requests: latencies, SLO attainment, goodput. No I/O.

    due_s      sent_s        token_times_s                            end_s
      |----------|--------------|-------|-------|-------------|---------|      seconds from the start of a run
       lateness      TTFT          ITL     ITL        ITL
                 |-------------------------- E2E ---------------------->|

TTFT  time to first token: from sending to the first event that carries text.
ITL   inter-token latency: gaps between such events. An event may carry several tokens.
TPOT  time per output token after the first: (E2E - TTFT) / (completion tokens - 1), one number per request.
E2E   from sending to the end of the stream.

A percentile p of n sorted values is at index p / 100 * (n - 1), between two values in proportion (Hyndman
and Fan's type 7, numpy's default). Failed requests have no latencies; they count against SLO attainment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from epd.errors import RequestError

# A sender this late, at the 95th percentile, has fallen behind the requested traffic.
MAX_LATENESS_S = 0.02
MAX_LATENESS_OF_TTFT = 0.05


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """One request as its client saw it; seconds from the start of the run.

    error: what went wrong, in few words that can be counted; None for a complete answer.
    completion_tokens, prompt_tokens: as the server counts them, None where it does not say.
    """

    index: int
    due_s: float
    sent_s: float
    end_s: float
    token_times_s: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    detail: str = ""
    waited_for_place: bool = False

    def __post_init__(self) -> None:
        times_s = (self.due_s, self.sent_s, *self.token_times_s, self.end_s)
        if any(after < before for before, after in pairwise(times_s)):
            raise ValueError(f"times of request {self.index} must not go backwards: {times_s}")

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def lateness_s(self) -> float:
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.sent_s if self.is_ok and self.token_times_s else None

    @property
    def e2e_s(self) -> float | None:
        return self.end_s - self.sent_s if self.is_ok else None

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of fewer than two tokens."""
        if self.ttft_s is None or self.e2e_s is None or (self.completion_tokens or 0) < 2:
            return None
        assert self.completion_tokens is not None
        return (self.e2e_s - self.ttft_s) / (self.completion_tokens - 1)

    @property
    def itl_s(self) -> tuple[float, ...]:
        if not self.is_ok:
            return ()
        times_s = self.token_times_s
        return tuple(after - before for before, after in pairwise(times_s))


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution of seconds in few numbers."""

    num: int
    mean_s: float
    min_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, values_s: Iterable[float | None]) -> Latency | None:
        """Summarises the values that are not None; None without any."""
        known = np.array([value for value in values_s if value is not None], np.float64)
        if not len(known):
            return None
        low, p50, p90, p95, p99, high = map(float, np.percentile(known, (0, 50, 90, 95, 99, 100)))
        return cls(len(known), float(known.mean()), low, p50, p90, p95, p99, high)


@dataclass(frozen=True, slots=True)
class SLO:
    """Limits that every request should meet; None sets no limit. A request of one token meets any TPOT."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            limit_s = getattr(self, name)
            if limit_s is not None and not limit_s > 0:
                raise RequestError(f"the objective {name} is {limit_s}, it must be above 0 seconds")

    @property
    def is_empty(self) -> bool:
        """Returns whether there is no limit."""
        return self.ttft_s is self.tpot_s is self.e2e_s is None

    def is_met(self, record: ClientRecord) -> bool:
        """Returns whether a request came to its end within all limits."""
        return record.is_ok and self.allows(record.ttft_s, record.tpot_s, record.e2e_s)

    def allows(self, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None) -> bool:
        """Returns whether no time is over its limit. None: there is no such time."""
        pairs = ((ttft_s, self.ttft_s), (tpot_s, self.tpot_s), (e2e_s, self.e2e_s))
        return all(value_s is None or limit_s is None or value_s <= limit_s for value_s, limit_s in pairs)


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run, or several pooled. Rates are per second of duration_s, which ends with the last answer.

    goodput_per_s: requests per second that met the SLO.
    errors: how many of each kind.
    num_waited: requests that were due while the maximum was in flight; they were sent later.
    lateness: how much later than due requests were sent; None in a closed loop.
    """

    num_requests: int
    num_ok: int
    num_waited: int
    duration_s: float
    ttft: Latency | None
    tpot: Latency | None
    itl: Latency | None
    e2e: Latency | None
    lateness: Latency | None
    prompt_tokens: int
    completion_tokens: int
    slo_attainment: float
    goodput_per_s: float
    errors: Mapping[str, int]

    @property
    def requests_per_s(self) -> float:
        return self.num_ok / self.duration_s

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.duration_s

    @property
    def is_late(self) -> bool:
        """Whether the sender fell behind the requested traffic, so that the figures do not count."""
        if self.lateness is None:
            return False
        share_s = MAX_LATENESS_OF_TTFT * (self.ttft.p50_s if self.ttft else 0.0)
        return self.lateness.p95_s > max(MAX_LATENESS_S, share_s)


def report_of(runs: Sequence[Sequence[ClientRecord]], slo: SLO, *, is_open_loop: bool = True) -> RunReport:
    """Pools runs, each with times from its own start. Raises ValueError without any request."""
    records = [record for run in runs for record in run]
    if not records:
        raise ValueError("a report needs at least one request")
    duration_s = sum(max(record.end_s for record in run) for run in runs if run) or np.finfo(float).tiny
    good = sum(map(slo.is_met, records))
    ok = [record for record in records if record.is_ok]
    return RunReport(
        num_requests=len(records),
        num_ok=len(ok),
        num_waited=sum(record.waited_for_place for record in records),
        duration_s=float(duration_s),
        ttft=Latency.of(record.ttft_s for record in ok),
        tpot=Latency.of(record.tpot_s for record in ok),
        itl=Latency.of(gap_s for record in ok for gap_s in record.itl_s),
        e2e=Latency.of(record.e2e_s for record in ok),
        lateness=Latency.of(record.lateness_s for record in records) if is_open_loop else None,
        prompt_tokens=sum(record.prompt_tokens or 0 for record in ok),
        completion_tokens=sum(record.completion_tokens or 0 for record in ok),
        slo_attainment=good / len(records),
        goodput_per_s=good / float(duration_s),
        errors=dict(Counter(record.error for record in records if record.error).most_common()),
    )


@dataclass(frozen=True, slots=True)
class Ratio:
    """How one endpoint compares with the baseline in one figure: the median of the rounds' ratios."""

    name: str
    baseline: str
    figure: str
    median: float
    low: float
    high: float
    num_rounds: int


_FIGURES: dict[str, Callable[[RunReport], float | None]] = {
    "TTFT p50": lambda report: report.ttft.p50_s if report.ttft else None,
    "TTFT p99": lambda report: report.ttft.p99_s if report.ttft else None,
    "TPOT p50": lambda report: report.tpot.p50_s if report.tpot else None,
    "TPOT p99": lambda report: report.tpot.p99_s if report.tpot else None,
    "ITL p99": lambda report: report.itl.p99_s if report.itl else None,
    "E2E p50": lambda report: report.e2e.p50_s if report.e2e else None,
    "requests/s": lambda report: report.requests_per_s,
    "goodput/s": lambda report: report.goodput_per_s,
}


def ratios(name: str, baseline: str, rounds: Sequence[tuple[RunReport, RunReport]]) -> list[Ratio]:
    """Returns figures of `name` over those of `baseline`, from (report of name, report of baseline) by round.

    A figure that is missing or zero in a round leaves that round out; one without rounds is left out.
    """
    found = []
    for figure, of in _FIGURES.items():
        pairs = [(of(ours), of(theirs)) for ours, theirs in rounds]
        values = [ours / theirs for ours, theirs in pairs if ours and theirs]
        if values:
            found.append(Ratio(name, baseline, figure, median(values), min(values), max(values), len(values)))
    return found
