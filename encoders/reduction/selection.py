"""Selects the visual tokens of a window to keep, from the window and the past of its item alone.

`TokenReducer` takes the units of one item, and gives the kept tokens window by window.

Shapes: U units of the window, S tokens of a unit, in raster order, C channels, k tokens to keep.
No method sees a question or an attention map, so what is kept serves every question, and fast kernels stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from epd.encoders.adapter import Embeddings, concatenated
from epd.encoders.device import all_to_host, arrays_to_device, to_device, to_host
from epd.encoders.plans import MediaItem
from epd.encoders.reduction.merging import MergedNeighbours, means
from epd.reduction import QUESTION_METHODS, SELECTION_METHODS, KeptCells, ReductionPolicy, Window
from epd.types import BoolArray, Int64Array

_LEAST_VALUE = 0.2
_CHANGE, _MOST_CHANGE = 0.5, 1.0
_REPETITION, _TURN_UNITS = 0.7, 8.0
_SHARPNESS = 16
_MOST_DISSIMILAR = 2.0  # 1 - the least cosine
_TINY = 1e-6


@dataclass(frozen=True, slots=True)
class ItemOutline:
    """Says what is known of an item before its units come.

    grid: tokens of a unit, (height, width).
    is_one_window: whether one window is all of it.
    surviving_share: of what is kept of it, the share that is left once a question is computed.
    """

    grid: tuple[int, int] = (1, 1)
    is_one_window: bool = False
    surviving_share: float = 1.0


class Method(Protocol):
    """Selects tokens, with a state of one reading."""

    def choose(self, units: Tensor, num_kept: int) -> Tensor:
        """Returns int64 [k], ascending, of the window's tokens, on the host: it places them in the prompt.

        units: [U, S, C], of the next window.
        """
        ...

    def merge(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Returns the rows [k, C] that replace the window's rows [U * S, C] at the chosen places.

        chosen: what `choose` has returned, on the device of the rows.
        """
        ...

    def is_key(self, chosen: Tensor) -> Tensor:
        """Marks those of the last window's chosen tokens, int64 [k], that no question may drop: bool [k]."""
        ...


class Dropping:
    """Drops the tokens that are not chosen."""

    def merge(self, rows: Tensor, chosen: Tensor) -> Tensor:
        return rows[chosen]

    def is_key(self, chosen: Tensor) -> Tensor:
        return torch.zeros(len(chosen), dtype=torch.bool)


