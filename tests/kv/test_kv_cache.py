"""The KV cache policy, told as stories; and what tokens are, which blocks are free, what is findable."""

from __future__ import annotations

import pytest

from epd.kv.block_pool import BlockCopy
from epd.kv.kv_cache import KVCacheManager
from epd.kv.kv_room import KVCacheSpec
from epd.kv.prefix_cache import TokenIdentity, token_identity
from epd.types import PlaceholderRange

DOG, CAT = b"dog" + bytes(13), b"cat" + bytes(13)


def manager(*num_blocks: int, block_size: int = 4) -> KVCacheManager:
    return KVCacheManager(KVCacheSpec(num_blocks or (20,), block_size))


def serve(cache: KVCacheManager, request_id: str, identity: TokenIdentity) -> list[BlockCopy]:
    """Opens a request and writes all its tokens."""
    copies = cache.open(request_id, identity, max_cached=len(identity) - 1)
    cache.allocate(request_id, len(identity))
    cache.commit(request_id, identity, len(identity))
    cache.check_integrity()
    return copies


def served(cache: KVCacheManager, request_id: str, identity: TokenIdentity) -> None:
    """A request that has come and gone."""
    serve(cache, request_id, identity)
    cache.free(request_id)
    cache.check_integrity()


def about(digest: bytes, *question: int) -> TokenIdentity:
    """[system][6 visual tokens][question]: with blocks of 4, the question starts at 3 of the second block."""
    tokens = [100, *[7] * 6, *question]
    return token_identity(tokens, [(PlaceholderRange(1, 6), digest)])


def text(*token_ids: int) -> TokenIdentity:
    return token_identity(token_ids)


# Prefixes


def test_a_second_question_about_a_video_computes_only_the_question() -> None:
    cache = manager()
    served(cache, "first", about(DOG, 1, 2, 3))
    copies = cache.open("second", about(DOG, 4, 5, 6), max_cached=9)
    assert cache.num_tokens("second") == 7
    (copy,) = copies
    assert copy.num_tokens == 3
    assert cache.block_table("second") == [0, copy.target]
    assert copy.source == 1
    assert copy.target not in (0, 1)


def test_another_video_with_the_same_placeholder_tokens_is_another_prefix() -> None:
    cache = manager()
    served(cache, "first", about(DOG, 1, 2, 3))
    assert cache.num_cached(about(CAT, 1, 2, 3)) == 1
    assert cache.open("second", about(CAT, 1, 2, 3), max_cached=9)[0].num_tokens == 1


def test_a_token_id_that_looks_like_a_visual_row_is_not_one() -> None:
    cache = manager()
    served(cache, "first", about(bytes(16), 1, 2, 3))
    assert cache.num_cached(text(100, 7, 7, 7, 7, 7, 7, 1, 2, 3)) == 1


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """Whoever opens says how much may be cached: without a computed token there are no logits."""
    cache = manager()
    served(cache, "first", text(*range(8)))
    assert cache.num_cached(text(*range(8))) == 8
    (copy,) = cache.open("second", text(*range(8)), max_cached=7)
    assert copy.num_tokens == 3
    assert cache.num_tokens("second") == 7


def test_two_requests_at_once_share_what_the_first_has_written_and_no_more() -> None:
    cache = manager()
    cache.open("first", text(*range(10)), max_cached=9)
    cache.allocate("first", 10)
    assert cache.num_cached(text(*range(10))) == 0
    cache.commit("first", text(*range(10)), 6)
    assert cache.num_cached(text(*range(10))) == 4
    cache.open("second", text(*range(10)), max_cached=9)
    assert list(cache.block_table("second")) == [cache.block_table("first")[0]]
    cache.check_integrity()


def test_what_is_generated_is_findable_for_the_next_turn_of_a_conversation() -> None:
    cache = manager()
    identity = text(1, 2, 3)
    serve(cache, "turn", identity)
    for token_id in (4, 5, 6):
        identity.append(token_id)
        cache.allocate("turn", len(identity))
        cache.commit("turn", identity, len(identity))
    cache.free("turn")
    assert cache.num_cached(text(1, 2, 3, 4, 5, 6, 7)) == 6


