"""Chooses the tiles of the attention kernel: by its type, head size, and query heads of a KV head.

`make kernels` prints what the compiler makes of each for sm_80 and sm_90. They are not tuned on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# tl.dot takes no fewer rows and channels.
LEAST_ROWS = 16
# Segments of at most this many new tokens are tiled apart from chunks, whose tiles would be mostly padding.
MOST_SHORT = 8


@dataclass(frozen=True, slots=True)
class Tiling:
    """Holds tile sizes, and how a tile is computed.

    tokens: new tokens of a tile.
    block_m, block_n, block_d: rows, keys and channels, powers of two.
    num_warps, num_stages: warps of a program, and how many tiles of keys are on their way at once. Keys wait
    for the block table, so with less than three stages nothing is loaded ahead.
    """

    tokens: int
    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def tiling(max_new: int, group: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """Returns the tiles of segments of at most `max_new` new tokens. group: query heads of a KV head."""
    block_d = max(LEAST_ROWS, next_power_of_2(head_dim))
    is_wide, is_short = block_d > 128, max_new <= MOST_SHORT
    if dtype.itemsize > 2:  # IEEE products have no tensor cores: they are unrolled, and larger tiles spill
        rows, block_n, num_warps, num_stages = LEAST_ROWS, 16 if is_wide else 32, 8, 2
    elif is_short:
        rows, block_n, num_warps, num_stages = LEAST_ROWS, 32 if is_wide else 64, 4, 3
    else:
        rows, block_n, num_warps, num_stages = 64, 32 if is_wide else 64, 8 if block_d > 64 else 4, 3
    tokens = max(1, rows // group)
    block_m = max(LEAST_ROWS, next_power_of_2(tokens * group))
    return Tiling(tokens, block_m, block_n, block_d, num_warps, num_stages)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
