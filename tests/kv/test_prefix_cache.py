"""The prefix cache, told as stories: what is found, what is kept, and what is evicted first.

Blocks have 2 tokens here, and tokens are letters.
"""

from __future__ import annotations

import pytest

from epd.kv.block_pool import BlockPool
from epd.kv.prefix_cache import CachedBlock, PrefixCache, TokenIdentity, token_identity


def identity(letters: str) -> TokenIdentity:
    return token_identity([ord(letter) for letter in letters])


class Cache(PrefixCache):
    """A prefix cache over 8 blocks, and requests that write letters into it."""

    def __init__(self) -> None:
        self.pool = BlockPool(8)
        super().__init__([self.pool], 2)

    def run(self, letters: str) -> list[CachedBlock]:
        """A request computes these tokens: its whole blocks are cached and pinned."""
        path, node = [], self.root
        for key in identity(letters).chunks(0, len(letters) // 2 * 2, 2):
            node = self.child(node, key, self._written(2))
            self.pin(node)
            path.append(node)
        self._forget_spare_blocks()
        return path

    def end(self, path: list[CachedBlock], tail: str = "", client: str = "") -> None:
        """The request is over; of its last block, part was written."""
        if tail:
            parent = path[-1] if path else self.root
            self.add_partial(parent, identity(tail).row_bytes(0, len(tail)), self._written(len(tail)), client)
            self._forget_spare_blocks()
        for node in reversed(path):
            self.unpin(node, client)

    def _written(self, num_tokens: int) -> tuple[int]:
        (block,) = self.pool.take(1)
        self.pool.write(block, 0, num_tokens)
        self._taken = [*getattr(self, "_taken", []), block]
        return (block,)

    def _forget_spare_blocks(self) -> None:
        """The request's own references: what the cache has not kept is free again."""
        for block in self._taken:
            self.pool.release(block)
        self._taken = []

    def found(self, letters: str, max_tokens: int = 99) -> int:
        """How many of the first tokens are cached."""
        match = self.match(identity(letters), max_tokens)
        return 2 * len(match.path) + match.num_partial

    def order(self) -> list[str]:
        """The last letter of every idle block, the first to go first."""
        self.check_integrity()
        return [chr(int.from_bytes(node.key[-24:-16], "little")) for node in self._idle]


def test_the_longest_prefix_is_found_in_whole_blocks_and_part_of_one() -> None:
    cache = Cache()
    cache.end(cache.run("abcdef"))
    prompts = ("abcdef", "abcdxx", "abcxxx", "xbcdef", "ab")
    assert [cache.found(letters) for letters in prompts] == [6, 4, 3, 0, 2]
    assert cache.found("abcdef", max_tokens=5) == 5, "the last token is left to compute"


def test_two_questions_share_the_video_and_branch_where_they_differ() -> None:
    cache = Cache()
    first, second = cache.run("videoA"), cache.run("videoB")
    assert first[:2] == second[:2]
    assert first[2] is not second[2]
    assert len(list(cache.nodes())) == 4
    assert cache.pool.num_free == 4


def test_the_tail_of_an_answer_is_found_too_and_a_longer_one_replaces_it() -> None:
    cache = Cache()
    cache.end(cache.run("ab"), tail="c")
    assert cache.found("abcd") == 3
    cache.end(cache.run("abcd"))
    assert cache.found("abcd") == 4
    assert len(list(cache.nodes())) == 2, "the tail is part of the whole block now"


def test_a_tail_that_a_cached_block_begins_with_is_not_kept_twice() -> None:
    cache = Cache()
    cache.end(cache.run("abcd"))
    cache.end(cache.run("ab"), tail="c")
    assert len(list(cache.nodes())) == 2


def test_looking_up_changes_nothing() -> None:
    cache = Cache()
    cache.end(cache.run("ab"))
    cache.end(cache.run("xy"))
    cache.found("abcd")
    assert cache.order() == ["b", "y"]


def test_the_end_of_a_prefix_goes_before_its_start() -> None:
    """Otherwise what is left could not be reached from the root."""
    cache = Cache()
    cache.end(cache.run("abcdef"))
    assert cache.order() == ["f", "d", "b"]
    cache.evict(2)
    assert (cache.found("abcdef"), cache.num_evictions, cache.pool.num_free) == (2, 2, 7)


def test_who_fills_more_than_half_makes_room_first() -> None:
    cache = Cache()
    cache.end(cache.run("ab"), client="ann")
    for letters in ("cd", "ef", "gh"):
        cache.end(cache.run(letters), client="bob")
    assert cache.order() == ["b", "d", "f", "h"]
    cache.evict(2)
    assert cache.order() == ["b", "h"]
    cache.evict(1)
    assert cache.order() == ["h"], "neither has more than half: the oldest goes"


def test_what_another_client_built_upon_goes_before_it() -> None:
    cache = Cache()
    cache.end(cache.run("abcd"), client="ann")
    cache.end(cache.run("ab"), client="bob")
    cache.end(cache.run("ef"), client="bob")
    cache.evict(1)
    assert cache.order() == ["b", "f"], "a block is not left without what it follows"


def test_what_was_used_last_goes_last() -> None:
    cache = Cache()
    for letters in ("ab", "cd", "ef"):
        cache.end(cache.run(letters))
    cache.end(cache.run("ab"))
    assert cache.order() == ["d", "f", "b"]
    cache.touch(cache.match(identity("cd"), 2).path[0])
    assert cache.order() == ["f", "b", "d"]


def test_what_a_request_builds_on_is_not_idle() -> None:
    """Two requests pin the same block: it is idle when both are over."""
    cache = Cache()
    first, second = cache.run("ab"), cache.run("ab")
    cache.end(first)
    assert cache.order() == []
    cache.end(second)
    assert cache.order() == ["b"]
    assert cache.num_pinned == 1, "it became pinned once"


def test_the_check_sees_a_cached_block_that_was_never_written() -> None:
    cache = Cache()
    cache.end(cache.run("abcd"))
    cache.pool._num_written[0] = 1
    with pytest.raises(AssertionError, match="2 tokens are cached in block 0, of which 1 were never written"):
        cache.check_integrity()
