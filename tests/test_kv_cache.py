"""Our cache against transformers' own, under appending, growing and cutting back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from stages.kv_cache import KVCache

LAYERS, HEADS, DIM = 2, 3, 4
STEPS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 90)), st.tuples(st.just("crop"), st.floats(0, 1))
)


def states(length: int) -> torch.Tensor:
    return torch.randn(1, HEADS, length, DIM)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 100), st.lists(STEPS, max_size=12))
def test_equals_the_dynamic_cache(capacity: int, steps: list[tuple[str, float]]) -> None:
    ours, theirs = KVCache(LAYERS, capacity), DynamicCache()
    for kind, amount in steps:
        if kind == "crop":
            keep = int(amount * len(ours))
            theirs.crop(keep - len(ours))
            ours.crop(keep)
            continue
        for layer in range(LAYERS):
            keys, values = states(int(amount)), states(int(amount))
            expected = theirs.update(keys.clone(), values.clone(), layer)
            held = ours.as_past.update(keys, values, layer)
            assert torch.equal(held[0], expected[0])
            assert torch.equal(held[1], expected[1])
        assert len(ours) == ours.as_past.get_seq_length() == theirs.get_seq_length()


def test_room_kept_ahead_is_not_given_up_by_cropping() -> None:
    cache = KVCache(1, capacity=200)
    cache.as_past.update(states(150), states(150), 0)
    reserved = cache.num_bytes
    cache.crop(10)
    cache.as_past.update(states(100), states(100), 0)

    assert reserved == cache.num_bytes == 2 * HEADS * 200 * DIM * 4
    assert len(cache) == 110


def test_cannot_keep_more_than_is_held() -> None:
    with pytest.raises(ValueError, match="cannot keep 1 tokens of the 0 held"):
        KVCache(1, capacity=8).crop(1)
