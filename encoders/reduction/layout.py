"""Lays out a prompt with room for the kept visual tokens, before they are known.

all visual tokens   text | 0 1 2 3 4 5 6 7 | 8 9 ... | text
kept                text | 1 2 5 | 8 ... | text          a range for each window
their positions            as they were: (t, h, w) of 1, 2, 5, 8 ...
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from epd.encoders.adapter import MediaItem, PromptPlan, PromptReduction
from epd.encoders.groups import cut
from epd.reduction import WINDOW_TOKENS, ReductionPolicy, Window, plan_windows
from epd.types import Int64Array, PlaceholderRange


def reduce_prompt(prompt: PromptPlan, policy: ReductionPolicy) -> PromptPlan:
    """Plans the prompt with only as many visual tokens of each item as the policy keeps.

    Text keeps its positions, and so do kept tokens. Where text lies between units, each unit is a window of
    its own. Items that are joined whole stay as they are. A policy that keeps all gives the same prompt.
    """
    if not policy.is_on:
        return prompt
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
    )


def _windows(item: MediaItem, policy: ReductionPolicy) -> tuple[Window, ...]:
    plan = item.plan
    if plan.is_joined_whole:
        return ()
    breaks = {unit + 1 for unit, (a, b) in enumerate(pairwise(item.units)) if a.stop != b.offset}
    starts = {start for start, _ in cut(plan, max(1, WINDOW_TOKENS // plan.tokens_per_unit))}
    runs = list(pairwise([*sorted(starts | breaks), plan.num_units]))
    each = item.units[0].length
    windows = plan_windows(
        runs,
        each,
        policy.cached_retention,
        is_in_prefill=policy.is_in_prefill,
        later_share=policy.later_share,
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