class Balanced(Dropping):
    """Keeps about as many tokens of every unit: those that differ from the background, in turns.

    A token is scored by how unlike it is to the usual token at its place - the mean over the window,
    averaged with those of earlier windows - and, half as much, to the last one there; every token scores a
    little. It counts for less if it looks like the one that was kept last at its place, and the less the
    shorter ago that was. So what is kept takes turns, and what does not move is repeated from time to time,
    although it has become background. If the window is the whole item, the background is what most of its
    units show; in a part of a longer item that may be what is asked for.
    """

    def __init__(self, *, sees_all: bool = False) -> None:
        """Takes whether the next window is the whole item."""
        self._sees_all = sees_all
        self._background: Tensor | None = None  # [S, C]
        self._last: Tensor | None = None  # [S, C]
        self._kept: Tensor | None = None  # [S, C], at each place, zeros before anything is
        self._kept_at = np.empty(0)  # [S], units before the next window, negative

    def choose(self, units: Tensor, num_kept: int) -> Tensor:
        ranks, _ = self._ranked(units, num_kept)
        return torch.from_numpy((ranks < ranks.shape[1]).ravel().nonzero()[0])

    def _ranked(self, units: Tensor, num_kept: int) -> tuple[Int64Array, Tensor]:
        """Returns what `_in_turns` does, and the values [U, S] by which it chose, on the host."""
        tokens = normalize(units.float(), dim=-1)
        before = torch.cat([-tokens[:1] if self._last is None else self._last[None], tokens[:-1]])
        change = (1 - (tokens * before).sum(-1)).clamp(max=_MOST_CHANGE)
        standing_out = 1 - (tokens * self._update_background(tokens)).sum(-1)
        self._last = tokens[-1]
        values = _LEAST_VALUE + standing_out + _CHANGE * change
        return self._in_turns(tokens, values, num_kept)

    def _in_turns(self, tokens: Tensor, values: Tensor, num_kept: int) -> tuple[Int64Array, Tensor]:
        """Ranks about as many of each unit, of the highest values [U, S]: int64 [U, S], S for all others.

        Returns the values, too, on the host.
        """
        num_units, num_tokens = values.shape
        if self._kept is None:
            self._kept, self._kept_at = torch.zeros_like(tokens[0]), np.full(num_tokens, -np.inf)
        line = torch.cat([self._kept[None], tokens])  # what may have been kept last at a place
        alike, values = all_to_host([torch.einsum("usc,lsc->uls", tokens, line).clamp_min(0), values])
        likeness, budgets = alike.numpy(), _even_budgets(values, num_kept)
        at, last, places = self._kept_at, np.zeros(num_tokens, dtype=np.int64), np.arange(num_tokens)
        ranks = np.full((num_units, num_tokens), num_tokens)
        for unit, (value, budget) in enumerate(zip(values.numpy(), budgets.tolist(), strict=True)):
            repetition = likeness[unit, last, places] * np.exp((at - unit) / _TURN_UNITS)
            chosen = np.argsort(value * (_REPETITION * repetition - 1), kind="stable")[:budget]
            ranks[unit, chosen] = np.arange(budget)
            at[chosen], last[chosen] = unit, unit + 1
        self._kept = line[tuple(arrays_to_device([last, places], line.device))]
        self._kept_at = at - num_units
        return ranks, values

    def _update_background(self, tokens: Tensor) -> Tensor:
        """Returns the usual token at each place, [S, C]; of a single unit, at all of its places."""
        if len(tokens) == 1:
            usual = tokens.mean(1).expand(tokens.shape[1], -1)
        else:
            usual = _mode(tokens) if self._sees_all else tokens.mean(0)
        usual = normalize(usual, dim=-1)
        mixed = usual if self._background is None else normalize(usual + self._background, dim=-1)
        self._background = mixed
        return mixed


class Funnel(Balanced):
    """Keeps for questions what `Balanced` does, and marks the best of it: no question may drop those.

    So a question's first layers read several times the tokens that its answer does, its later ones fewer and
    fewer, and which ones are left in the end depends on the video alone.
    """

    def __init__(self, surviving_share: float, *, sees_all: bool = False) -> None:
        """Takes the share of the chosen tokens that is left in the end."""
        super().__init__(sees_all=sees_all)
        self._share = surviving_share
        self._num_chosen = self._num_keys = 0
        self._is_key = torch.empty(0, dtype=torch.bool)

    def choose(self, units: Tensor, num_kept: int) -> Tensor:
        ranks, values = self._ranked(units, num_kept)
        budgets = _even_budgets(values, self._next_keys(num_kept)).numpy()
        self._is_key = torch.from_numpy((ranks < budgets[:, None]).ravel())
        return torch.from_numpy((ranks < ranks.shape[1]).ravel().nonzero()[0])

    def is_key(self, chosen: Tensor) -> Tensor:
        return self._is_key[chosen]

    def _next_keys(self, num_kept: int) -> int:
        """Counts the keys of the next window; what rounding takes from one, the next gets."""
        self._num_chosen += num_kept
        here = round(self._share * self._num_chosen) - self._num_keys
        self._num_keys += here
        return here


def _even_budgets(scores: Tensor, num_kept: int) -> Tensor:
    """Shares the budget evenly, int64 [U]; the rest goes to units whose next best token scores highest."""
    num_units, num_tokens = scores.shape
    each, rest = divmod(num_kept, num_units)
    budgets = torch.full((num_units,), each)
    if rest:
        following = scores.sort(1, descending=True).values[:, min(each, num_tokens - 1)]
        budgets[following.topk(rest).indices] += 1
    return budgets


