"""Rules out the tokens that an answer's grammar does not allow next.

Masks are bits on the host, token i is bit i % 8 of byte i // 8, and go to the device as they are.
R rows of logits, G of them with a grammar, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epd.types import Int64Array, ceil_div
from stages.sampling.sampling_state import SamplingRow

_WORD_BITS = 32


def allowed_tokens(rows: Sequence[SamplingRow], num_tokens: int) -> tuple[Int64Array, NDArray[np.uint8]]:
    """Returns which rows have a grammar, int64 [G], and what it allows there: uint8 [G, bytes of V tokens].

    Raises RequestError for a grammar that cannot be followed.
    """
    places = [i for i, row in enumerate(rows) if row.state.matcher is not None]
    bits = np.zeros((len(places), ceil_div(num_tokens, _WORD_BITS)), np.int32)
    for i, mask in zip(places, bits, strict=True):
        _fill(rows[i], mask)
    return np.array(places, np.int64), bits.view(np.uint8)


def _fill(row: SamplingRow, mask: NDArray[np.int32]) -> None:
    """Fills a mask. Where the grammar allows nothing else, the answer ends early, else has a bad word."""
    if row.state.matcher is None:
        return
    row.state.matcher.fill(mask, row.drafted)
    for unwanted in filter(None, (row.bad_ids | row.banned_ids, row.bad_ids)):
        kept = _without(mask, unwanted)
        if kept.any():
            mask[:] = kept
            return


def _without(mask: NDArray[np.int32], token_ids: Iterable[int]) -> NDArray[np.int32]:
    """Returns a mask in which these tokens are not allowed."""
    kept = mask.copy()
    for token_id in token_ids:
        if token_id < len(kept) * _WORD_BITS:
            kept.view(np.uint32)[token_id // _WORD_BITS] &= ~np.uint32(1 << token_id % _WORD_BITS)
    return kept


def ruled_out(scores: Tensor, places: Tensor, bits: Tensor) -> Tensor:
    """Returns scores [R, V] with -inf for what the bits [G, B] of the rows `places` do not allow."""
    if not len(places):
        return scores
    allowed = _unpacked(bits, scores.shape[1])
    if len(places) == len(scores):
        return scores.masked_fill(~allowed, -torch.inf)
    some = scores.index_select(0, places).masked_fill_(~allowed, -torch.inf)
    return scores.index_copy(0, places, some)


def _unpacked(bits: Tensor, num_tokens: int) -> Tensor:
    """Returns bool [G, V]. NumPy's is several times as fast as torch's on a CPU."""
    if bits.device.type != "cpu":
        return _unpacked_by_shifts(bits, num_tokens)
    unpacked = np.unpackbits(bits.numpy(), axis=1, count=num_tokens, bitorder="little")
    return torch.from_numpy(unpacked.view(np.bool_))


def _unpacked_by_shifts(bits: Tensor, num_tokens: int) -> Tensor:
    shifts = torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits[:, :, None] >> shifts & 1).flatten(1)[:, :num_tokens].bool()
