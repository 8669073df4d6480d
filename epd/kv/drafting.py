"""Drafts the next tokens, for the model to check in one pass, and decides how many are worth drafting.

Sampling at every drafted position as if nothing had been drafted shows whether a draft holds: drafting
changes when tokens come, never which.
"""

from __future__ import annotations

import numpy as np

from epd.types import Int64Array

# Bits of a token id in the key of an n-gram: three ids fit into one int64. Larger ids would share keys, and
# drafts be wrong more often.
_ID_BITS = 21
MAX_NGRAM = 63 // _ID_BITS
# Factor by which probes are more frequent while next to nothing is known of drafts.
_FIRST_PROBES_FACTOR = 8


class PromptLookup:
    """Drafts that a sequence continues as it did where its last tokens occurred before (Saxena 2023).

        known    ... the red circle moves left ... the red circle | moves left ...
                     [  n-gram    ) [  draft )     [  n-gram    )   the draft

    One object per sequence, which may only grow. Work per call is that for the tokens since the last one.
    """

    def __init__(self, *, min_ngram: int = 2, max_ngram: int = MAX_NGRAM) -> None:
        """Begins with nothing known. min_ngram, max_ngram: tokens that must match; more are better."""
        if not 1 <= min_ngram <= max_ngram <= MAX_NGRAM:
            raise ValueError(f"n-grams need 1 <= min <= max <= {MAX_NGRAM}, got {min_ngram} and {max_ngram}")
        # For each n, from the key of an n-gram to the place of the token after its latest occurrence.
        self._follows: dict[int, dict[int, int]] = {n: {} for n in range(max_ngram, min_ngram - 1, -1)}
        self._num_indexed = 0

    def propose(self, token_ids: Int64Array, max_draft: int) -> list[int]:
        """Returns at most max_draft tokens that may follow token_ids, int64 [T], the whole sequence."""
        if max_draft < 1:
            return []
        self._index(token_ids)
        for n, follows in self._follows.items():
            start = follows.get(_key(token_ids[-n:])) if len(token_ids) >= n else None
            if start is not None:
                return _copied(token_ids, start, max_draft)
        return []

    def _index(self, token_ids: Int64Array) -> None:
        """Indexes the n-grams that are followed by a token: all but the last."""
        first, stop = self._num_indexed, len(token_ids)
        if stop < first:
            raise ValueError(f"a sequence only grows; it had {first} tokens, now {stop}")
        for n, follows in self._follows.items():
            begin = max(first, n)
            if begin < stop:
                keys = _keys(token_ids[begin - n : stop - 1], n)
                follows.update(zip(keys.tolist(), range(begin, stop), strict=True))
        self._num_indexed = stop


def _keys(token_ids: Int64Array, n: int) -> Int64Array:
    """Returns the keys of all n-grams of token_ids, in order: int64 [T - n + 1]."""
    num = len(token_ids) - n + 1
    keys = token_ids[:num]
    for i in range(1, n):
        keys = (keys << _ID_BITS) | token_ids[i : i + num]
    return keys


def _key(ngram: Int64Array) -> int:
    return int(_keys(ngram, len(ngram))[0])


def _copied(token_ids: Int64Array, start: int, count: int) -> list[int]:
    """Returns the tokens from start on; past the end the copy continues with itself, so a loop stays one."""
    copied: list[int] = token_ids[start : start + count].tolist()
    period = len(copied)
    return [copied[i % period] for i in range(count)]


class _StepCost:
    """Fits seconds of a step by the tokens scheduled in it: a straight line through the recent steps."""

    def __init__(self, memory: float) -> None:
        """Begins without steps. memory: how much a step still counts one step later, below 1."""
        self._memory = memory
        self._moments = np.zeros(5)  # of 1, n, n * n, s, n * s

    def record(self, num_tokens: int, seconds: float) -> None:
        new = (1.0, num_tokens, num_tokens**2, seconds, num_tokens * seconds)
        self._moments = self._moments * self._memory + new

    def line(self) -> tuple[float, float] | None:
        """Returns seconds per step and per token; None while all steps had as many tokens."""
        weight, n, nn, s, ns = self._moments.tolist()
        spread = weight * nn - n * n
        if spread <= 1e-9 * weight * nn:
            return None
        per_token = max((weight * ns - n * s) / spread, 0.0)
        return max((s - per_token * n) / weight, 0.0), per_token


class DraftGain:
    """Decides how many tokens to draft per sequence for most tokens per second; 0 if drafting does not pay.

    It learns how often the first, second, ... token of a draft holds, and how long steps take. Occasionally
    it requests full drafts against its estimate, since an estimate that is never tested cannot change.
    """

    def __init__(
        self,
        max_draft: int = 8,
        *,
        probe_interval: int = 64,
        num_first_drafts: int = 8,
        min_gain: float = 1.05,
        memory: float = 0.995,
    ) -> None:
        """Begins with nothing known.

        probe_interval: steps between probes; an eighth of it until num_first_drafts drafts have been seen.
        min_gain: drafting must promise this many times the tokens per second.
        memory: how much a step or a draft still counts one later, below 1.
        """
        self.max_draft = max_draft
        self._probe_interval = probe_interval
        self._num_first_drafts = num_first_drafts
        self._min_gain = min_gain
        self._memory = memory
        self._cost = _StepCost(memory)
        # By position in a draft: how many drafts reached it, and in how many all held up to it.
        self._tried, self._held = np.zeros(max_draft), np.zeros(max_draft)
        self._num_drafts = 0
        self._steps_since_probe = 0

    def num_drafts(self, num_sequences: int) -> int:
        """Returns how many tokens to draft for each of `num_sequences` sequences in the next step."""
        self._steps_since_probe += 1
        few = self._num_drafts < self._num_first_drafts
        if self._steps_since_probe * (_FIRST_PROBES_FACTOR if few else 1) >= self._probe_interval:
            return self.max_draft
        return 0 if few else self._best(num_sequences)

    def _best(self, num_sequences: int) -> int:
        line = self._cost.line()
        if line is None:
            return 0
        num_tokens = 1 + np.concatenate([[0.0], np.cumsum(self._held / np.maximum(self._tried, 1e-9))])
        seconds = line[0] + line[1] * num_sequences * np.arange(1, self.max_draft + 2)
        rates = num_tokens / np.maximum(seconds, 1e-12)
        best = int(rates.argmax())
        return best if rates[best] >= self._min_gain * rates[0] else 0

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Learns from a step that only decoded: `num_tokens`, drafted ones included, took `seconds`."""
        self._cost.record(num_tokens, seconds)

    def record_draft(self, num_drafted: int, num_accepted: int) -> None:
        """Learns that of a draft of num_drafted tokens the first num_accepted held."""
        if not 0 <= num_accepted <= num_drafted <= self.max_draft:
            raise ValueError(
                f"of {num_drafted} tokens {num_accepted} cannot have held, {self.max_draft} at most"
            )
        if num_drafted == self.max_draft:
            self._steps_since_probe = 0
        self._num_drafts += 1
        self._tried[:num_drafted] = self._tried[:num_drafted] * self._memory + 1
        self._held[:num_drafted] *= self._memory
        self._held[:num_accepted] += 1