def _mode(tokens: Tensor) -> Tensor:
    """Returns about what most units [U, S, C] show at each place, [S, C].

    It is a mean in which a unit counts for the less, the less it is like all others: what passes by, hardly.
    """
    along = (tokens * tokens.mean(0)).sum(-1)  # [U, S], cosines with the mean, times its length
    weights = (along / along.amax(0).clamp_min(_TINY)).clamp_min(_TINY) ** _SHARPNESS
    return (weights[:, :, None] * tokens).sum(0)


class RandomTokens(Dropping):
    """Selects random tokens as a control, the same ones every time."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def choose(self, units: Tensor, num_kept: int) -> Tensor:
        order = torch.randperm(units.shape[0] * units.shape[1], generator=self._generator)
        return order[:num_kept].sort().values


class UniformPooling(Dropping):
    """Averages runs of neighbours in raster and time order, of equal length, as a control."""

    def choose(self, units: Tensor, num_kept: int) -> Tensor:
        """Chooses the middle of each run."""
        edges = _edges(units.shape[0] * units.shape[1], num_kept)
        return (edges[:-1] + edges[1:] - 1) // 2

    def merge(self, rows: Tensor, chosen: Tensor) -> Tensor:
        edges = _edges(len(rows), len(chosen))
        owners = torch.repeat_interleave(torch.arange(len(chosen)), edges.diff())
        return means(rows, to_device(owners, rows.device), len(chosen))


class EVS(Dropping):
    """Keeps what changes most since one unit earlier at its place (Efficient Video FrameSampling, in vLLM).

    The first unit of an item is kept before anything else.
    """

    def __init__(self) -> None:
        self._last: Tensor | None = None  # [S, C]

    def choose(self, units: Tensor, num_kept: int) -> Tensor:
        tokens = normalize(units, dim=-1)
        before = torch.cat([tokens[:1] if self._last is None else self._last[None], tokens[:-1]])
        scores = 1 - (tokens * before).sum(-1)
        if self._last is None:
            scores[0] = _MOST_DISSIMILAR
        self._last = tokens[-1]
        return _best(to_host(scores).flatten(), num_kept)


def _edges(num_tokens: int, num_runs: int) -> Tensor:
    """Computes the edges of runs that are as equal as possible: int64 [num_runs + 1]."""
    return torch.arange(num_runs + 1) * num_tokens // num_runs


def _best(scores: Tensor, num_kept: int) -> Tensor:
    """Returns the places of the highest scores [n]: int64 [k], ascending."""
    return scores.topk(num_kept).indices.sort().values


_METHODS: Mapping[str, Callable[[ItemOutline], Method]] = {
    "balanced": lambda item: Balanced(sees_all=item.is_one_window),
    "evs": lambda _: EVS(),
    "random": lambda _: RandomTokens(),
    "uniform": lambda _: UniformPooling(),
    "funnel": lambda item: Funnel(item.surviving_share, sees_all=item.is_one_window),
    "mustdrop": lambda item: MergedNeighbours(*item.grid),
}
assert set(_METHODS) == set(SELECTION_METHODS + QUESTION_METHODS)


def new_method(name: str, item: ItemOutline) -> Method:
    """Creates a method without state, for the item.

    name: one of SELECTION_METHODS and QUESTION_METHODS.
    """
    return _METHODS[name](item)


@dataclass(frozen=True, slots=True)
class Kept:
    """Holds the language model's input of one window: the k kept tokens, or all where it chooses itself.

    indices: int64 [k], ascending, of the tokens of the whole item.
    is_key: bool [k], those that no question may drop.
    """

    window: int
    embeddings: Embeddings
    indices: Int64Array
    is_key: BoolArray


def kept_cells(item: MediaItem, kept: Sequence[Kept]) -> KeptCells:
    """Returns which tokens are kept of consecutive windows, without those that show no part of a picture."""
    start, stop = item.windows[kept[0].window].start, item.windows[kept[-1].window].stop
    grid = _token_grid(item)
    is_kept = np.zeros((stop - start) * grid[0] * grid[1], dtype=bool)
    places = np.concatenate([each.indices for each in kept]) - start * grid[0] * grid[1]
    is_kept[places[places < len(is_kept)]] = True
    bits = np.packbits(is_kept).tobytes()
    return KeptCells((start, stop), item.plan.frames_per_unit, grid, bits)


class TokenReducer:
    """Holds the state of one item, whose units must arrive in order and without gaps."""

    def __init__(self, policy: ReductionPolicy, item: MediaItem) -> None:
        """Takes an item of a reduced prompt, whose windows may be those of some of its readings alone."""
        self._policy = policy
        self._outline = _outline(policy, item)
        self._method: Method | None = None
        self._windows = item.windows
        self._next = 0  # window
        self._num_before = _num_before(item)  # tokens of the windows before it
        self._rest: Embeddings | None = None  # what has come of it

    def push(self, embeddings: Embeddings) -> Iterator[Kept]:
        """Takes the tokens of the next whole units; returns what is kept of the windows they complete."""
        if self._rest is not None:
            embeddings = concatenated([self._rest, embeddings])
        start = 0
        while self._next < len(self._windows):
            window = self._windows[self._next]
            if len(embeddings) - start < window.num_tokens:
                break
            stop = start + window.num_tokens
            yield self._reduce(window, embeddings.cut(start, stop))
            start = stop
            self._num_before += window.num_tokens
            self._next += 1
        self._rest = embeddings.cut(start, len(embeddings)) if start < len(embeddings) else None

    def _reduce(self, window: Window, embeddings: Embeddings) -> Kept:
        indices = self._num_before + np.arange(window.num_tokens)
        if window.begins_reading and not window.is_in_prefill:
            self._method = new_method(self._policy.method, self._outline)
        method = self._method
        if method is None:
            return Kept(self._next, embeddings, indices, np.zeros(len(indices), dtype=bool))
        regular = window.num_tokens - window.num_extra
        rows = embeddings.rows[:regular]
        units = rows.view(window.stop - window.start, -1, rows.shape[1])
        kept = method.choose(units, window.num_kept - window.num_extra)
        chosen = to_device(kept, rows.device)

        def reduced(rows: Tensor) -> Tensor:
            return torch.cat([method.merge(rows[:regular], chosen), rows[regular:]])

        places = np.concatenate([indices[:regular][kept.numpy()], indices[regular:]])
        return Kept(self._next, embeddings.mapped(reduced), places, _key_set(method, kept, len(places)))


def _key_set(method: Method, kept: Tensor, num_kept: int) -> BoolArray:
    """Marks the key set among what is kept; tokens behind the units are none of it."""
    is_key = np.zeros(num_kept, dtype=bool)
    is_key[: len(kept)] = method.is_key(kept).numpy()
    return is_key


def _outline(policy: ReductionPolicy, item: MediaItem) -> ItemOutline:
    first = item.windows[0]
    is_one_window = first.stop - first.start == item.plan.num_units
    return ItemOutline(_token_grid(item), is_one_window, policy.surviving_share)


def _num_before(item: MediaItem) -> int:
    """Returns the tokens of the item before its first window."""
    first = item.windows[0]
    return first.start * ((first.num_tokens - first.num_extra) // (first.stop - first.start))


def _token_grid(item: MediaItem) -> tuple[int, int]:
    """Returns the tokens of a unit each way, shaped like its patches; one row if they make no such grid.

    Tokens behind the units, such as the newline of LLaVA-OneVision, are none of a unit's.
    """
    window, grid = item.windows[0], item.plan.grid
    num_tokens = (window.num_tokens - window.num_extra) // (window.stop - window.start)
    height = round((num_tokens * grid.h / grid.w) ** 0.5)
    width = num_tokens // max(height, 1)
    return (height, width) if height * width == num_tokens else (1, num_tokens)