def test_equal_requests_side_by_side_keep_their_own_blocks() -> None:
    cache = manager()
    prompts = [text(*range(9)) for _ in range(2)]
    for name, prompt in zip("ab", prompts, strict=True):
        cache.open(name, prompt, max_cached=8)
        cache.allocate(name, 9)
    before = list(cache.block_table("b"))
    for name, prompt in zip("ab", prompts, strict=True):
        cache.commit(name, prompt, 9)
    assert cache.block_table("b") == before
    assert not set(before) & set(cache.block_table("a"))
    cache.free("a")
    cache.open("c", text(*range(9)), max_cached=8)
    assert cache.num_tokens("c") == 8
    cache.check_integrity()


def test_without_prefix_caching_nothing_is_found_and_nothing_stays() -> None:
    cache = KVCacheManager(KVCacheSpec((4,), 4), enable_prefix_caching=False)
    served(cache, "first", text(*range(8)))
    assert cache.num_cached(text(*range(8))) == 0
    assert cache.open("second", text(*range(8)), max_cached=7) == []
    assert cache.num_tokens("second") == 0
    assert cache.num_evictions == 0


def test_a_request_that_will_be_pruned_neither_finds_nor_leaves_anything() -> None:
    cache = manager(10, 10)
    served(cache, "first", text(*range(9)))
    assert cache.open("pruned", text(*range(9)), max_cached=8, is_shareable=False) == []
    cache.allocate("pruned", 9)
    cache.commit("pruned", text(*range(9)), 9)
    shared = set(cache.block_table("pruned"))
    cache.open("next", text(*range(9)), max_cached=8)
    assert not shared & set(cache.block_table("next"))


def test_a_longer_tail_takes_the_place_of_a_shorter_one() -> None:
    cache = manager()
    served(cache, "short", text(1, 2))
    assert cache.num_free_blocks() == 20
    served(cache, "long", text(1, 2, 3))
    served(cache, "short again", text(1, 2))
    cache.clear_idle()
    assert cache.num_evictions == 1


def test_a_part_of_a_block_that_has_no_room_for_its_copy_is_computed() -> None:
    cache = manager(3)
    served(cache, "first", text(*range(6)))
    cache.open("second", text(9), max_cached=0)
    cache.allocate("second", 4)
    assert cache.num_cached(text(*range(6))) == 6
    assert cache.open("third", text(*range(6)), max_cached=5) == []
    assert cache.num_tokens("third") == 4


# Eviction


def test_the_prefix_idle_longest_goes_first_and_its_end_before_its_start() -> None:
    cache = manager(4)
    served(cache, "old", text(*range(8)))
    served(cache, "new", text(*range(10, 18)))
    serve(cache, "third", text(20))
    assert cache.num_cached(text(*range(8))) == 4
    assert cache.num_cached(text(*range(10, 18))) == 8
    assert cache.num_evictions == 1


def test_use_makes_a_prefix_young_again() -> None:
    cache = manager(5)
    served(cache, "old", text(*range(8)))
    served(cache, "new", text(*range(10, 18)))
    served(cache, "old again", text(*range(8), 9))
    serve(cache, "third", text(*range(20, 28)))
    assert cache.num_cached(text(*range(8))) == 8
    assert cache.num_cached(text(*range(10, 18))) == 0


def test_what_is_copied_from_is_young_again_too() -> None:
    cache = manager(3)
    served(cache, "old", text(1, 2, 3))
    served(cache, "new", text(4, 5, 6))
    cache.open("half", text(1, 2, 9), max_cached=2)
    serve(cache, "third", text(7))
    assert cache.num_cached(text(1, 2, 3)) == 3
    assert cache.num_cached(text(4, 5, 6)) == 0


def test_a_tail_that_was_there_already_is_young_again() -> None:
    cache = manager(3)
    served(cache, "old", text(1, 2, 3))
    served(cache, "new", text(4, 5, 6))
    cache.open("alike", text(1, 2), max_cached=0)
    cache.allocate("alike", 2)
    cache.commit("alike", text(1, 2), 2)
    cache.free("alike")
    serve(cache, "third", text(*range(20, 25)))
    assert cache.num_cached(text(1, 2, 3)) == 3
    assert cache.num_cached(text(4, 5, 6)) == 0


