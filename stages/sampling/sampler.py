"""Chooses the next token of many sequences at once, each as if it were alone.

The order is that of transformers: repetition penalty, temperature, top_k, top_p, min_p; presence and
frequency penalties come with the first. Then one number in [0, 1), a hash of (seed, index), is looked up in
the cumulative distribution:

    weights     |  token 0  | 1 |     token 2      | 3 |     (tokens ruled out have none)
    number                            ^  -> token 2

Weights are integers, so their sums are exact, and no token depends on which rows are computed together.
R rows of logits, D of them drawn, V tokens in the vocabulary, K tokens that can be drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epd.sampling_params import MAX_LOGPROBS, SamplingParams
from stages.sampling.sampling_state import SamplingRow, SamplingState

__all__ = ["SampledToken", "SamplingRow", "SamplingState", "sample", "token_weights", "uniform"]

# The weight of the most likely token, and bits for a token's place. A weight and a place fit into one int64,
# and so does the sum of as many weights as there are places.
_FULL_WEIGHT = 2**40
_PLACE_BITS = 22
_LAST_PLACE = 2**_PLACE_BITS - 1
# One pass works on this many logits on a CPU: temporaries of this size stay in the caches.
_CPU_CHUNK = 2**18
_FLOAT32_MAX = torch.finfo(torch.float32).max
# Divisors beyond this and its inverse are not distinguished: float32 holds no quotients by them.
_MAX_DIVISOR = 1e37


class SampledToken(NamedTuple):
    """Holds a chosen token.

    logprob: in nats, before temperature and penalties, where the params ask for it.

    top_logprobs: (token id, logprob) of the most likely tokens, the likeliest first.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def uniform(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64]:
    """Hashes seeds and indices to [0, 1), float64 [D]: SplitMix64 (Steele et al. 2014)."""
    gamma = np.uint64(0x9E3779B97F4A7C15)
    start = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64) + gamma)
    bits = _mix(start + (np.array(indices, np.uint64) + np.uint64(1)) * gamma)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Samples one token for each row of logits [R, V], of any float dtype, on any device."""
    if len(logits) != len(rows):
        raise ValueError(f"{len(logits)} rows of logits need as many sampling rows, got {len(rows)}")
    if all(row.state.is_plain for row in rows):
        return [SampledToken(token_id) for token_id in _argmax(logits)]
    step = max(1, _CPU_CHUNK // logits.shape[1]) if logits.device.type == "cpu" else len(rows)
    chunks = (slice(start, start + step) for start in range(0, len(rows), step))
    return [token for chunk in chunks for token in _sample_chunk(logits[chunk], rows[chunk])]


def _argmax(logits: Tensor) -> list[int]:
    """Returns the first of the largest of each row. NumPy's is ten times as fast as torch's on a CPU."""
    if logits.device.type != "cpu" or not len(logits):
        return logits.argmax(-1).tolist()
    chosen: list[int] = logits.float().numpy().argmax(-1).tolist()
    return chosen


def _sample_chunk(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    raw = logits.float()
    scores = _without_banned(_penalised(raw, rows), rows)
    drawn = [i for i, row in enumerate(rows) if not row.state.params.is_greedy]
    ids = _argmax(scores) if len(drawn) < len(rows) else [0] * len(rows)
    for group in _groups(rows, drawn):
        picked = _draw(_take(scores, group), [rows[i] for i in group])
        for i, token_id in zip(group, picked, strict=True):
            ids[i] = token_id
    return _with_logprobs(raw, rows, ids)


def _take(scores: Tensor, rows: list[int]) -> Tensor:
    return scores if len(rows) == len(scores) else scores[rows]


def _penalised(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Penalises scores [R, V] for tokens that came before (CTRL, section 4.1; OpenAI's two)."""
    places = [i for i, row in enumerate(rows) if row.state.params.has_penalties]
    if not places:
        return scores
    counts = [rows[i].counts for i in places]
    params = [rows[i].state.params for i in places]
    lengths = [len(c.ids) for c in counts]
    table = np.array([[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params])
    factor, frequency, presence = np.repeat(table, lengths, axis=0).T
    times = np.concatenate([c.counts for c in counts])
    amount = frequency * times + presence * (times > 0)
    flat = np.concatenate([c.ids for c in counts]) + np.repeat(np.array(places) * scores.shape[1], lengths)
    changes = np.stack([factor.clip(1 / _MAX_DIVISOR, _MAX_DIVISOR), amount]).astype(np.float32)
    return _change(scores, torch.from_numpy(flat), torch.from_numpy(changes))


def _change(scores: Tensor, places: Tensor, changes: Tensor) -> Tensor:
    """Changes scores [R, V] at places, int64 [N] of all R * V: float32 [2, N], factors and amounts."""
    places, (factor, amount) = places.to(scores.device), changes.to(scores.device)
    old = scores.reshape(-1)[places]
    scaled = torch.where(old < 0, old * factor, old / factor).clamp(-_FLOAT32_MAX, _FLOAT32_MAX)
    return scores.reshape(-1).index_copy(0, places, scaled - amount).view_as(scores)


def _without_banned(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Sets scores [R, V] to -inf at the tokens that would end an answer too early."""
    banned = [
        (i, token_id) for i, row in enumerate(rows) if row.state.ending_ids for token_id in row.banned_ids
    ]
    inside = [(i, token_id) for i, token_id in banned if token_id < scores.shape[1]]
    if not inside:
        return scores
    places = torch.tensor(inside, device=scores.device)
    return scores.index_put((places[:, 0], places[:, 1]), scores.new_tensor(-torch.inf))


def _groups(rows: Sequence[SamplingRow], drawn: list[int]) -> list[list[int]]:
    """Groups rows drawn together: one that ranks all its tokens must not make the others do so."""
    groups: dict[tuple[bool, bool], list[int]] = {}
    for i in drawn:
        params = rows[i].state.params
        groups.setdefault((params.top_k > 0, params.top_p < 1), []).append(i)
    return list(groups.values())


def _draw(scores: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draws token ids from scores [D, V]; all rows restrict top_k or none does, and so for top_p."""
    weights, ids = token_weights(scores, [row.state.params for row in rows])
    numbers = uniform([row.state.seed for row in rows], [row.draw_index for row in rows])
    places = _look_up(weights, torch.from_numpy(numbers).to(scores.device)[:, None])
    chosen: list[int] = (places if ids is None else ids.gather(1, places))[:, 0].tolist()
    return chosen


def token_weights(scores: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor | None]:
    """Weighs tokens by relative probability, int64 [D, K], for ids [D, K], or all of V if that is None.

    scores: float32 [D, V]. params: all of them restrict top_k or none does, and so for top_p.
    """
    if scores.shape[1] > _LAST_PLACE + 1:
        raise ValueError(f"{scores.shape[1]} tokens cannot be ranked, {_LAST_PLACE + 1} at most")
    knobs = torch.tensor([[p.temperature, p.top_p, p.min_p] for p in params], dtype=torch.float64)
    temperature, top_p, min_p = knobs.to(scores.device).T[:, :, None]
    ids = None
    if params[0].top_k > 0:
        scores, ids = _top_k(scores, [p.top_k for p in params])
    weights = _weights(scores, temperature)
    if params[0].top_p < 1:
        weights, ids = _top_p(weights, ids, top_p)
    if any(p.min_p for p in params):
        weights = weights.masked_fill(weights < (min_p * _FULL_WEIGHT).long(), 0)
    return weights, ids


def _weights(scores: Tensor, temperature: Tensor) -> Tensor:
    """Computes each token's weight, int64 [D, K], the likeliest 2**40. temperature: float64 [D, 1]."""
    distance = scores - scores.amax(1, keepdim=True)
    quotient = distance / temperature.clamp(1 / _MAX_DIVISOR, _MAX_DIVISOR).float()
    return (quotient.exp_() * _FULL_WEIGHT).long()


def _top_k(scores: Tensor, top_k: list[int]) -> tuple[Tensor, Tensor]:
    """Keeps scores [D, K] and ids of each row's top_k tokens and the equals of the last, all others -inf."""
    ranks = torch.tensor([[min(k, scores.shape[1]) - 1] for k in top_k], device=scores.device)
    most = int(ranks.max()) + 1
    values, ids = scores.topk(most)
    floor = values.gather(1, ranks)
    num_kept = int((scores >= floor).sum(1).max())
    if num_kept > most:
        ids = scores.topk(num_kept).indices
    # In the order of ids, for that of equals is anybody's.
    ids = ids.sort(1).values
    values = scores.gather(1, ids)
    return values.masked_fill(values < floor, -torch.inf), ids


def _top_p(weights: Tensor, ids: Tensor | None, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Keeps weights [D, K] and ids of the fewest tokens of each row that make up top_p of its sum, others 0.

    Of equals the first go first. top_p: float64 [D, 1]. (Holtzman et al. 2019)
    """
    places = torch.arange(weights.shape[1], device=weights.device)
    ranked = _sorted((weights << _PLACE_BITS) | (_LAST_PLACE - places))
    weights, places = ranked >> _PLACE_BITS, _LAST_PLACE - (ranked & _LAST_PLACE)
    so_far = weights.cumsum(1)
    total = so_far[:, -1:]
    weights = weights.masked_fill(total - so_far >= top_p * total, 0)
    return weights, places if ids is None else ids.gather(1, places)


def _sorted(keys: Tensor) -> Tensor:
    """Sorts each row ascending, int64 [D, K]. NumPy's is ten times as fast as torch's on a CPU."""
    if keys.device.type != "cpu":
        return keys.sort(1).values
    return torch.from_numpy(np.sort(keys.numpy(), axis=1))


def _look_up(weights: Tensor, number: Tensor) -> Tensor:
    """Returns places [D, 1] where numbers [D, 1] in [0, 1) lie in the cumulative weights [D, K]."""
    ends = weights.cumsum(1)
    total = ends[:, -1:]
    # Rounded up, a number close to 1 would lie behind all of them.
    target = (number * total).long().minimum(total - 1)
    return torch.searchsorted(ends, target, right=True)


def _with_logprobs(raw: Tensor, rows: Sequence[SamplingRow], ids: list[int]) -> list[SampledToken]:
    """Returns the chosen tokens with what their rows ask for. raw: float32 [R, V]."""
    asked = [i for i, row in enumerate(rows) if row.state.params.logprobs is not None]
    tokens = [SampledToken(token_id) for token_id in ids]
    if not asked:
        return tokens
    logprobs = torch.log_softmax(_take(raw, asked), 1)
    chosen = torch.tensor([[ids[i]] for i in asked], device=raw.device)
    values = logprobs.gather(1, chosen)[:, 0].tolist()
    # Always equally many, so that the order of equals does not depend on what other rows ask for.
    top = logprobs.topk(min(MAX_LOGPROBS, raw.shape[1]))
    tops = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    for i, value, (top_ids, top_values) in zip(asked, values, tops, strict=True):
        best = tuple(zip(top_ids, top_values, strict=True))[: rows[i].state.params.logprobs]
        tokens[i] = SampledToken(ids[i], value, best)
    return tokens
