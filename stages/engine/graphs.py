"""Captures work for a GPU once, to be launched as one thing from then on: passes of decodes of a few sizes.

A batch is padded to the next size, and its arrays are copied to where the captured pass reads them, in one
copy, which ends with the longest block table:

    batch     | request a | request b | request c | padding |
    arrays    | slots | token ids | positions | contexts | work | states | blocks 0 of all | blocks 1 of ..

Rows that pad a batch write to a block that no request gets, the last of each pool, and nobody reads them.
They have no recurrent state. The logits are copied from where the pass leaves them, since the next one may be
launched before they are used.

Each size above one is captured twice: with one reading of keys and values for each request, and with a set of
work more for what several read together (`stages/attention/device.py`), replayed if there is any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from epd.encoders.device import arrays_over, bytes_into, room_bytes
from epd.stages.attention.attention import AttentionBatch, AttentionPlan
from epd.stages.attention.device import DeviceHeads, DevicePlan, FixedWork, WorkRoom, fixed_work
from epd.stages.attention.pieces import SharedRun
from epd.stages.decoder.delta_rule import DeltaPlan, DeltaWork
from epd.stages.engine.kv_pool import KVPools
from epd.stages.engine.packed_pass import PackedPass
from epd.stages.kernels.tiles import PagedSegments, growth
from epd.types import Int64Array, UInt8Array, ceil_div

_SIZES = (1, 2, 4, 8, 16, *range(32, 513, 32))
# Tokens for which the keys of a batch stay cut as they are: the last pieces are longer by so many.
_LASTING = 16
_INT32_BYTES = 4
# Makes logits [B, V] of token ids, int64 [B], and positions, int64 [rows, B], by plans of layer groups and of
# recurrent states.
Compute = Callable[[Tensor, Tensor, Sequence[AttentionPlan], DeltaPlan], Tensor]


# Passes of one token of each of some requests, and any others.
PassKind = Literal["decodes", "chunks"]
ALL_PASSES: frozenset[PassKind] = frozenset({"decodes", "chunks"})


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
class Capturing:
    """Says which passes are captured, and by what.

    max_num_seqs, max_tokens: of a pass.
    """

    maker: GraphMaker
    max_num_seqs: int
    max_tokens: int
    kinds: frozenset[PassKind] = ALL_PASSES


@dataclass(frozen=True, slots=True)
class PassShape:
    """Describes what captured passes have in common.

    num_position_rows: three for M-RoPE, else one.
    max_num_seqs: of a pass. max_blocks: of a request's table.
    spare_blocks: of each layer group, the block for rows that pad a pass.
    heads: of each layer group.
    has_states: whether layers have a recurrent state.
    """

    num_position_rows: int
    block_size: int
    max_num_seqs: int
    max_blocks: int
    spare_blocks: tuple[int, ...]
    heads: tuple[DeviceHeads, ...]
    has_states: bool

    @classmethod
    def of(
        cls,
        pools: KVPools,
        heads: Sequence[DeviceHeads],
        num_position_rows: int,
        max_num_seqs: int,
        max_positions: int,
    ) -> PassShape:
        """Describes passes over these pools, whose last blocks are spare. max_positions: of a request."""
        num_blocks = [pool.num_blocks for pool in pools.groups]
        max_blocks = min(*num_blocks, ceil_div(max_positions, pools.block_size))
        spare = tuple(number - 1 for number in num_blocks)
        sizes = num_position_rows, pools.block_size, max_num_seqs, max_blocks
        return cls(*sizes, spare, tuple(heads), pools.states is not None)

    def room(self, size: int) -> WorkRoom:
        """Returns the room for attention's work of a batch."""
        return WorkRoom.of_all([WorkRoom.of_decodes(size, heads) for heads in self.heads])

    def num_segments(self, num_tokens: int) -> int:
        """Returns how many segments so many tokens have at most."""
        return min(self.max_num_seqs, num_tokens)

    @property
    def spare_slots(self) -> Int64Array:
        """Returns a slot of each spare block: int64 [G, 1]."""
        return np.array(self.spare_blocks, np.int64)[:, None] * self.block_size


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Holds the arrays of a batch of B, G layer groups: tensors, or NumPy's on the host.

    slots: int64 [G, B]. token_ids: int64 [B]. positions: int64 [rows, B]. contexts: int32 [G, B].
    own, together: items, int32 [G, I, 8]. rows: int32 [G, 2 B]. merges: int32 [G, B, 3].
    entries: int32 [G, E]. See `WorkList`. steps: int32 [B, 5], see `DeltaWork`; [0, 5] without states.
    tables: int32 [max_blocks, G, B], last, so that columns that no table of the batch has need not be copied.
    """

    slots: Any
    token_ids: Any
    positions: Any
    contexts: Any
    own: Any
    together: Any
    rows: Any
    merges: Any
    entries: Any
    steps: Any
    tables: Any

    def states(self) -> DeltaPlan:
        """Plans the recurrent states, of runs of one row."""
        chunks, walks = self.steps.new_empty(0, 2), self.steps.new_empty(0, 4)
        return DeltaPlan((), self.steps.device, DeltaWork(self.steps, chunks, walks, self.steps))

    def plans(self, shape: PassShape, *, is_shared: bool) -> list[AttentionPlan]:
        """Plans the attention of each layer group. is_shared: with what is read together."""
        starts = torch.arange(len(self.token_ids) + 1, dtype=torch.int32, device=self.slots.device)
        on_device = [
            DevicePlan.fixed(
                self.slots[group],
                PagedSegments(starts, self.contexts[group], self.tables[:, group].t()),
                1,
                self._work(group, is_shared=is_shared),
                heads,
                shape.block_size,
            )
            for group, heads in enumerate(shape.heads)
        ]
        return [AttentionPlan(plan.slot_mapping, plan) for plan in on_device]

    def _work(self, group: int, *, is_shared: bool) -> FixedWork:
        sets = (self.own, self.together) if is_shared else (self.own,)
        entries = self.entries[group] if is_shared else self.entries[group, : self.own.shape[1]]
        return FixedWork([items[group] for items in sets], self.rows[group], self.merges[group], entries)


class _HostBatch:
    """Holds the arrays of a batch of B rows on the host, and writes only what a pass changes.

    A pass that goes on by a token has the work of the one before, with keys that are one more at the end of
    each request. After _LASTING tokens the keys are cut anew.
    is_shared: whether requests read something together.
    """

    def __init__(self, memory: UInt8Array, shape: PassShape, size: int) -> None:
        """Lays them out in memory, uint8 [n], with nothing but padding."""
        self._shape, self._size, self._num_rows = shape, size, size
        self._memory = torch.from_numpy(memory)
        self._arrays = _Arrays(*(each.numpy() for each in arrays_over(self._memory, _layout(shape, size))))
        self._start = room_bytes(_layout(shape, size)[:-1])  # of the tables
        self._num_columns = 1
        self._planned: PackedPass | None = None
        self._first_context = 0
        self._arrays.token_ids[:], self._arrays.positions[:] = 0, 0
        self._arrays.steps[:, 0], self._arrays.steps[:, 1:3] = np.arange(len(self._arrays.steps)), 1
        self._pad(0)
        self._plan([()] * len(shape.heads))

    @property
    def memory(self) -> Tensor:
        """Returns what a pass reads of the memory: uint8 [n]."""
        num_blocks = self._num_columns * len(self._shape.heads) * self._size
        return self._memory[: self._start + num_blocks * _INT32_BYTES]

    def _pad(self, num_rows: int) -> None:
        """Lets the rows behind the first `num_rows` write to, and read, what nobody else does."""
        padding = slice(num_rows, max(self._num_rows, num_rows))
        self._arrays.slots[:, padding] = self._shape.spare_slots
        self._arrays.contexts[:, padding] = 1
        self._arrays.steps[padding, 3:] = -1
        self._arrays.tables[0, :, padding] = np.array(self._shape.spare_blocks, np.int32)[:, None]
        self._num_rows = num_rows

    def write(self, packed: PackedPass) -> None:
        """Takes a pass of at most B requests, which may be the one before, moved on by some tokens."""
        arrays, num_rows = self._arrays, len(packed.token_ids)
        if num_rows != self._num_rows:
            self._pad(num_rows)
        arrays.token_ids[:num_rows] = packed.token_ids
        arrays.positions[:, :num_rows] = packed.positions[: self._shape.num_position_rows]
        self._num_columns = num_columns_of(packed)
        for group, batch in enumerate(packed.batches):
            arrays.slots[group, :num_rows] = batch.slot_mapping
            arrays.contexts[group, :num_rows] = batch.context_lens
            columns = batch.block_tables[:, : self._num_columns].T
            arrays.tables[: len(columns), group, :num_rows] = columns
        if packed.states:
            arrays.steps[:num_rows, 3:] = [(-1 if old is None else old, new) for old, new, _ in packed.states]
        num_tokens = int(packed.batches[0].context_lens[0]) - self._first_context
        if packed is not self._planned or not 0 <= num_tokens < _LASTING:
            self._planned, num_tokens = packed, 0
            self._first_context = int(packed.batches[0].context_lens[0])
            pairs = zip(packed.batches, self._shape.heads, strict=True)
            self._plan([shared_runs(batch, heads) for batch, heads in pairs])
        np.add(self._own, self._growth * num_tokens, out=arrays.own)

    def _plan(self, runs: Sequence[Sequence[SharedRun]]) -> None:
        """Cuts the keys into items of work. runs: of each layer group, what its requests read together."""
        arrays, room = self._arrays, self._shape.room(self._size)
        starts = np.arange(self._size + 1, dtype=np.int32)
        for group, heads in enumerate(self._shape.heads):
            work = fixed_work(starts, arrays.contexts[group], runs[group], heads, room)
            arrays.own[group], arrays.together[group] = work.items
            arrays.rows[group], arrays.merges[group] = work.rows, work.merges
            arrays.entries[group] = work.entries
        self.is_shared = any(runs)
        self._own = arrays.own.copy()
        self._growth = growth(self._own, self._num_rows)


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
        shape: PassShape,
        device: torch.device,
    ) -> None:
        """Captures passes of several sizes, the largest first, whose memory serves the others."""
        self._shape = shape
        self._sizes = graph_sizes(shape.max_num_seqs)
        num_bytes = room_bytes(_layout(shape, self._sizes[-1]))
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._on_host = np.zeros(num_bytes, np.uint8)
        self._logits: Tensor | None = None
        self._captured = {
            (size, is_shared): self._capture(maker, compute, size, is_shared=is_shared)
            for size in reversed(self._sizes)
            for is_shared in ((True, False) if size > 1 else (False,))
        }
        self._host = self._laid_out(self._sizes[-1])

    def _laid_out(self, size: int) -> _HostBatch:
        self._host_size = size
        return _HostBatch(self._on_host, self._shape, size)

    def _capture(self, maker: GraphMaker, compute: Compute, size: int, *, is_shared: bool) -> _Captured:
        bytes_into(self._memory, self._laid_out(size).memory)
        arrays = _Arrays(*arrays_over(self._memory, _layout(self._shape, size)))
        plans, states = arrays.plans(self._shape, is_shared=is_shared), arrays.states()
        if self._logits is None:
            self._logits = compute(arrays.token_ids, arrays.positions, plans, states)
        logits = self._logits[:size]

        def run() -> None:
            logits.copy_(compute(arrays.token_ids, arrays.positions, plans, states))

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
            and num_columns_of(packed) <= self._shape.max_blocks
        )

    def run(self, packed: PackedPass, token_ids: Tensor | None) -> Tensor:
        """Returns logits [T, V] of a pass that fits. token_ids: int64 [T], on the device, if not its own.

        A pass may be run again after `go_on`, which costs less than another one.
        """
        assert self._logits is not None
        num_rows = len(packed.token_ids)
        size = next(size for size in self._sizes if size >= num_rows)
        if size != self._host_size:
            self._host = self._laid_out(size)
        self._host.write(packed)
        captured = self._captured[size, self._host.is_shared]
        bytes_into(self._memory, self._host.memory)
        if token_ids is not None:
            captured.arrays.token_ids[:num_rows].copy_(token_ids)
        captured.replay()
        return self._logits[:num_rows].clone()


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Returns the sizes of batches that are captured where at most so many sequences run at once."""
    return [*takewhile(lambda size: size < max_num_seqs, _SIZES), min(max_num_seqs, _SIZES[-1])]


def shared_runs(batch: AttentionBatch, heads: DeviceHeads) -> Sequence[SharedRun]:
    """Returns what decodes read together; nothing if they take part more often than there is room for."""
    runs = heads.shared(batch.query_starts, batch.context_lens, batch.block_tables, batch.block_size)
    return runs if sum(len(run.segments) for run in runs) <= len(batch.context_lens) else ()


def num_columns_of(packed: PackedPass) -> int:
    """Returns how many blocks the longest of the tables needs."""
    return max(ceil_div(int(batch.context_lens.max()), batch.block_size) for batch in packed.batches)


def _layout(shape: PassShape, size: int) -> list[Tensor]:
    """Returns the arrays of a batch without their values, in their order."""
    num_groups = len(shape.spare_blocks)
    shapes = [(num_groups, size), (size,), (shape.num_position_rows, size)]
    layout = [torch.empty(each, dtype=torch.int64, device="meta") for each in shapes]
    work = shape.room(size).shapes
    shapes = [
        (num_groups, size),
        *((num_groups, *each) for each in work),
        (size if shape.has_states else 0, 5),
        (shape.max_blocks, num_groups, size),
    ]
    return layout + [torch.empty(each, dtype=torch.int32, device="meta") for each in shapes]