def test_blocks_in_use_are_never_evicted() -> None:
    cache = manager(3)
    serve(cache, "running", text(*range(8)))
    assert cache.num_free_blocks() == 1
    cache.open("second", text(9), max_cached=0)
    assert not cache.can_allocate("second", 5)
    with pytest.raises(
        ValueError, match=r"room for 5 tokens of request 'second' needs \[2\] blocks, \[1\] are free"
    ):
        cache.allocate("second", 5)
    assert cache.can_allocate("second", 4)


def test_a_prefix_is_kept_while_what_follows_it_is_in_use() -> None:
    """The second to write the same block builds on the first's node, which must outlive the first."""
    cache = manager(5)
    for name in "ab":
        cache.open(name, text(*range(8)), max_cached=7)
        cache.allocate(name, 8)
    cache.commit("a", text(*range(8)), 4)
    cache.commit("b", text(*range(8)), 8)
    cache.free("a")
    assert cache.num_free_blocks() == 2
    cache.open("c", text(9), max_cached=0)
    cache.allocate("c", 8)
    assert cache.num_cached(text(*range(8))) == 8
    cache.check_integrity()


# Room


def test_room_grows_by_whole_blocks_in_every_layer_group() -> None:
    cache = manager(8, 9)
    cache.open("one", text(*range(5)), max_cached=4)
    cache.allocate("one", 5)
    assert [list(cache.block_table("one", group)) for group in (0, 1)] == [[0, 1], [0, 1]]
    cache.allocate("one", 8)
    assert cache.num_free_blocks(0) == 6
    assert cache.num_free_blocks(1) == 7
    assert cache.usage == 0.25


def test_a_table_goes_on_in_the_block_after_its_last_where_it_can() -> None:
    cache = manager()
    for name in "ab":
        cache.open(name, text(*range(30)), max_cached=0)
    for num_tokens in (4, 8, 12, 20):
        for name in "ab":
            cache.allocate(name, num_tokens)
    for name in "ab":
        table = list(cache.block_table(name))
        assert table == list(range(table[0], table[0] + 5))


def test_tokens_without_room_or_identity_cannot_be_committed() -> None:
    cache = manager()
    cache.open("one", text(*range(9)), max_cached=0)
    cache.allocate("one", 4)
    with pytest.raises(ValueError, match="'one' cannot commit 5 tokens: 0 are written, 4 have room"):
        cache.commit("one", text(*range(9)), 5)
    cache.commit("one", text(*range(9)), 4)
    with pytest.raises(ValueError, match="cannot commit 3 tokens: 4 are written"):
        cache.commit("one", text(*range(9)), 3)
    cache.allocate("one", 6)
    with pytest.raises(ValueError, match="8 have room, 5 are known"):
        cache.commit("one", text(*range(5)), 6)
    assert cache.num_tokens("one") == 4


def test_names_are_unique_while_they_are_open() -> None:
    cache = manager()
    serve(cache, "one", text(1))
    with pytest.raises(ValueError, match="'one' is open already"):
        cache.open("one", text(1), max_cached=0)
    cache.fork("one", "two")
    with pytest.raises(ValueError, match="'two' is open already"):
        cache.fork("one", "two")
    cache.free("one")
    assert "one" not in cache
    serve(cache, "one", text(1))


@pytest.mark.parametrize("spec", [((), 4), ((0,), 4), ((3, 0), 4), ((3,), 0)])
def test_a_cache_of_nothing_is_refused(spec: tuple[tuple[int, ...], int]) -> None:
    with pytest.raises(ValueError, match="at least 1 layer group of 1 block of 1 token"):
        KVCacheSpec(*spec)


# Forks and cuts


def test_a_fork_shares_whole_blocks_and_copies_the_one_in_part() -> None:
    cache = manager()
    serve(cache, "parent", text(*range(6)))
    (copy,) = cache.fork("parent", "child")
    assert (copy.layer_group, copy.source, copy.num_tokens) == (0, 1, 2)
    assert copy.target not in (0, 1)
    assert list(cache.block_table("parent")) == [0, 1]
    assert cache.num_tokens("child") == 6
    cache.free("parent")
    assert list(cache.block_table("child")) == [0, copy.target]
    cache.check_integrity()


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    cache = manager(2)
    serve(cache, "parent", text(*range(8)))
    assert cache.can_fork("parent")
    assert cache.fork("parent", "child") == []


