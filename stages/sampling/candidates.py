"""Weighs the tokens that can be drawn: temperature, then top_k, top_p and min_p.

Weights are integers, so their sums are exact. Nothing sorts the vocabulary. On a CPU a floor is found that
tokens with a part in it reach, and those alone are ranked. On a GPU, where their number would have to be read
back, a fixed number of the likeliest is, and whether they were enough:

    scores       |  the likeliest, ranked  |  all others, which have no part in it if those were enough
    is_exact     their weights reach top_p of the whole; the last of top_k is not among the last looked at

D rows of logits, V tokens in the vocabulary, K tokens that can be drawn.

Tokens that an answer's grammar does not allow next are ruled out before. Masks are bits on the host, token i
is bit i % 8 of byte i // 8, and go to the device as they are; G of the rows have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epd.encoders.device import to_device
from epd.sampling_params import SamplingParams
from epd.stages.sampling.sampling_state import SamplingRow
from epd.types import Int64Array, ceil_div

_FLOAT32_MAX = torch.finfo(torch.float32).max
# Tokens of a block: one pass over all, then a few hundred largest.
_BLOCK = 128
# Floors of weights, tried in turn: the likeliest token weighs 2**40.
_WEIGHT_FLOORS = (2**32, 2**28, 2**24, 2**16)


def likely_floor(scores: Tensor, count: int) -> Tensor | None:
    """Returns a score of each row that at least `count` tokens reach, [D, 1], and few others.

    None where there are not enough blocks to tell.
    """
    num_blocks = scores.shape[1] // _BLOCK  # a short last one is left out: the floor is only lower for it
    if num_blocks < count:
        return None
    maxima = scores[:, : num_blocks * _BLOCK].view(-1, num_blocks, _BLOCK).amax(2)
    return maxima.topk(count).values[:, -1:]


def likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest scores of each row, descending, and their ids: [D, count].

    On a CPU the first of equals come first, whatever other rows hold.
    """
    floor = likely_floor(scores, count) if scores.device.type == "cpu" else None
    if floor is None:
        return scores.topk(count)
    ids, values = reaching(scores, floor, least=-torch.inf)
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values[:, :count], ids.gather(1, order[:, :count])


def heavy_floor(weights: Tensor, share: Tensor) -> Tensor:
    """Returns a weight of each row such that the tokens that reach it weigh `share` or more: int64 [D, 1].

    weights: int64 [D, V]. share: float64 [D, 1].
    """
    floor = torch.zeros(len(weights), 1, dtype=torch.int64)
    for least in _WEIGHT_FLOORS:
        heavy = (weights * (weights >= least)).sum(1, keepdim=True)
        suffices = (heavy >= share) & (floor == 0)
        floor = torch.where(suffices, least, floor)
        if bool(floor.all()):
            break
    return floor


def reaching(values: Tensor, floor: Tensor, *, least: float) -> tuple[Tensor, Tensor]:
    """Returns ids, int64 [D, K], and values [D, K] of the tokens of each row that reach its floor [D, 1].

    Ids ascend. Rows with fewer tokens are filled up: with their last token, and the value `least`.
    """
    flat = np.flatnonzero((values >= floor).numpy())  # in two dimensions NumPy takes eight times as long
    rows, ids = np.divmod(flat, values.shape[1])
    counts = np.bincount(rows, minlength=len(values))
    if len(values) == 1:
        chosen = torch.from_numpy(ids)[None]
        return chosen, values.gather(1, chosen)
    starts = np.cumsum(counts) - counts
    at = starts[:, None] + np.minimum(np.arange(counts.max(initial=1)), counts[:, None] - 1)
    is_filled = torch.from_numpy(np.arange(at.shape[1]) >= counts[:, None])
    chosen = torch.from_numpy(ids[at])
    return chosen, values.gather(1, chosen).masked_fill_(is_filled, least)


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_WORD_BYTES = 4
# The weight of the most likely token, and bits for a token's place. A weight and a place fit into one int64,
# and so does the sum of as many weights as there are places.
_FULL_WEIGHT = 2**40
_PLACE_BITS = 22
_LAST_PLACE = 2**_PLACE_BITS - 1
# Divisors beyond this and its inverse are not distinguished: float32 holds no quotients by them.
_MAX_DIVISOR = 1e37
# Tokens of a row that are looked at for top_p, and beyond its own for top_k: equals of the last belong to it.
NUM_CANDIDATES = 1024
_SPARE_CANDIDATES = 64


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


