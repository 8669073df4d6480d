"""Chooses the tiles of the attention kernel: by chip, type, new tokens, head size, and heads of a KV head.

`make kernels` prints what the compiler makes of each entry of the table. Those of an H100 for heads of 65 to
128 channels were the fastest of the six and seven that were tried on one; the others are not tuned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

# tl.dot takes no fewer rows and channels.
LEAST_ROWS = 16
# Segments of at most this many new tokens are tiled apart from chunks, whose tiles would be mostly padding.
MOST_SHORT = 8

# exact: float32, whose IEEE products have no tensor cores: they are unrolled, and larger tiles spill.
Kind = Literal["exact", "short", "tall"]


class _Sizes(NamedTuple):
    """Holds rows of a tile, keys of a step, warps, and how many steps are on their way at once."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# By compute capability without its point; 0 for all other chips, some of which have only 99 KiB of shared
# memory. Of each kind, for heads of up to 64, 128 and 256 channels.
_EXACT = _Sizes(16, 32, 8, 2), _Sizes(16, 32, 8, 2), _Sizes(16, 16, 8, 2)
_TABLE: Mapping[int, Mapping[Kind, tuple[_Sizes, _Sizes, _Sizes]]] = {
    90: {
        "exact": _EXACT,
        "short": (_Sizes(16, 64, 4, 3), _Sizes(16, 128, 4, 3), _Sizes(16, 32, 4, 3)),
        "tall": (_Sizes(128, 64, 8, 3), _Sizes(64, 64, 4, 3), _Sizes(64, 32, 8, 3)),
    },
    80: {
        "exact": _EXACT,
        "short": (_Sizes(16, 64, 4, 3), _Sizes(16, 64, 4, 3), _Sizes(16, 32, 4, 3)),
        "tall": (_Sizes(64, 64, 4, 3), _Sizes(64, 64, 8, 3), _Sizes(64, 32, 8, 3)),
    },
    0: {
        "exact": _EXACT,
        "short": (_Sizes(16, 64, 4, 3), _Sizes(16, 32, 4, 3), _Sizes(16, 16, 4, 3)),
        "tall": (_Sizes(64, 64, 4, 2), _Sizes(64, 32, 4, 2), _Sizes(64, 16, 8, 2)),
    },
}


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


def tiling(max_new: int, group: int, head_dim: int, dtype: torch.dtype, chip: int = 0) -> Tiling:
    """Returns the tiles of segments of at most `max_new` new tokens.

    group: query heads of a KV head. chip: its compute capability, such as 90; see the table.
    """
    block_d = max(LEAST_ROWS, next_power_of_2(head_dim))
    kind: Kind = "exact" if dtype.itemsize > 2 else "short" if max_new <= MOST_SHORT else "tall"
    column = 0 if block_d <= 64 else 1 if block_d <= 128 else 2
    rows, keys, num_warps, num_stages = _TABLE.get(chip, _TABLE[0])[kind][column]
    tokens = max(1, rows // group)
    block_m = max(LEAST_ROWS, next_power_of_2(tokens * group))
    return Tiling(tokens, block_m, keys, block_d, num_warps, num_stages)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
