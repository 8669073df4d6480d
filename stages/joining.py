"""From groups as they were encoded to embeddings at their places in the prompt, as soon as can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from encoders import Adapter, Embeddings, MediaItem
from encoders.groups import MediaGroup
from stages.visual_inputs import PlacedEmbeddings, concatenated


def joined(
    adapter: Adapter, items: Sequence[MediaItem], groups: Iterable[tuple[MediaGroup, Embeddings]]
) -> Iterator[PlacedEmbeddings]:
    """Takes groups in prompt order; gives each at once, but an item that is joined whole at its end.

    items: of the request's prompt, in order.
    """
    parts: list[Embeddings] = []
    start = 0
    for group, embeddings in groups:
        plan = items[group.item].plan
        start = start if parts else group.start
        parts.append(embeddings)
        if plan.is_joined_whole and group.stop < plan.num_units:
            continue
        rows = adapter.join(concatenated(parts), plan, start, group.stop)
        parts = []
        yield PlacedEmbeddings(rows, items[group.item].token_indices(start, group.stop))
