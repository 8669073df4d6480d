"""The encoder cache's policy, told as stories."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epd.encode.encoder_cache import EncoderCacheManager
from epd.errors import InfeasibleError
from tests.encoders.fakes import fake_key

A, B, C, D = (fake_key(value, 1) for value in range(4))


def filled(cache: EncoderCacheManager, *keys: object, num_embeddings: int = 2) -> EncoderCacheManager:
    for key in keys:
        cache.reserve(key, num_embeddings, "writer")  # type: ignore[arg-type]
        cache.commit(key)  # type: ignore[arg-type]
        cache.release(key, "writer")  # type: ignore[arg-type]
    return cache


def test_a_second_reader_finds_what_the_first_left() -> None:
    cache = filled(EncoderCacheManager(3, 2), A)
    assert cache.is_ready(A)
    cache.acquire(A, "reader")
    assert cache.counts.hits == 1
    assert cache.eviction_order() == []


def test_room_is_made_by_dropping_what_was_let_go_longest_ago() -> None:
    cache = filled(EncoderCacheManager(3, 2), A, B, C)
    cache.acquire(A, "reader")
    cache.release(A, "reader")
    cache.reserve(D, 2, "writer")
    assert A in cache
    assert B not in cache
    assert cache.counts.evictions == 1
    cache.check_integrity()


def test_who_fills_more_than_half_makes_room_first() -> None:
    cache = EncoderCacheManager(4, 2)
    ours, others = replace(A, client="ann"), [replace(key, client="bob") for key in (B, C, D)]
    filled(cache, ours, *others)
    cache.reserve(fake_key(4, 1), 2, "writer")
    assert [key in cache for key in (A, B, C, D)] == [True, False, True, True]
    cache.acquire(A, "reader")
    assert cache.counts.hits == 1, "whose it is does not tell keys apart"
    cache.check_integrity()


def test_what_is_held_is_never_dropped() -> None:
    cache = filled(EncoderCacheManager(2, 2), A, B)
    cache.acquire(A, "reader")
    cache.acquire(B, "reader")
    assert not cache.can_reserve(1)
    with pytest.raises(ValueError, match="cannot reserve 1 embeddings"):
        cache.reserve(C, 1, "writer")


def test_a_question_changes_nothing() -> None:
    cache = filled(EncoderCacheManager(2, 2), A, B)
    assert cache.can_reserve(4)
    assert cache.eviction_order() == [A, B]
    assert cache.num_free_blocks == 0


def test_a_pending_entry_that_nobody_waits_for_frees_its_blocks_at_once() -> None:
    cache = EncoderCacheManager(2, 2)
    cache.reserve(A, 3, "writer")
    cache.acquire(A, "reader")
    cache.release(A, "writer")
    assert cache.num_free_blocks == 0
    cache.release(A, "reader")
    assert cache.num_free_blocks == 2
    assert A not in cache


def test_an_entry_takes_whole_blocks() -> None:
    cache = EncoderCacheManager(4, 4)
    assert len(cache.reserve(A, 5, "writer").block_ids) == 2
    assert cache.get(A).num_embeddings == 5


def test_what_cannot_ever_fit_is_infeasible() -> None:
    cache = EncoderCacheManager(2, 4)
    cache.check_fits(8)
    with pytest.raises(InfeasibleError, match="9 embeddings do not fit into an encoder cache of 8"):
        cache.check_fits(9)


def test_a_holder_cannot_hold_twice() -> None:
    cache = filled(EncoderCacheManager(2, 2), A)
    cache.acquire(A, "reader")
    with pytest.raises(ValueError, match="'reader' holds"):
        cache.acquire(A, "reader")


@pytest.mark.parametrize("damage", ["lose", "share", "idle"])
def test_check_integrity_sees_damage(damage: str) -> None:
    cache = filled(EncoderCacheManager(3, 2), A, B)
    if damage == "lose":
        cache._free.clear()
    elif damage == "share":
        cache._entries[A].block_ids = cache._entries[B].block_ids
    else:
        cache._idle.remove(A)
    with pytest.raises(AssertionError):
        cache.check_integrity()
