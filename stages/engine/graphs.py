"""Captures work for a GPU once, to be launched as one thing from then on: passes of decodes of a few sizes.

A batch is padded to the next size, and its arrays are copied to where the captured pass reads them, in one
copy, which ends with the longest block table:

    batch     | request a | request b | request c | padding |
    arrays    | slots | token ids | positions | contexts | work | blocks 0 of all | blocks 1 of all | ...

Rows that pad a batch write to a block that no request gets, the last of each pool, and nobody reads them. The
logits are copied from where the pass leaves them, since the next one may be launched before they are used.

Each size above one is captured twice: with one reading of keys and values for each request, and with a set of
work more for what several read together (`stages/attention/device.py`), replayed if there is any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from epd.encoders.device import arrays_into, arrays_over, room_bytes
from epd.stages.attention.attention import AttentionBatch, AttentionPlan
from epd.stages.attention.device import DecodeRoom, DecodeWork, DeviceHeads, DevicePlan, decode_work
from epd.stages.attention.pieces import SharedRun
from epd.stages.engine.packed_pass import PackedPass
from epd.types import Int32Array, Int64Array

_SIZES = (1, 2, 4, 8, 16, *range(32, 513, 32))
# Makes logits [B, V] of token ids, int64 [B], and positions, int64 [rows, B], by the plans of layer groups.
Compute = Callable[[Tensor, Tensor, Sequence[AttentionPlan]], Tensor]


class GraphMaker(Protocol):
    """Captures work."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Returns what repeats on the device all that `run` does there, from and to the same memory.

        run: waits for nothing, and may be called several times. What it allocates is its own until it ends;
        other graphs of this maker use the same memory for theirs, so they are replayed one after another.
        What it reads and writes besides must be kept by the caller.
        """


class CudaGraphMaker:
    """Captures CUDA graphs, which share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            self._once(run)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process may use the device meanwhile: encoders do.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                run()
        return graph.replay

    def _once(self, run: Callable[[], None]) -> None:
        """Runs it as it is, so that kernels are compiled and libraries have their memory."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Describes what passes of decodes have in common.

    num_position_rows: three for M-RoPE, else one.
    max_blocks: of a request's table.
    spare_blocks: of each layer group, the block for rows that pad a batch.
    heads: of each layer group.
    """

    num_position_rows: int
    block_size: int
    max_blocks: int
    spare_blocks: tuple[int, ...]
    heads: tuple[DeviceHeads, ...]

    def room(self, size: int) -> DecodeRoom:
        """Returns the room for attention's work of a batch."""
        rooms = [DecodeRoom.of(size, heads) for heads in self.heads]
        items = [max(each) for each in zip(*(room.num_items for room in rooms), strict=True)]
        return DecodeRoom((items[0], items[1]), max(room.num_entries for room in rooms))


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Holds the arrays of a batch of B, G layer groups.

    slots: int64 [G, B]. token_ids: int64 [B]. positions: int64 [rows, B]. contexts: int32 [G, B].
    own, together: items, int32 [G, I, 8]. rows: int32 [G, 2 B]. merges: int32 [G, B, 3].
    entries: int32 [G, E]. See `WorkList`.
    tables: int32 [max_blocks, G, B], last, so that columns that no table of the batch has need not be copied.
    """

    slots: Tensor
    token_ids: Tensor
    positions: Tensor
    contexts: Tensor
    own: Tensor
    together: Tensor
    rows: Tensor
    merges: Tensor
    entries: Tensor
    tables: Tensor

    @classmethod
    def over(cls, memory: Tensor, shape: DecodeShape, size: int) -> _Arrays:
        return cls(*arrays_over(memory, _layout(shape, size)))

    def plans(self, shape: DecodeShape, *, is_shared: bool) -> list[AttentionPlan]:
        """Plans the attention of each layer group. is_shared: with what is read together."""
        on_device = [
            DevicePlan.of_decodes(
                self.slots[group],
                self.contexts[group],
                self.tables[:, group].t(),
                self._work(group, is_shared=is_shared),
                heads,
                shape.block_size,
            )
            for group, heads in enumerate(shape.heads)
        ]
        return [AttentionPlan(plan.slot_mapping, plan) for plan in on_device]

    def _work(self, group: int, *, is_shared: bool) -> DecodeWork:
        sets = (self.own, self.together) if is_shared else (self.own,)
        entries = self.entries[group] if is_shared else self.entries[group, : self.own.shape[1]]
        return DecodeWork([items[group] for items in sets], self.rows[group], self.merges[group], entries)


@dataclass(frozen=True, slots=True)
class _Captured:
    """Holds a pass of one size. plans: kept, since it reads their tensors."""

    arrays: _Arrays
    plans: Sequence[AttentionPlan]
    replay: Callable[[], None]


class DecodeGraphs:
    """Holds the captured passes of one runner."""

    def __init__(
        self,
        maker: GraphMaker,
        compute: Compute,
        shape: DecodeShape,
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        """Captures passes of these sizes, the largest first, whose memory serves the others."""
        self._shape = shape
        self._sizes = sorted(sizes)
        num_bytes = room_bytes(_layout(shape, self._sizes[-1]))
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._logits: Tensor | None = None
        self._captured = {
            (size, is_shared): self._capture(maker, compute, size, is_shared=is_shared)
            for size in reversed(self._sizes)
            for is_shared in ((True, False) if size > 1 else (False,))
        }

    def _capture(self, maker: GraphMaker, compute: Compute, size: int, *, is_shared: bool) -> _Captured:
        arrays_into(self._memory, _host_arrays(None, self._shape, size, ()))
        arrays = _Arrays.over(self._memory, self._shape, size)
        plans = arrays.plans(self._shape, is_shared=is_shared)
        if self._logits is None:
            self._logits = compute(arrays.token_ids, arrays.positions, plans)
        logits = self._logits[:size]

        def run() -> None:
            logits.copy_(compute(arrays.token_ids, arrays.positions, plans))

        return _Captured(arrays, plans, maker.capture(run))

    def fits(self, packed: PackedPass) -> bool:
        """Reports whether a pass may be replayed: one token of each of some requests, with its logits.

        What adapters add was not captured.
        """
        num_rows = len(packed.token_ids)
        return (
            num_rows == len(packed.logit_rows) == len(packed.batches[0].context_lens)
            and num_rows <= self._sizes[-1]
            and not len(packed.visual_rows)
            and not packed.adapters
            and _num_columns(packed) <= self._shape.max_blocks
        )

    def run(self, packed: PackedPass, token_ids: Tensor | None) -> Tensor:
        """Returns logits [T, V] of a pass that fits. token_ids: int64 [T], on the device, if not its own."""
        assert self._logits is not None
        num_rows = len(packed.token_ids)
        size = next(size for size in self._sizes if size >= num_rows)
        runs = [_shared(batch, heads) for batch, heads in zip(packed.batches, self._shape.heads, strict=True)]
        captured = self._captured[size, any(runs)]
        arrays_into(self._memory, _host_arrays(packed, self._shape, size, runs))
        if token_ids is not None:
            captured.arrays.token_ids[:num_rows].copy_(token_ids)
        captured.replay()
        return self._logits[:num_rows].clone()


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Returns the sizes of batches that are captured where at most so many sequences run at once."""
    return [*takewhile(lambda size: size < max_num_seqs, _SIZES), min(max_num_seqs, _SIZES[-1])]


