"""Captures passes with chunks of prompts or drafts, of up to 512 tokens, to be launched as one thing.

A pass is padded to the next size, of tokens and of segments; its arrays and its embedded tokens are copied to
where the captured pass reads them:

    tokens     | chunk of a ....... | chunk of b ... | c | d d d | padding |      c decodes, d has drafts
    segments   | a | b | c | d | of no tokens .... |

The work of attention, and of recurrent states, is listed for each pass, in memory for the most that such a
pass can have. Rows that pad a
pass are in none of it: they write to a block that no request gets, and nobody reads them. Embeddings with
visual tokens in their places, and the head, are launched as they are, before and behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from epd.encoders import Embeddings
from epd.encoders.device import CPU, arrays_over, arrays_to_device, bytes_into, room_bytes
from epd.stages.attention.attention import AttentionBatch, AttentionPlan
from epd.stages.attention.device import DevicePlan, FixedWork, WorkRoom, fixed_work
from epd.stages.decoder.delta_rule import DeltaPlan, DeltaWork, work_shapes, work_tables
from epd.stages.engine.graphs import GraphMaker, PassShape, num_columns_of, shared_runs
from epd.stages.engine.packed_pass import PackedPass
from epd.stages.kernels.tiles import PagedSegments

# Tokens: of larger passes the device takes longer than the host takes to launch them.
SIZES = (64, 128, 192, 256, 384, 512)
# Makes rows [T, C] behind all layers of embedded tokens [T, C], which may be overwritten, positions, int64
# [rows, T], plans of layer groups and of recurrent states, and what is added behind each of the first layers,
# [T, C].
ComputeRows = Callable[[Tensor, Tensor, Sequence[AttentionPlan], DeltaPlan, Sequence[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Holds the arrays of a pass of B tokens, S segments, G layer groups: tensors, or NumPy's on the host.

    slots: int64 [G, B]. positions: int64 [rows, B]. starts: int32 [S + 1]. contexts: int32 [G, S].
    short, tall: int32 [G, I, 8]. rows: int32 [G, P]. merges: int32 [G, B, 3]. entries: int32 [G, E].
    See `WorkList`. steps, chunks, walks, pieces: see `DeltaWork`; without states they have no rows.
    """

    slots: Any
    positions: Any
    starts: Any
    contexts: Any
    short: Any
    tall: Any
    rows: Any
    merges: Any
    entries: Any
    steps: Any
    chunks: Any
    walks: Any
    pieces: Any

    def states(self) -> DeltaPlan:
        """Plans the recurrent states."""
        work = DeltaWork(self.steps, self.chunks, self.walks, self.pieces)
        return DeltaPlan((), self.steps.device, work)

    def plans(self, shape: PassShape, tables: Tensor) -> list[AttentionPlan]:
        """Plans the attention of each layer group. tables: int32 [G, S, max_blocks]."""
        num_tokens = self.slots.shape[1]
        on_device = []
        for group, heads in enumerate(shape.heads):
            segments = PagedSegments(self.starts, self.contexts[group], tables[group])
            items = [self.short[group], self.tall[group]]
            work = FixedWork(items, self.rows[group], self.merges[group], self.entries[group])
            sizes = num_tokens, work, heads, shape.block_size
            on_device.append(DevicePlan.fixed(self.slots[group], segments, *sizes))
        return [AttentionPlan(plan.slot_mapping, plan) for plan in on_device]


class _Captured:
    """Holds a pass of one size, and its arrays on both sides, in memory that all sizes use."""

    def __init__(self, shape: PassShape, size: int, memory: Tensor, host: Tensor) -> None:
        """Takes memory, uint8 [n], on the device and on the host. It is to be captured yet."""
        layout = _layout(shape, size)
        self.size, self.arrays = size, _Arrays(*arrays_over(memory, layout))
        self.replay: Callable[[], None] = _not_captured
        self._shape, self._room = shape, _room(shape, size)
        self._host = _Arrays(*(each.numpy() for each in arrays_over(host, layout)))
        self._memory, self._bytes = memory, host[: room_bytes(layout)]

    def place(self, packed: PackedPass) -> None:
        """Writes the arrays of a pass, and copies them to the device."""
        arrays, shape, first = self._host, self._shape, packed.batches[0]
        num_tokens, num_seqs = len(packed.token_ids), len(first.context_lens)
        arrays.slots[:], arrays.positions[:], arrays.contexts[:] = shape.spare_slots, 0, 0
        arrays.positions[:, :num_tokens] = packed.positions[: shape.num_position_rows]
        arrays.starts[:] = num_tokens
        arrays.starts[:num_seqs] = first.query_starts[:-1]
        for group, batch in enumerate(packed.batches):
            arrays.slots[group, :num_tokens] = batch.slot_mapping
            arrays.contexts[group, :num_seqs] = batch.context_lens
            self._list_work(group, batch)
        tables = arrays.steps, arrays.chunks, arrays.walks, arrays.pieces
        runs = DeltaPlan.build(first.query_starts, packed.states, CPU).parts
        for table, listed in zip(tables, work_tables(runs), strict=True):
            table[:], table[: len(listed)] = -1, listed
        bytes_into(self._memory, self._bytes)

    def _list_work(self, group: int, batch: AttentionBatch) -> None:
        arrays, heads = self._host, self._shape.heads[group]
        runs = shared_runs(batch, heads)
        work = fixed_work(batch.query_starts, batch.context_lens, runs, heads, self._room)
        arrays.short[group], arrays.tall[group] = work.items
        arrays.rows[group], arrays.merges[group] = work.rows, work.merges
        arrays.entries[group] = work.entries


