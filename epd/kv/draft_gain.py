"""Decides for each request who drafts and how many tokens, by measured gain; nobody where it does not pay.

    tokens of a pass    1 + p + p^2 + ... + p^n     p: how often a drafted token holds, by request and source
    its seconds         cost of a pass of so many sequences with n drafts each, fitted to those before

A request wishes to draft where that pays if all do as it does. A pass has drafts if the wishes of all that
are in it pay together, for its first draft costs more than each later one. Sources whose drafts are not
used are compared with what was sampled, one token in some passes, which makes no pass longer. So a request
begins to draft only when its own text, or that of others at the same length, promises a gain, and stops when
measured passes show none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from epd.kv.draft_sources import DraftSource
from epd.types import Int64Array

# Gains at which a request begins and stops to draft, and below which a pass has no drafts.
_BEGIN_GAIN = 1.10
_STOP_GAIN = 1.02
# Own passes with which a request may begin to draft, since an answer of a word or two gains nothing, and with
# which the answer counts as a long one, of which those that ended soon say nothing.
_PHASE_STARTS = (2, 8)
# Own passes between two decisions, and between two comparisons of a source that is not used. Nothing is done
# in the others: with 32 requests in a pass of 10 ms, 10 microseconds for each are 3 % of it.
_DECISION_PASSES = 8
_COMPARED_PASSES = 5
# Drafts that what other requests have shown counts for, and of one that failed before any.
_PRIOR_DRAFTS = 4.0
_FIRST_DRAFT = 1.0
# Passes with drafts after which their cost counts as measured; until then how often drafts must hold, and how
# many are made: of two lengths, so that the first and the later ones are told apart, and few in a pass.
_NUM_TRIALS = 8
_TRIAL_RATE = 0.5
_TRIAL_LENGTHS = (2, 6)
_TRIAL_TOKENS = 16
# Passes without drafts after which their cost is measured anew: what was slow once may not be slow for ever.
_REMEASURE_PASSES = 1024
# Passes after which the cost is fitted again, once there are many and single ones change little; from then on
# a pass that took this much longer than predicted was interrupted, and counts as no longer than that.
_REFIT_PASSES = 16
_MANY_PASSES = 64
_INTERRUPTED = 3.0
# How much a pass, and a draft of a request or of all, still counts one later.
_COST_MEMORY = 0.99
_OWN_MEMORY, _SHARED_MEMORY = 0.95, 0.97


class PassCost:
    """Fits seconds of a pass that only decodes: a + b S + c [D > 0] + d D, S sequences, D drafted tokens."""

    def __init__(self) -> None:
        """Begins without passes."""
        self._products, self._sums = np.zeros((4, 4)), np.zeros(4)
        self._line: list[float] = []
        self._passes: list[tuple[int, int, float]] = []  # that the line is not fitted to yet
        self._num_passes = 0
        self._num_drafted = self._num_plain = 0  # passes since the last trials began

    def record(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        """Learns from one pass."""
        if self._num_passes >= _MANY_PASSES and (self.is_measured or not num_drafted):
            seconds = min(seconds, _INTERRUPTED * self.seconds(num_sequences, num_drafted))
        self._passes.append((num_sequences, num_drafted, seconds))
        self._num_passes += 1
        if len(self._passes) >= _REFIT_PASSES:
            self._fit()
        self._num_drafted += num_drafted > 0
        self._num_plain = 0 if num_drafted else self._num_plain + 1
        if self._num_plain == _REMEASURE_PASSES:
            self._num_drafted = self._num_plain = 0

    def _fit(self) -> None:
        for num_sequences, num_drafted, seconds in self._passes:
            row = np.array([1.0, num_sequences, num_drafted > 0, num_drafted])
            self._products = self._products * _COST_MEMORY + row[:, None] * row
            self._sums = self._sums * _COST_MEMORY + row * seconds
        self._passes = []
        # The least solution: passes that were all alike divide their cost among the terms.
        self._line = (np.linalg.pinv(self._products, rcond=1e-9, hermitian=True) @ self._sums).tolist()

    def seconds(self, num_sequences: int, num_drafted: int) -> float:
        """Predicts a pass. num_drafted: of all sequences together."""
        if not self._line or (self._passes and self._num_passes < _MANY_PASSES):
            self._fit()
        a, b, c, d = self._line
        plain = max(a + b * num_sequences, 1e-9)
        return plain + max(c + d * num_drafted, 0.0) if num_drafted else plain

    @property
    def is_measured(self) -> bool:
        """Returns whether enough passes with drafts were among them lately."""
        return self._num_drafted >= _NUM_TRIALS

    @property
    def trial_length(self) -> int:
        """Returns how many tokens to draft in the next pass that is to be measured."""
        return _TRIAL_LENGTHS[self._num_drafted % len(_TRIAL_LENGTHS)]


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

    def expect(self, other: HoldRate) -> None:
        """Learns what the other has shown, as if it had been seen in a few drafts."""
        num_drafts = min(_PRIOR_DRAFTS, other.tried)
        self.tried += num_drafts
        self.held += num_drafts * other.rate


@dataclass(slots=True)
class DraftStatistics:
    """Holds what all requests of an engine have shown. rates: by source and phase of the answer."""

    max_draft: int
    cost: PassCost = field(default_factory=PassCost)
    rates: dict[tuple[str, int], HoldRate] = field(default_factory=dict)
    _expected: float = 0.0  # tokens that the wishes for the next pass will give
    _num_wished: int = 0  # tokens of those wishes

    def shared_rate(self, name: str, phase: int) -> HoldRate:
        """Returns how often tokens of a source hold, of all requests in this phase of their answers."""
        found = self.rates.get((name, phase))
        if found is None:
            found = self.rates[name, phase] = HoldRate(_SHARED_MEMORY, tried=_FIRST_DRAFT)
        return found

    def best_length(self, rate: float, num_sequences: int) -> tuple[int, float]:
        """Returns how many tokens to draft where they hold at this rate, and the gain in tokens/s."""
        if rate < 1 - 1 / _STOP_GAIN:  # not worth it if drafts were free
            return 0, 1.0
        if not self.cost.is_measured:
            length = min(self.cost.trial_length, self.max_draft)
            return (length, 2.0) if rate >= _TRIAL_RATE else (0, 1.0)
        plain_s, num_tokens, power = self.cost.seconds(num_sequences, 0), 1.0, 1.0
        best = (0, 1.0)
        for length in range(1, self.max_draft + 1):
            power *= rate
            num_tokens += power
            gain = num_tokens * plain_s / self.cost.seconds(num_sequences, length * num_sequences)
            best = max(best, (length, gain), key=lambda each: each[1])
        return best

    @property
    def may_wish(self) -> bool:
        """Returns whether another request may draft in the next pass: a few, until the cost is measured."""
        return self.cost.is_measured or self._num_wished < _TRIAL_TOKENS

    def wish(self, num_drafted: int, rate: float) -> None:
        """Notes a draft for the next pass, whose tokens hold at this rate."""
        self._num_wished += num_drafted
        self._expected += sum(rate**place for place in range(1, num_drafted + 1))

    def pays(self, num_sequences: int) -> bool:
        """Returns whether the wishes since the last call pay in one pass of so many sequences."""
        expected, num_wished = self._expected, self._num_wished
        self._expected, self._num_wished = 0.0, 0
        if not num_wished or not self.cost.is_measured:
            return True
        seconds = self.cost.seconds(num_sequences, num_wished)
        gain = (1 + expected / num_sequences) * self.cost.seconds(num_sequences, 0) / seconds
        return gain >= _STOP_GAIN


class ChosenDrafts:
    """Drafts for one request from whichever source pays most at present, or from none."""

    def __init__(self, sources: Mapping[str, DraftSource], statistics: DraftStatistics) -> None:
        """Takes sources by name, those of this request. statistics: shared by all requests."""
        self._sources = sources
        self._statistics = statistics
        self._own = {name: HoldRate(_OWN_MEMORY) for name in sources}
        self._lengths: list[tuple[str, int]] = []  # of the sources that pay, the best first
        self._num_passes = self._phase = 0
        self._drafting = ""  # who has proposed the draft of this pass
        self._guesses: dict[str, int] = {}  # the next token, by sources that are compared

    def propose(self, token_ids: Int64Array, room: int, num_sequences: int) -> list[int]:
        """Returns tokens that may follow token_ids, int64 [T]: the whole sequence; none if that pays most."""
        number = self._num_passes
        self._num_passes += 1
        if number in _PHASE_STARTS:
            self._begin_phase(_PHASE_STARTS.index(number))
        if number in _PHASE_STARTS or (number and number % _DECISION_PASSES == 0):
            self._lengths = self._decide(num_sequences)
        self._drafting, self._guesses = "", {}
        drafts = self._chosen(token_ids, room) if self._lengths else []
        if number and number % _COMPARED_PASSES == 0:
            self._compare(token_ids)
        return drafts

    def _begin_phase(self, phase: int) -> None:
        self._phase = phase
        for name, own in self._own.items():
            own.expect(self._statistics.shared_rate(name, phase))

    def _chosen(self, token_ids: Int64Array, room: int) -> list[int]:
        """Returns the draft of the first source that pays and has one."""
        if not self._statistics.may_wish:
            return []
        for name, length in self._lengths:
            drafts = self._sources[name].propose(token_ids, min(length, room))
            if drafts:
                self._drafting, self._guesses[name] = name, drafts[0]
                self._statistics.wish(len(drafts), self._own[name].rate)
                return drafts
        return []

    def _compare(self, token_ids: Int64Array) -> None:
        for name, source in self._sources.items():
            if name != self._drafting and (guess := source.propose(token_ids, 1)):
                self._guesses[name] = guess[0]

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
        num_open: int | None = None,
    ) -> None:
        """Learns from a pass; see `AllDrafts`. A draft that the pass was run without is compared, too."""
        for name, guess in self._guesses.items():
            guesses = drafts if drafts and name == self._drafting else [guess]
            pairs = zip(guesses, sampled, strict=False)
            num_right = next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(guesses))
            self._record(name, len(guesses), num_right if num_open is None else min(num_right, num_open))
        if drafts:
            for source in self._sources.values():
                source.learn(token_ids, drafts, sampled)

    def _record(self, name: str, num_drafted: int, num_held: int) -> None:
        self._own[name].record(num_drafted, num_held)
        self._statistics.shared_rate(name, self._phase).record(num_drafted, num_held)
