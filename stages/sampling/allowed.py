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

from epd.stages.sampling.sampling_state import SamplingRow
from epd.types import Int64Array, ceil_div

_WORD_BYTES = 4


def allowed_tokens(rows: Sequence[SamplingRow], num_tokens: int) -> tuple[Int64Array, NDArray[np.uint8]]:
    """Returns which rows have a grammar, int64 [G], and what it allows there: uint8 [G, bytes of V tokens].

    Raises RequestError for a grammar that cannot be followed.
    """
    places = [i for i, row in enumerate(rows) if row.state.matcher is not None]
    num_bytes = _WORD_BYTES * ceil_div(num_tokens, 8 * _WORD_BYTES)
    masks = bytearray().join([_mask(rows[i])[:num_bytes].ljust(num_bytes, b"\0") for i in places])
    return np.array(places, np.int64), np.frombuffer(masks, np.uint8).reshape(len(places), num_bytes)


def _mask(row: SamplingRow) -> bytes:
    """Returns a mask. Where the grammar allows nothing else, the answer ends early, else has a bad word."""
    assert row.state.matcher is not None
    mask = row.state.matcher.mask(row.drafted)
    bad, banned = row.bad_ids, row.banned_ids
    if not bad and not banned:
        return mask
    for unwanted in filter(None, (bad | banned, bad)):
        kept = _without(mask, unwanted)
        if any(kept):
            return kept
    return mask


def _without(mask: bytes, token_ids: Iterable[int]) -> bytes:
    """Returns a mask in which these tokens are not allowed."""
    kept = bytearray(mask)
    for token_id in token_ids:
        if token_id < 8 * len(kept):
            kept[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(kept)


def ruled_out(scores: Tensor, places: Tensor, bits: Tensor) -> Tensor:
    """Returns scores [R, V] with -inf for what the bits [G, B] of the rows `places` do not allow."""
    if not len(places):
        return scores
    allowed = _unpacked(bits, scores.shape[1])
    if len(places) == len(scores):
        return torch.where(allowed, scores, -torch.inf)
    some = torch.where(allowed, scores.index_select(0, places), -torch.inf)
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
