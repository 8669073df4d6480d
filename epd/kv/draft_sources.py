"""Proposes the tokens that may come next: by repetition in a sequence, or by what has followed elsewhere.

Whoever proposes, the model checks all proposed tokens in one pass. Sampling at every proposed position as if
nothing had been proposed shows whether a draft holds: drafting changes when tokens come, never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from epd.types import Int64Array

# Bits of a token id in the key of an n-gram: three ids fit into one int64. Larger ids would share keys, and
# drafts be wrong more often.
_ID_BITS = 21
MAX_NGRAM = 63 // _ID_BITS
MIN_NGRAM = 2  # tokens that must match; more are better
# New tokens from which on NumPy indexes them all at once.
_FEW_TOKENS = 16
# Columns of a table of successors.
_NUM_SUCCESSORS = 8
_KNUTH = 2654435761  # spreads the ids of neighbouring tokens over the columns


class DraftSource(Protocol):
    """Proposes drafts for one sequence."""

    def propose(self, token_ids: Int64Array, max_draft: int) -> list[int]:
        """Returns at most max_draft tokens that may follow token_ids, int64 [T], the whole sequence."""
        ...

    def learn(self, token_ids: Int64Array, drafts: Sequence[int], sampled: Sequence[int]) -> None:
        """Learns from a pass: what was sampled after token_ids, and after each draft as if it had held."""
        ...


class PromptLookup:
    """Drafts that a sequence continues as it did where its last tokens occurred before (Saxena 2023).

        known    ... the red circle moves left ... the red circle | moves left ...
                     [  n-gram    ) [  draft )     [  n-gram    )   the draft

    One object per sequence, which may only grow. Work per call is that for the tokens since the last one.
    """

    def __init__(self) -> None:
        """Begins with nothing known."""
        # For each n, from the key of an n-gram to the place of the token after its latest occurrence.
        self._follows: dict[int, dict[int, int]] = {n: {} for n in range(MAX_NGRAM, MIN_NGRAM - 1, -1)}
        self._num_indexed = 0

    def propose(self, token_ids: Int64Array, max_draft: int) -> list[int]:
        """Returns at most max_draft tokens that may follow token_ids, int64 [T], the whole sequence."""
        if max_draft < 1:
            return []
        self._index(token_ids)
        last = token_ids[-MAX_NGRAM:].tolist()
        for n, follows in self._follows.items():
            start = follows.get(_key(last[-n:])) if len(last) >= n else None
            if start is not None:
                return _copied(token_ids, start, max_draft)
        return []

    def learn(self, token_ids: Int64Array, drafts: Sequence[int], sampled: Sequence[int]) -> None:
        """Learns nothing: the sequence itself has all that is looked up."""

    def _index(self, token_ids: Int64Array) -> None:
        """Indexes the n-grams that are followed by a token: all but the last."""
        first, stop = self._num_indexed, len(token_ids)
        if stop < first:
            raise ValueError(f"a sequence only grows; it had {first} tokens, now {stop}")
        if stop - first <= _FEW_TOKENS:
            self._index_few(token_ids, first, stop)
        else:
            for n, follows in self._follows.items():
                begin = max(first, n)
                if begin < stop:
                    keys = _keys(token_ids[begin - n : stop - 1], n)
                    # Of equal n-grams in a row, as in a run of visual tokens, the last counts.
                    places = np.append(np.flatnonzero(keys[1:] != keys[:-1]), len(keys) - 1)
                    follows.update(zip(keys[places].tolist(), (places + begin).tolist(), strict=True))
        self._num_indexed = stop

    def _index_few(self, token_ids: Int64Array, first: int, stop: int) -> None:
        """Does the same token by token, in a tenth of the time that NumPy takes for one."""
        start = max(0, first - MAX_NGRAM)
        tail = token_ids[start:stop].tolist()
        for place in range(first - start, stop - start):
            for n, follows in self._follows.items():
                if place >= n:
                    follows[_key(tail[place - n : place])] = start + place


def _keys(token_ids: Int64Array, n: int) -> Int64Array:
    """Returns the keys of all n-grams of token_ids, in order: int64 [T - n + 1]."""
    num = len(token_ids) - n + 1
    keys = token_ids[:num]
    for i in range(1, n):
        keys = (keys << _ID_BITS) | token_ids[i : i + num]
    return keys


def _key(ngram: Sequence[int]) -> int:
    key = 0
    for token_id in ngram:
        key = key << _ID_BITS | token_id
    return key


def _copied(token_ids: Int64Array, start: int, count: int) -> list[int]:
    """Returns the tokens from start on; past the end the copy continues with itself, so a loop stays one."""
    copied: list[int] = token_ids[start : start + count].tolist()
    period = len(copied)
    return [copied[i % period] for i in range(count)]


class SuccessorTable:
    """Keeps what followed each token of a vocabulary when last seen: Token Recycling (Luo et al. 2024).

                   any context | after tokens of hash 1, 2, ...
        token 17 |     42      |   42      8     -  ...           int32 [V, K], K = 8

    The paper ranks successors for a tree of drafts. A chain follows one of them, so the columns here hold the
    successor by the token before instead. All requests of an engine share the table, whose size depends on
    the vocabulary alone. It begins empty with the engine, is never reset, and the latest pass counts.
    """

    def __init__(self, num_token_ids: int) -> None:
        """Begins with nothing known. num_token_ids: V."""
        # 1 + the successor; 0 for none.
        self._rows = np.zeros((num_token_ids, _NUM_SUCCESSORS), dtype=np.int32)

    def after(self, before: int, token_id: int) -> int | None:
        """Returns what followed token_id, after `before` if that is known; None if it never came."""
        if not 0 <= token_id < len(self._rows):
            return None
        row = self._rows[token_id]
        return int(row[_column(before)] or row[0]) - 1 if row[0] else None

    def record(self, before: int, token_id: int, successor: int) -> None:
        """Records that `successor` followed token_id, and that `before` stood before it."""
        if 0 <= token_id < len(self._rows):
            self._rows[token_id, 0] = self._rows[token_id, _column(before)] = successor + 1


def _column(before: int) -> int:
    return 1 + (before * _KNUTH >> 16) % (_NUM_SUCCESSORS - 1)


class Recycling:
    """Drafts a chain of successors from a table, which learns from every pass, rejected drafts included."""

    def __init__(self, table: SuccessorTable) -> None:
        self._table = table
        self._num_seen = 0  # tokens of the sequence

    def propose(self, token_ids: Int64Array, max_draft: int) -> list[int]:
        """Returns at most max_draft tokens that may follow token_ids, int64 [T], the whole sequence."""
        self._see(token_ids)
        before, last = _last_two(token_ids)
        drafts: list[int] = []
        while len(drafts) < max_draft and (successor := self._table.after(before, last)) is not None:
            drafts.append(successor)
            before, last = last, successor
        return drafts

    def learn(self, token_ids: Int64Array, drafts: Sequence[int], sampled: Sequence[int]) -> None:
        """Records what was sampled after each token that the pass computed."""
        self._see(token_ids)
        before, last = _last_two(token_ids)
        for index, successor in enumerate(sampled):
            self._table.record(before, last, successor)
            if index < len(drafts):
                before, last = last, drafts[index]

    def _see(self, token_ids: Int64Array) -> None:
        """Records what has come since the last call; of tokens before the first one, nothing."""
        num_new = len(token_ids) - self._num_seen if self._num_seen else 0
        self._num_seen = len(token_ids)
        if num_new:
            ids = [-1, -1, *token_ids[-num_new - 2 :].tolist()]
            for place in range(len(ids) - num_new, len(ids)):
                self._table.record(ids[place - 2], ids[place - 1], ids[place])


def _last_two(token_ids: Int64Array) -> tuple[int, int]:
    """Returns the last two of at least one token; -1 for one that is missing."""
    last = token_ids[-2:].tolist()
    return (last[0], last[1]) if len(last) == 2 else (-1, last[0])