def _shared(batch: AttentionBatch, heads: DeviceHeads) -> Sequence[SharedRun]:
    """Returns what decodes read together; nothing if they take part more often than there is room for."""
    runs = heads.shared(batch.query_starts, batch.context_lens, batch.block_tables, batch.block_size)
    return runs if sum(len(run.segments) for run in runs) <= len(batch.context_lens) else ()


def _num_columns(packed: PackedPass) -> int:
    return max(int(batch.block_tables.shape[1]) for batch in packed.batches)


def _layout(shape: DecodeShape, size: int) -> list[Tensor]:
    """Returns the arrays of a batch without their values, in their order."""
    num_groups = len(shape.spare_blocks)
    shapes = [(num_groups, size), (size,), (shape.num_position_rows, size)]
    layout = [torch.empty(each, dtype=torch.int64, device="meta") for each in shapes]
    work = shape.room(size).shapes(size)
    shapes = [
        (num_groups, size),
        *((num_groups, *each) for each in work),
        (shape.max_blocks, num_groups, size),
    ]
    return layout + [torch.empty(each, dtype=torch.int32, device="meta") for each in shapes]


def _host_arrays(
    packed: PackedPass | None, shape: DecodeShape, size: int, runs: Sequence[Sequence[SharedRun]]
) -> list[Int64Array | Int32Array]:
    """Returns the arrays of a batch, padded to `size` rows; without a pass nothing but padding.

    runs: of each layer group, what decodes read together.
    """
    spare = np.array(shape.spare_blocks, np.int32)[:, None]
    num_columns = 1 if packed is None else _num_columns(packed)
    slots = np.tile(spare.astype(np.int64) * shape.block_size, size)
    token_ids = np.zeros(size, np.int64)
    positions = np.zeros((shape.num_position_rows, size), np.int64)
    contexts = np.ones((len(spare), size), np.int32)
    tables = np.zeros((num_columns, len(spare), size), np.int32)
    tables[0] = spare
    if packed is not None:
        num_rows = len(packed.token_ids)
        token_ids[:num_rows] = packed.token_ids
        positions[:, :num_rows] = packed.positions[: shape.num_position_rows]
        for group, batch in enumerate(packed.batches):
            slots[group, :num_rows] = batch.slot_mapping
            contexts[group, :num_rows] = batch.context_lens
            tables[: batch.block_tables.shape[1], group, :num_rows] = batch.block_tables.T
    room = shape.room(size)
    work = [
        decode_work(each, together, heads, room)
        for each, together, heads in zip(contexts, runs or [()] * len(spare), shape.heads, strict=True)
    ]
    columns = zip(*((*each.items, each.rows, each.merges, each.entries) for each in work), strict=True)
    return [slots, token_ids, positions, contexts, *(np.stack(each) for each in columns), tables]
