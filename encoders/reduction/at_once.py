"""Computes the choices of a whole window in few large operations, for devices on which small ones are slow.

What is chosen is read once, at the end. The twins, which take one token or block at a time and which a CPU
runs: `complementary` in `encoders/reduction/selection.py`, `likeness` in `encoders/reduction/merging.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

_TINY = 1e-6


def complementary_at_once(tokens: Tensor, scores: Tensor, num_turns: int) -> Tensor:
    """Returns the turn of each token, [U, S]: the best by score times what is outside others' span first.

    tokens: [U, S, C]. scores: [U, S]. num_turns: after which all others have the same turn.
    """
    rest, turns = tokens.clone(), torch.full_like(scores, num_turns)
    for turn in range(num_turns):
        gains = scores.clamp_min(_TINY) * rest.norm(dim=2).clamp_min(_TINY)
        best = gains.masked_fill(turns < num_turns, -1).argmax(1, keepdim=True)
        turns.scatter_(1, best, turn)
        places = best[:, :, None].expand(-1, -1, tokens.shape[2])
        direction = normalize(rest.gather(1, places), dim=2)
        rest = rest - (rest @ direction.transpose(1, 2)) * direction
    return turns


def likeness_at_once(tokens: Tensor, is_member: Tensor, blocks: Tensor, num_blocks: int) -> Tensor:
    """Computes the mean cosine of all pairs of each block's members: [U, B]; 1 for fewer than two.

    tokens: [U, S, C], of length 1. is_member: bool [U, S]. blocks: int64 [S], the block of each place.
    """
    member = is_member.to(tokens.dtype)
    sums = tokens.new_zeros(len(tokens), num_blocks, tokens.shape[2])
    sums.index_add_(1, blocks, tokens * member[:, :, None])
    counts = tokens.new_zeros(len(tokens), num_blocks).index_add_(1, blocks, member)
    pairs = counts * (counts - 1)
    return torch.where(pairs > 0, (sums.square().sum(-1) - counts) / pairs.clamp_min(1), 1.0)
