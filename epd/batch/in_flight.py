"""Says how many media and lines a batch asks about at once, and in which order.

The number follows the workers that answer. The order keeps decoding, encoding and the language model busy.
Three stages, one after the other, are a flow shop: media whose questions take longer than their decoding go
first and fill the last stage early; those that take longest to decode come when the last stage has enough to
do; the ones with the least left for the last stage end the run.

One medium that takes long by itself would end alone if it began late, so orders that begin with the longest
are looked at too, and the one that ends first is taken.

Sources: Johnson, 1954, optimal for two stages. Campbell, Dudek and Smith, 1970: three stages seen as two, in
the two possible ways; the better one is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import Self

from epd.batch.line_index import LineGroup
from epd.client.endpoint import Endpoint, get
from epd.errors import EPDError

# Media of a server or worker at once, where the lines of each are many.
MAX_TASKS = 4
# Lines of a server or worker: at least, and those that fill the passes of an engine, 64 by default.
MAX_REQUESTS, FULL_REQUESTS = 16, 64
# In one process some more: planned, with their images decoded, they take the places of those that end.
# A server refuses those that wait too long, and has other users.
OWN_REQUESTS = FULL_REQUESTS + 16
# That wait at a server. It refuses more.
_MAX_WAITING = 256
# Media that are ordered together.
_CHUNK = 512


def num_workers(endpoint: Endpoint) -> int:
    """Returns how many workers of a server prefill: 1 where it does not say, or does not answer."""
    try:
        workers = get(endpoint, "/v1/epd/status", "ask again").json()["workers"]
        return max(1, sum("p" in each["roles"] for each in workers))
    except (EPDError, ValueError, LookupError, TypeError):
        return 1


def lines_at_once(num_workers: int) -> int:
    """Returns how many lines each of a server's workers is asked at once, fewer of many workers."""
    return max(MAX_REQUESTS, min(FULL_REQUESTS, _MAX_WAITING // num_workers))


def media_at_once(num_lines: int, lines_per_medium: float) -> int:
    """Returns how many media keep so many lines in flight. Some, since their first lines go alone."""
    return max(MAX_TASKS, math.ceil(num_lines / lines_per_medium))


@dataclass(frozen=True, slots=True)
class InFlight:
    """Says how many media and lines are asked about at once, at all servers.

    num_workers: of each server, where places follow them.
    media_of_worker, lines_of_worker: for each worker that joins a server.
    """

    media: int
    lines: int
    num_workers: tuple[int, ...] = ()
    media_of_worker: int = 0
    lines_of_worker: int = 0

    @classmethod
    def at(cls, endpoints: Sequence[Endpoint], lines_per_medium: float, media: int | None) -> Self:
        """Looks at the workers of servers. lines_per_medium: mean of the input.

        media: instead, which then stays.
        """
        workers = tuple(map(num_workers, endpoints))
        num_lines = lines_at_once(math.ceil(sum(workers) / len(endpoints)))
        lines = num_lines * sum(workers)
        if media is not None:
            return cls(media, max(media, lines))
        of_worker = media_at_once(num_lines, lines_per_medium)
        return cls(of_worker * sum(workers), lines, workers, of_worker, num_lines)


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Estimates the seconds of one group at each stage."""

    decode_s: float
    encode_s: float
    language_s: float

    @property
    def total_s(self) -> float:
        return self.decode_s + self.encode_s + self.language_s


def busy_order(jobs: Sequence[StageSeconds], max_tasks: int | None = None) -> list[int]:
    """Returns indices of the jobs in a good order; the given order if no other is better.

    max_tasks: jobs that are worked on at once; None for any number
    """
    orders = [
        list(range(len(jobs))),
        johnson_order([(job.decode_s, job.language_s) for job in jobs]),
        johnson_order([(job.decode_s + job.encode_s, job.encode_s + job.language_s) for job in jobs]),
    ]
    orders += [_longest_first(jobs, order) for order in orders if jobs]

    def ends_s(order: Sequence[int]) -> float:
        ordered = [jobs[place] for place in order]
        return makespan_s(ordered) if max_tasks is None else bounded_makespan_s(ordered, max_tasks)

    return min(orders, key=ends_s)


def _longest_first(jobs: Sequence[StageSeconds], order: Sequence[int]) -> list[int]:
    longest = max(order, key=lambda place: jobs[place].total_s)
    return [longest, *(place for place in order if place != longest)]


def johnson_order(jobs: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the order of jobs (first stage, second stage) that ends earliest."""
    first = [place for place, (a, b) in enumerate(jobs) if a < b]
    last = [place for place, (a, b) in enumerate(jobs) if a >= b]
    return sorted(first, key=lambda place: jobs[place][0]) + sorted(last, key=lambda place: -jobs[place][1])


def makespan_s(jobs: Iterable[StageSeconds]) -> float:
    """Returns when the last of the jobs leaves the last stage, each stage doing one at a time."""
    decoded_s = encoded_s = answered_s = 0.0
    for job in jobs:
        decoded_s += job.decode_s
        encoded_s = max(encoded_s, decoded_s) + job.encode_s
        answered_s = max(answered_s, encoded_s) + job.language_s
    return answered_s


def bounded_makespan_s(jobs: Iterable[StageSeconds], max_tasks: int) -> float:
    """Returns the same where `max_tasks` jobs are worked on at once, and decoded beside each other.

    The other stages take the job that is ready first.
    """
    waiting, ready = iter(jobs), list[tuple[float, int, int, StageSeconds]]()
    free_s, end_s = [0.0, 0.0], 0.0
    for place, job in enumerate(islice(waiting, max_tasks)):
        heappush(ready, (job.decode_s, place, 0, job))
    place = max_tasks
    while ready:
        now_s, number, stage, job = heappop(ready)
        if stage < len(free_s):
            free_s[stage] = max(free_s[stage], now_s) + (job.language_s if stage else job.encode_s)
            heappush(ready, (free_s[stage], number, stage + 1, job))
            continue
        end_s = now_s
        if (following := next(waiting, None)) is not None:
            heappush(ready, (now_s + following.decode_s, place, 0, following))
            place += 1
    return end_s


class CostModel:
    """Predicts seconds by size and number of questions, from finished work."""

    def __init__(self) -> None:
        # Used until a measurement exists: shapes-vl on two cores, 640x360 H.264.
        self._decode_s_per_byte = self._encode_s_per_byte = 2e-7
        self._language_s_per_line = 1e-2

    def learn(self, busy_s: Mapping[str, float], num_bytes: float, num_lines: int) -> None:
        """Learns from the stages' busy_s (decode, encode, language) for `num_bytes` and `num_lines`."""
        if num_bytes > 0:
            self._decode_s_per_byte = busy_s.get("decode", 0.0) / num_bytes
            self._encode_s_per_byte = busy_s.get("encode", 0.0) / num_bytes
        if num_lines > 0:
            self._language_s_per_line = busy_s.get("language", 0.0) / num_lines

    def estimate(self, group: LineGroup) -> StageSeconds:
        return StageSeconds(
            group.num_bytes * self._decode_s_per_byte,
            group.num_bytes * self._encode_s_per_byte,
            group.num_lines * self._language_s_per_line,
        )

    def work_s(self, num_bytes: float, num_lines: int) -> float:
        """Predicts the seconds of all stages for lines and the bytes of their media."""
        per_byte_s = self._decode_s_per_byte + self._encode_s_per_byte
        return num_bytes * per_byte_s + num_lines * self._language_s_per_line


def in_busy_order(
    groups: Iterator[LineGroup], costs: CostModel, chunk: int = _CHUNK, max_tasks: int | None = None
) -> Iterator[LineGroup]:
    """Yields the groups in a good order, some hundred at a time, by the costs known at that time."""
    while window := list(islice(groups, chunk)):
        jobs = [costs.estimate(group) for group in window]
        yield from (window[place] for place in busy_order(jobs, max_tasks))
