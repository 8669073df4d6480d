"""The work list of the attention kernel: every key of every row once, in pieces that are about equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from epd.stages.attention.device import DeviceHeads, PassWork, WorkRoom, fixed_work, shared_prefixes
from epd.stages.attention.pieces import SharedRun
from epd.stages.kernels.tiles import (
    ITEM_WIDTH,
    MERGE_WIDTH,
    Tiles,
    growth,
    keys_each,
    segment_tiles,
    work_list,
)

HEADS = DeviceHeads(7, 4, 128, torch.bfloat16, num_processors=132, chip=90)
Lens = list[tuple[int, int]]  # (new tokens, context) of each segment
PASSES: list[tuple[Lens, int]] = [  # with processors
    ([(1, 40), (1, 1)], 1),
    ([(1, 100_000), *[(1, 500)] * 31], 132),
    ([(1, 3000), (5, 2000), (8, 8)], 40),
    ([(300, 9000), (70, 70), (64, 70_000), (1, 900)], 132),
]
# Decodes of one video; of two videos behind one system prompt; and others beside them.
SHARED: list[tuple[Lens, list[SharedRun]]] = [
    ([(1, 5000 + i) for i in range(10)], [SharedRun(tuple(range(10)), 0, 4992, 0)]),
    (
        [(1, 40), *[(1, 9000)] * 21, (30, 600), (3, 700), *[(1, 2100)] * 2],
        [
            SharedRun((*range(1, 22), 24, 25), 0, 512, 0),
            SharedRun(tuple(range(1, 22)), 512, 8000, 0),
            SharedRun((24, 25), 1024, 512, 0),
        ],
    ),
]


def starts_of(lens: Lens) -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *(new for new, _ in lens)]).astype(np.int32)
    return starts, np.array([context for _, context in lens], np.int32)


def check(lens: Lens, runs: Sequence[SharedRun], listed: PassWork) -> None:
    """Each row attends each of its keys once, in pieces that are merged, or in one that is not."""
    read: dict[int, list[tuple[int, int, int]]] = defaultdict(
        list
    )  # of each row: first key, behind last, part
    for items, tile in zip(listed.work.items, listed.tiles, strict=True):
        for table, first, number, last, low, high, _, part in items.tolist():
            assert 0 < number <= tile.tokens
            for row in range(number):
                packed = listed.rows[first + row]
                read[packed].append((low, min(high, last + row + 1), part + row if part >= 0 else -1))
                assert table == owner_of(packed, lens) or any(
                    {table, owner_of(packed, lens)} <= set(run.segments)
                    and run.start <= low < high <= run.start + run.num_tokens
                    for run in runs
                )
    entries, merged = listed.work.entries.tolist(), {}
    for packed, first, count in listed.work.merges.tolist():
        merged[packed] = entries[first : first + count]
    starts, contexts = starts_of(lens)
    assert sorted(read) == list(range(starts[-1]))
    for packed, pieces in read.items():
        segment = owner_of(packed, lens)
        stop = contexts[segment] - starts[segment + 1] + packed + 1
        keys = sorted(key for low, high, _ in pieces for key in range(low, max(low, high)))
        assert keys == list(range(stop))
        assert ([part for *_, part in pieces] == [-1]) == (packed not in merged)
        assert sorted(merged.get(packed, [])) == sorted(part for *_, part in pieces if part >= 0)
    used = [part for pieces in read.values() for *_, part in pieces if part >= 0]
    assert sorted(used) == list(range(listed.work.num_parts))


def owner_of(packed: int, lens: Lens) -> int:
    return int(np.searchsorted(starts_of(lens)[0], packed, side="right")) - 1


@pytest.mark.parametrize(("lens", "num_processors"), PASSES)
def test_each_row_attends_each_of_its_keys_once(lens: Lens, num_processors: int) -> None:
    heads = replace(HEADS, num_processors=num_processors)
    listed = PassWork.of(*starts_of(lens), [], heads)
    check(lens, [], listed)
    short, tall = (len(each) for each in listed.work.items)
    assert short <= sum(new <= 8 for new, _ in lens) + heads.num_more + sum(new == 8 for new, _ in lens) * 4
    assert (tall > 0) == any(new > 8 for new, _ in lens)


@pytest.mark.parametrize(("lens", "runs"), SHARED)
def test_what_several_read_is_read_once_for_as_many_as_a_tile_takes(
    lens: Lens, runs: list[SharedRun]
) -> None:
    listed = PassWork.of(*starts_of(lens), runs, HEADS)
    check(lens, runs, listed)
    num_keys = sum(int((items[:, 5] - items[:, 4]).sum()) for items in listed.work.items)
    alone = PassWork.of(*starts_of(lens), [], HEADS)
    num_alone = sum(int((items[:, 5] - items[:, 4]).sum()) for items in alone.work.items)
    tokens = listed.tiles[1].tokens
    saved = sum(run.num_tokens * (len(run.segments) - -(-len(run.segments) // tokens)) for run in runs)
    assert num_alone - num_keys == saved


@pytest.mark.parametrize(
    ("lens", "runs"), [(PASSES[0][0], []), (PASSES[1][0], []), SHARED[0]], ids=["short", "long", "shared"]
)
def test_work_that_grows_by_keys_attends_each_of_them_once(lens: Lens, runs: list[SharedRun]) -> None:
    """Of decodes alone; what is read together stays as it is, and so do the rows that pad a batch."""
    listed = PassWork.of(*starts_of(lens), runs, HEADS)
    own, together = listed.work.items
    work = replace(listed.work, items=(own + 9 * growth(own, len(lens)), together))
    check([(new, context + 9) for new, context in lens], runs, replace(listed, work=work))
    assert not growth(own, 0).any()
    assert growth(own, 1)[own[:, 0] > 0].sum() == 0


def test_a_long_context_among_short_ones_is_cut_and_they_are_not() -> None:
    """100 thousand keys and 31 times 500, on 66 more items than segments: none has more than 1,792 keys."""
    (items, _), work = listed_decodes([100_000, *[500] * 31])
    lengths = (items[:, 5] - items[:, 4]).tolist()
    assert max(lengths) == 1792
    assert lengths[-31:] == [500] * 31
    assert work.merges.tolist() == [[0, 0, len(lengths) - 31]]


def listed_decodes(contexts: list[int]) -> tuple[tuple[np.ndarray, ...], object]:
    work = PassWork.of(*starts_of([(1, each) for each in contexts]), [], HEADS).work
    return work.items, work


def test_work_is_padded_with_what_does_nothing() -> None:
    lens: Lens = [(1, 40), (1, 700)]
    starts, contexts = starts_of(lens)
    tiles = segment_tiles(starts, contexts, np.arange(2), 2)
    work = work_list([tiles, Tiles.joined([tiles])], np.arange(2), 4)
    padded = work.padded((9, 10), 5, 20)
    assert [each.shape for each in padded.items] == [(9, ITEM_WIDTH), (10, ITEM_WIDTH)]
    assert padded.merges.shape == (5, MERGE_WIDTH)
    assert padded.entries.shape == (20,)
    for items, before in zip(padded.items, work.items, strict=True):
        assert (items[: len(before)] == before).all()
        assert (items[len(before) :, [2, 4, 5]] == 0).all(), "no rows, no keys"
    assert (padded.merges[len(work.merges) :, 2] == 0).all()


NEWS = (1, 2, 3, 8, 9, 17, 40)


@pytest.mark.parametrize("new", [*NEWS, 0])
@pytest.mark.parametrize("chip", [0, 90])
def test_the_work_of_a_pass_of_any_segments_has_room(new: int, chip: int) -> None:
    """As many segments of one length as a pass takes, or mixed; decodes share something, or pairs do."""
    random = np.random.default_rng(new + chip)
    for dtype, num_processors in ((torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 132)):
        heads = replace(HEADS, dtype=dtype, num_processors=num_processors, chip=chip)
        for size, num_seqs in ((64, 64), (192, 16), (512, 256)):
            lens = random_lens(random, [new] if new else NEWS, size, num_seqs)
            decodes = tuple(number for number, (length, _) in enumerate(lens) if length == 1)
            shared = [SharedRun(decodes, 0, 256, 0)] if len(decodes) > 1 else []
            pairs = zip(decodes[::2], decodes[1::2], strict=False)
            for runs in ([], shared, [SharedRun(pair, 512, 256, 0) for pair in pairs]):
                room = WorkRoom.of_tokens(size, num_seqs, heads)
                work = fixed_work(*starts_of(lens), runs, heads, room)
                arrays = *work.items, work.rows, work.merges, work.entries
                assert [each.shape for each in arrays] == room.shapes
                assert PassWork.of(*starts_of(lens), runs, heads).work.num_parts <= room.num_entries


def random_lens(random: np.random.Generator, news: Sequence[int], size: int, num_seqs: int) -> Lens:
    """Segments of these lengths, as many as there is room for, most of contexts that are cut."""
    lens: Lens = []
    while len(lens) < num_seqs and sum(new for new, _ in lens) + min(news) <= size:
        new = min(int(random.choice(news)), size - sum(new for new, _ in lens))
        lens.append((new, int(random.choice([770, 900, 3000])) + new))
    return lens


@pytest.mark.parametrize(
    ("num_keys", "num_more", "keys"), [(100, 1, 256), (60_000, 66, 960), (4_000_000, 66, 60_608)]
)
def test_pieces_are_as_long_as_the_device_needs(num_keys: int, num_more: int, keys: int) -> None:
    assert keys_each(num_keys, num_more) == keys


class TestPrefixes:
    """Which blocks are found, whatever lies where in memory."""

    SIZE = 16

    def found(self, tables: list[list[int]], contexts: list[int], **changed: int) -> list[SharedRun]:
        width = max(map(len, tables))
        padded = np.array([[*table, *[0] * (width - len(table))] for table in tables], np.int32)
        starts = np.arange(len(tables) + 1, dtype=np.int32)
        options = {"tile_tokens": 9, "bytes_per_token": 2**20} | changed
        return shared_prefixes(starts, np.array(contexts, np.int32), padded, self.SIZE, **options)

    def tables(self, *parts: list[int]) -> list[int]:
        return [block for part in parts for block in part]

    def test_blocks_that_lie_anywhere_are_one_prefix(self) -> None:
        shuffled = np.random.default_rng(1).permutation(900).tolist()
        video, others = shuffled[:100], shuffled[100:]
        tables = [[*video, *others[3 * i : 3 * i + 3]] for i in range(4)]
        runs = self.found(tables, [1620, 1630, 1640, 1648])
        assert [(set(run.segments), run.start, run.num_tokens) for run in runs] == [({0, 1, 2, 3}, 0, 1600)]

    def test_videos_behind_a_common_prompt_are_found_each(self) -> None:
        prompt, one, two = list(range(20, 40)), list(range(100, 180)), list(range(300, 360))
        tables = [[*prompt, *one, 1], [*prompt, *one, 2], [*prompt, *two, 3], [*prompt, *two, 4]]
        runs = self.found(tables, [1610, 1605, 1290, 1285])
        found = [(set(run.segments), run.start, run.num_tokens) for run in runs]
        assert found == [({0, 1, 2, 3}, 0, 320), ({0, 1}, 320, 1280), ({2, 3}, 320, 960)]

    @pytest.mark.parametrize(
        ("contexts", "changed"),
        [
            ([1610, 200], {}),  # one of them is too short
            ([1610, 1605], {"bytes_per_token": 4096}),  # less is saved than two launches take
        ],
    )
    def test_what_does_not_pay_is_not_shared(self, contexts: list[int], changed: dict[str, int]) -> None:
        blocks = list(range(100))
        tables = [[*blocks, 200 + i] for i in range(2)]
        assert self.found(tables, [1610, 1605]) != []
        assert self.found(tables, contexts, **changed) == []

    def test_tables_of_their_own_share_nothing(self) -> None:
        assert self.found([list(range(100)), list(range(100, 200))], [1600, 1600]) == []
