"""However the blocks lie: each new token attends each of its keys once, and none that is another's."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.stages.attention.attention import AttentionBatch
from epd.stages.attention.gathered import GatheredPiece, OwnSpan
from epd.stages.attention.host import HostPlan
from epd.stages.attention.pieces import CausalPiece, Piece


@dataclass(frozen=True, slots=True)
class Layout:
    """A segment's blocks: some of the common prefix, then runs of its own; the last one is not full.

    room: tokens that its last block still takes.
    """

    num_shared: int
    runs: tuple[int, ...]
    room: int
    num_new: int


LAYOUTS = st.builds(
    Layout,
    num_shared=st.integers(0, 8),
    runs=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    room=st.integers(0, 3),
    num_new=st.sampled_from([1, 1, 1, 2, 8, 9, 30]),
)


def make_batch(layouts: list[Layout], block_size: int) -> AttentionBatch:
    next_block, tables, contexts, lens = 10, [], [], []
    for layout in layouts:
        table = list(range(layout.num_shared))
        for run in layout.runs:
            table += range(next_block, next_block + run)
            next_block += run + 1
        own = sum(layout.runs) * block_size - min(layout.room, block_size - 1)
        tables.append(table)
        contexts.append(layout.num_shared * block_size + own)
        lens.append(min(layout.num_new, own))
    padded = np.full((len(tables), max(map(len, tables)) + 1), 9, np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    slots = [slots_of(*one, block_size)[-new:] for *one, new in zip(padded, contexts, lens, strict=True)]
    starts = np.cumsum([0, *lens]).astype(np.int32)
    return AttentionBatch(starts, np.array(contexts, np.int32), padded, np.concatenate(slots), block_size)


def slots_of(table: np.ndarray, num_tokens: int, block_size: int) -> np.ndarray:
    tokens = np.arange(num_tokens)
    return table[tokens // block_size].astype(np.int64) * block_size + tokens % block_size


def own_spans(piece: GatheredPiece, segment: int) -> list[OwnSpan]:
    """The spans of a segment, which have columns of their own."""
    spans = [span for span in piece.own if span.segment == segment]
    for before, span in pairwise(spans):
        assert span.column == before.column + before.num_tokens
    return spans


def attended_by(piece: Piece, block_size: int, num_rows: int) -> dict[int, list[int]]:
    """Slots that each packed row attends in a piece."""
    rows = torch.arange(num_rows)[piece.rows.index].tolist()
    assert len(rows) == piece.rows.num_rows
    if isinstance(piece, GatheredPiece):
        slots = torch.from_numpy(piece.blocks)[..., None] * block_size + torch.arange(block_size)
        each = slots.view(piece.num_segments, 1, -1)[..., : piece.mask.shape[-1]]
        seen = piece.mask[:, 0] == 0
        assert piece.is_masked == (not bool(seen.all()))
        num_each = seen.shape[1]
        each = each.expand(seen.shape).flatten(0, 1)
        gathered = {row: each[i][seen.flatten(0, 1)[i]].tolist() for i, row in enumerate(rows)}
        for i, row in enumerate(rows):
            for span in own_spans(piece, i // num_each):
                gathered[row] += range(span.slot, span.slot + span.num_tokens)
        return gathered
    span = piece.keys
    blocks = torch.arange(span.first, span.stop) if span.blocks is None else span.blocks
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten().tolist()
    slots = slots[span.skipped : span.skipped + span.num_tokens]
    assert len(slots) == span.num_tokens
    is_causal = isinstance(piece, CausalPiece)
    return {row: slots[: i + 1] if is_causal else slots for i, row in enumerate(rows)}


@settings(deadline=None)  # the machine may be busy
@given(
    layouts=st.lists(LAYOUTS, min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4]),
    least_shared=st.integers(1, 12),
    least_alone=st.integers(12, 40),
    most_at_once=st.sampled_from([8, 8192]),
)
def test_every_key_is_attended_once(
    layouts: list[Layout], block_size: int, least_shared: int, least_alone: int, most_at_once: int
) -> None:
    batch = make_batch(layouts, block_size)
    limits = {
        "_LEAST_SHARED": least_shared,
        "_LEAST_ALONE": least_alone,
        "_BATCH_COST_TOKENS": 20,
        "_MOST_AT_ONCE": most_at_once,
    }
    with patch.multiple("epd.stages.attention.host", **limits):
        pieces = HostPlan.build(batch).pieces
    attended: dict[int, list[int]] = defaultdict(list)
    for piece in pieces:
        for row, slots in attended_by(piece, block_size, len(batch.slot_mapping)).items():
            assert piece.merges or row not in attended
            attended[row] += slots
    for segment, context in enumerate(batch.context_lens.tolist()):
        start, stop = batch.query_starts[segment : segment + 2].tolist()
        expected = slots_of(batch.block_tables[segment], context, block_size).tolist()
        for row in range(start, stop):
            assert sorted(attended[row]) == sorted(expected[: context - stop + row + 1])
