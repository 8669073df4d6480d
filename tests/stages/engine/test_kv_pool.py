"""Keys and values come out as they went in, wherever they lay in between.

Modules: `stages/engine/slot_copies.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from epd.errors import InfeasibleError
from epd.stages.attention.pieces import is_one_piece
from epd.stages.engine.kv_pool import (
    KVGroupShape,
    KVLayout,
    KVPool,
    KVPools,
    KVPoolsShape,
    StorageOrder,
)
from epd.stages.engine.pool_memory import pool_memory
from epd.stages.engine.slot_copies import CopyRun, copy_slots, slot_runs, token_slots

HAS_GPU = torch.cuda.is_available() or any(Path("/dev").glob("nvidia[0-9]*"))
ORDERS: tuple[StorageOrder, ...] = ("blocks", "heads")
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32)
INT8 = replace(LAYOUT, int8_values=True)
of_both = pytest.mark.parametrize("layout", [LAYOUT, INT8], ids=["one type", "values in int8"])


@dataclass(frozen=True)
class Copy:
    """Has what a `BlockCopy` has."""

    layer_group: int
    source: int
    target: int
    num_tokens: int


def numbered(pool: KVPool) -> KVPool:
    """The pool with another number in every place, as far as the type has them."""
    for plane in pool.planes:
        plane.copy_(torch.arange(1, 1 + plane.numel()).view(plane.shape))
    return pool


def token(pool: KVPool, slot: int) -> Tensor:
    """What lies in one slot, read the slow way: all numbers in a row."""
    place = slot // pool.block_size, slice(None), slice(None), slot % pool.block_size
    return torch.cat([plane[place].flatten().float() for plane in pool.planes])


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (0, 11), (3, 11), (4, 8), (7, 9)])
def test_slots_of_tokens_follow_the_block_table(block_size: int, start: int, stop: int) -> None:
    table = [7, 3, 4, 9, 0, 1, 2, 11, 5, 6, 8]
    expected = [table[t // block_size] * block_size + t % block_size for t in range(start, stop)]
    assert token_slots(table, start, stop, block_size).tolist() == expected


def test_tokens_past_the_block_table_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens \[3, 9\) are not in 2 blocks of 4; allocate first"):
        token_slots([1, 0], 3, 9, 4)


@pytest.mark.parametrize("orders", [("blocks", "blocks"), ("heads", "heads"), ("heads", "blocks")])
@pytest.mark.parametrize(("source_size", "target_size"), [(4, 4), (4, 16), (16, 4), (1, 1), (1, 4)])
@pytest.mark.parametrize("count", [0, 1, 5, 13, 16])
@of_both
def test_a_copy_brings_every_token_and_touches_nothing_else(
    source_size: int,
    target_size: int,
    count: int,
    orders: tuple[StorageOrder, StorageOrder],
    layout: KVLayout,
) -> None:
    source = numbered(KVPool(32 // source_size, source_size, layout, order=orders[0]))
    target = KVPool(32 // target_size, target_size, layout, order=orders[1])
    sources = token_slots(torch.randperm(source.num_blocks).tolist(), 2, 2 + count, source_size)
    targets = token_slots(torch.randperm(target.num_blocks).tolist(), 1, 1 + count, target_size)
    target.copy(source, sources, targets)
    for here, there in zip(sources.tolist(), targets.tolist(), strict=True):
        assert torch.equal(token(target, there), token(source, here))
    untouched = sorted(set(range(32)) - set(targets.tolist()))
    assert all(not token(target, slot).any() for slot in untouched)


@of_both
def test_copying_runs_equals_copying_slots(layout: KVLayout) -> None:
    source = numbered(KVPool(8, 4, layout))
    fast, plain = KVPool(8, 4, layout), KVPool(8, 4, layout)
    sources = token_slots([5, 6, 7, 1], 1, 15, 4)
    targets = token_slots([0, 1, 6, 3, 4], 3, 17, 4)
    fast.copy(source, sources, targets)
    for ours, theirs in zip(plain.planes, source.planes, strict=True):
        copy_slots(ours, theirs, sources, targets)
    assert all(map(torch.equal, fast.planes, plain.planes))
    assert all(bool(plane.any()) for plane in fast.planes)


def test_tokens_move_and_blocks_fill_another_pool_with_their_values() -> None:
    source, target = numbered(KVPool(8, 4, INT8)), KVPool(3, 4, INT8)
    expected = [token(source, slot) for slot in (1, 6)]
    source.move(torch.tensor([1, 6]), torch.tensor([20, 31]))
    assert torch.equal(torch.stack([token(source, slot) for slot in (20, 31)]), torch.stack(expected))
    target.fill(source, [5, 2])
    for slot in range(4):
        assert torch.equal(token(target, slot), token(source, 20 + slot))
        assert torch.equal(token(target, 4 + slot), token(source, 8 + slot))
        assert not token(target, 8 + slot).any()


def test_heads_of_a_pool_have_their_values() -> None:
    source, target = numbered(KVPool(2, 4, INT8)), KVPool(2, 4, INT8)
    slots = torch.arange(8)
    target.heads(0, 1).copy(source.heads(1, 2), slots, slots)
    for ours, theirs in zip(target.planes, source.planes, strict=True):
        assert torch.equal(ours[..., 0, :], theirs[..., 1, :])
        assert not ours[..., 1, :].any()


def test_values_in_8_bits_leave_room_for_a_third_more() -> None:
    """A scale of 4 bytes for 128 channels is what is missing of the third and of the quarter."""
    whole = KVLayout(num_layers=28, num_kv_heads=4, head_dim=128, dtype=torch.bfloat16)
    less = replace(whole, int8_values=True)
    memory_bytes = 2 << 30
    more, usual = (memory_bytes // (16 * each.bytes_per_token) for each in (less, whole))
    assert 1.31 < more / usual < 4 / 3
    pool = KVPool(3, 16, less)
    assert sum(plane.nbytes for plane in pool.planes) == 3 * 16 * less.bytes_per_token
    assert 0.75 < less.bytes_per_token / whole.bytes_per_token < 0.76


def test_pools_of_different_layouts_do_not_mix() -> None:
    other = KVPool(2, 4, KVLayout(3, 2, 8, torch.float32))
    slots = torch.arange(2)
    for each in (other, KVPool(2, 4, INT8)):
        with pytest.raises(ValueError, match="cannot copy tokens of KVLayout"):
            KVPool(2, 4, LAYOUT).copy(each, slots, slots)


@of_both
def test_a_copied_block_is_written_apart_from_its_source(layout: KVLayout) -> None:
    pool = numbered(KVPool(4, 4, layout))
    all_before = [plane.clone() for plane in pool.planes]
    pool.copy_blocks([Copy(0, source=1, target=3, num_tokens=3), Copy(0, source=3, target=0, num_tokens=2)])
    for plane, before in zip(pool.planes, all_before, strict=True):
        assert torch.equal(plane[3, :, :, :3], before[1, :, :, :3])
        assert torch.equal(plane[3, :, :, 3], before[3, :, :, 3])
        assert torch.equal(plane[0, :, :, :2], before[1, :, :, :2])
        assert torch.equal(plane[1], before[1])


@pytest.mark.parametrize("order", ORDERS)
@of_both
def test_a_request_that_was_in_host_memory_comes_back_elsewhere(
    order: StorageOrder, layout: KVLayout
) -> None:
    pool = numbered(KVPool(8, 4, layout, order=order))
    here, there = token_slots([6, 2, 5], 0, 10, 4), token_slots([1, 0, 7], 0, 10, 4)
    expected = [token(pool, slot).clone() for slot in here.tolist()]
    kept = pool.to_host([6, 2, 5], 10)
    assert kept.num_blocks == 3
    for plane in pool.planes:
        plane.zero_()
    pool.copy(kept, torch.arange(2, 10), there[2:])
    assert all(torch.equal(token(pool, there[i]), expected[i]) for i in range(2, 10))
    assert not token(pool, there[1]).any()  # found in the prefix cache, say
    assert not any(bool(plane[2:7].any()) for plane in pool.planes)


def test_what_lies_in_one_piece_is_up_to_the_order() -> None:
    by_block, by_head = (KVPool(5, 4, LAYOUT, order=order) for order in ORDERS)
    assert by_block.storage.shape == by_head.storage.shape
    assert by_block.storage[1].is_contiguous()
    assert not by_block.layer(1)[0].is_contiguous()
    caches = [cache for index in range(3) for cache in by_head.layer(index)]
    assert all(is_one_piece(cache) and cache.permute(2, 0, 1, 3).is_contiguous() for cache in caches)


def test_layers_are_views_of_the_pool_in_the_order_of_the_model() -> None:
    wide = KVLayout(2, 2, 4, torch.float32)
    groups = (KVGroupShape(3, LAYOUT), KVGroupShape(5, wide))
    pools = KVPools(KVPoolsShape(groups, block_size=4))
    for index in range(5):
        keys, values = pools.layer(index)
        keys.fill_(index + 1)
        values.fill_(-(index + 1))
    assert [float(pools.groups[0].storage[:, i, 0].mean()) for i in range(3)] == [1, 2, 3]
    assert [float(pools.groups[1].storage[:, i, 1].mean()) for i in range(2)] == [-4, -5]
    assert pools.layer(4)[0].shape == (5, 4, 2, 4)
    assert pools.bytes_per_token == 2 * 5 * 2 * 4 * 4


def test_copies_of_blocks_go_to_their_layer_group() -> None:
    pools = KVPools(KVPoolsShape((KVGroupShape(3, LAYOUT), KVGroupShape(3, LAYOUT)), block_size=4))
    for pool in pools.groups:
        numbered(pool)
    pools.copy_blocks([Copy(1, source=0, target=2, num_tokens=4)])
    assert torch.equal(pools.groups[1].storage[2], pools.groups[1].storage[0])
    assert not torch.equal(pools.groups[0].storage[2], pools.groups[0].storage[0])


@pytest.mark.parametrize("order", ORDERS)
def test_two_mappings_of_one_file_are_one_pool(tmp_path: Path, order: StorageOrder) -> None:
    shape = KVPoolsShape((KVGroupShape(3, LAYOUT), KVGroupShape(2, LAYOUT)), 4, order)
    file = tmp_path / "pool"
    file.write_bytes(bytes(shape.num_bytes))
    ours, theirs = shape.build(file), shape.build(file)
    ours.layer(4)[1].fill_(7)
    assert bool((theirs.layer(4)[1] == 7).all())
    assert not theirs.groups[0].storage.any()


def test_memory_of_a_device_cannot_be_shared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory of 'cuda' cannot be shared"):
        KVPools(KVPoolsShape((KVGroupShape(3, LAYOUT),), 4), tmp_path / "pool", "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU in this machine")
def test_tokens_go_from_and_to_a_device() -> None:
    source = numbered(KVPool(8, 4, LAYOUT))
    there, back = KVPool(8, 4, LAYOUT, device="cuda"), KVPool(8, 4, LAYOUT)
    slots, others = token_slots([5, 6, 1], 1, 11, 4), token_slots([0, 7, 3], 2, 12, 4)
    there.copy(source, slots, others)
    back.copy(there, others, slots)
    kept = there.to_host([0, 7, 3], 12)
    torch.cuda.synchronize()
    for slot, other, place in zip(slots.tolist(), others.tolist(), range(2, 12), strict=True):
        assert torch.equal(token(back, slot), token(source, slot))
        assert torch.equal(token(there, other).cpu(), token(source, slot))
        assert torch.equal(token(kept, place), token(source, slot))


@given(
    data=st.data(),
    source_size=st.sampled_from([1, 2, 4, 8]),
    target_size=st.sampled_from([1, 2, 4, 8]),
    num_tokens=st.integers(0, 40),
)
def test_pieces_hold_each_token_once(
    data: st.DataObject, source_size: int, target_size: int, num_tokens: int
) -> None:
    at = [data.draw(st.integers(0, 9)) for _ in range(2)]
    tables = [data.draw(st.permutations(range(50))) for _ in range(2)]
    sizes = source_size, target_size
    sources, targets = (
        token_slots(table, start, start + num_tokens, size).numpy()
        for table, start, size in zip(tables, at, sizes, strict=True)
    )
    runs = slot_runs(sources, targets, *sizes)
    pairs = []
    for block in runs.blocks():
        assert source_size == target_size
        tokens = range(block.length * source_size)
        pairs += [(block.source * source_size + i, block.target * source_size + i) for i in tokens]
    loose = []
    for run in runs.tokens:
        assert run.source // source_size == (run.source + run.length - 1) // source_size
        assert run.target // target_size == (run.target + run.length - 1) // target_size
        loose += [(run.source + token, run.target + token) for token in range(run.length)]
    assert loose == list(map(tuple, runs.slots.T.tolist()))
    assert sorted(pairs + loose) == sorted(zip(sources.tolist(), targets.tolist(), strict=True))


def test_blocks_that_follow_each_other_are_one_piece() -> None:
    sources = token_slots([5, 6, 7, 1, 2], 2, 19, 4).numpy()
    targets = token_slots([0, 1, 2, 3, 9], 2, 19, 4).numpy()
    runs = slot_runs(sources, targets, 4, 4)
    assert runs.blocks() == [CopyRun(6, 1, 2), CopyRun(1, 3, 1)]
    assert runs.tokens == (CopyRun(22, 2, 2), CopyRun(8, 36, 3))


def test_a_chunk_of_a_large_model_is_a_piece_for_each_block() -> None:
    """Blocks of both pools in no order; with the layers outermost it was 56 pieces for each block."""
    tables = np.random.default_rng(0).permutation(400)
    sources = token_slots(tables[:128].tolist(), 0, 2048, 16).numpy()
    targets = token_slots(tables[200:328].tolist(), 0, 2048, 16).numpy()
    runs = slot_runs(sources, targets, 16, 16)
    assert sum(run.length for run in runs.blocks()) == 128
    assert not runs.tokens
    layout = KVLayout(num_layers=28, num_kv_heads=4, head_dim=128, dtype=torch.bfloat16)
    block = KVPool(2, 16, layout).storage[1]
    assert (block.nbytes, block.is_contiguous()) == (917_504, True)


def test_more_address_space_than_the_process_may_have_is_told() -> None:
    """Linux gives no process 2^62 bytes, as it gives none what `ulimit -v` forbids."""
    with pytest.raises(InfeasibleError, match="where ulimit -v limits memory, raise it; else lower num_kv"):
        pool_memory(1 << 62)
