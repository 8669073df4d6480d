"""Reduces the visual tokens of one item: units go in, and the kept tokens come out window by window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from epd.encoders.adapter import Embeddings, concatenated
from epd.encoders.device import to_device
from epd.encoders.plans import MediaItem
from epd.encoders.reduction.method import ItemOutline, Method
from epd.encoders.reduction.selection import new_method
from epd.reduction import KeptCells, ReductionPolicy, Window
from epd.types import BoolArray, Int64Array


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
