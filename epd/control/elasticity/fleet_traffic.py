"""Adds up the traffic of a front, so that another front's estimate counts it. Totals only grow.

Any two totals give the requests between them, however many reports in between were never seen:

    front a   totals 3, 5, 9    leader saw 3 and 9: six requests, of the mean size of the six
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from epd.control.elasticity.cluster import RequestWork
from epd.control.elasticity.estimator import TrafficEstimator

# Of one front between two looks; a look a second never sees as many.
_MAX_REQUESTS = 10_000


@dataclass(frozen=True, slots=True)
class TrafficTotals:
    """The traffic of one front since its start.

    num_with_media: requests that have patches
    expected_tokens: of their answers, or max_tokens where that is not known
    num_finished: answers that have ended
    num_waiting: requests that no worker has taken, now
    """

    num_requests: int = 0
    num_with_media: int = 0
    num_patches: int = 0
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    expected_tokens: int = 0
    num_finished: int = 0
    num_waiting: int = 0

    def plus(self, work: RequestWork) -> TrafficTotals:
        """Returns the totals after one more request."""
        return replace(
            self,
            num_requests=self.num_requests + 1,
            num_with_media=self.num_with_media + bool(work.num_patches),
            num_patches=self.num_patches + work.num_patches,
            num_prompt_tokens=self.num_prompt_tokens + work.num_prompt_tokens,
            max_tokens=self.max_tokens + work.max_tokens,
            expected_tokens=self.expected_tokens + (work.expected_tokens or work.max_tokens),
        )

    def since(self, before: TrafficTotals) -> list[RequestWork]:
        """Returns as many requests as came in between, which together have the same work."""
        num = min(self.num_requests - before.num_requests, _MAX_REQUESTS)
        if num <= 0:
            return []
        num_media = min(self.num_with_media - before.num_with_media, num)
        patches = [*_parts(self.num_patches - before.num_patches, num_media), *[0] * (num - num_media)]
        prompts = _parts(self.num_prompt_tokens - before.num_prompt_tokens, num)
        longest = _parts(self.max_tokens - before.max_tokens, num)
        expected = _parts(self.expected_tokens - before.expected_tokens, num)
        return [
            RequestWork(each, max(1, prompt), max(1, most), max(1, tokens))
            for each, prompt, most, tokens in zip(patches, prompts, longest, expected, strict=True)
        ]


class OtherFronts:
    """Adds the traffic of other fronts to an estimate."""

    def __init__(self, estimator: TrafficEstimator) -> None:
        self._estimator = estimator
        self._seen: Mapping[str, TrafficTotals] = {}

    @property
    def num_waiting(self) -> int:
        """Returns the requests in the queues of the other fronts."""
        return sum(totals.num_waiting for totals in self._seen.values())

    def follow(self, now_s: float, fronts: Mapping[str, TrafficTotals]) -> None:
        """Counts what came since the last call. fronts: the others that are there, by id.

        What a front had before it was first seen does not count: it may be long ago.
        """
        for front, totals in fronts.items():
            before = self._seen.get(front, totals)
            for work in totals.since(before):
                self._estimator.arrived(now_s, work)
            for _ in range(min(totals.num_finished - before.num_finished, _MAX_REQUESTS)):
                self._estimator.finished(now_s)
        self._seen = dict(fronts)


def _parts(total: int, num: int) -> Iterator[int]:
    """Yields that many numbers, as equal as can be, whose sum is the total."""
    return (total * (index + 1) // num - total * index // num for index in range(num))