class ChunkGraphs:
    """Holds the captured passes of one runner."""

    def __init__(
        self,
        maker: GraphMaker,
        compute: ComputeRows,
        shape: PassShape,
        hidden: Tensor,
        num_deepstack: int,
        sizes: Sequence[int],
    ) -> None:
        """Captures passes of these sizes, which ascend, the largest first.

        hidden: [T, C], embedded tokens of the largest, whose memory is to be used. num_deepstack: layers with
        features of visual tokens.
        """
        self._shape, self._hidden = shape, hidden
        self._out, self._deepstack = torch.empty_like(hidden), hidden.new_zeros(num_deepstack, *hidden.shape)
        num_bytes, num_segments = room_bytes(_layout(shape, sizes[-1])), shape.num_segments(sizes[-1])
        table_shape = len(shape.heads), num_segments, shape.max_blocks
        self._tables = torch.zeros(table_shape, dtype=torch.int32, device=hidden.device)
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=hidden.device)
        on_host = torch.from_numpy(np.zeros(num_bytes, np.uint8))
        self._captured = [_Captured(shape, size, self._memory, on_host) for size in sizes]
        for captured in reversed(self._captured):
            self._capture(maker, compute, captured)

    def _capture(self, maker: GraphMaker, compute: ComputeRows, captured: _Captured) -> None:
        size, first = captured.size, _one_token(self._shape)
        captured.place(first)
        self._place_tables(first)
        plans = captured.arrays.plans(self._shape, self._tables[:, : self._shape.num_segments(size)])
        hidden, out, deepstack = self._hidden[:size], self._out[:size], list(self._deepstack[:, :size])
        states = captured.arrays.states()

        def run() -> None:
            out.copy_(compute(hidden, captured.arrays.positions, plans, states, deepstack))

        captured.replay = maker.capture(run)

    def fits(self, packed: PackedPass) -> bool:
        """Reports whether a pass may be replayed, all segments of which are whole.

        What adapters add was not captured, nor tokens that attend later ones.
        """
        return (
            len(packed.token_ids) <= len(self._hidden)
            and len(packed.batches[0].context_lens) <= self._shape.max_num_seqs
            and packed.num_deepstack in (0, len(self._deepstack))
            and not packed.adapters
            and all(batch.both_ways is None for batch in packed.batches)
            and num_columns_of(packed) <= self._shape.max_blocks
        )

    def run(
        self, packed: PackedPass, hidden: Tensor, visual_rows: Tensor, visual: Embeddings | None
    ) -> Tensor:
        """Returns what the last layer gives in a pass that fits, [T, C], until the next one.

        hidden: [T, C], embedded tokens with visual ones in their places, rows visual_rows, int64 [V].
        """
        captured = next(each for each in self._captured if each.size >= len(hidden))
        captured.place(packed)
        self._place_tables(packed)
        self._hidden[: len(hidden)].copy_(hidden)
        if len(self._deepstack):
            self._deepstack[:, : captured.size].zero_()
        for rows, features in zip(self._deepstack, () if visual is None else visual.deepstack, strict=False):
            rows.index_copy_(0, visual_rows, features.to(rows.dtype))
        captured.replay()
        return self._out[: len(hidden)]

    def _place_tables(self, packed: PackedPass) -> None:
        """Copies as much of the block tables as the pass reads."""
        num_columns = num_columns_of(packed)
        read = [batch.block_tables[:, :num_columns] for batch in packed.batches]
        for tables, some in zip(self._tables, arrays_to_device(read, self._tables.device), strict=True):
            tables[: len(some), : some.shape[1]].copy_(some)


def chunk_sizes(max_tokens: int) -> list[int]:
    """Returns the sizes that are captured where a pass has at most so many tokens."""
    smaller = list(takewhile(lambda size: size < max_tokens, SIZES))
    return list(SIZES[: len(smaller) + 1])


def _not_captured() -> None:
    raise AssertionError("a pass is replayed before it is captured")


def _one_token(shape: PassShape) -> PackedPass:
    """Returns a pass of a token that reads what it writes, where nobody else does."""
    none, one = np.empty(0, np.int64), np.array([1], np.int32)
    batches = tuple(
        AttentionBatch(np.array([0, 1], np.int32), one, block * one[None], slots, shape.block_size)
        for block, slots in zip(shape.spare_blocks, shape.spare_slots, strict=True)
    )
    return PackedPass(np.zeros(1, np.int64), np.zeros((3, 1), np.int64), none, none, 0, batches)


def _room(shape: PassShape, size: int) -> WorkRoom:
    rooms = [WorkRoom.of_tokens(size, shape.num_segments(size), heads) for heads in shape.heads]
    return WorkRoom.of_all(rooms)


def _layout(shape: PassShape, size: int) -> list[Tensor]:
    """Returns the arrays of a pass without their values, in their order."""
    num_groups, num_segments = len(shape.heads), shape.num_segments(size)
    wide = [(num_groups, size), (shape.num_position_rows, size)]
    narrow = [(num_segments + 1,), (num_groups, num_segments)]
    narrow += [(num_groups, *each) for each in _room(shape, size).shapes]
    narrow += work_shapes(size, num_segments) if shape.has_states else work_shapes(0, 0)
    layout = [torch.empty(each, dtype=torch.int64, device="meta") for each in wide]
    return layout + [torch.empty(each, dtype=torch.int32, device="meta") for each in narrow]
