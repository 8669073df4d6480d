"""Attention over the paged cache against softmax attention written out for each row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2Model

from stages.attention import AttentionBatch, AttentionPlan, attend, register, write_kv

# (query heads, KV heads, head dim)
HEADS = [(4, 2, 64), (4, 4, 16), (6, 1, 24)]


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


def naive(case: Case, scale: float) -> Tensor:
    """float64 [T, Hq, D]: the formula, row by row and head by head."""
    rows = []
    for s, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        start, stop = case.batch.query_starts[s : s + 2].tolist()
        group = case.query.shape[1] // keys.shape[1]
        for i, row in enumerate(case.query[start:stop].double()):
            seen = len(keys) - (stop - start) + i + 1
            heads = []
            for head, one in enumerate(row):
                weights = (keys[:seen, head // group].double() @ one * scale).softmax(0)
                heads.append(weights @ values[:seen, head // group].double())
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def filled(case: Case) -> tuple[Tensor, Tensor]:
    """Caches as they are once the new tokens are written; what no segment owns is not a number."""
    heads = case.keys[0].shape[1:]
    num_blocks = int(case.batch.block_tables.max()) + 2
    caches = torch.full((2, num_blocks, case.batch.block_size, *heads), float("nan"), dtype=case.query.dtype)
    new_keys, new_values = [], []
    for s, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        tokens = np.arange(len(keys))
        blocks = case.batch.block_tables[s, tokens // case.batch.block_size]
        past = len(keys) - int(np.diff(case.batch.query_starts)[s])
        places = (blocks[:past], tokens[:past] % case.batch.block_size)
        caches[0][places] = keys[:past]
        caches[1][places] = values[:past]
        new_keys.append(keys[past:])
        new_values.append(values[past:])
    slots = torch.from_numpy(case.batch.slot_mapping)
    write_kv(torch.cat(new_keys), torch.cat(new_values), caches[0], caches[1], slots)
    return caches[0], caches[1]


def check(case: Case, tolerance: float = 2e-6) -> None:
    scale = case.query.shape[-1] ** -0.5
    ours = attend(case.query, *filled(case), AttentionPlan.build(case.batch, "cpu"), scale)
    assert ours.shape == case.query.shape
    assert ours.dtype == case.query.dtype
    assert (ours.double() - naive(case, scale)).abs().max() < tolerance


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_mixed_pass(block_size: int, heads: tuple[int, int, int], shuffled: bool) -> None:
    lens = [(1, 1), (1, 40), (5, 5), (3, 20), (1, 39), (7, 18), (1, 150), (4, 4), (1, 16)]
    check(make_case(lens, heads, block_size, shuffled=shuffled))


@dataclass(frozen=True, slots=True)
class OneLayerType:
    """What `epd_paged` is handed when every layer has the same plan: caches [layers, 2, blocks, ...]."""

    storage: Tensor
    plan: AttentionPlan

    def layer(self, index: int) -> tuple[Tensor, Tensor, AttentionPlan]:
        return self.storage[index, 0], self.storage[index, 1], self.plan


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
        storage = torch.zeros(3, 2, 8, 4, 2, 16)
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
