"""Measures the traffic of a cluster: arrival rate, work of the mean request and answer lengths."""

from __future__ import annotations

from epd.control.arrivals import RequestWork
from epd.control.decayed_mean import DecayedMean
from epd.control.elasticity.trend import RateTrend

# Answers are longer than the gaps between requests; their lengths are remembered longer by this factor.
_ANSWER_MEMORY = 3.0


class Traffic:
    """Counts every request and every end of an answer; `look` ends an interval."""

    def __init__(self, memory_s: float) -> None:
        """memory_s is the time after which data has lost most of its weight."""
        self.trend = RateTrend(memory_s)
        self.num_arrived = 0
        self._patches, self._prompt_tokens = DecayedMean(memory_s), DecayedMean(memory_s)
        self._media, self._max_tokens = DecayedMean(memory_s), DecayedMean(memory_s)
        self._expected_tokens = DecayedMean(memory_s)
        self._answers = DecayedMean(_ANSWER_MEMORY * memory_s)
        self._num_new = self._num_finished = 0
        self._looked_s: float | None = None
        self._arrived_s: float | None = None

    def arrived(self, now_s: float, work: RequestWork) -> None:
        self.num_arrived += 1
        self._num_new += 1
        if self._looked_s is None:
            self._looked_s = now_s
        elapsed_s = 0.0 if self._arrived_s is None else max(0.0, now_s - self._arrived_s)
        self._arrived_s = now_s
        self._media.add(bool(work.num_patches), 1, elapsed_s)
        self._patches.add(work.num_patches, bool(work.num_patches), elapsed_s)
        self._prompt_tokens.add(work.num_prompt_tokens, 1, elapsed_s)
        self._max_tokens.add(work.max_tokens, 1, elapsed_s)
        self._expected_tokens.add(work.expected_tokens or work.max_tokens, 1, elapsed_s)

    def finished(self) -> None:
        self._num_finished += 1

    def look(self, now_s: float, num_output_tokens: float) -> float:
        """Ends an interval in which that number of tokens was decoded and returns its length in seconds."""
        elapsed_s = 0.0 if self._looked_s is None else max(0.0, now_s - self._looked_s)
        self._looked_s = now_s
        self.trend.add(self._num_new, elapsed_s)
        self._answers.add(num_output_tokens, self._num_finished, elapsed_s)
        self._num_new = self._num_finished = 0
        return elapsed_s

    @property
    def media_share(self) -> float:
        """Returns the share of requests that bring media."""
        return self._media.value or 0.0

    @property
    def patches(self) -> float:
        """Returns the mean patches of a request that has media; 0 before the first."""
        return self._patches.value or 0.0

    @property
    def prompt_tokens(self) -> float:
        """Returns the mean prompt tokens of a request; 0 before the first."""
        return self._prompt_tokens.value or 0.0

    @property
    def output_tokens(self) -> float:
        """Returns the tokens that an answer still has to produce, however many it has.

        Answers are assumed to end at random: all generated tokens, unfinished answers included, are divided
        by the number that ended; at most the requests' limit. Before the first ends, their estimate counts.
        """
        learned = self._answers.value
        if learned is None:
            return max(1.0, self._expected_tokens.value or 1.0)
        return max(1.0, min(self._max_tokens.value or 1.0, learned))
