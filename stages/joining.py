"""From groups as they were encoded to embeddings at their places in the prompt, as soon as can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from encoders import Adapter, Embeddings, MediaItem
from encoders.groups import MediaGroup
from stages.visual_inputs import PlacedEmbeddings, concatenated


class Joiner:
    """Takes the groups of one prompt in order; gives each at once, but an item joined whole at its end."""

    def __init__(self, adapter: Adapter, items: Sequence[MediaItem]) -> None:
        """items: of the request's prompt, in order."""
        self._adapter = adapter
        self._items = items
        self._parts: list[Embeddings] = []
        self._start = 0

    def push(self, group: MediaGroup, embeddings: Embeddings) -> PlacedEmbeddings | None:
        """What the next group completes; None while more of its item has to come."""
        plan = self._items[group.item].plan
        if not self._parts:
            self._start = group.start
        self._parts.append(embeddings)
        if plan.is_joined_whole and group.stop < plan.num_units:
            return None
        rows = self._adapter.join(concatenated(self._parts), plan, self._start, group.stop)
        self._parts = []
        return PlacedEmbeddings(rows, self._items[group.item].token_indices(self._start, group.stop))


def joined(
    adapter: Adapter, items: Sequence[MediaItem], groups: Iterable[tuple[MediaGroup, Embeddings]]
) -> Iterator[PlacedEmbeddings]:
    """What a `Joiner` makes of all groups of a prompt, in order."""
    joiner = Joiner(adapter, items)
    for group, embeddings in groups:
        placed = joiner.push(group, embeddings)
        if placed is not None:
            yield placed
