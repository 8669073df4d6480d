"""Attention over the paged cache against softmax attention written out for each row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2Model

from epd.kv.drafting import MOST_DRAFTS
from epd.stages.attention import host
from epd.stages.attention.attention import AttentionBatch, AttentionPlan, attend, register, write_kv
from epd.stages.attention.gathered import GatheredPiece
from epd.stages.attention.host import HostPlan
from epd.stages.attention.pieces import Piece, SharedRun, UnmaskedPiece, find_runs
from epd.stages.engine.kv_pool import KVLayout, KVPool, StorageOrder
from epd.stages.kernels.scaled_values import scaled, unscaled

# (query heads, KV heads, head dim)
HEADS = [(4, 2, 64), (4, 4, 16), (6, 1, 24)]
ORDERS: tuple[StorageOrder, ...] = ("blocks", "heads")


@dataclass(frozen=True, slots=True)
class Case:
    """A pass: query [T, Hq, D]; keys and values of each segment, [context, Hkv, D]."""

    batch: AttentionBatch
    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def make_case(
    lens: list[tuple[int, int]],
    heads: tuple[int, int, int] = (4, 2, 64),
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    *,
    shuffled: bool = True,
) -> Case:
    """lens: (new tokens, context) of each segment. shuffled: blocks in no order, else one after another."""
    generator = np.random.default_rng(sum(context for _, context in lens))
    query_heads, kv_heads, dim = heads
    num_blocks = [-(-context // block_size) for _, context in lens]
    ids = np.arange(1, sum(num_blocks) + 1, dtype=np.int32)
    tables = np.zeros((len(lens), max(num_blocks)), np.int32)
    slots = []
    pool = iter(generator.permutation(ids) if shuffled else ids)
    for s, (new, context) in enumerate(lens):
        tables[s, : num_blocks[s]] = [next(pool) for _ in range(num_blocks[s])]
        tokens = np.arange(context - new, context)
        slots.append(tables[s, tokens // block_size].astype(np.int64) * block_size + tokens % block_size)
    starts = np.cumsum([0, *(new for new, _ in lens)]).astype(np.int32)
    contexts = np.array([context for _, context in lens], np.int32)
    torch.manual_seed(len(lens))
    return Case(
        AttentionBatch(starts, contexts, tables, np.concatenate(slots), block_size),
        torch.randn(int(starts[-1]), query_heads, dim).to(dtype),
        [torch.randn(context, kv_heads, dim).to(dtype) for _, context in lens],
        [torch.randn(context, kv_heads, dim).to(dtype) for _, context in lens],
    )


def within(
    case: Case, window: int | None, both_ways: tuple[int, ...] = (), marked: tuple[int, ...] = ()
) -> Case:
    """The same pass with a window, and with segments whose new tokens attend each other.

    marked: packed rows that do so besides.
    """
    is_both = np.repeat(np.isin(np.arange(len(case.keys)), both_ways), np.diff(case.batch.query_starts))
    is_both |= np.isin(np.arange(len(is_both)), marked)
    batch = replace(case.batch, window=window, both_ways=is_both if is_both.any() else None)
    return replace(case, batch=batch)


def freed(batch: AttentionBatch) -> AttentionBatch:
    """The same pass when blocks that lie before every window are nobody's."""
    if batch.window is None:
        return batch
    past = batch.context_lens - np.diff(batch.query_starts)
    first = np.maximum(past - batch.window + 1, 0) // batch.block_size
    is_freed = np.arange(batch.block_tables.shape[1]) < first[:, None]
    return replace(batch, block_tables=np.where(is_freed, -1, batch.block_tables).astype(np.int32))


