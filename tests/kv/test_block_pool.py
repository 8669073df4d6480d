"""Block ids and block tables: runs stay together, shared blocks are never written, nothing is lost."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.kv.block_pool import BlockPool, BlockTable


def test_a_fresh_pool_gives_ascending_runs() -> None:
    pool = BlockPool(6)
    assert pool.take(3) == [0, 1, 2]
    assert pool.take(2) == [3, 4]
    pool.release(1)
    assert pool.take(2, after=4) == [5, 1]


def test_a_pool_does_not_give_what_it_has_not_got() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks are needed, 2 are free"):
        pool.take(3)
    with pytest.raises(ValueError, match="block 0 is free already"):
        pool.release(0)
    with pytest.raises(ValueError, match="block 0 is free and cannot be shared"):
        pool.share(0)


def test_a_new_run_starts_where_it_and_the_run_before_it_can_grow() -> None:
    pool = BlockPool(12)
    assert pool.take(2) == [0, 1]
    assert pool.take(2) == [6, 7]
    assert pool.take(1, after=1) == [2]
    assert pool.take(2) == [9, 10]


def test_blocks_that_were_held_before_are_taken_again() -> None:
    """Of many short requests, twenty at a time: no more is ever written than they need at once."""
    pool, touched, live = BlockPool(4096), set(range(100)), deque[list[int]]()
    pool.take(100)
    rng = random.Random(0)
    for _ in range(400):
        if len(live) == 20:
            live.rotate(rng.randrange(20))
            for block in live.popleft():
                pool.release(block)
        run = pool.take(2)
        live.append([*run, *pool.take(1, after=run[-1])])
        touched |= set(live[-1])
    assert len(touched) <= 100 + 20 * 3 + 3


def test_what_is_scattered_is_given_out_when_there_is_nothing_else() -> None:
    pool = BlockPool(6)
    for block in pool.take(6)[::2]:
        pool.release(block)
    assert pool.take(1, after=3) == [4]
    assert pool.take(2, after=5) == [0, 2]
    pool.check_integrity()


@settings(deadline=None)
@given(st.data())
def test_every_block_is_free_or_held(data: st.DataObject) -> None:
    """Whatever is taken, shared and released: counts match the holders, no block is given twice."""
    pool = BlockPool(8)
    holders: list[int] = []
    for _ in range(data.draw(st.integers(1, 40))):
        if holders and data.draw(st.booleans()):
            block = data.draw(st.sampled_from(holders))
            if data.draw(st.booleans()):
                pool.share(block)
                holders.append(block)
            else:
                pool.release(block)
                holders.remove(block)
        elif pool.num_free:
            taken = pool.take(data.draw(st.integers(1, pool.num_free)), data.draw(st.sampled_from([None, 3])))
            assert not set(taken) & set(holders)
            holders += taken
        assert [pool.references(block) for block in range(8)] == [holders.count(b) for b in range(8)]
        assert pool.num_free == 8 - len(set(holders))
        pool.check_integrity()


def test_slots_count_as_written_from_the_front_of_a_block_on() -> None:
    """A gap may hold what an earlier holder left there."""
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.write(block, 2, 3)
    assert pool.num_written(block) == 0
    pool.write(block, 0, 2)
    pool.write(block, 1, 4)
    assert pool.num_written(block) == 4
    pool.release(block)
    assert pool.take(1) == [block]
    assert pool.num_written(block) == 0


# Block tables


def table_of(pool: BlockPool, num_tokens: int) -> BlockTable:
    table = BlockTable(pool, block_size=4)
    table.take(table.num_missing(num_tokens))
    table.write(num_tokens)
    return table


def test_a_table_grows_by_whole_blocks() -> None:
    table = table_of(BlockPool(8), 5)
    assert (table.blocks, table.num_tokens, table.room, table.num_whole) == ([0, 1], 5, 3, 1)
    assert table.has_written_partial
    assert [table.num_missing(added) for added in (0, 3, 4, 8)] == [0, 0, 1, 2]
    table.take(1)
    assert (table.blocks, table.room) == ([0, 1, 2], 7)


@settings(deadline=None)
@given(st.lists(st.integers(0, 11), max_size=8), st.integers(0, 7))
def test_a_table_records_what_is_written_block_by_block(pieces: list[int], num_unwritten: int) -> None:
    """However tokens come in pieces, and where the first block waits for a copy of its front."""
    pool = BlockPool(32)
    table = BlockTable(pool, block_size=4)
    table.take(table.num_missing(num_unwritten + sum(pieces)))
    table.num_tokens = num_unwritten
    slots = [False] * num_unwritten
    for piece in pieces:
        table.write(piece)
        slots += [True] * piece
        for index, block in enumerate(table.blocks):
            assert pool.num_written(block) == [*slots[4 * index :][:4], False].index(False)
    assert table.num_tokens == len(slots)


def test_two_tables_share_what_is_written_in_full() -> None:
    pool = BlockPool(8)
    old, new = table_of(pool, 8), BlockTable(pool, block_size=4)
    new.share(old.blocks)
    assert (new.blocks, new.num_tokens, new.room) == ([0, 1], 8, 0)
    assert [pool.references(block) for block in old.blocks] == [2, 2]
    old.cut(0)
    assert pool.num_free == 6
    new.check_integrity()
    new.cut(0)
    assert (pool.num_free, new.blocks, new.num_tokens) == (8, [], 0)
    pool.check_integrity()


def test_a_cut_inside_a_shared_block_needs_a_block_of_its_own() -> None:
    """The other holder keeps its tokens; only a cut between blocks is free of charge."""
    pool = BlockPool(8)
    old, new = table_of(pool, 8), BlockTable(pool, block_size=4)
    new.share(old.blocks)
    assert [new.splits_shared(num) for num in (8, 6, 4)] == [False, True, False]
    source, target = new.replace(1)
    assert (source, new.blocks, pool.references(source)) == (1, [0, target], 1)
    assert not new.is_written, "the copy into the fresh block is still to be carried out"
    new.cut(6)
    pool.write(target, 0, 2)
    assert new.is_written
    for table in (old, new):
        table.check_integrity()


def test_a_table_that_would_write_into_a_shared_block_is_damaged() -> None:
    pool = BlockPool(8)
    table = table_of(pool, 6)
    pool.share(table.blocks[1])
    with pytest.raises(AssertionError, match="still to be written and have other holders"):
        table.check_integrity()
