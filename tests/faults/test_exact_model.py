"""A token of the exact model depends on all that its request has in the cache, and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from epd.encoders import Embeddings
from epd.stages.engine.kv_pool import KVGroupShape, KVLayout, KVPoolsShape
from epd.stages.engine.packed_pass import GroupKind, Segment, packed_pass
from tests.faults.exact_model import run_packed

_SIZE = 4  # of a block
_IDS = np.random.default_rng(0).integers(0, 90, 14)
_BLOCKS = (5, 1, 7, 2)


def runner() -> Any:
    layout = KVLayout(1, 2, 8, torch.float32)
    pools = KVPoolsShape((KVGroupShape(10, layout),), _SIZE).build()
    return SimpleNamespace(pools=pools, _embed=SimpleNamespace(num_embeddings=100))


def passed(run: Any, start: int, stop: int, blocks: Sequence[int] = _BLOCKS, shift: int = 0) -> torch.Tensor:
    """Returns the logits of the last token of _IDS[start:stop]."""
    positions = np.arange(start, stop)[None] + shift
    segment = Segment(_IDS[start:stop], positions, (start,), (np.array(blocks, np.int32),))
    logits: torch.Tensor = run_packed(run, packed_pass([segment], [GroupKind()], _SIZE), None)
    return logits


def test_chunks_and_blocks_change_nothing() -> None:
    whole = passed(runner(), 0, 14)
    assert whole.shape == (1, 100)
    for blocks in (_BLOCKS, (0, 9, 8, 3)):
        run = runner()
        for start, stop in ((0, 3), (3, 4), (4, 13)):
            passed(run, start, stop, blocks)
        assert torch.equal(passed(run, 13, 14, blocks), whole)


def test_every_bit_changes_the_logits() -> None:
    run = runner()
    passed(run, 0, 13)
    right = passed(run, 13, 14)
    storage = run.pools.groups[0].storage.view(torch.int32)
    draws = np.random.default_rng(1)
    for _ in range(200):
        token, half = draws.integers(13), draws.integers(2)
        head, channel = draws.integers(2), draws.integers(8)
        place = (_BLOCKS[token // _SIZE], 0, half, token % _SIZE, head, channel)
        bit = 1 << int(draws.integers(31))
        storage[place] ^= bit
        assert not torch.equal(passed(run, 13, 14), right), place
        storage[place] ^= bit
    assert torch.equal(passed(run, 13, 14), right)


def test_order_places_and_positions_change_the_logits() -> None:
    run = runner()
    passed(run, 0, 13)
    right = passed(run, 13, 14)
    assert not torch.equal(passed(run, 13, 14, (1, 5, 7, 2)), right)
    assert not torch.equal(passed(run, 13, 14, (5, 1, 6, 2)), right)
    assert not torch.equal(passed(run, 13, 14, shift=1), right)
    assert torch.equal(passed(run, 13, 14), right)


def test_visual_tokens_are_their_embeddings() -> None:
    def logits(rows: torch.Tensor) -> torch.Tensor:
        segment = Segment(_IDS[:2], np.arange(2)[None], (0,), (np.array([0], np.int32),))
        packed = packed_pass([segment], [GroupKind()], _SIZE)
        with_rows = SimpleNamespace(**{name: getattr(packed, name) for name in packed.__slots__})
        with_rows.visual_rows = np.array([0])
        found: torch.Tensor = run_packed(runner(), with_rows, Embeddings(rows))  # type: ignore[arg-type]
        return found

    rows = torch.ones(1, 8)
    assert torch.equal(logits(rows), logits(rows.clone()))
    assert not torch.equal(logits(rows), logits(torch.nextafter(rows, torch.tensor(2.0))))