def with_biases(scores: Tensor, places: Tensor, biases: Tensor, *, in_place: bool) -> Tensor:
    """Adds biases to scores [R, V], before all else, as vLLM does. in_place: see `with_changes`."""
    if not len(places):
        return scores
    flat = (scores if in_place else scores.clone()).view(-1)
    return flat.index_add_(0, places, biases).view_as(scores)


def with_changes(
    scores: Tensor, penalised: Tensor, changes: Tensor, banned: Tensor, *, in_place: bool
) -> Tensor:
    """Changes scores [R, V] where they are penalised, and sets those that are banned to -inf.

    in_place: whether the scores are nobody else's; if not, they are copied once.
    """
    if not len(penalised) and not len(banned):
        return scores
    flat = (scores if in_place else scores.clone()).view(-1)
    if len(penalised):
        factor, amount = changes
        old = flat.index_select(0, penalised)
        scaled = torch.where(old < 0, old * factor, old / factor).clamp(-_FLOAT32_MAX, _FLOAT32_MAX)
        flat.index_copy_(0, penalised, scaled - amount)
    if len(banned):
        flat.index_fill_(0, banned, -torch.inf)
    return flat.view_as(scores)


@dataclass(frozen=True, slots=True)
class TokenCandidates:
    """Holds what can be drawn from D rows.

    weights: int64 [D, K], a token's relative probability.
    ids: int64 [D, K], of the tokens; None for all of V.
    is_exact: bool [D], of rows in which no other token has a weight; None where that is known of all.
    """

    weights: Tensor
    ids: Tensor | None = None
    is_exact: Tensor | None = None


def knobs(params: Sequence[SamplingParams]) -> NDArray[np.float64]:
    """Returns temperature, top_p and min_p of each row: float64 [D, 3]."""
    return np.array([[p.temperature, p.top_p, p.min_p] for p in params])


def token_weights(scores: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor | None]:
    """Weighs tokens by relative probability, int64 [D, K], for ids [D, K], or all of V if that is None.

    scores: float32 [D, V]. params: all of them restrict top_k or none does, and so for top_p.
    """
    found = candidates(scores, params, torch.from_numpy(knobs(params)).to(scores.device))
    return found.weights, found.ids


def candidates(
    scores: Tensor, params: Sequence[SamplingParams], values: Tensor, *, is_bounded: bool = False
) -> TokenCandidates:
    """Weighs what can be drawn from scores, float32 [D, V].

    params: all of them restrict top_k or none does, and so for top_p. values: `knobs`, on the device.
    is_bounded: whether only the likeliest tokens are looked at, so that nothing is sorted or read back.
    """
    if scores.shape[1] > _LAST_PLACE + 1:
        raise ValueError(f"{scores.shape[1]} tokens cannot be ranked, {_LAST_PLACE + 1} at most")
    temperature, top_p, min_p = values.T[:, :, None]
    ids, is_exact, has_top_p = None, None, params[0].top_p < 1
    if params[0].top_k > 0:
        top_k = [min(p.top_k, scores.shape[1]) for p in params]
        scores, ids, is_exact = (
            _top_k_bounded(scores, top_k) if is_bounded else (*_top_k(scores, top_k), None)
        )
    weights = _weights(scores, temperature)
    if has_top_p and is_bounded and ids is None and weights.shape[1] > NUM_CANDIDATES:
        weights, ids, is_exact = _top_p_bounded(scores, weights, top_p)
    elif has_top_p and ids is None and weights.device.type == "cpu":
        total = weights.sum(1, keepdim=True)
        ids, weights = reaching(weights, heavy_floor(weights, top_p * total), least=0)
        weights, ids = _top_p(weights, ids, top_p, total)
    elif has_top_p:
        weights, ids = _top_p(weights, ids, top_p)
    if any(p.min_p for p in params):
        weights = weights.masked_fill(weights < (min_p * _FULL_WEIGHT).long(), 0)
    return TokenCandidates(weights, ids, is_exact)


def _weights(scores: Tensor, temperature: Tensor) -> Tensor:
    """Computes each token's weight, int64 [D, K], the likeliest 2**40. temperature: float64 [D, 1]."""
    distance = scores - scores.amax(1, keepdim=True)
    quotient = distance.div_(temperature.clamp(1 / _MAX_DIVISOR, _MAX_DIVISOR).float())
    return quotient.exp_().mul_(_FULL_WEIGHT).long()


