"""Every token of a copy is in one piece, and pieces are as large as the blocks allow."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from epd.stages.engine.kv_pool import KVLayout, KVPool, token_slots
from epd.stages.engine.slot_runs import BlockRun, TokenRun, slot_runs


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
        tokens = range(block.num_blocks * source_size)
        pairs += [(block.source * source_size + i, block.target * source_size + i) for i in tokens]
    loose = []
    for run in runs.tokens:
        assert run.source // source_size == (run.source + run.num_tokens - 1) // source_size
        assert run.target // target_size == (run.target + run.num_tokens - 1) // target_size
        loose += [(run.source + token, run.target + token) for token in range(run.num_tokens)]
    assert loose == list(map(tuple, runs.slots.T.tolist()))
    assert sorted(pairs + loose) == sorted(zip(sources.tolist(), targets.tolist(), strict=True))


def test_blocks_that_follow_each_other_are_one_piece() -> None:
    sources = token_slots([5, 6, 7, 1, 2], 2, 19, 4).numpy()
    targets = token_slots([0, 1, 2, 3, 9], 2, 19, 4).numpy()
    runs = slot_runs(sources, targets, 4, 4)
    assert runs.blocks() == [BlockRun(6, 1, 2), BlockRun(1, 3, 1)]
    assert runs.tokens == (TokenRun(22, 2, 2), TokenRun(8, 36, 3))


def test_a_chunk_of_a_large_model_is_a_piece_for_each_block() -> None:
    """Blocks of both pools in no order; with the layers outermost it was 56 pieces for each block."""
    tables = np.random.default_rng(0).permutation(400)
    sources = token_slots(tables[:128].tolist(), 0, 2048, 16).numpy()
    targets = token_slots(tables[200:328].tolist(), 0, 2048, 16).numpy()
    runs = slot_runs(sources, targets, 16, 16)
    assert sum(run.num_blocks for run in runs.blocks()) == 128
    assert not runs.tokens
    layout = KVLayout(num_layers=28, num_kv_heads=4, head_dim=128, dtype=torch.bfloat16)
    block = KVPool(2, 16, layout).storage[1]
    assert (block.nbytes, block.is_contiguous()) == (917_504, True)
