"""The work list of the attention kernel: every key of every tile once, in pieces that are about equal."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from stages.kernels.work_list import WorkList, keys_each, work_list

# (new tokens, context) of each segment; new tokens of a tile; items at most beyond one for each tile.
PASSES = [
    ([(1, 40), (1, 1)], 2, 1),
    ([(1, 100_000), *[(1, 500)] * 31], 2, 66),
    ([(1, 3000), (5, 2000), (8, 8)], 2, 20),
    ([(300, 9000), (70, 70), (64, 70_000)], 9, 66),
]


def listed(lens: list[tuple[int, int]], tile_tokens: int, num_more: int) -> WorkList:
    starts = np.cumsum([0, *(new for new, _ in lens)]).astype(np.int32)
    contexts = np.array([context for _, context in lens], np.int32)
    return work_list(starts, contexts, np.arange(len(lens)), tile_tokens, num_more)


@pytest.mark.parametrize(("lens", "tile_tokens", "num_more"), PASSES)
def test_each_row_attends_each_of_its_keys_once(
    lens: list[tuple[int, int]], tile_tokens: int, num_more: int
) -> None:
    work = listed(lens, tile_tokens, num_more)
    tiles = [(s, first) for s, (new, _) in enumerate(lens) for first in range(0, new, tile_tokens)]
    written: dict[int, tuple[int, int]] = {}  # of each part, its packed row and the first key
    for segment, first in tiles:
        new, context = lens[segment]
        rows = min(tile_tokens, new - first)
        items = [each for each in work.items.tolist() if each[:2] == [segment, first]]
        bounds = [each[2] for each in items] + [context - new + first + rows]
        assert [each[3] for each in items] == bounds[1:], "one follows the other, to what the last row sees"
        assert bounds[0] == 0
        assert all(low < high for low, high in pairwise(bounds))
        packed = sum(each for each, _ in lens[:segment]) + first
        for *_, low, _, part in items:
            assert (part == -1) == (len(items) == 1)
            for row in range(rows if part >= 0 else 0):
                assert part + row not in written
                written[part + row] = packed + row, low
    assert sorted(written) == list(range(work.num_parts))
    merged = {first + i * step: row for row, first, step, count in work.merges.tolist() for i in range(count)}
    assert merged == {part: row for part, (row, _) in written.items()}
    assert len({row for row, *_ in work.merges.tolist()}) == len(work.merges)
    assert len(work.items) <= len(tiles) + num_more


def test_a_long_context_among_short_ones_is_cut_and_they_are_not() -> None:
    """100 thousand keys and 31 times 500, on 66 more items than segments: none has more than 1,792 keys."""
    work = listed([(1, 100_000), *[(1, 500)] * 31], 2, 66)
    lengths = (work.items[:, 3] - work.items[:, 2]).tolist()
    assert max(lengths) == 1792
    assert lengths[-31:] == [500] * 31
    assert work.merges.tolist() == [[0, 0, 1, len(lengths) - 31]]


def test_work_is_padded_with_what_does_nothing() -> None:
    work = listed([(1, 40), (1, 700)], 2, 4)
    padded = work.padded(9, 5)
    assert (padded.items.shape, padded.merges.shape) == ((9, 5), (5, 4))
    assert (padded.items[: len(work.items)] == work.items).all()
    assert (padded.items[len(work.items) :, 2:4] == 0).all()
    assert (padded.items[len(work.items) :, 1] > 10**9).all(), "no token of the segment"
    assert (padded.merges[len(work.merges) :, 3] == 0).all()


@pytest.mark.parametrize(
    ("num_keys", "num_more", "keys"), [(100, 1, 256), (60_000, 66, 960), (4_000_000, 66, 60_608)]
)
def test_pieces_are_as_long_as_the_device_needs(num_keys: int, num_more: int, keys: int) -> None:
    assert keys_each(num_keys, num_more) == keys
