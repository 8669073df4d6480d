"""Reads a reduced item group by group where it is encoded, so that only kept tokens are sent.

    groups     |      g0      |      g1      |    g2    |     each is read once
    windows    [  w0  )[  w1  )[     w2     )[    w3    )     none reaches into the next group
    readings   [                             )[         )     one encoder reads all groups of one, in order
    sent with       g0: w0, w1     g1: w2        g2: w3

What is kept of a window depends on the windows of its reading before it. So different encoders get different
readings of an item. By methods that choose from each window alone, each group is a reading.

A prompt is laid out with room for the kept visual tokens, before they are known:

all visual tokens   text | 0 1 2 3 4 5 6 7 | 8 9 ... | text
kept                text | 1 2 5 | 8 ... | text          a range for each window
their positions            as they were: (t, h, w) of 1, 2, 5, 8 ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, takewhile

import numpy as np

from epd.encode.encoder_cache import GroupSpec
from epd.encoders.adapter import Embeddings, concatenated
from epd.encoders.groups import MediaGroup, cut
from epd.encoders.plans import MediaItem, MediaPlan, PromptPlan, PromptReduction
from epd.encoders.reduction.selection import TokenReducer
from epd.errors import RequestError
from epd.reduction import SELECTION_METHODS, WINDOW_TOKENS, ReductionPolicy, Window, plan_windows
from epd.types import BoolArray, Int64Array, PlaceholderRange

# Of kept tokens among those of the item; of one that no question may drop, -1 - place.
Places = tuple[int, ...]
# `Adapter.join`
Join = Callable[[Embeddings, MediaPlan, int, int], Embeddings]


@dataclass(frozen=True, slots=True, eq=False)
class ItemReduction:
    """Says how the tokens of an item are chosen in one reading, and in how many groups they come.

    item: with the windows of the reading alone.
    """

    policy: ReductionPolicy
    item: MediaItem
    num_groups: int

    @classmethod
    def of(cls, prompt: PromptPlan, groups: Sequence[MediaGroup]) -> ItemReduction | None:
        """Returns the reading that begins with the first of the groups, if one does.

        groups: of the prompt, from one of an item that `is_cut_at_encoder`.
        """
        assert prompt.reduction is not None
        first = groups[0]
        item = prompt.media[first.item]
        if not begins_reading(item, first):
            return None
        rest = takewhile(lambda each: each.item == first.item, islice(groups, 1, None))
        mine = [first, *takewhile(lambda each: not begins_reading(item, each), rest)]
        start, stop = windows_of(item, first)[0], windows_of(item, mine[-1])[1]
        part = replace(item, units=item.units[start:stop], windows=item.windows[start:stop])
        return cls(prompt.reduction.policy, part, len(mine))

    @property
    def is_of_a_group(self) -> bool:
        """Returns whether it is over with its first group."""
        return self.num_groups == 1


class ItemReducer:
    """Chooses what is kept of an item. Holds what the method remembers of the groups that were read."""

    def __init__(self, join: Join, reading: ItemReduction, first: MediaGroup) -> None:
        """Takes the first group, with which the reading begins."""
        self.end = first.index + reading.num_groups
        self.next = first.index
        self._join = join
        self._item = reading.item
        self._reducer = TokenReducer(reading.policy, reading.item)

    def read(self, group: MediaGroup, embeddings: Embeddings) -> tuple[Embeddings, Places]:
        """Returns what is kept of the next group, and its places among the tokens of the item.

        Raises ValueError for another group than the next.
        """
        if group.index != self.next:
            raise ValueError(f"received group {group.index}; allowed: {self.next}; read groups in order")
        self.next += 1
        rows = self._join(embeddings, self._item.plan, group.start, group.stop)
        kept = list(self._reducer.push(rows))
        places = np.concatenate([_with_keys(each.indices, each.is_key) for each in kept])
        return concatenated([each.embeddings for each in kept]), tuple(places.tolist())


def _with_keys(indices: Int64Array, is_key: BoolArray) -> Int64Array:
    return np.where(is_key, -1 - indices, indices)


def without_keys(places: Places) -> tuple[Int64Array, BoolArray]:
    """Returns the places of kept tokens alone, int64 [k], and which no question may drop, bool [k]."""
    noted = np.array(places, dtype=np.int64)
    is_key = noted < 0
    return np.where(is_key, -1 - noted, noted), is_key


def is_cut_at_encoder(prompt: PromptPlan, groups: Sequence[MediaGroup]) -> bool:
    """Returns whether an encoder can drop tokens of an item. groups: all of the item's.

    It cannot where the language model chooses, nor where a window needs a later group.
    """
    windows = prompt.media[groups[0].item].windows
    if not windows or windows[0].is_in_prefill:
        return False
    ends = {window.stop for window in windows}
    return all(group.stop in ends for group in groups)


def begins_reading(item: MediaItem, group: MediaGroup) -> bool:
    """Returns whether a group of an item that `is_cut_at_encoder` is the first of a reading."""
    return item.windows[windows_of(item, group)[0]].begins_reading


def kept_spec(item: MediaItem, group: MediaGroup, name: str) -> GroupSpec:
    """Returns what is sent of a group in the reading of that name, with the patches of the whole group."""
    start, stop = windows_of(item, group)
    num_kept = sum(window.num_kept for window in item.windows[start:stop])
    return replace(group.spec, key=replace(group.spec.key, reading=name), num_embeddings=num_kept)


def windows_of(item: MediaItem, group: MediaGroup) -> tuple[int, int]:
    """Returns the windows [start, stop) of an item that lie in a group."""
    start, stop = (bisect_right(item.windows, unit, key=_end) for unit in (group.start, group.stop))
    return start, stop


def _end(window: Window) -> int:
    return window.stop


def reduce_prompt(prompt: PromptPlan, policy: ReductionPolicy) -> PromptPlan:
    """Plans the prompt with only as many visual tokens of each item as the policy keeps.

    Text keeps its positions, and so do kept tokens. Where text lies between units, each unit is a window of
    its own. Items that are joined whole or whose units have tiles stay as they are, and so do those whose
    pixels have decided already. A policy that keeps all gives the same prompt.
    Raises RequestError for a method that the language model takes part in, where tokens of media attend each
    other.
    """
    if not policy.is_on:
        return prompt
    if prompt.both_ways is not None and policy.method not in SELECTION_METHODS:
        raise RequestError(
            f"received the reduction {policy.method} for a model whose media attend each other across the "
            f"prompt; allowed: {', '.join(SELECTION_METHODS)}; use one of these"
        )
    windows = [_windows(item, policy) for item in prompt.media]
    is_kept = np.ones(len(prompt), dtype=bool)
    positions = []
    for item, its_windows in zip(prompt.media, windows, strict=True):
        positions.append(_positions(prompt, item) if its_windows else np.empty((0, 0), dtype=np.int64))
        for window in its_windows:
            place = _place(item, window)
            is_kept[place.offset + window.num_kept : place.stop] = False
    moved = np.cumsum(is_kept) - is_kept  # of each token, how many are kept before it
    media = tuple(
        _moved(item, its_windows, moved) for item, its_windows in zip(prompt.media, windows, strict=True)
    )
    return PromptPlan(
        token_ids=prompt.token_ids[is_kept],
        positions=prompt.positions[:, is_kept],
        next_position=prompt.next_position,
        media=media,
        reduction=PromptReduction(policy, tuple(positions)),
        both_ways=None if prompt.both_ways is None else prompt.both_ways[is_kept],
    )


def _windows(item: MediaItem, policy: ReductionPolicy) -> tuple[Window, ...]:
    plan = item.plan
    if not plan.is_reducible or plan.kept:
        return ()
    breaks = {unit + 1 for unit, (a, b) in enumerate(pairwise(item.units)) if a.stop != b.offset}
    window_units = max(1, WINDOW_TOKENS // plan.tokens_per_unit)
    starts = breaks | {start for start, _ in cut(plan, window_units)}
    runs = list(pairwise([*sorted(starts), plan.num_units]))
    if policy.reading_windows > 1:
        starts = {start for start, _ in cut(plan, window_units * policy.reading_windows)}
    each = item.units[0].length
    windows = plan_windows(
        runs,
        each,
        policy.cached_retention,
        is_in_prefill=policy.is_in_prefill,
        later_share=policy.later_share,
        reading_starts=starts,
    )
    return (*windows[:-1], _with_extra(windows[-1], item.units[-1].length - each))


def _with_extra(last: Window, num_extra: int) -> Window:
    return replace(
        last,
        num_tokens=last.num_tokens + num_extra,
        num_kept=last.num_kept + num_extra,
        num_extra=num_extra,
        num_later=None if last.num_later is None else last.num_later + num_extra,
    )


def _place(item: MediaItem, window: Window) -> PlaceholderRange:
    return PlaceholderRange(item.units[window.start].offset, window.num_tokens)


def _positions(prompt: PromptPlan, item: MediaItem) -> Int64Array:
    return prompt.positions[:, item.token_indices(0, item.plan.num_units)]


def _moved(item: MediaItem, windows: tuple[Window, ...], moved: Int64Array) -> MediaItem:
    if windows:
        places = [(_place(item, window).offset, window.num_kept) for window in windows]
    else:
        places = [(unit.offset, unit.length) for unit in item.units]
    ranges = tuple(PlaceholderRange(int(moved[offset]), length) for offset, length in places)
    return MediaItem(item.plan, ranges, windows)