def naive(case: Case, scale: float) -> Tensor:
    """float64 [T, Hq, D]: the formula, row by row and head by head."""
    window, both_ways = case.batch.window or 2**30, case.batch.both_ways
    rows = []
    for s, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        start, stop = case.batch.query_starts[s : s + 2].tolist()
        group = case.query.shape[1] // keys.shape[1]
        for i, row in enumerate(case.query[start:stop].double()):
            place = len(keys) - (stop - start) + i
            at = np.arange(len(keys))
            is_later = np.zeros(len(keys), np.bool_)
            if both_ways is not None and both_ways[start + i]:
                is_later[start - stop :] = both_ways[start:stop]
            seen = torch.from_numpy((at > place - window) & ((at <= place) | is_later))
            heads = []
            for head, one in enumerate(row):
                weights = (keys[seen, head // group].double() @ one * scale).softmax(0)
                heads.append(weights @ values[seen, head // group].double())
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def rounded(case: Case) -> Case:
    """The same pass with the values that are left of them in 8 bits."""
    return replace(case, values=[unscaled(scaled(each), each.dtype) for each in case.values])


def filled(case: Case, order: StorageOrder = "blocks", *, int8_values: bool = False) -> tuple[Tensor, Tensor]:
    """Caches of one of two layers once the new tokens are written; what no segment owns is not a number."""
    layout = KVLayout(2, *case.keys[0].shape[1:], case.query.dtype, int8_values)
    pool = KVPool(int(case.batch.block_tables.max()) + 2, case.batch.block_size, layout, order=order)
    storage = pool.storage.fill_(float("nan"))
    if int8_values:
        pool.planes[1].fill_(-1)  # a scale of these bytes is not a number
    caches = pool.layer(1)
    new_keys, new_values = [], []
    for s, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        tokens = np.arange(len(keys))
        blocks = case.batch.block_tables[s, tokens // case.batch.block_size]
        past = len(keys) - int(np.diff(case.batch.query_starts)[s])
        seen = slice(max(0, past - (case.batch.window or 2**30) + 1), past)
        places = (blocks[seen], tokens[seen] % case.batch.block_size)
        caches[0][places] = keys[seen]
        caches[1][places] = scaled(values[seen]) if int8_values else values[seen]
        new_keys.append(keys[past:])
        new_values.append(values[past:])
    slots = torch.from_numpy(case.batch.slot_mapping)
    write_kv(torch.cat(new_keys), torch.cat(new_values), *caches, slots)
    assert bool(storage[:, 0].isnan().all())
    return caches


def check(case: Case, tolerance: float = 2e-6) -> None:
    """In pools of either order."""
    scale = case.query.shape[-1] ** -0.5
    expected = naive(case, scale)
    for order in ORDERS:
        ours = attend(case.query, *filled(case, order), AttentionPlan.build(freed(case.batch), "cpu"), scale)
        assert ours.shape == case.query.shape
        assert ours.dtype == case.query.dtype
        assert (ours.double() - expected).abs().max() < tolerance
    plan = AttentionPlan.build(freed(case.batch), "cpu")
    for order in ORDERS:
        ours = attend(case.query, *filled(case, order, int8_values=True), plan, scale)
        plain = attend(case.query, *filled(rounded(case), order), plan, scale)
        assert (ours - plain).abs().max() < tolerance


def share(case: Case, segments: list[int], num_tokens: int) -> Case:
    """The first tokens of the first of `segments`, whole blocks, are also those of the others."""
    first, *others = segments
    for other in others:
        num_blocks = num_tokens // case.batch.block_size
        case.batch.block_tables[other, :num_blocks] = case.batch.block_tables[first, :num_blocks]
        case.keys[other][:num_tokens] = case.keys[first][:num_tokens]
        case.values[other][:num_tokens] = case.values[first][:num_tokens]
    return case


def pieces_of(case: Case) -> tuple[Piece, ...]:
    return HostPlan.build(case.batch).pieces


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_mixed_pass(block_size: int, heads: tuple[int, int, int], shuffled: bool) -> None:
    lens = [(1, 1), (1, 40), (5, 5), (3, 20), (1, 39), (7, 18), (1, 150), (4, 4), (1, 16)]
    check(make_case(lens, heads, block_size, shuffled=shuffled))


# Of each third token of all segments, but for the first of them.
SOME = tuple(range(3, 100, 3))
WINDOWS: list[tuple[int | None, tuple[int, ...], tuple[int, ...], bool]] = [
    (24, (), (), True),
    (24, (1, 4), (), False),
    (1, (), (), True),
    (None, (1, 4), (), True),
    (200, (4,), (), False),
    (None, (), SOME, True),
    (None, (4,), SOME, False),
    (24, (1,), SOME, True),
]


@pytest.mark.parametrize(("window", "both_ways", "marked", "shuffled"), WINDOWS)
def test_windows_and_tokens_that_attend_each_other(
    window: int | None,
    both_ways: tuple[int, ...],
    marked: tuple[int, ...],
    shuffled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "_MASKED_ROWS", 16)
    lens = [(1, 300), (40, 90), (3, 20), (1, 24), (16, 70), (5, 205), (1, 25)]
    check(within(make_case(lens, (4, 2, 16), shuffled=shuffled), window, both_ways, marked))
    check(within(make_case(lens[:1], (4, 2, 16), shuffled=shuffled), window))


def test_what_lies_before_a_window_in_its_first_block_is_not_read() -> None:
    """Nor where that block pads a table that is shorter than others."""
    check(within(make_case([(1, 32), (1, 35), (1, 3)], (4, 2, 16), 16), 10))


SMALL = (4, 2, 16)
LONG = [(1, 1300), (1, 40), (3, 1205), (1, 33), (40, 1190)]  # decodes, drafts, a chunk


@pytest.mark.parametrize("shuffled", [True, False])
def test_long_contexts(shuffled: bool) -> None:
    check(make_case(LONG, SMALL, 16, shuffled=shuffled))


def test_a_run_is_read_in_place_where_a_layer_is_in_one_piece() -> None:
    """And what is read is the same where it is copied."""
    case = make_case([(40, 150)], SMALL, 4, shuffled=False)
    (run,) = (piece.keys for piece in pieces_of(case) if isinstance(piece, UnmaskedPiece))
    span = replace(run, skipped=5, num_tokens=100)
    caches = {order: filled(case, order) for order in ORDERS}
    in_place = span.read(*caches["heads"])
    assert [read.data_ptr() for read in in_place] == [
        cache[span.first + 1, 1].data_ptr() for cache in caches["heads"]
    ]
    for read, copied in zip(in_place, span.read(*caches["blocks"]), strict=True):
        assert torch.equal(read, copied)


def test_a_long_run_is_read_in_place_and_its_end_gathered() -> None:
    """As a request grows: its prompt lies in one run, the blocks of its answer elsewhere."""
    case = make_case([(1, 1200), (1, 1208), (1, 90)], SMALL, 16, shuffled=False)
    tables = case.batch.block_tables
    case.batch.slot_mapping[1] += (tables[0, 73] - tables[1, 75]) * 16
    tables[0, 73], tables[1, 75] = tables[1, 75], tables[0, 73]
    short, long = pieces_of(case)
    assert isinstance(short, GatheredPiece)
    assert isinstance(long, GatheredPiece)
    assert (short.num_segments, short.own, short.merges) == (1, (), False)
    assert [(span.segment, span.column, span.num_tokens) for span in long.own] == [
        (0, 0, 73 * 16),
        (1, 0, 75 * 16),
    ]
    assert (long.blocks.shape, long.merges) == ((2, 2), False)
    check(case)


@pytest.mark.parametrize("shuffled", [True, False])
def test_what_is_long_is_read_part_by_part(shuffled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the copy that is read has a bound, whatever the context."""
    monkeypatch.setattr("epd.stages.attention.host._MOST_AT_ONCE", 500)
    for lens in (LONG, [(1, 1300)], [(40, 1205)]):
        case = make_case(lens, SMALL, 16, shuffled=shuffled)
        alone = [piece.keys for piece in pieces_of(case) if isinstance(piece, UnmaskedPiece)]
        assert max((keys.num_tokens for keys in alone), default=0) <= 500
        check(case)


@pytest.mark.parametrize("shuffled", [True, False])
def test_shared_prefixes(shuffled: bool) -> None:
    lens = [(1, 300), (1, 330), (40, 300), (9, 290), (1, 200), (1, 99)]
    case = make_case(lens, SMALL, 16, shuffled=shuffled)
    check(share(share(case, [0, 1, 2, 3], 272), [0, 4], 160))


def test_decodes_with_all_of_their_drafts_are_side_by_side() -> None:
    case = make_case([(1 + MOST_DRAFTS, 90 + number) for number in range(3)], SMALL, 16, shuffled=False)
    (piece,) = pieces_of(case)
    assert isinstance(piece, GatheredPiece)
    check(case)


def test_a_shared_run_is_read_once() -> None:
    lens = [(1, 1000 + 5 * i) for i in range(8)]
    case = share(make_case(lens, SMALL, 16, shuffled=False), list(range(8)), 960)
    run, rest = pieces_of(case)
    assert isinstance(run, UnmaskedPiece)
    assert (run.rows.num_rows, run.keys.num_tokens, run.merges) == (8, 960, False)
    assert isinstance(rest, GatheredPiece)
    assert (rest.num_segments, rest.mask.shape[-1], rest.merges) == (8, 75, True)
    check(case)


def test_runs_that_part_are_followed_while_they_are_shared() -> None:
    tables = np.array([[3, 4, 5, 6, 7, 0], [3, 4, 5, 6, 9, 2], [3, 4, 5, 0, 0, 0]], np.int32)
    runs = find_runs(tables, np.array([18, 24, 10]), 4, least_alone=8, least_shared=4)
    assert runs == [SharedRun((0, 1, 2), 0, 8, 12), SharedRun((0, 1), 8, 8, 20)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)])
def test_narrow_types(dtype: torch.dtype, tolerance: float) -> None:
    """Within a rounding of the values and of the result."""
    check(share(make_case([*LONG, (5, 60)], SMALL, 16, dtype), [0, 2], 640), tolerance)


def test_layer_groups_of_different_lengths() -> None:
    """After pruning the same new tokens have other contexts in other layers: one plan for each group."""
    whole, pruned = [(1, 400), (6, 300), (12, 350)], [(1, 120), (6, 90), (12, 60)]
    query = make_case(whole).query
    check(replace(make_case(whole), query=query))
    check(replace(make_case(pruned), query=query))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_lens": np.array([3], np.int32)}, "1 context lengths"),
        ({"slot_mapping": np.arange(5)}, "need as many slots, got 5"),
        ({"query_starts": np.array([0, 4, 4], np.int32)}, "every segment needs a new token"),
        ({"context_lens": np.array([3, 99], np.int32)}, "does not fit 5 blocks of 4; allocate first"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(change: dict[str, Any], message: str) -> None:
    batch = make_case([(3, 3), (1, 18)]).batch
    with pytest.raises(ValueError, match=message):
        replace(batch, **change)


@dataclass(frozen=True, slots=True)
class OneLayerType:
    """What `epd_paged` is handed when every layer has the same plan: caches [blocks, layers, 2, ...]."""

    storage: Tensor
    plan: AttentionPlan

    def layer(self, index: int) -> tuple[Tensor, Tensor, AttentionPlan]:
        return self.storage[:, index, 0], self.storage[:, index, 1], self.plan


def test_a_transformers_decoder_takes_it() -> None:
    """A prompt in two chunks, packed with another one: hidden states equal those of sdpa without a cache."""
    register()
    config = Qwen2Config(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = Qwen2Model(config).eval()
    embeds = torch.randn(2, 11, 64)
    with torch.inference_mode():
        wanted = model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        model.set_attn_implementation("epd_paged")
        storage = torch.zeros(8, 3, 2, 4, 2, 16)
        tables = np.array([[5, 2, 3], [1, 6, 4]], np.int32)
        for start, stop in [(0, 7), (7, 8), (8, 11)]:
            tokens = np.arange(start, stop)
            new = stop - start
            slots = (tables[:, tokens // 4].astype(np.int64) * 4 + tokens % 4).ravel()
            starts, contexts = np.array([0, new, 2 * new], np.int32), np.array([stop, stop], np.int32)
            plan = AttentionPlan.build(AttentionBatch(starts, contexts, tables, slots, 4), "cpu")
            got = model(
                inputs_embeds=embeds[:, start:stop].reshape(1, 2 * new, 64),
                position_ids=torch.from_numpy(np.tile(tokens, 2))[None],
                use_cache=False,
                paged=OneLayerType(storage, plan),
            ).last_hidden_state
            assert (got.view(2, new, 64) - wanted[:, start:stop]).abs().max() < 1e-5