def test_a_fork_without_room_is_refused_and_changes_nothing() -> None:
    cache = manager(2)
    serve(cache, "parent", text(*range(6)))
    assert not cache.can_fork("parent")
    with pytest.raises(ValueError, match="the copy for a fork of request 'parent'"):
        cache.fork("parent", "child")
    assert "child" not in cache


def test_a_fork_under_a_name_that_is_taken_evicts_nothing() -> None:
    cache = manager(3)
    served(cache, "idle", text(9))
    serve(cache, "parent", text(*range(6)))
    with pytest.raises(ValueError, match="'parent' is open already"):
        cache.fork("parent", "parent")
    assert cache.num_cached(text(9)) == 1


def test_rejected_drafts_give_their_blocks_back() -> None:
    cache = manager()
    serve(cache, "one", text(*range(6)))
    cache.allocate("one", 15)
    assert cache.num_free_blocks() == 16
    assert cache.truncate("one", 7) == []
    assert cache.num_tokens("one") == 6
    assert cache.num_free_blocks() == 18


def test_a_cut_into_a_cached_block_leaves_the_cached_one_as_it_is() -> None:
    cache = manager()
    serve(cache, "one", text(*range(8)))
    (copy,) = cache.truncate("one", 6)
    assert (copy.source, copy.num_tokens) == (1, 2)
    cache.copied([copy])
    assert list(cache.block_table("one")) == [0, copy.target]
    cache.allocate("one", 8)
    cache.commit("one", text(0, 1, 2, 3, 4, 5, 60, 70), 8)
    assert cache.num_cached(text(*range(8))) == 8
    assert cache.num_cached(text(0, 1, 2, 3, 4, 5, 60, 70)) == 8
    cache.check_integrity()


def test_pruned_layers_have_shorter_tables_that_grow_with_the_others() -> None:
    cache = manager(10, 10)
    cache.open("one", text(*range(40)), max_cached=39, is_shareable=False)
    cache.allocate("one", 16)
    cache.commit("one", text(*range(40)), 16)
    cache.truncate("one", 5, layer_group=1)
    assert [cache.num_tokens("one", group) for group in (0, 1)] == [16, 5]
    assert cache.num_free_blocks(1) == 8
    cache.allocate("one", 20)
    cache.commit("one", text(*range(40)), 20)
    assert [cache.num_tokens("one", group) for group in (0, 1)] == [20, 9]
    assert [len(cache.block_table("one", group)) for group in (0, 1)] == [5, 3]
    cache.truncate("one", 18)
    assert [cache.num_tokens("one", group) for group in (0, 1)] == [18, 7]
    with pytest.raises(ValueError, match=r"of \[18, 7\] tokens cannot be cut to \[10, -1\]"):
        cache.truncate("one", 10)
    cache.free("one")
    assert cache.num_cached(text(*range(40))) == 0
    cache.check_integrity()


# Conservation


@pytest.mark.parametrize("damage", ["lose", "share", "pin", "idle", "key"])
def test_check_integrity_sees_damage(damage: str) -> None:
    cache = manager()
    serve(cache, "one", text(*range(9)))
    served(cache, "two", text(*range(20, 29)))
    node = next(cache._cache.nodes())
    if damage == "lose":
        cache._requests["one"].tables[0].blocks.pop()
    elif damage == "share":
        cache._requests["one"].tables[0].blocks[2] = 0
    elif damage == "pin":
        node.num_pins += 1
    elif damage == "idle":
        cache._cache._idle.remove(next(iter(cache._cache._idle)))
    else:
        node.key = text(1, 2, 3, 4).row_bytes(0, 4)
    with pytest.raises(AssertionError):
        cache.check_integrity()


def test_the_check_knows_what_has_been_written() -> None:
    """A copy that was decided and not carried out leaves its block unwritten, whoever files it."""
    kv = KVCacheManager(KVCacheSpec((8,), 4))
    kv.open("a", token_identity([1] * 6), max_cached=0)
    kv.allocate("a", 6)
    kv.commit("a", token_identity([1] * 6), 6)
    copies = kv.fork("a", "child")
    assert not kv.is_written("child")
    kv.allocate("child", 8)
    kv.commit("child", token_identity([1] * 8), 8)
    with pytest.raises(AssertionError, match="never written"):
        kv.check_integrity()
    kv.free("child")
    kv.clear_idle()
    kv.fork("a", "other")
    kv.copied(copies)
    kv.check_integrity()
