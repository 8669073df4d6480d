"""Decides for each request who drafts and how many tokens, by measured gain; nobody where it does not pay.

    tokens of a pass    1 + p + p^2 + ... + p^n     p: how often a drafted token holds, by request and source
    its seconds         cost of a pass of so many sequences with n drafts each, fitted to those before

Sources whose drafts are not used are compared with what was sampled, one token in some passes, which makes
no pass longer. So a request begins to draft only when its own text, or that of others before it, promises a
gain, and stops when measured passes show none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from epd.kv.draft_sources import DraftSource
from epd.types import Int64Array

# Gains at which a request begins and stops to draft.
_BEGIN_GAIN = 1.10
_STOP_GAIN = 1.02
# Own passes between two decisions, and between two comparisons of a source that is not used.
_DECISION_PASSES = 8
_COMPARED_PASSES = 2
# Drafts that what other requests have shown counts for.
_PRIOR_DRAFTS = 4.0
# Passes with drafts after which their cost counts as measured, and until then how often drafts must hold.
_NUM_TRIALS = 8
_TRIAL_RATE = 0.5
# Passes without drafts after which their cost is measured anew: what was slow once may not be slow for ever.
_REMEASURE_PASSES = 1024
# How much a pass, and a draft of a request or of all, still counts one later.
_COST_MEMORY = 0.99
_OWN_MEMORY, _SHARED_MEMORY = 0.95, 0.998


class PassCost:
    """Fits seconds of a pass that only decodes: a + b S + c [D > 0] + d D, S sequences, D drafted tokens."""

    def __init__(self) -> None:
        """Begins without passes."""
        self._products, self._sums = np.zeros((4, 4)), np.zeros(4)
        self._line: list[float] | None = None
        self._num_drafted = self._num_plain = 0  # passes since the last trials began

    def record(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        """Learns from one pass."""
        row = np.array([1.0, num_sequences, num_drafted > 0, num_drafted])
        self._products = self._products * _COST_MEMORY + row[:, None] * row
        self._sums = self._sums * _COST_MEMORY + row * seconds
        self._line = None
        self._num_drafted += num_drafted > 0
        self._num_plain = 0 if num_drafted else self._num_plain + 1
        if self._num_plain == _REMEASURE_PASSES:
            self._num_drafted = self._num_plain = 0

    def seconds(self, num_sequences: int, num_drafted: int) -> float:
        """Predicts a pass. num_drafted: of all sequences together."""
        if self._line is None:
            # The least solution: passes that were all alike divide their cost among the terms.
            self._line = (np.linalg.pinv(self._products, rcond=1e-9, hermitian=True) @ self._sums).tolist()
        a, b, c, d = self._line
        plain = max(a + b * num_sequences, 1e-9)
        return plain + max(c + d * num_drafted, 0.0) if num_drafted else plain

    @property
    def is_measured(self) -> bool:
        """Returns whether enough passes with drafts were among them lately."""
        return self._num_drafted >= _NUM_TRIALS


@dataclass(slots=True)
class HoldRate:
    """Measures how often a drafted token holds after those before it did. memory: of a token, one later."""

    memory: float
    tried: float = 0.0
    held: float = 0.0

    def record(self, num_drafted: int, num_held: int) -> None:
        """Learns that of a draft the first num_held tokens held; the one after them, if any, did not."""
        for index in range(min(num_held + 1, num_drafted)):
            self.tried = self.tried * self.memory + 1
            self.held = self.held * self.memory + (index < num_held)

    @property
    def rate(self) -> float:
        """Returns the rate; 0 before any draft."""
        return self.held / self.tried if self.tried else 0.0


@dataclass(slots=True)
class DraftStatistics:
    """Holds what all requests of an engine have shown. rates: of each source, by name."""

    max_draft: int
    cost: PassCost = field(default_factory=PassCost)
    rates: dict[str, HoldRate] = field(default_factory=dict)

    def shared_rate(self, name: str) -> HoldRate:
        """Returns how often tokens of a source hold, of all requests."""
        return self.rates.setdefault(name, HoldRate(_SHARED_MEMORY, tried=_PRIOR_DRAFTS))

    def first_rate(self, name: str) -> HoldRate:
        """Returns what a new request begins with: the rate of all, as if seen in a few drafts."""
        rate = self.shared_rate(name).rate
        return HoldRate(_OWN_MEMORY, _PRIOR_DRAFTS, rate * _PRIOR_DRAFTS)

    def best_length(self, rate: float, num_sequences: int) -> tuple[int, float]:
        """Returns how many tokens to draft where they hold at this rate, and the gain in tokens/s."""
        if not self.cost.is_measured:
            return (self.max_draft, 2.0) if rate >= _TRIAL_RATE else (0, 1.0)
        plain_s, num_tokens, power = self.cost.seconds(num_sequences, 0), 1.0, 1.0
        best = (0, 1.0)
        for length in range(1, self.max_draft + 1):
            power *= rate
            num_tokens += power
            gain = num_tokens * plain_s / self.cost.seconds(num_sequences, length * num_sequences)
            best = max(best, (length, gain), key=lambda each: each[1])
        return best


class ChosenDrafts:
    """Drafts for one request from whichever source pays most at present, or from none."""

    def __init__(self, sources: Mapping[str, DraftSource], statistics: DraftStatistics) -> None:
        """Takes sources by name, those of this request. statistics: shared by all requests."""
        self._sources = sources
        self._statistics = statistics
        self._own = {name: statistics.first_rate(name) for name in sources}
        self._lengths: list[tuple[str, int]] = []  # of the sources that pay, the best first
        self._num_passes = 0
        self._drafting = ""  # whose draft is being checked
        self._compared: dict[str, int] = {}  # the next token by sources that are not

    def propose(self, token_ids: Int64Array, room: int, num_sequences: int) -> list[int]:
        """Returns tokens that may follow token_ids, int64 [T]: the whole sequence; none if that pays most."""
        if self._num_passes % _DECISION_PASSES == 0:
            self._lengths = self._decide(num_sequences)
        self._num_passes += 1
        self._drafting, drafts = "", list[int]()
        for name, length in self._lengths:
            drafts = self._sources[name].propose(token_ids, min(length, room))
            if drafts:
                self._drafting = name
                break
        self._compared = {}
        if self._num_passes % _COMPARED_PASSES == 0:
            self._compare(token_ids)
        return drafts

    def _compare(self, token_ids: Int64Array) -> None:
        for name, source in self._sources.items():
            if name != self._drafting and (guess := source.propose(token_ids, 1)):
                self._compared[name] = guess[0]

    def _decide(self, num_sequences: int) -> list[tuple[str, int]]:
        least = _STOP_GAIN if self._lengths else _BEGIN_GAIN
        found = []
        for name, own in self._own.items():
            length, gain = self._statistics.best_length(own.rate, num_sequences)
            if gain >= least:
                found.append((gain, name, length))
        return [(name, length) for _, name, length in sorted(found, reverse=True)]

    def learn(
        self,
        token_ids: Int64Array,
        drafts: Sequence[int],
        sampled: Sequence[int],
        num_held: int | None = None,
    ) -> None:
        """Learns from a pass: what was sampled after token_ids, and after each draft as if it had held."""
        if drafts and self._drafting:
            pairs = zip(drafts, sampled, strict=False)
            if num_held is None:
                num_held = next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
            self._record(self._drafting, len(drafts), num_held)
        for name, guess in self._compared.items():
            self._record(name, 1, int(guess == sampled[0]))
        for source in self._sources.values():
            source.learn(token_ids, drafts, sampled)

    def _record(self, name: str, num_drafted: int, num_held: int) -> None:
        self._own[name].record(num_drafted, num_held)
        self._statistics.shared_rate(name).record(num_drafted, num_held)