def _top_k(scores: Tensor, top_k: list[int]) -> tuple[Tensor, Tensor]:
    """Keeps scores [D, K] and ids of each row's top_k tokens and the equals of the last, all others -inf."""
    ranks = _column([k - 1 for k in top_k], scores)
    most = max(top_k)
    if scores.device.type == "cpu" and (low := likely_floor(scores, most)) is not None:
        ids, values = reaching(scores, low, least=-torch.inf)
        floor = values.topk(most).values.gather(1, ranks)
        return values.masked_fill_(values < floor, -torch.inf), ids
    values, ids = scores.topk(most)
    floor = values.gather(1, ranks)
    num_kept = int((scores >= floor).sum(1).max())
    if num_kept > most:
        ids = scores.topk(num_kept).indices
    return _at_least(floor, scores, ids)


def _top_k_bounded(scores: Tensor, top_k: list[int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keeps the same, of a few tokens more than top_k; returns also in which rows these were enough."""
    num_looked_at = min(max(top_k) + _SPARE_CANDIDATES, scores.shape[1])
    values, ids = scores.topk(num_looked_at)
    floor = values.gather(1, _column([k - 1 for k in top_k], scores))
    is_exact = None if num_looked_at == scores.shape[1] else values[:, -1] < floor[:, 0]
    return *_at_least(floor, scores, ids), is_exact


def _at_least(floor: Tensor, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Keeps scores that reach their row's floor [D, 1], in the order of ids: that of equals is anybody's."""
    ids = ids.sort(1).values
    values = scores.gather(1, ids)
    return values.masked_fill(values < floor, -torch.inf), ids


def _column(values: list[int], like: Tensor) -> Tensor:
    """Returns int64 [D, 1] beside a tensor."""
    return to_device(torch.tensor(values)[:, None], like.device)


def _top_p(
    weights: Tensor, ids: Tensor | None, top_p: Tensor, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keeps weights [D, K] and ids of the fewest tokens of each row that make up top_p of its sum, others 0.

    Of equals the first go first. top_p: float64 [D, 1]. total: int64 [D, 1], the sum, if there are other
    tokens, none of which outweighs these. (Holtzman et al. 2019)
    """
    places = torch.arange(weights.shape[1], device=weights.device)
    ranked = _sorted((weights << _PLACE_BITS) | (_LAST_PLACE - places))
    weights, places = ranked >> _PLACE_BITS, _LAST_PLACE - (ranked & _LAST_PLACE)
    so_far = weights.cumsum(1)
    whole = so_far[:, -1:]
    share = top_p * (whole if total is None else total)
    weights = weights.masked_fill(whole - so_far >= share, 0)
    return weights, places if ids is None else ids.gather(1, places)


def _top_p_bounded(scores: Tensor, weights: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keeps the same of the likeliest tokens alone; returns also in which rows these were enough.

    They are if those that outweigh all others reach the share: equals of the last may lie outside.
    """
    ids = scores.topk(NUM_CANDIDATES).indices.sort(1).values
    inside = weights.gather(1, ids)
    least = inside.amin(1, keepdim=True)
    outweighing = inside.masked_fill(inside <= least, 0).sum(1, keepdim=True)
    total = weights.sum(1, keepdim=True)
    is_exact = (outweighing >= top_p * total) | (least == 0)
    kept, ids = _top_p(inside, ids, top_p, total)
    return kept, ids, is_exact[:, 0]


def _sorted(keys: Tensor) -> Tensor:
    """Sorts each row ascending, int64 [D, K]. NumPy's is ten times as fast as torch's on a CPU."""
    if keys.device.type != "cpu":
        return keys.sort(1).values
    return torch.from_numpy(np.sort(keys.numpy(), axis=1))


def uniform(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64]:
    """Hashes seeds and indices to [0, 1), float64 [D]: SplitMix64 (Steele et al. 2014)."""
    return draw_numbers(draw_starts(seeds), np.array(indices, np.uint64))


def draw_starts(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """Hashes seeds, for `draw_numbers`: uint64 [D]."""
    return _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64) + _GAMMA)


def draw_numbers(starts: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Does what `uniform` does, after `draw_starts`. indices: uint64 [D]."""
    bits = _mix(starts + (indices + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def look_up(weights: Tensor, number: Tensor) -> Tensor:
    """Returns places [D, 1] where numbers [D, 1] in [0, 1) lie in the cumulative weights [D, K]."""
    ends = weights.cumsum(1)
    total = ends[:, -1:]
    # Rounded up, a number close to 1 would lie behind all of them.
    target = (number * total).long().minimum(total - 1)
    return torch.searchsorted(ends, target, right=True)
