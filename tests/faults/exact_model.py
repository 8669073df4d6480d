"""A model of integers: a token depends on every bit that its request has in the cache.

Keys and values of a token are words of its id, its positions, its embedding and all tokens before it. They
are in the real pools, where workers copy, move and share them. A token is drawn from all words that the block
table of its request leads to. One wrong, missing or misplaced word changes it. Attention may round that away.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from epd.encoders import Embeddings
from epd.encoders.adapter import PatchRun
from epd.encoders.groups import FrameEncoder
from epd.encoders.plans import MediaPlan
from epd.stages.engine.kv_pool import KVPool
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.packed_pass import PackedPass

Words = npt.NDArray[np.uint64]

_MAX_TOKENS = 4096  # of a context
_MAX_WORDS = 4096  # of a row, or of a unit's frames
_PATCHES_OF_TOKEN = 4
_PLACES, _WEIGHTS, _SALTS = np.random.default_rng(0).integers(
    1, 2**63, (3, max(_MAX_TOKENS, _MAX_WORDS)), np.uint64
) | np.uint64(1)
_SCORES = np.random.default_rng(1).standard_normal(1 << 12, np.float32) * 2
_NO_WORD = np.zeros(1, np.uint64)
_HALF, _FACTOR = np.uint64(32), np.uint64(0xD6E8FEB86659FD93)
_CLEARLY = 6.0  # by which one token is likelier than it would be


def _mixed(words: Words) -> Words:
    """Returns words of which every bit depends on every bit of one word."""
    words = words ^ (words >> _HALF)
    words *= _FACTOR
    words ^= words >> _HALF
    words *= _FACTOR
    words ^= words >> _HALF
    return words


def _summed(rows: Words) -> Words:
    """Returns one word for each row of words, uint64 [N, W] to [N]."""
    return _mixed(rows @ _WEIGHTS[: rows.shape[1]])


def _words_of(rows: Any) -> Words:
    """Returns the bits of rows, an array [N, ...], as uint64 [N, W]."""
    flat: Words = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    return np.ascontiguousarray(flat).view(np.uint64)


def _stored(pool: KVPool) -> Words:
    """Views keys and values of a pool's one layer as words: uint64 [num_blocks, 2, block_size, Hkv, W]."""
    words: Words = pool.storage.numpy()[:, 0].view(np.uint64)
    return words


def _contents(packed: PackedPass, visual: Embeddings | None) -> Words:
    """Returns what new tokens are, whatever comes before them: uint64 [T]."""
    ids = _mixed(packed.token_ids.astype(np.uint64) + np.uint64(1))
    if visual is not None:
        ids[packed.visual_rows] = _summed(_words_of(visual.rows.numpy()))
    return ids ^ _summed(np.ascontiguousarray(packed.positions.T).astype(np.uint64))


def run_packed(
    runner: ModelRunner, packed: PackedPass, visual: Embeddings | None, token_ids: Tensor | None = None
) -> Tensor:
    """Does what `ModelRunner.run_packed` does. Returns logits [R, V]."""
    assert token_ids is None
    assert not packed.segments
    batch, contents, stored = packed.batches[0], _contents(packed, visual), _stored(*runner.pools.groups)
    starts, num_new = batch.query_starts, np.diff(batch.query_starts)
    num_cached = batch.context_lens - num_new
    seen, before = _seen(stored, batch, num_cached)
    owners, places = _rows_of(num_new, num_cached)
    sums = before[owners] + _running(contents * _PLACES[places], starts, owners)
    at, words = np.divmod(batch.slot_mapping, batch.block_size), np.stack([sums, _mixed(sums)], 1)
    num_words = stored.shape[-2] * stored.shape[-1]  # of a token's keys
    stored[at[0], :, at[1]] = words[:, :, None, None] ^ _SALTS[:num_words].reshape(stored.shape[-2:])
    added = _running(_summed(_words_at(stored, *at)) * _PLACES[places], starts, owners)
    return _logits(_mixed(seen[owners] + added)[packed.logit_rows], runner)


