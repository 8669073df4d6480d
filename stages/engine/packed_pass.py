"""Packs the new tokens of many requests into the arrays of one pass, on the host.

T new tokens of the pass, one segment per request, packed without padding:

| prefill chunk of a ......... | chunk of b ... | c | d | e |        c, d, e decode: one token each
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from operator import is_
from typing import Any

import numpy as np

from epd.encoders import Embeddings, concatenated
from epd.stages.attention.attention import AttentionBatch
from epd.stages.reduction.propagation import GoingOn
from epd.stages.reduction.question_views import QuestionView
from epd.stages.visual_inputs import PlacedEmbeddings
from epd.types import BoolArray, Int32Array, Int64Array

# Returns the block of a layer group, of a row, at an index of its table.
BlockAt = Callable[[int, int, int], int]
_SPARE_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """Holds the new tokens of one request.

    token_ids: int64 [n].
    positions: int64 [rows, n], three rows for M-RoPE, else one.
    num_cached: tokens in the cache before these, of each layer group.
    block_tables: of each layer group, with room for the new ones.
    visual: visual tokens among the new ones, indices counted from the first of them.
    num_logits: how many of the last new tokens to give logits for.
    num_kept: how many new tokens stay in the cache, chosen by each layer; all of them if None.
    method: of `PREFILL_METHODS`, by which they are chosen.
    going_on: receives which continue, where those that are attended most are kept and continue.
    view: what of the cache a question reads, if not all.
    states: slots of the recurrent state that is read, None at the start, and of the one that is written; and
        how many of the last new tokens are drafts, which that one does without.
    both_ways: bool [n], tokens that attend each other, also later ones; None without any.
    lora: name of the adapter that the request wants; empty for the model alone.
    num_prompt: how many of the first new tokens are the prompt's; the others are the answer's.
    next_id: the token after the new ones; any where it is not known.
    """

    token_ids: Int64Array
    positions: Int64Array
    num_cached: Sequence[int]
    block_tables: Sequence[Int32Array]
    visual: PlacedEmbeddings | None = None
    num_logits: int = 1
    num_kept: int | None = None
    method: str = "quickprefill"
    going_on: GoingOn | None = None
    view: QuestionView | None = None
    states: tuple[int | None, int, int] | None = None
    both_ways: BoolArray | None = None
    lora: str = ""
    num_prompt: int = 0
    next_id: int = 0

    @property
    def is_whole(self) -> bool:
        """Returns whether all of its tokens stay, in all layers, and read the whole cache."""
        return self.num_kept is None and self.view is None

    def later(self) -> Segment:
        """Returns the segment of later layers: with as many rows as continue, some of which they keep."""
        if self.going_on is None or self.num_kept is None:
            return self
        later = replace(self, token_ids=self.token_ids[: self.going_on.num_tokens])
        if self.num_kept == self.going_on.num_tokens:
            return replace(later, num_kept=None, going_on=None)
        return replace(later, going_on=GoingOn(self.num_kept))


@dataclass(frozen=True, slots=True)
class GroupKind:
    """Says how the layers of a group attend.

    window: see `AttentionBatch`. is_both_ways: whether tokens of segments that say so attend each other.
    """

    window: int | None = None
    is_both_ways: bool = False


@dataclass(frozen=True, slots=True)
class PackedPass:
    """Holds the arrays of a pass, all int64.

    token_ids: [T]. positions: [rows, T].
    logit_rows: [R], of the last layer's output, those that logits are wanted of.
    visual_rows: [V], the packed rows of visual tokens.
    num_deepstack: layers that have features of the visual tokens.
    batches: of each layer group.
    states: of each segment, see `Segment`; without any for a model that has no recurrent state.
    segments: all of them, without visual tokens, where one of them is not whole; else none.
    adapters: of each segment, see `Segment.lora`; without any where none has one.
    num_prompt: of each segment, see `Segment`; without any where all tokens are of answers.
    """

    token_ids: Int64Array
    positions: Int64Array
    logit_rows: Int64Array
    visual_rows: Int64Array
    num_deepstack: int
    batches: tuple[AttentionBatch, ...]
    states: tuple[tuple[int | None, int, int], ...] = ()
    segments: tuple[Segment, ...] = ()
    adapters: tuple[str, ...] = ()
    num_prompt: tuple[int, ...] = ()


def packed_pass(segments: Sequence[Segment], kinds: Sequence[GroupKind], block_size: int) -> PackedPass:
    """Packs segments. kinds: of layer groups. block_size: tokens."""
    ends = ends_of(segments)
    is_whole = all(segment.is_whole for segment in segments)
    later = [segment.later() for segment in segments]
    placed = [
        (segment.visual, end - len(segment.token_ids))
        for segment, end in zip(segments, ends, strict=True)
        if segment.visual is not None
    ]
    rows = [visual.indices + start for visual, start in placed]
    adapters = tuple(segment.lora for segment in segments)
    return PackedPass(
        _joined([segment.token_ids for segment in segments]),
        _joined([segment.positions for segment in segments]),
        _logit_rows(later, ends_of(later)),
        _joined(rows) if rows else np.empty(0, dtype=np.int64),
        len(placed[0][0].embeddings.deepstack) if placed else 0,
        attention_batches(segments, kinds, block_size),
        tuple(segment.states for segment in segments if segment.states is not None),
        () if is_whole else tuple(replace(segment, visual=None) for segment in segments),
        adapters if any(adapters) else (),
        tuple(segment.num_prompt for segment in segments) if any(s.num_prompt for s in segments) else (),
    )


def pass_of_rows(packed: PackedPass, rows: Sequence[int]) -> PackedPass:
    """Returns the part of a pass of one generated token of each sequence that has these rows.

    It has memory of its own. Tables have room for blocks that sequences may begin.
    """
    adapters = tuple(packed.adapters[row] for row in rows) if packed.adapters else ()
    return replace(
        packed,
        token_ids=packed.token_ids[rows],
        positions=packed.positions[:, rows],
        logit_rows=packed.logit_rows[: len(rows)],
        batches=tuple(
            replace(
                batch,
                query_starts=batch.query_starts[: len(rows) + 1],
                context_lens=batch.context_lens[rows],
                block_tables=_padded(batch.block_tables[rows], batch.block_tables.shape[1] + _SPARE_BLOCKS),
                slot_mapping=batch.slot_mapping[rows],
            )
            for batch in packed.batches
        ),
        adapters=adapters if any(adapters) else (),
    )


def joined_pass(first: PackedPass, second: PackedPass) -> PackedPass:
    """Returns the pass of the segments of both: whole ones, without recurrent states or `both_ways`."""
    num_tokens = len(first.token_ids)
    nums_segments = [len(each.batches[0].context_lens) for each in (first, second)]
    adapters, num_prompt = (first.adapters, second.adapters), (first.num_prompt, second.num_prompt)
    return PackedPass(
        _joined([first.token_ids, second.token_ids]),
        _joined([first.positions, second.positions]),
        _joined([first.logit_rows, second.logit_rows + num_tokens]),
        _joined([first.visual_rows, second.visual_rows + num_tokens]),
        max(first.num_deepstack, second.num_deepstack),
        tuple(map(_joined_batch, first.batches, second.batches)),
        adapters=_of_all(adapters, nums_segments, "") if any(adapters) else (),
        num_prompt=_of_all(num_prompt, nums_segments, 0) if any(num_prompt) else (),
    )


def _of_all(parts: Sequence[tuple[Any, ...]], counts: Sequence[int], none: Any) -> tuple[Any, ...]:
    """Joins what passes of `counts` segments have for each; `none` for those of one without any."""
    return tuple(chain(*(part or (none,) * count for part, count in zip(parts, counts, strict=True))))


def _joined_batch(first: AttentionBatch, second: AttentionBatch) -> AttentionBatch:
    tables = first.block_tables, second.block_tables
    width = max(each.shape[1] for each in tables)
    return replace(
        first,
        query_starts=np.concatenate([first.query_starts, second.query_starts[1:] + first.query_starts[-1]]),
        context_lens=np.concatenate([first.context_lens, second.context_lens]),
        block_tables=np.concatenate([_padded(each, width) for each in tables]),
        slot_mapping=_joined([first.slot_mapping, second.slot_mapping]),
    )


def rows_begun(packed: PackedPass) -> list[list[int]]:
    """Returns, for each layer group, the rows whose next token begins a block."""
    return [np.flatnonzero(batch.context_lens % batch.block_size == 0).tolist() for batch in packed.batches]


def go_on(packed: PackedPass, begun: Sequence[Sequence[int]], block_at: BlockAt) -> PackedPass:
    """Moves a pass of one generated token of each sequence, in memory of its own, on by a token.

    Only what a token changes is written, in place: one place, one position, and a block where it begins one.
    Its token_ids stay those of `packed`, since nobody knows the next ones yet.
    Returns `packed`, or the same with wider tables.
    """
    np.add(packed.positions, 1, out=packed.positions)
    groups = enumerate(packed.batches)
    batches = tuple(_gone_on(batch, begun[group], partial(block_at, group)) for group, batch in groups)
    is_same = all(map(is_, batches, packed.batches))
    return packed if is_same else replace(packed, batches=batches)


def _gone_on(
    batch: AttentionBatch, begun: Sequence[int], block_at: Callable[[int, int], int]
) -> AttentionBatch:
    size = batch.block_size
    np.add(batch.slot_mapping, 1, out=batch.slot_mapping)
    indices = [int(batch.context_lens[row]) // size for row in begun]
    width = batch.block_tables.shape[1]
    if max(indices, default=0) >= width:
        batch = replace(batch, block_tables=_padded(batch.block_tables, width + _SPARE_BLOCKS))
    for row, index in zip(begun, indices, strict=True):
        batch.block_tables[row, index] = block = block_at(row, index)
        batch.slot_mapping[row] = block * size
    np.add(batch.context_lens, 1, out=batch.context_lens)
    return batch


def attention_batches(
    segments: Sequence[Segment], kinds: Sequence[GroupKind], block_size: int
) -> tuple[AttentionBatch, ...]:
    """Describes the attention of each layer group."""
    ends = ends_of(segments)
    batches = (_attention_batch(segments, ends, group, block_size) for group in range(len(kinds)))
    seen = None
    if any(segment.both_ways is not None for segment in segments):
        seen = np.concatenate(
            [
                np.zeros(len(each.token_ids), np.bool_) if each.both_ways is None else each.both_ways
                for each in segments
            ]
        )
    return tuple(
        replace(batch, window=kind.window, both_ways=seen if kind.is_both_ways else None)
        if kind.window is not None or kind.is_both_ways
        else batch
        for batch, kind in zip(batches, kinds, strict=True)
    )


def visual_of(segments: Sequence[Segment]) -> Embeddings | None:
    """Returns the visual tokens of all segments in order; None without any."""
    placed = [segment.visual.embeddings for segment in segments if segment.visual is not None]
    return concatenated(placed) if placed else None


def ends_of(segments: Sequence[Segment]) -> list[int]:
    """Returns, for each segment, the packed row after its last."""
    return list(accumulate(len(segment.token_ids) for segment in segments))


def _attention_batch(
    segments: Sequence[Segment], ends: Sequence[int], group: int, block_size: int
) -> AttentionBatch:
    starts = np.array([0, *ends], dtype=np.int32)
    cached = np.array([segment.num_cached[group] for segment in segments], dtype=np.int32)
    lengths = np.diff(starts)
    tables = _padded([segment.block_tables[group] for segment in segments])
    owners, at = np.arange(len(segments)), cached  # of each new token: its request, its place in it
    if ends[-1] > len(segments):
        owners = np.repeat(owners, lengths)
        at = np.arange(ends[-1]) + (cached - starts[:-1])[owners]
    slots = tables[owners, at // block_size].astype(np.int64) * block_size + at % block_size
    return AttentionBatch(starts, cached + lengths, tables, slots, block_size)


def _joined(arrays: Sequence[Int64Array]) -> Int64Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)


def _padded(tables: Sequence[Int32Array] | Int32Array, least: int = 1) -> Int32Array:
    """Copies to int32 [S, the longest, or more]; what is past a table's end is 0."""
    padded = np.zeros((len(tables), max(least, *map(len, tables))), dtype=np.int32)
    if isinstance(tables, np.ndarray):
        padded[:, : tables.shape[1]] = tables
        return padded
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _logit_rows(segments: Sequence[Segment], ends: Sequence[int]) -> Int64Array:
    counts = np.array([segment.num_logits for segment in segments])
    stops = np.array(ends, dtype=np.int64)
    firsts = np.repeat(stops - counts, counts)
    rows: Int64Array = firsts + np.arange(len(firsts)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows
