"""The Triton kernels against their plain torch twins where there is a GPU.

`tests/stages/test_interpreted.py` interprets them anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from epd.encoders.patches import PatchSpec, patchify
from epd.kv.kv_room import SCALE_BYTES
from epd.stages.attention import device as attention_device
from epd.stages.attention.attention import AttentionBatch, AttentionPlan, attend, write_kv
from epd.stages.attention.device import DeviceHeads, DevicePlan, FixedWork, WorkRoom, fixed_work
from epd.stages.kernels.scaled_values import scaled
from epd.stages.kernels.tiles import PagedSegments, growth
from tests.stages.attention.test_attention import (
    Case,
    filled,
    freed,
    make_case,
    naive,
    rounded,
    share,
    within,
)

HAS_GPU = torch.cuda.is_available() or any(Path("/dev").glob("nvidia[0-9]*"))
on_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU in this machine")


@dataclass(frozen=True, slots=True)
class Pass:
    """lens: (new tokens, context) of each segment. heads: of queries, of keys, channels of a head.

    num_processors: that the device is taken to have; the more, the more splits.
    num_shared: leading blocks of all segments with one new token that are the same.
    window, both_ways, marked: see `within`. int8_values: see `KVLayout`.
    """

    lens: tuple[tuple[int, int], ...]
    heads: tuple[int, int, int]
    block_size: int
    dtype: torch.dtype = torch.float32
    num_processors: int = 1
    num_shared: int = 0
    window: int | None = None
    both_ways: tuple[int, ...] = ()
    marked: tuple[int, ...] = ()
    int8_values: bool = False


# Few programs each: interpreted, one takes milliseconds.
PASSES = [
    Pass(((1, 40), (5, 5), (3, 20), (1, 33)), (4, 2, 24), 4),  # decodes and drafts; channels are padded
    Pass(((1, 40), (1, 1), (1, 129)), (7, 1, 16), 16),  # a group that is no power of two
    Pass(((1, 3), (2, 70)), (2, 2, 64), 1),
    Pass(((40, 100), (9, 9), (1, 65)), (6, 2, 16), 16),  # chunks of several tiles beside a decode
    Pass(((1, 600), (1, 20), (20, 520)), (4, 1, 16), 16, num_processors=16),  # some tiles are cut
    Pass(((1, 900), (1, 20), (4, 700), (1, 31)), (6, 2, 16), 4, num_processors=4),  # one long context
    # Decodes that share 256 tokens, in more tiles than one; beside them a chunk, or one that shares nothing.
    Pass(((1, 270), (1, 300), (1, 600), (20, 50)), (8, 1, 16), 16, num_processors=2, num_shared=16),
    Pass(((1, 40), *[(1, 530 + i) for i in range(3)]), (32, 1, 16), 16, num_shared=32),
    Pass(((1, 40), (12, 30)), (4, 2, 32), 4, torch.float16),
    Pass(((1, 40), (12, 30)), (4, 2, 32), 4, torch.bfloat16),
    Pass(((40, 300), (9, 200), (20, 20)), (4, 2, 24), 16, torch.float16),  # most keys are seen by every row
    # A window, also of segments whose tokens attend each other; some tiles are cut.
    Pass(((1, 40), (30, 90), (3, 20), (20, 60), (1, 7)), (4, 2, 16), 4, window=12, both_ways=(1,)),
    Pass(((70, 800), (1, 900)), (4, 1, 16), 16, num_processors=4, window=700),
    Pass(((30, 90), (1, 33)), (4, 2, 24), 16, both_ways=(0,)),
    # Some of a chunk's tokens attend each other; some tiles are cut, and some have none of these.
    Pass(((1, 33), (60, 190), (9, 9)), (4, 2, 24), 16, num_processors=4, marked=(3, *range(20, 50, 3), 68)),
    Pass(((30, 90), (20, 20)), (4, 2, 16), 4, window=40, both_ways=(0,), marked=(32, 40, 49)),
    Pass(((1, 33), (30, 70)), (4, 2, 24), 16, marked=(3, 9, 28), int8_values=True),
    Pass(((1, 40), (5, 5), (3, 20), (1, 33)), (4, 2, 24), 4, int8_values=True),
    Pass(((40, 300), (9, 200), (20, 20)), (4, 2, 24), 16, torch.bfloat16, int8_values=True),
    Pass(((1, 600), (12, 520)), (4, 1, 16), 16, torch.float16, num_processors=16, int8_values=True),
    Pass(((1, 40), (30, 90), (1, 7)), (4, 2, 16), 4, window=12, int8_values=True),
]
LARGE_PASSES = [
    Pass(tuple((1, 200 + 87 * i) for i in range(32)), (28, 4, 128), 16),
    Pass(((1, 60_000),), (28, 4, 128), 16),
    Pass(((512, 4512), (1, 900), (300, 300), (20, 8000)), (32, 8, 128), 16),
    Pass(tuple((30 + 11 * i, 30 + 11 * i) for i in range(16)), (4, 2, 64), 16),
    Pass(((700, 700), (4, 1000)), (8, 8, 80), 32),
    Pass(((64, 300), (1, 500)), (8, 1, 256), 64),
    Pass(((1, 60_000), (300, 300)), (28, 4, 128), 16, int8_values=True),
]
MEAN, STD = (122.77, 116.75, 104.09), (68.5, 66.63, 70.32)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def in_float32(case: Case) -> Case:
    """The same values, so that the truth is not rounded in between."""
    return replace(
        case,
        query=case.query.float(),
        keys=[keys.float() for keys in case.keys],
        values=[values.float() for values in case.values],
    )


def case_of(one: Pass) -> Case:
    """The segments of a pass, with the blocks that they share."""
    case = make_case(list(one.lens), one.heads, one.block_size, one.dtype)
    return within(sharing(case, one.num_shared), one.window, one.both_ways, one.marked)


def truth_of(one: Pass, case: Case) -> Case:
    """What a pass attends, in float32: of values in 8 bits, what is left of them."""
    return in_float32(rounded(case) if one.int8_values else case)


def sharing(case: Case, num_blocks: int) -> Case:
    """The same, but that leading blocks of segments with one new token, which have more, are one."""
    batch, num_tokens = case.batch, num_blocks * case.batch.block_size
    able = np.flatnonzero((np.diff(batch.query_starts) == 1) & (batch.context_lens > num_tokens))
    return share(case, able.tolist(), num_tokens) if num_blocks else case


@contextmanager
def sharing_pays() -> Iterator[None]:
    with patch.object(attention_device, "LAUNCH_BYTES", 0):
        yield


def heads_of(one: Pass, key_cache: Tensor) -> DeviceHeads:
    """Those of the device; of a CPU, as if it had the processors of the pass."""
    heads = DeviceHeads.of(key_cache, one.heads[0])
    return heads if key_cache.is_cuda else replace(heads, num_processors=one.num_processors)


def compare_attention(one: Pass, device: str, *, is_large: bool = False) -> None:
    case = case_of(one)
    scale = one.heads[2] ** -0.5
    key_cache, value_cache = (cache.to(device) for cache in filled(case, int8_values=one.int8_values))
    with sharing_pays():
        plan = DevicePlan.build(freed(case.batch), torch.device(device), heads_of(one, key_cache))
    assert (len(plan.work.rows) > len(case.query)) == (one.num_shared > 0)
    ours = plan.attend_by_kernels(case.query.to(device), key_cache, value_cache, scale)
    assert ours.dtype == one.dtype
    truth = truth_of(one, case)
    twin = attend(truth.query, *filled(truth), AttentionPlan.build(case.batch), scale)
    expected = twin if is_large else naive(truth, scale)
    for wanted in (twin, expected):
        difference = float((ours.cpu().double() - wanted.double()).abs().max())
        assert difference < TOLERANCE[one.dtype], f"the kernel is off by {difference} for {one}"


def compare_refilled(device: str) -> None:
    """Decodes from arrays whose values change: a batch of three, then of two others, in rows for four.

    Then with what two of three read together, and again without it. Some have the work of contexts that were
    shorter by five keys, moved on by as many.
    """
    heads = (4, 2, 32)
    memory: list[Tensor] = []
    for lens, num_shared, num_more in (
        (((1, 700), (1, 9), (1, 300)), 0, 0),
        (((1, 20), (1, 610)), 0, 5),
        (((1, 700), (1, 9), (1, 300)), 16, 5),
        (((1, 600), (1, 610), (1, 580), (1, 20)), 32, 0),
        (((1, 20), (1, 610)), 0, 0),
    ):
        case = sharing(make_case(list(lens), heads, 16), num_shared)
        key_cache, value_cache = (cache.to(device) for cache in filled(case))
        unit = replace(DeviceHeads.of(key_cache, heads[0]), num_processors=4)
        arrays = refilled(case.batch, unit, num_more, num_rows=4, max_blocks=64)
        if not memory:
            memory = [array.to(device) for array in arrays]
            slots, contexts, tables, own, together, *rest = memory
            segments = PagedSegments(torch.arange(5).int().to(device), contexts, tables)
            work = FixedWork([own, together], *rest)
            plan = DevicePlan.fixed(slots, segments, 1, work, unit, block_size=16)
        for place, array in zip(memory, arrays, strict=True):
            place.copy_(array)
        query = torch.cat([case.query, torch.full((4 - len(lens), *heads[::2]), torch.nan)]).to(device)
        ours = plan.attend_by_kernels(query, key_cache, value_cache, 0.2)[: len(lens)]
        assert (ours.cpu().double() - naive(case, 0.2)).abs().max() < TOLERANCE[torch.float32]


def compare_padded(device: str) -> None:
    """Passes of chunks, drafts and decodes, in rows for 64 tokens and work for 6 segments."""
    heads = (6, 2, 16)
    for lens, num_shared in (
        (((40, 300), (9, 9), (1, 650), (3, 20)), 0),
        (((1, 300), (1, 290), (1, 280), (17, 17)), 16),
        (tuple((8, 40 + number) for number in range(6)), 0),
    ):
        case = sharing(make_case(list(lens), heads, 16), num_shared)
        batch, num_tokens = case.batch, len(case.query)
        caches = [cache.to(device) for cache in filled(case)]
        unit = replace(DeviceHeads.of(caches[0], heads[0]), num_processors=8)
        with sharing_pays():
            runs = unit.shared(batch.query_starts, batch.context_lens, batch.block_tables, 16)
        assert bool(runs) == (num_shared > 0)
        room = WorkRoom.of_tokens(64, 6, unit)
        listed = fixed_work(batch.query_starts, batch.context_lens, runs, unit, room)
        arrays = *listed.items, listed.rows, listed.merges, listed.entries
        short, tall, *rest = (torch.from_numpy(each).to(device) for each in arrays)
        located = batch.slot_mapping, batch.query_starts, batch.context_lens, batch.block_tables
        slots, *places = (torch.from_numpy(each).to(device) for each in located)
        work = FixedWork([short, tall], *rest)
        plan = DevicePlan.fixed(slots, PagedSegments(*places), 64, work, unit, block_size=16)
        query = torch.cat([case.query, torch.full((64 - num_tokens, *heads[::2]), torch.nan)]).to(device)
        ours = plan.attend_by_kernels(query, *caches, 0.2)[:num_tokens]
        assert (ours.cpu().double() - naive(case, 0.2)).abs().max() < TOLERANCE[torch.float32]


def refilled(
    batch: AttentionBatch, heads: DeviceHeads, num_more: int, num_rows: int, max_blocks: int
) -> list[Tensor]:
    """Slots, contexts, tables and work of a batch, in more rows than it has, else nonsense.

    num_more: keys of each that have come since the work was listed.
    """
    num_used, width = batch.block_tables.shape
    tables = np.full((max_blocks, num_rows), 10**6, np.int32)
    tables[:width, :num_used] = batch.block_tables.T
    tables[0, num_used:] = 0  # for rows that pad the batch: of one token each
    slots, contexts = np.full(num_rows, 10**6), np.ones(num_rows, np.int32)
    slots[:num_used], contexts[:num_used] = batch.slot_mapping, batch.context_lens
    with sharing_pays():
        runs = heads.shared(batch.query_starts, batch.context_lens, batch.block_tables, batch.block_size)
    before = np.maximum(contexts - num_more, 1)
    starts = np.arange(num_rows + 1, dtype=np.int32)
    work = fixed_work(starts, before, runs, heads, WorkRoom.of_decodes(num_rows, heads))
    own, together = work.items
    own = own + num_more * growth(own, num_used)
    arrays = [slots, contexts, tables, own, together, work.rows, work.merges, work.entries]
    tensors = [torch.from_numpy(array) for array in arrays]
    tensors[2] = tensors[2].t()
    return tensors


def compare_moves(device: str, dtype: torch.dtype = torch.float32) -> None:
    """Writing, bit by bit; keys are transposed views, as from transformers. Then blocks of another pool."""
    from epd.stages.kernels.kv_slots import copy_blocks_fused, write_slots

    torch.manual_seed(0)
    slots = torch.tensor([7, 0, 30, 31, 12], device=device)
    keys, values = (torch.randn(3, 5, 40).to(device, dtype).transpose(0, 1) for _ in range(2))
    ours, twin = (torch.zeros(8, 2, 2, 4, 3, 40, dtype=dtype, device=device) for _ in range(2))
    write_slots(keys, values, ours[:, 1, 0], ours[:, 1, 1], slots)
    for plane, rows in enumerate((keys, values)):
        for slot, row in zip(slots.tolist(), rows, strict=True):
            twin[slot // 4, 1, plane, slot % 4] = row
    assert torch.equal(ours, twin)
    cached = torch.zeros(8, 2, 4, 3, 40, dtype=dtype, device=device)
    rows = torch.zeros(8, 2, 4, 3, 40 + SCALE_BYTES, dtype=torch.int8, device=device)
    write_slots(keys, values, cached[:, 1], rows[:, 1], slots)
    assert torch.equal(cached[slots // 4, 1, slots % 4], keys)
    assert torch.equal(rows[slots // 4, 1, slots % 4], scaled(values))
    assert int(rows.any(-1).sum()) == keys.shape[0] * keys.shape[1]
    theirs = torch.randn(6, 2, 2, 4, 3, 40).to(device, dtype)
    read, written = torch.tensor([5, 0, 3], device=device), torch.tensor([1, 7, 4], device=device)
    copy_blocks_fused(theirs, ours, read, written)
    twin[written] = theirs[read]
    assert torch.equal(ours, twin)


@pytest.mark.parametrize("one", PASSES)
def test_the_plain_twin_attends_from_the_same_inputs(one: Pass) -> None:
    case = in_float32(case_of(replace(one, dtype=torch.float32)))
    caches = filled(case, int8_values=one.int8_values)
    plan = DevicePlan.build(freed(case.batch), torch.device("cpu"), heads_of(one, caches[0]))
    scale = one.heads[2] ** -0.5
    ours = plan.attend(case.query, *caches, scale)
    assert (ours.double() - naive(truth_of(one, case), scale)).abs().max() < TOLERANCE[torch.float32]


def test_tensors_without_values_take_the_twins() -> None:
    """On a fake device kernels cannot run; the twins check shapes and devices there, and wait for nothing."""
    pytest.importorskip("triton")
    from tests.stages.kernels_ahead import fake_tensors

    case = make_case([(1, 40), (12, 30)], (4, 2, 64), 16)
    with fake_tensors():
        caches = [torch.zeros(8, 2, 2, 16, 2, 64, device="cuda")[:, 1, plane] for plane in range(2)]
        plan = AttentionPlan.build(case.batch, "cuda", DeviceHeads.of(caches[0], 4))
        query, keys = torch.zeros(13, 4, 64, device="cuda"), torch.zeros(13, 2, 64, device="cuda")
        write_kv(keys, keys, caches[0], caches[1], plan.slot_mapping)
        out = attend(query, caches[0], caches[1], plan, 0.125)
        patches = patchify(
            torch.zeros(2, 56, 84, 3, dtype=torch.uint8, device="cuda"), PatchSpec(14, 2, 2, MEAN, STD, 3)
        )
        assert (out.device.type, out.shape) == ("cuda", query.shape)
        assert (patches.device.type, patches.shape) == ("cuda", (24, 1176))
        with pytest.raises(RuntimeError, match="device"):
            attend(query.cpu(), caches[0], caches[1], plan, 0.125)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("one", [*PASSES[:5], *LARGE_PASSES])
def test_the_compiled_kernel_attends_as_its_twin(one: Pass, dtype: torch.dtype) -> None:
    compare_attention(replace(one, dtype=dtype), "cuda", is_large=one in LARGE_PASSES)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_compiled_kernels_move_as_their_twins(dtype: torch.dtype) -> None:
    compare_moves("cuda", dtype)


@pytest.mark.gpu
@on_gpu
def test_the_compiled_kernel_attends_from_arrays_that_change() -> None:
    compare_refilled("cuda")
    compare_padded("cuda")


@pytest.mark.gpu
@on_gpu
def test_caches_on_a_gpu_take_the_kernels() -> None:
    case = make_case([(1, 90), (30, 40)], (4, 2, 64), 16)
    caches: list[Tensor] = [torch.zeros_like(cache).cuda() for cache in filled(case)]
    plan = AttentionPlan.build(case.batch, "cuda", DeviceHeads.of(caches[0], 4))
    new_keys, new_values = (
        torch.cat([rows[0][-1:], rows[1][-30:]]).cuda() for rows in (case.keys, case.values)
    )
    for cache, full in zip(caches, filled(case), strict=True):
        cache.copy_(full.nan_to_num())
        cache.view(-1, 2, 64)[plan.slot_mapping] = 0
    write_kv(new_keys, new_values, caches[0], caches[1], plan.slot_mapping)
    ours = attend(case.query.cuda(), caches[0], caches[1], plan, 0.125)
    assert (ours.cpu().double() - naive(case, 0.125)).abs().max() < TOLERANCE[torch.float32]
