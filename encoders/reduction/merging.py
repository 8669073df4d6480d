"""Implements MustDrop's first stage: neighbours that look alike become one token.

Source: Liu et al. 2024, section 3.2 (arXiv 2411.10803), which merges 3 x 3 patches whose mean pairwise cosine
is .8 or more, in an early layer of the tower, and never drops a key set. Under a hard budget the blocks most
alike are merged first, and as many as the budget needs. Here it is done behind the tower, so that groups are
encoded as ever; inside of it: `encoders/reduction/tower_merging.py`. Without a CLS token to identify the key
set, it is what is least like its frame.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from epd.encoders.device import all_to_host, to_device

SIDE = 3
_KEY_SHARE = 0.05
_DROPPED = -1


class MergedNeighbours:
    """Merges neighbours: see `epd.encoders.reduction.selection.Method`. Keeps no state of earlier windows."""

    def __init__(self, height: int, width: int) -> None:
        """Takes the number of tokens of a unit each way, in raster order."""
        self._height, self._width = height, width
        self._owners = torch.empty(0, dtype=torch.int64)
        self._is_key = torch.empty(0, dtype=torch.bool)

    def choose(self, units: Tensor, num_kept: int) -> Tensor:
        tokens = normalize(units, dim=-1)
        num_units, num_tokens = tokens.shape[:2]
        is_key = key_sets(tokens)
        if tokens.device.type == "cpu":
            members = self._members(is_key)
            rows = tokens.flatten(0, 1)
            alike = torch.stack([likeness(rows[block]) for block in members])
        else:
            is_key, likenesses = all_to_host([is_key, self._likeness_at_once(tokens, ~is_key)])
            members = self._members(is_key)
            has_members = [bool(len(block)) for block in self._members(is_key, are_all=True)]
            alike = likenesses.flatten()[torch.tensor(has_members)]
        self._is_key = is_key.flatten()
        order = [members[at] for at in alike.argsort(descending=True, stable=True).tolist()]
        self._owners = _merge(order, num_units * num_tokens, num_kept)
        chosen: Tensor = torch.unique(self._owners[self._owners != _DROPPED])
        return chosen

    def merge(self, rows: Tensor, chosen: Tensor) -> Tensor:
        kept = (self._owners != _DROPPED).nonzero()[:, 0]
        kept, owners = (to_device(each, rows.device) for each in (kept, self._owners[kept]))
        return means(rows[kept], torch.searchsorted(chosen, owners), len(chosen))

    def is_key(self, chosen: Tensor) -> Tensor:
        """Marks those of the last window's chosen tokens, int64 [k], that must survive: bool [k]."""
        return self._is_key[chosen]

    def _members(self, is_key: Tensor, *, are_all: bool = False) -> list[Tensor]:
        """Lists the tokens of each block of each unit that are no keys; without those of none, or all.

        is_key: bool [U, S], on the host.
        """
        members = [
            block[~key_set[block]] + unit * is_key.shape[1]
            for unit, key_set in enumerate(is_key)
            for block in blocks_of(self._height, self._width)
        ]
        return members if are_all else [block for block in members if len(block)]

    def _likeness_at_once(self, tokens: Tensor, is_member: Tensor) -> Tensor:
        blocks = blocks_of(self._height, self._width)
        block_of = torch.empty(tokens.shape[1], dtype=torch.int64)
        for number, places in enumerate(blocks):
            block_of[places] = number
        return likeness_at_once(tokens, is_member, to_device(block_of, tokens.device), len(blocks))


def blocks_of(height: int, width: int) -> list[Tensor]:
    """Returns the places of each block of neighbours in a raster of height x width: int64, ascending."""
    grid = torch.arange(height * width).view(height, width)
    return [block.flatten() for rows in torch.split(grid, SIDE, 0) for block in torch.split(rows, SIDE, 1)]


def means(rows: Tensor, owners: Tensor, num_owners: int) -> Tensor:
    """Averages the rows [n, C] of each owner: [num_owners, C]. owners: int64 [n]; each owns at least one."""
    sums = rows.new_zeros(num_owners, rows.shape[1]).index_add_(0, owners, rows)
    counts = owners.new_zeros(num_owners).index_add_(0, owners, torch.ones_like(owners))
    return sums / counts[:, None]


def key_sets(tokens: Tensor) -> Tensor:
    """Marks the tokens of [U, S, C] that are least like the mean of their unit: bool [U, S]."""
    alike = (tokens * normalize(tokens.mean(1, keepdim=True), dim=-1)).sum(-1)
    count = num_keys(tokens.shape[1])
    return torch.zeros_like(alike, dtype=torch.bool).scatter_(
        1, alike.topk(count, largest=False).indices, True
    )


def num_keys(num_tokens: int) -> int:
    """Returns how many of a unit's tokens are its key set."""
    return max(1, round(_KEY_SHARE * num_tokens))


def likeness(block: Tensor) -> Tensor:
    """Computes the mean cosine of all pairs of block [n, C]; 1 for a single row."""
    count = len(block)
    return ((block @ block.T).sum() - count) / (count * (count - 1)) if count > 1 else torch.tensor(1.0)


def _merge(blocks: list[Tensor], num_tokens: int, num_kept: int) -> Tensor:
    """Assigns each token an owner, perhaps itself, int64 [num_tokens]; the most alike are merged first."""
    owners = torch.arange(num_tokens)
    left = num_tokens - num_kept
    for block in blocks:
        gone = min(left, len(block) - 1)
        owners[block[: gone + 1]] = block[gone // 2]
        left -= gone
    for owner in [owners[block[0]] for block in blocks][:left]:  # not even one for each block
        owners[owners == owner] = _DROPPED
        left -= 1
    for token in (owners == torch.arange(num_tokens)).nonzero()[:left, 0].tolist():
        owners[owners == token] = _DROPPED
    return owners


def likeness_at_once(tokens: Tensor, is_member: Tensor, blocks: Tensor, num_blocks: int) -> Tensor:
    """Computes what `likeness` does, of all blocks in few large operations, for devices: [U, B].

    tokens: [U, S, C], of length 1. is_member: bool [U, S]. blocks: int64 [S], the block of each place.
    """
    member = is_member.to(tokens.dtype)
    sums = tokens.new_zeros(len(tokens), num_blocks, tokens.shape[2])
    sums.index_add_(1, blocks, tokens * member[:, :, None])
    counts = tokens.new_zeros(len(tokens), num_blocks).index_add_(1, blocks, member)
    pairs = counts * (counts - 1)
    return torch.where(pairs > 0, (sums.square().sum(-1) - counts) / pairs.clamp_min(1), 1.0)
