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
from epd.encoders.adapter import MediaPlan, PatchRun
from epd.encoders.batch import FrameEncoder
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
_CLEARLY = 6.0  # by which one token is likelier than it would be


def _mixed(words: Words) -> Words:
    """Returns words of which every bit depends on every bit of one word."""
    words = (words ^ (words >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    words = (words ^ (words >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return words ^ (words >> np.uint64(32))


def _summed(rows: Words) -> Words:
    """Returns one word for each row of words, uint64 [N, W] to [N]."""
    return _mixed((rows * _WEIGHTS[: rows.shape[1]]).sum(1, dtype=np.uint64))


def _words_of(rows: Any) -> Words:
    """Returns the bits of rows, an array [N, ...], as uint64 [N, W]."""
    flat: Words = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    return np.ascontiguousarray(flat).view(np.uint64)


def _filled(words: Words, like: Any) -> Any:
    """Returns rows that all bits of some words decide. like: [..., heads, channels], which takes them."""
    num_words = like.shape[-1] * like.shape[-2] * like.itemsize // 8
    rows = words[:, None] ^ _SALTS[:num_words]
    return rows.view(like.dtype).reshape(len(words), *like.shape[-2:])


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
    batch, contents = packed.batches[0], _contents(packed, visual)
    keys, values = (cache.numpy() for cache in runner.pools.layer(0))
    states = np.empty(len(contents), np.uint64)
    for segment, context in enumerate(batch.context_lens.tolist()):
        new = slice(*batch.query_starts[segment : segment + 2].tolist())
        num_cached = context - (new.stop - new.start)
        places = np.arange(num_cached)
        at = batch.block_tables[segment][places // batch.block_size], places % batch.block_size
        rows = [_words_of(cache[at]) for cache in (keys, values)]
        seen = _summed(np.concatenate(rows, 1)) * _PLACES[:num_cached]
        # The first word of the last row is the sum of all tokens before it, itself included.
        before = rows[0][-1:, 0] ^ _SALTS[0] if num_cached else np.zeros(1, np.uint64)
        sums = before + np.cumsum(contents[new] * _PLACES[num_cached:context], dtype=np.uint64)
        to = np.divmod(batch.slot_mapping[new], batch.block_size)
        for cache, words in ((keys, sums), (values, _mixed(sums))):
            cache[to] = _filled(words, cache)
        written = np.concatenate([_words_of(cache[to]) for cache in (keys, values)], 1)
        added = np.cumsum(_summed(written) * _PLACES[num_cached:context], dtype=np.uint64)
        states[new] = _mixed(seen.sum(dtype=np.uint64, keepdims=True) + added)
    return _logits(states[packed.logit_rows], runner)


def _logits(states: Words, runner: Any) -> Tensor:
    """Returns logits that a state decides, float32 [R, V]."""
    size = runner._embed.num_embeddings
    starts = (states % np.uint64(len(_SCORES) - size)).astype(np.int64)
    logits = torch.from_numpy(_SCORES[starts[:, None] + np.arange(size)])
    likely = ((states >> np.uint64(32)) % np.uint64(size)).astype(np.int64)
    logits[torch.arange(len(states)), torch.from_numpy(likely)] += _CLEARLY
    return logits


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
