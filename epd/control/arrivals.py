"""Counts the requests that come to a front and keeps the latest of all fronts. Totals only grow.

Any two totals of a front give the requests between them, however many reports in between were never seen:

    front a   totals 3, 5, 9    another front saw 3 and 9: six requests, of the mean size of the six
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

_MAX_RECENT = 10_000
# Of one front between two looks; a look a second never sees as many.
_MAX_REQUESTS = 10_000
_PUBLISH_S = 1.0  # between totals that other fronts are sent


@dataclass(frozen=True, slots=True)
class RequestWork:
    """Describes the work of one request at each stage, as planned on its arrival.

    max_tokens: upper bound of its answers' tokens
    expected_tokens: of its answers while their lengths are unknown; None means max_tokens
    """

    num_patches: int
    num_prompt_tokens: int
    max_tokens: int
    expected_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.num_patches < 0 or self.num_prompt_tokens < 1 or self.max_tokens < 1:
            raise ValueError(f"a request has a prompt and an answer of at least 1 token, got {self}")


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


class Arrivals:
    """Keeps the latest requests of all fronts, and the totals of this one.

    num_arrived, num_finished: requests and ended answers of all fronts, as far as known here
    """

    def __init__(self, window_s: float = 600.0) -> None:
        """Starts without requests. window_s: of the arrivals that `recent` returns."""
        self.num_arrived = self.num_finished = 0
        self._window_s = window_s
        self._totals = self._published = TrafficTotals()
        self._published_s = float("-inf")
        self._fronts: Mapping[str, TrafficTotals] = {}
        self._recent: deque[tuple[float, RequestWork]] = deque(maxlen=_MAX_RECENT)

    def arrived(self, now_s: float, work: RequestWork) -> None:
        """Counts a request of this front that was not refused."""
        self._totals = self._totals.plus(work)
        self._keep(now_s, work)

    def finished(self) -> None:
        """Counts an answer of this front that has ended, completely or not."""
        self._totals = replace(self._totals, num_finished=self._totals.num_finished + 1)
        self.num_finished += 1

    def recent(self, now_s: float) -> tuple[tuple[float, RequestWork], ...]:
        """Returns arrivals of the last window_s as (time, work), oldest first, the latest 10,000 at most."""
        while self._recent and self._recent[0][0] < now_s - self._window_s:
            self._recent.popleft()
        return tuple(self._recent)

    def newest(self, num: int) -> Sequence[tuple[float, RequestWork]]:
        """Returns the last arrivals, oldest first, as far as they are kept."""
        return list(islice(self._recent, max(0, len(self._recent) - num), None))

    # Other fronts

    def published(self, now_s: float, num_waiting: int) -> TrafficTotals:
        """Returns what other fronts count of this one; it changes once a second at most."""
        if now_s - self._published_s >= _PUBLISH_S:
            self._published_s = now_s
            self._published = replace(self._totals, num_waiting=num_waiting)
        return self._published

    @property
    def num_waiting_elsewhere(self) -> int:
        """Returns the requests in the queues of the other fronts."""
        return sum(totals.num_waiting for totals in self._fronts.values())

    def follow(self, now_s: float, fronts: Mapping[str, TrafficTotals]) -> None:
        """Counts what came since the last call. fronts: the others that are there, by id.

        What a front had before it was first seen does not count: it may be long ago.
        """
        for front, totals in fronts.items():
            before = self._fronts.get(front, totals)
            for work in totals.since(before):
                self._keep(now_s, work)
            self.num_finished += min(totals.num_finished - before.num_finished, _MAX_REQUESTS)
        self._fronts = dict(fronts)

    def _keep(self, now_s: float, work: RequestWork) -> None:
        self.num_arrived += 1
        self._recent.append((now_s, work))


def _parts(total: int, num: int) -> Iterator[int]:
    """Yields that many numbers, as equal as can be, whose sum is the total."""
    return (total * (index + 1) // num - total * index // num for index in range(num))
