"""Computes parts of a pass's attention on a CPU: some keys for some rows, each in a few large operations.

Shapes: as in `epd.stages.attention`; G = Hq / Hkv query heads to a KV head. Queries of several rows and of
the G heads that share a KV head are folded into one matrix, so keys are never repeated.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from epd.types import Int64Array

# What torch's scaled_dot_product_attention calls on a CPU; it also gives the logarithms of the sums.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True, slots=True)
class Rows:
    """Selects packed rows of some segments; index: int64 [N], or a slice where they follow each other."""

    index: Tensor | slice
    num_rows: int

    @classmethod
    def of(cls, rows: Int64Array) -> Rows:
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows) and (np.diff(rows) == 1).all():
            return cls(slice(first, last + 1), len(rows))
        return cls(torch.from_numpy(rows), len(rows))


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Locates keys that follow each other in some blocks: `num_tokens` of them, after the first `skipped`.

    first, stop: blocks that follow each other in memory, half-open; or `blocks`, int64 [n], if given.
    """

    num_tokens: int
    first: int = 0
    stop: int = 0
    blocks: Tensor | None = None
    skipped: int = 0

    @classmethod
    def of(cls, blocks: Int64Array, num_tokens: int, skipped: int = 0) -> BlockSpan:
        first, last = int(blocks[0]), int(blocks[-1])
        if last - first + 1 == len(blocks) and (np.diff(blocks) == 1).all():
            return cls(num_tokens, first, last + 1, None, skipped)
        return cls(num_tokens, blocks=torch.from_numpy(blocks), skipped=skipped)

    def read(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values, [Hkv, K, D] each, valid until the next read.

        Blocks that follow each other are read in place in caches of one piece; others are copied side by
        side, whole: products over memory in one piece earn the copy.
        """
        if self.blocks is None and is_one_piece(keys):
            start = self.first * keys.shape[1] + self.skipped
            held = slice(start, start + self.num_tokens)
            return keys.flatten(0, 1)[held].transpose(0, 1), values.flatten(0, 1)[held].transpose(0, 1)
        num_blocks = self.stop - self.first if self.blocks is None else len(self.blocks)
        together = scratch.take((2, num_blocks, *keys.shape[1:]), keys.dtype)
        for cache, part in zip((keys, values), together, strict=True):
            if self.blocks is None:
                part.copy_(cache[self.first : self.stop])
            else:
                torch.index_select(cache, 0, self.blocks, out=part)
        tokens = together.view(2, -1, *keys.shape[2:])[:, self.skipped : self.skipped + self.num_tokens]
        heads = tokens.transpose(1, 2)
        return heads[0], heads[1]


@dataclass(frozen=True, slots=True)
class Attended:
    """Holds a piece's result.

    out: [N, Hkv, G, D], weighted values.
    log_sums: float32 [N, Hkv, G]; None from a piece that comes last and merges with none before.
    """

    out: Tensor
    log_sums: Tensor | None


class Piece(Protocol):
    """Attends some keys for some rows. merges: the rows have results of earlier pieces."""

    @property
    def rows(self) -> Rows: ...
    @property
    def merges(self) -> bool: ...

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        """Attends query: [N, Hkv, G, D], the piece's rows.

        keys, values: caches [num_blocks, block_size, Hkv, D].
        """


@dataclass(frozen=True, slots=True)
class UnmaskedPiece:
    """Lets all rows attend all of the keys."""

    rows: Rows
    merges: bool
    keys: BlockSpan

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        num_rows, num_heads, group, dim = query.shape
        folded = query.transpose(0, 1).reshape(1, num_heads, num_rows * group, dim)
        keys, values = self.keys.read(keys, values)
        out, log_sums = _flash(folded, keys[None], values[None], scale=scale)
        shape = (num_heads, num_rows, group)
        return Attended(out.view(*shape, dim).transpose(0, 1), log_sums.view(shape).transpose(0, 1))


@dataclass(frozen=True, slots=True)
class CausalPiece:
    """Lets row i attend the keys up to its own: as many keys as rows."""

    rows: Rows
    merges: bool
    keys: BlockSpan

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        keys, values = self.keys.read(keys, values)
        each_head = (-1, query.shape[2], -1, -1)
        out, log_sums = _flash(
            query.permute(1, 2, 0, 3),
            keys[:, None].expand(each_head),
            values[:, None].expand(each_head),
            is_causal=True,
            scale=scale,
        )
        return Attended(out.permute(2, 0, 1, 3), log_sums.permute(2, 0, 1))


def is_one_piece(cache: Tensor) -> bool:
    """Reports whether the tokens of a head follow each other from block to block."""
    return cache.stride(0) == cache.shape[1] * cache.stride(1)


class Scratch(threading.local):
    """Keeps memory for gathered keys and values, from layer to layer and from pass to pass.

    Large pieces of fresh memory cost more in page faults than the gathering itself.
    """

    def __init__(self) -> None:
        self._held: dict[torch.dtype, Tensor] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a tensor, uninitialised, valid until the next `take`."""
        num_values = prod(shape)
        held = self._held.get(dtype)
        if held is None or held.numel() < num_values:
            with torch.inference_mode(False):  # usable in either mode from now on
                held = torch.empty(num_values, dtype=dtype)
            self._held[dtype] = held
        return held[:num_values].view(shape)


scratch = Scratch()