def _rows_of(counts: Any, firsts: Any) -> tuple[Any, Any]:
    """Returns each row's segment, and its place there. counts: rows of segments. firsts: first places."""
    owners = np.repeat(np.arange(len(counts)), counts)
    shifts = firsts - (np.cumsum(counts) - counts)
    return owners, np.arange(len(owners)) + shifts[owners]


def _running(words: Words, starts: Any, owners: Any) -> Words:
    """Returns the sum of each row and those before it in its segment: uint64 [T]."""
    sums = np.concatenate([_NO_WORD, np.cumsum(words, dtype=np.uint64)])
    running: Words = sums[1:] - sums[starts[owners]]
    return running


def _words_at(stored: Words, blocks: Any, places: Any) -> Words:
    """Returns all words of tokens, keys and values: uint64 [N, 2 * Hkv * W]."""
    words: Words = stored[blocks, :, places].reshape(len(blocks), 2 * stored.shape[-2] * stored.shape[-1])
    return words


def _seen(stored: Words, batch: Any, num_cached: Any) -> tuple[Words, Words]:
    """Returns what each segment has in the cache, and the sum of its last token there: uint64 [S] both."""
    owners, places = _rows_of(num_cached, np.zeros_like(num_cached))
    blocks = batch.block_tables[owners, places // batch.block_size]
    rows = _words_at(stored, blocks, places % batch.block_size)
    sums = np.concatenate([_NO_WORD, np.cumsum(_summed(rows) * _PLACES[places], dtype=np.uint64)])
    ends = np.cumsum(num_cached)
    # The first word of the last row is the sum of all tokens before it, itself included.
    lasts = np.concatenate([rows[:, 0] ^ _SALTS[0], _NO_WORD])[ends - 1]
    return sums[ends] - sums[ends - num_cached], np.where(num_cached > 0, lasts, _NO_WORD)


def _logits(states: Words, runner: Any) -> Tensor:
    """Returns logits that a state decides, float32 [R, V]."""
    size = runner._embed.num_embeddings
    starts = (states % np.uint64(len(_SCORES) - size)).astype(np.int64)
    logits = _SCORES[starts[:, None] + np.arange(size)]
    likely = ((states >> np.uint64(32)) % np.uint64(size)).astype(np.int64)
    logits[np.arange(len(states)), likely] += _CLEARLY
    return torch.from_numpy(logits)


def _patches(encoder: FrameEncoder, frames: Tensor, plan: MediaPlan) -> PatchRun:
    """Takes a word of each unit's pixels, in the place of patches."""
    units = frames.numpy().reshape(plan.grid.t, -1)
    words = np.array([_digest(unit) for unit in units], np.uint64)
    return PatchRun(plan.kind, torch.from_numpy(words.view(np.int64)), plan.grid)


def _digest(unit: Any) -> int:
    return int.from_bytes(hashlib.blake2b(unit, digest_size=8).digest(), "little")


def _encode(
    encoder: Any,
    runs: Sequence[PatchRun],
    tower_share: float | None = None,  # as it is called
) -> list[Embeddings]:
    """Returns embeddings that units decide, in the place of a tower's."""
    num_channels = encoder._tower.config.out_hidden_size
    return [Embeddings(_rows(run, num_channels)) for run in runs]


def _rows(run: PatchRun, num_channels: int) -> Tensor:
    """Returns visual tokens, float32 [V, C]."""
    of_unit = run.grid.h * run.grid.w // _PATCHES_OF_TOKEN
    units = np.repeat(run.values.numpy().view(np.uint64), of_unit)
    tokens = _mixed(units ^ np.tile(_PLACES[:of_unit], run.grid.t))
    words = _mixed(tokens[:, None] ^ _SALTS[: num_channels // 2])
    return torch.from_numpy(words.view(np.float32))


@contextmanager
def exact_model() -> Iterator[None]:
    """Lets workers compute with it, whatever weights they have loaded."""
    with (
        mock.patch.object(ModelRunner, "run_packed", run_packed),
        mock.patch.object(FrameEncoder, "patches", _patches),
        mock.patch.object(FrameEncoder, "encode", _encode),
    ):
        yield
