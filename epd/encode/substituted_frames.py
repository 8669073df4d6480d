"""Remembers frames that could not be decoded, by group, so that answers from a cache report them too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from epd.encode.encoder_cache import GroupKey

# Groups of damaged videos to remember; even after a busy day they take less than 20 MB.
MAX_GROUPS = 1 << 14


class SubstitutedFrames:
    """Counts the frames of each group that show a neighbour, as of its last decoding.

    Caches share groups by their key, so what was found when a group was decoded holds for each answer that
    gets it without decoding. Beyond `max_groups` the groups noted longest ago are forgotten.
    """

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self._num_by_group: OrderedDict[GroupKey, int] = OrderedDict()
        self._max_groups = max_groups

    def note(self, group: GroupKey, num_substituted: int) -> None:
        """Notes the result of decoding a group."""
        self._num_by_group.pop(group, None)
        if num_substituted:
            self._num_by_group[group] = num_substituted
        if len(self._num_by_group) > self._max_groups:
            self._num_by_group.popitem(last=False)

    def total(self, groups: Iterable[GroupKey]) -> int:
        """Returns the number of substituted frames in these groups."""
        return sum(self._num_by_group.get(group, 0) for group in groups)
