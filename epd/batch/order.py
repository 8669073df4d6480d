"""Orders media so that decoding, encoding and the language model are all busy.

Three stages, one after the other, are a flow shop: media whose questions take longer than their decoding go
first and fill the last stage early; those that take longest to decode come when the last stage has enough to
do; the ones with the least left for the last stage end the run.

Sources: Johnson, 1954, optimal for two stages. Campbell, Dudek and Smith, 1970: three stages seen as two, in
the two possible ways; the better one is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from epd.batch.line_index import LineGroup

_CHUNK = 512


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Estimates the seconds of one group at each stage."""

    decode_s: float
    encode_s: float
    language_s: float


def busy_order(jobs: Sequence[StageSeconds]) -> list[int]:
    """Returns indices of the jobs in a good order; the given order if no other is better."""
    orders = [
        list(range(len(jobs))),
        johnson_order([(job.decode_s, job.language_s) for job in jobs]),
        johnson_order([(job.decode_s + job.encode_s, job.encode_s + job.language_s) for job in jobs]),
    ]
    return min(orders, key=lambda order: makespan_s([jobs[place] for place in order]))


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


class CostModel:
    """Predicts seconds by size and number of questions, from finished work."""

    def __init__(self) -> None:
        # Used until a measurement exists: shapes-vl on two cores, 640x360 H.264.
        self._decode_s_per_byte = self._encode_s_per_byte = 2e-7
        self._language_s_per_line = 1e-2

    def learn(self, busy_s: Mapping[str, float], num_bytes: int, num_lines: int) -> None:
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


def in_busy_order(groups: Iterator[LineGroup], costs: CostModel, chunk: int = _CHUNK) -> Iterator[LineGroup]:
    """Yields the groups in a good order, some hundred at a time, by the costs known at that time."""
    while window := list(islice(groups, chunk)):
        yield from (window[place] for place in busy_order([costs.estimate(group) for group in window]))
