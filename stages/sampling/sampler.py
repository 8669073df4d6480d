"""Chooses the next token of many sequences at once, each as if it were alone.

The order is that of transformers: repetition penalty, temperature, top_k, top_p, min_p; presence and
frequency penalties come with the first, then what a grammar and bad words rule out. Then one number in
[0, 1), a hash of (seed, index), is looked up in the cumulative distribution:

    weights     |  token 0  | 1 |     token 2      | 3 |     (tokens ruled out have none)
    number                            ^  -> token 2

Weights are integers, so their sums are exact, and no token depends on which rows are computed together.
R rows of logits, D of them drawn, V tokens in the vocabulary, K tokens that can be drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epd.encoders.device import HostCopy, arrays_to_device, rows_of, to_host
from epd.sampling_params import MAX_LOGPROBS, SamplingParams
from epd.stages.sampling.candidates import (
    allowed_tokens,
    candidates,
    draw_numbers,
    draw_starts,
    knobs,
    likeliest,
    look_up,
    ruled_out,
    token_weights,
    uniform,
    with_biases,
    with_changes,
)
from epd.stages.sampling.sampling_state import UNREAD, SamplingRow, SamplingState

__all__ = ["SampledToken", "SamplingRow", "SamplingState", "sample", "token_weights", "uniform"]

# One pass works on this many logits on a CPU: temporaries of this size stay in the caches.
_CPU_CHUNK = 2**18
# Factors beyond this and its inverse are not distinguished: float32 holds no quotients by them.
_MAX_FACTOR = 1e37


class SampledToken(NamedTuple):
    """Holds a chosen token.

    logprob: in nats, before temperature and penalties, where the params ask for it.

    top_logprobs: (token id, logprob) of the most likely tokens, the likeliest first.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Samples one token for each row of logits [R, V], of any float dtype, on any device."""
    if len(logits) != len(rows):
        raise ValueError(f"{len(logits)} rows of logits need as many sampling rows, got {len(rows)}")
    if all(row.state.is_plain for row in rows):
        return [SampledToken(token_id) for token_id in _argmax(logits)]
    only = [row.only_token for row in rows]
    places = [i for i, token_id in enumerate(only) if token_id is None]
    if len(places) == len(rows):
        return _sample_rows(logits, rows)
    chosen = iter(_sample_rows(rows_of(logits, places), [rows[i] for i in places]) if places else ())
    return [next(chosen) if token_id is None else SampledToken(token_id) for token_id in only]


class TokensAhead:
    """Holds the chosen tokens of R rows of which the host has read none. ids: int64 [R], on the device."""

    def __init__(self, choices: Sequence[_Choice]) -> None:
        self._choices = choices
        self.ids = choices[0].ids if len(choices) == 1 else torch.cat([each.ids for each in choices])

    def read(self) -> tuple[list[SampledToken], list[bool]]:
        """Waits for the tokens. Returns them, and which of `ids` were right, as they nearly always are."""
        parts = [choice.read() for choice in self._choices]
        return [each for tokens, _ in parts for each in tokens], [each for _, are in parts for each in are]


class SamplerAhead:
    """Samples as `sample` does one token after each of some states, without a wait.

    is_foreseeable: whether that can be done before the tokens of the pass before are known.
    Where no state changes its scores, all but the numbers to draw with stays from pass to pass.
    """

    def __init__(self, states: Sequence[SamplingState], nums_unread: Sequence[int]) -> None:
        """nums_unread: tokens that a state lacks at first, since they have not been read yet: 0 or 1."""
        self._states, self._nums_unread = states, nums_unread
        self._is_changed = any(state.is_changed for state in states)
        self.is_foreseeable = all(state.is_foreseeable for state in states)
        self._kept: dict[int, list[_Draws]] = {}  # by the first row of those that are chosen at once

    def sample(self, logits: Tensor, before: Tensor | None = None) -> TokensAhead:
        """Samples from logits [R, V]. before: int64 [R], on the device, where some are not read yet."""
        step = _rows_at_once(logits)
        parts = [slice(start, start + step) for start in range(0, len(logits), step)]
        chosen = TokensAhead([self._choose(logits, before, part) for part in parts])
        self._nums_unread = [1] * len(self._states)
        return chosen

    def _choose(self, logits: Tensor, before: Tensor | None, part: slice) -> _Choice:
        states, nums_unread = self._states[part], self._nums_unread[part]
        if self._is_changed:
            nums_unread = nums_unread if before is not None else [0] * len(states)
            pairs = zip(states, nums_unread, strict=True)
            rows = [SamplingRow(state, (UNREAD,) * num_unread) for state, num_unread in pairs]
            return _choose(logits[part], rows, None if before is None else before[part])
        if part.start not in self._kept:
            self._kept[part.start] = [
                _Draws([states[i] for i in kind], kind, [nums_unread[i] for i in kind], logits.device)
                for kind in _kinds([state.params for state in states])
            ]
        return _drawn(logits[part].float(), self._kept[part.start])


class _Draws:
    """Holds what stays from pass to pass of rows that are drawn together: see `_Group`."""

    def __init__(
        self,
        states: Sequence[SamplingState],
        rows: list[int],
        nums_unread: Sequence[int],
        device: torch.device,
    ) -> None:
        self._params = [state.params for state in states]
        self._fixed = arrays_to_device([np.array(rows, np.int64), knobs(self._params)], device)
        self._starts = draw_starts([state.seed for state in states])
        self._indices = np.array([each.num_generated for each in states], np.uint64)
        self._indices += np.array(nums_unread, np.uint64)

    def numbers(self) -> NDArray[np.float64]:
        """Returns what is looked up in the next pass, float64 [D, 1]."""
        self._indices += np.uint64(1)
        return draw_numbers(self._starts, self._indices - np.uint64(1))[:, None]

    def group(self, numbers: Tensor) -> _Group:
        index, values = self._fixed
        return _Group(self._params, index, values, numbers)


def _drawn(scores: Tensor, draws: Sequence[_Draws]) -> _Choice:
    """Chooses from scores [R, V] that nothing changes."""
    numbers = arrays_to_device([each.numbers() for each in draws], scores.device) if draws else ()
    groups = [each.group(number) for each, number in zip(draws, numbers, strict=True)]
    has_greedy = sum(len(group.params) for group in groups) < len(scores)
    return _Choice((), [], scores, groups, None, has_greedy=has_greedy)


def _sample_rows(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Samples rows of which each has a choice, or reports about its tokens."""
    step = _rows_at_once(logits)
    chunks = (slice(start, start + step) for start in range(0, len(rows), step))
    return [token for chunk in chunks for token in _sample_chunk(logits[chunk], rows[chunk])]


