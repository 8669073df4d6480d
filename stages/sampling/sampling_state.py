"""Tracks what a sequence's next token depends on besides its logits.

A word that an answer may not contain is a sequence of tokens, as the tokenizer writes it at the beginning of
a text and behind a space. Its last token may not come where the others have come before it, in the answer or
among the drafted tokens:

    word     [41, 7, 9]
    answer   ... 41  7 | 9 is ruled out        ... 41  8 | nothing is
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from epd.sampling_params import SamplingParams
from epd.types import Int64Array

_MAX_KEPT = 64
_SPARE_SLOTS = 64
# Stands for a drafted token that the host does not know yet.
UNREAD = -1


class BadWords:
    """Holds words. num_before: tokens of the answer that decide what may follow, at most."""

    __slots__ = ("_after", "_alone", "num_before")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """Takes words: token ids, at least one of each."""
        known = {tuple(word) for word in words}
        self._alone = frozenset(word[0] for word in known if len(word) == 1)
        self._after: dict[int, list[tuple[int, ...]]] = {}
        for word in sorted(known):
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(word)
        self.num_before = max(map(len, known), default=1) - 1

    def completing(self, before: Sequence[int]) -> frozenset[int]:
        """Returns the tokens that would complete a word. before: the last `num_before` tokens, or all."""
        words = self._after.get(before[-1], ()) if before else ()
        found = [word[-1] for word in words if tuple(before[1 - len(word) :]) == word[:-1]]
        return self._alone.union(found) if found else self._alone


def with_bad_tokens(
    params: SamplingParams, tokenizer: Any, suppressed_ids: tuple[int, ...] = ()
) -> SamplingParams:
    """Returns params with the tokens of their bad words. tokenizer: of transformers, lent to the caller.

    Spaces before a word make no difference. suppressed_ids: tokens that are such words beside these.
    """
    alone = tuple((token_id,) for token_id in suppressed_ids)
    if not params.bad_words:
        return replace(params, bad_token_ids=alone) if alone else params
    texts = [space + word.lstrip() for word in params.bad_words for space in ("", " ")]
    token_ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return replace(params, bad_token_ids=(*alone, *(tuple(word) for word in token_ids if word)))


@lru_cache(maxsize=_MAX_KEPT)
def bad_words_of(token_ids: tuple[tuple[int, ...], ...]) -> BadWords | None:
    """Returns the words of a request, kept for its other answers; None without any."""
    return BadWords(token_ids) if token_ids else None


class TokenCounts:
    """Counts the tokens that a sequence holds, and how often each came in the answer, which may be never."""

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self, prompt_ids: Int64Array) -> None:
        """Takes prompt_ids: int64 [T], repeated as they may be."""
        known = np.unique(prompt_ids)
        self._slots = {token_id: slot for slot, token_id in enumerate(known.tolist())}
        self._ids = np.concatenate([known, np.empty(_SPARE_SLOTS, np.int64)])
        self._counts = np.zeros(len(self._ids), np.int64)

    @property
    def ids(self) -> Int64Array:
        """Returns int64 [K], each once, in the order in which they became known."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Int64Array:
        """Returns int64 [K], how often each of `ids` came in the answer."""
        return self._counts[: len(self._slots)]

    def append(self, token_id: int) -> None:
        """Adds a token of the answer."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += 1

    def extended(self, token_ids: Iterable[int]) -> TokenCounts:
        """Returns a copy with more tokens of the answer."""
        copy = TokenCounts.__new__(TokenCounts)
        copy._slots = dict(self._slots)
        copy._ids, copy._counts = self._ids.copy(), self._counts.copy()
        for token_id in token_ids:
            copy.append(token_id)
        return copy


class Matcher(Protocol):
    """Knows which tokens may follow: see `epd.stages.grammar.matcher.TokenMatcher`."""

    def append(self, token_id: int, /) -> None: ...

    def only_token(self, drafted: Sequence[int], /) -> int | None: ...

    def mask(self, drafted: Sequence[int], /) -> bytes: ...


class SamplingState:
    """Holds one sequence's state for the sampler: its options, its seed, and its tokens with their number.

    is_changed: scores are changed before a token is chosen, or its probability is reported.
    is_plain: the most likely token is taken as it is, and nothing is reported about the others.
    is_foreseeable: the token after the next one can be chosen on a device before the host has read the next.
    ending_ids: tokens that may not come before `min_tokens`.
    matcher: knows which tokens may follow; None where any may.
    bad_words: that the answer may not contain; None without any.
    """

    __slots__ = (
        "_counts", "_last_ids", "bad_words", "ending_ids", "is_changed", "is_foreseeable", "is_plain",
        "matcher", "num_generated", "params", "seed",
    )  # fmt: skip

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_ids: Int64Array,
        output_ids: Iterable[int] = (),
        *,
        ending_ids: frozenset[int] = frozenset(),
        matcher: Matcher | None = None,
        bad_words: BadWords | None = None,
    ) -> None:
        """Creates a state. seed: as resolved for this sequence, whatever params say. prompt_ids: int64 [T].

        output_ids: what has been generated before. ending_ids: all that end the answer.
        """
        self.params = params
        self.seed = seed
        self.matcher = matcher
        self.num_generated = 0
        self.ending_ids = ending_ids if params.min_tokens else frozenset()
        has_rules = matcher is not None or bad_words is not None or bool(self.ending_ids)
        is_scored = params.has_penalties or bool(params.logit_bias) or params.logprobs is not None
        self.is_changed = has_rules or is_scored
        self.is_plain = params.is_greedy and not self.is_changed
        repeats_alone = not (params.presence_penalty or params.frequency_penalty)
        has_words = bad_words is not None and bad_words.num_before > 0
        self.is_foreseeable = matcher is None and not has_words and repeats_alone
        seen = prompt_ids if params.repetition_penalty != 1 else prompt_ids[:0]
        self._counts = TokenCounts(seen) if params.has_penalties else None
        self.bad_words = bad_words
        self._last_ids: deque[int] = deque(maxlen=bad_words.num_before if bad_words else 0)
        for token_id in output_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Records the next token of the sequence."""
        self.num_generated += 1
        if not self.is_changed:
            return
        self._last_ids.append(token_id)
        if self.matcher is not None:
            self.matcher.append(token_id)
        if self._counts is not None:
            self._counts.append(token_id)

    def completing_ids(self, drafted: tuple[int, ...]) -> frozenset[int]:
        """Returns the tokens that complete a bad word, as if the drafted ones had been generated."""
        return self.bad_words.completing((*self._last_ids, *drafted)) if self.bad_words else frozenset()

    def counts_with(self, drafted: tuple[int, ...]) -> TokenCounts:
        """Returns the tokens that penalties apply to, as if the drafted ones had been generated."""
        if self._counts is None:
            raise ValueError("tokens are counted only where penalties need it; these params have none")
        known = drafted if UNREAD not in drafted else ()
        return self._counts.extended(known) if known else self._counts


class SamplingRow(NamedTuple):
    """Identifies a row of logits: that of the token after a sequence and the tokens drafted for it."""

    state: SamplingState
    drafted: tuple[int, ...] = ()

    @property
    def draw_index(self) -> int:
        """Counts the generated tokens before the one to choose: with the seed, it identifies the draw."""
        return self.state.num_generated + len(self.drafted)

    @property
    def only_token(self) -> int | None:
        """Returns the token that its grammar leaves it, if that is one and nothing is reported about others.

        Raises RequestError for a grammar that cannot be followed.
        """
        if self.state.matcher is None or self.state.params.logprobs is not None:
            return None
        return self.state.matcher.only_token(self.drafted)

    @property
    def counts(self) -> TokenCounts:
        return self.state.counts_with(self.drafted)

    @property
    def banned_ids(self) -> frozenset[int]:
        """Lists the tokens that would end the answer too early."""
        return self.state.ending_ids if self.draw_index < self.state.params.min_tokens else frozenset()

    @property
    def bad_ids(self) -> frozenset[int]:
        """Lists the tokens that would complete a bad word."""
        return self.state.completing_ids(self.drafted)