def _rows_at_once(logits: Tensor) -> int:
    return max(1, _CPU_CHUNK // logits.shape[1]) if logits.device.type == "cpu" else len(logits)


def _argmax(logits: Tensor) -> list[int]:
    """Returns the first of the largest of each row. NumPy's is ten times as fast as torch's on a CPU."""
    if logits.device.type != "cpu" or not len(logits):
        return to_host(logits.argmax(-1)).tolist()
    chosen: list[int] = logits.float().numpy().argmax(-1).tolist()
    return chosen


@dataclass(frozen=True, slots=True)
class _Group:
    """Holds rows that are drawn together: one that ranks all its tokens must not make the others do so.

    params: of each row; all of them restrict top_k or none does, and so for top_p.
    index: int64 [D], the rows. knobs: float64 [D, 3]. numbers: float64 [D, 1], what is looked up.
    """

    params: list[SamplingParams]
    index: Tensor
    knobs: Tensor
    numbers: Tensor


def _sample_chunk(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    return _choose(logits, rows).read()[0]


def _choose(logits: Tensor, rows: Sequence[SamplingRow], before: Tensor | None = None) -> _Choice:
    """Chooses with one copy to the device, unless more than the likeliest tokens matter.

    before: see `SamplerAhead.sample`.
    """
    # Of most batches no row is changed before it is drawn, and none reports.
    changed = rows if any(row.state.is_changed for row in rows) else ()
    asked = [i for i, row in enumerate(changed) if row.state.params.logprobs is not None]
    kinds = _kinds([row.state.params for row in rows])
    num_tokens = logits.shape[1]
    arrays = [*_penalties(changed, num_tokens), _banned(changed, num_tokens), np.array(asked, np.int64)]
    arrays += [*allowed_tokens(changed, num_tokens), *_biases(changed, num_tokens)]
    arrays += _repeated(changed if before is not None else (), num_tokens)
    arrays += [array for kind in kinds for array in _drawing(rows, kind)]
    moved = arrays_to_device(arrays, logits.device)
    penalised, changes, banned, asked_rows, held_rows, allowed, biased, biases, *moved = moved
    repeated, starts, factors, *drawing = moved
    if before is not None and len(repeated):
        penalised = torch.cat([penalised, starts + before.index_select(0, repeated)])
        changes = torch.cat([changes, factors], dim=1)
    groups = [
        _Group([rows[i].state.params for i in kind], *drawing[3 * number : 3 * number + 3])
        for number, kind in enumerate(kinds)
    ]
    raw = logits.float()
    logprobs = _Logprobs.of(raw.index_select(0, asked_rows), asked_rows) if asked else None
    raw = with_biases(raw, biased, biases, in_place=raw is not logits)
    is_own = raw is not logits
    scores = ruled_out(with_changes(raw, penalised, changes, banned, in_place=is_own), held_rows, allowed)
    has_greedy = sum(map(len, kinds)) < len(rows)
    return _Choice(rows, asked, scores, groups, logprobs, has_greedy=has_greedy)


def _kinds(params_of_rows: Sequence[SamplingParams]) -> list[list[int]]:
    """Groups the rows that are drawn: see `_Group`."""
    groups: dict[tuple[bool, bool], list[int]] = {}
    for i, params in enumerate(params_of_rows):
        if not params.is_greedy:
            groups.setdefault((params.top_k > 0, params.top_p < 1), []).append(i)
    return list(groups.values())


def _drawing(rows: Sequence[SamplingRow], kind: list[int]) -> list[NDArray[Any]]:
    """Returns index, knobs and numbers of a group: see `_Group`."""
    group = [rows[i] for i in kind]
    numbers = uniform([row.state.seed for row in group], [row.draw_index for row in group])
    return [np.array(kind, np.int64), knobs([row.state.params for row in group]), numbers[:, None]]


def _penalties(rows: Sequence[SamplingRow], num_tokens: int) -> list[NDArray[Any]]:
    """Returns which scores are penalised for tokens that came before (CTRL, section 4.1; OpenAI's two).

    Places among all R * V, int64 [N]; factors and amounts, float32 [2, N].
    """
    places = [i for i, row in enumerate(rows) if row.state.params.has_penalties]
    if not places:
        return [np.empty(0, np.int64), np.empty((2, 0), np.float32)]
    counts = [rows[i].counts for i in places]
    params = [rows[i].state.params for i in places]
    lengths = [len(c.ids) for c in counts]
    table = np.array([[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params])
    factor, frequency, presence = np.repeat(table, lengths, axis=0).T
    times = np.concatenate([c.counts for c in counts])
    amount = frequency * times + presence * (times > 0)
    flat = np.concatenate([c.ids for c in counts]) + np.repeat(np.array(places) * num_tokens, lengths)
    return [flat, np.stack([factor.clip(1 / _MAX_FACTOR, _MAX_FACTOR), amount]).astype(np.float32)]


def _repeated(rows: Sequence[SamplingRow], num_tokens: int) -> list[NDArray[Any]]:
    """Returns what penalises a token for being repeated that only the device knows.

    The rows, int64 [N]; the places of their first scores among all R * V, int64 [N]; factors and amounts of
    0, float32 [2, N]: a token that is known besides is penalised once, as equal values are written twice.
    """
    places = np.array([i for i, row in enumerate(rows) if row.state.params.has_penalties], np.int64)
    factors = np.zeros((2, len(places)), np.float32)
    factors[0] = [rows[i].state.params.repetition_penalty for i in places]
    factors[0] = factors[0].clip(1 / _MAX_FACTOR, _MAX_FACTOR)
    return [places, places * num_tokens, factors]


def _banned(rows: Sequence[SamplingRow], num_tokens: int) -> NDArray[np.int64]:
    """Returns the places, among all R * V, of tokens that end an answer too early or a word: int64 [B]."""
    places = [
        i * num_tokens + token_id
        for i, row in enumerate(rows)
        if (row.state.ending_ids or row.state.bad_words) and row.state.matcher is None
        for token_id in row.banned_ids | row.bad_ids
        if token_id < num_tokens
    ]
    return np.array(places, np.int64)


def _biases(rows: Sequence[SamplingRow], num_tokens: int) -> list[NDArray[Any]]:
    """Returns the places, among all R * V, of tokens with a bias: int64 [N]; and the biases, float32 [N]."""
    given = [
        (i * num_tokens + token_id, bias)
        for i, row in enumerate(rows)
        for token_id, bias in row.state.params.logit_bias
        if token_id < num_tokens
    ]
    places, biases = zip(*given, strict=True) if given else ((), ())
    return [np.array(places, np.int64), np.array(biases, np.float32)]


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Holds what A rows report. rows: int64 [A]. values: [A, V]. top, top_ids: [A, MAX_LOGPROBS]."""

    rows: Tensor
    values: Tensor
    top: Tensor
    top_ids: Tensor

    @classmethod
    def of(cls, raw: Tensor, rows: Tensor) -> _Logprobs:
        """Computes them from raw scores [A, V], before temperature and penalties."""
        values = torch.log_softmax(raw, 1)
        # Always equally many, so that the order of equals does not depend on what other rows ask for.
        return cls(rows, values, *likeliest(values, min(MAX_LOGPROBS, raw.shape[1])))

    def report(self, ids: Tensor) -> list[Tensor]:
        """Returns the logprob of each row's token of ids [R], [A], and the likeliest and theirs [A, M]."""
        chosen = ids.index_select(0, self.rows)[:, None]
        return [self.values.gather(1, chosen)[:, 0], self.top_ids, self.top]


class _Choice:
    """Chooses tokens on the device; the host reads them when it likes, whatever is queued there by then.

    On a GPU, only the likeliest tokens are looked at; if that was not enough for a row, `read` looks at all.
    ids: int64 [R], on the device.
    """

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        asked: list[int],
        scores: Tensor,
        groups: Sequence[_Group],
        logprobs: _Logprobs | None,
        *,
        has_greedy: bool,
    ) -> None:
        """Takes scores [R, V] as they are drawn from. asked: rows that report, of which logprobs are."""
        self._rows, self._asked, self._logprobs = rows, asked, logprobs
        self._scores, self._groups = scores, groups
        self._largest = _largest(scores) if has_greedy else scores.new_zeros(len(scores), dtype=torch.int64)
        self.ids, self._copy = self._drawn(is_bounded=scores.device.type != "cpu")
        if not groups:  # nothing will be looked at again, and scores of many rows are large
            self._scores = scores[:0].clone()

    def _drawn(self, *, is_bounded: bool) -> tuple[Tensor, HostCopy]:
        ids, are_exact = _draw(self._scores, self._largest, self._groups, is_bounded=is_bounded)
        report = self._logprobs.report(ids) if self._logprobs is not None else []
        return ids, HostCopy([ids, *report, *are_exact])

    def read(self) -> tuple[list[SampledToken], list[bool]]:
        """Returns the tokens, on the host, and which of `ids` were right."""
        ids, values, is_exact = self._on_host(self._copy)
        are_right = [True] * len(ids)
        if not is_exact:
            bounded = ids
            ids, values, _ = self._on_host(self._drawn(is_bounded=False)[1])
            are_right = (ids == bounded).tolist()
        return _tokens(self._rows, self._asked, ids, values), are_right

    def _on_host(self, copy: HostCopy) -> tuple[Tensor, list[Tensor], bool]:
        ids, *rest = copy.wait()
        num_values = 3 if self._logprobs is not None else 0
        return ids, rest[:num_values], all(bool(each.all()) for each in rest[num_values:])


def _largest(scores: Tensor) -> Tensor:
    """Returns int64 [R], as `_argmax` does, on the device."""
    return scores.argmax(-1) if scores.device.type != "cpu" else torch.tensor(_argmax(scores))


def _draw(
    scores: Tensor, ids: Tensor, groups: Sequence[_Group], *, is_bounded: bool
) -> tuple[Tensor, list[Tensor]]:
    """Draws the rows of the groups; returns ids [R] with these, and which draws are exact: bool [D] each."""
    are_exact = []
    for group in groups:
        some = scores if len(group.params) == len(scores) else scores.index_select(0, group.index)
        found = candidates(some, group.params, group.knobs, is_bounded=is_bounded)
        places = look_up(found.weights, group.numbers)
        picked = places if found.ids is None else found.ids.gather(1, places)
        ids = ids.index_copy(0, group.index, picked[:, 0])
        if found.is_exact is not None:
            are_exact.append(found.is_exact)
    return ids, are_exact


def _tokens(
    rows: Sequence[SamplingRow], asked: list[int], ids: Tensor, values: list[Tensor]
) -> list[SampledToken]:
    """Returns the chosen tokens with what their rows ask for. values: of the rows `asked`, on the host."""
    tokens = [SampledToken(token_id) for token_id in ids.tolist()]
    if not asked:
        return tokens
    for i, value, top_ids, top_values in zip(asked, *(each.tolist() for each in values), strict=True):
        best = tuple(zip(top_ids, top_values, strict=True))[: rows[i].state.params.logprobs]
        tokens[i] = SampledToken(tokens[i].token_id, value, best)
    return tokens
