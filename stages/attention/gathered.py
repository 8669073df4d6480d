"""Attends short contexts side by side on a CPU: their blocks are copied, what is long is read in place.

    scores of a segment   | own spans ............ | padding | copied blocks | padding |

Products in float32 of one batch: that of torch's flash attention takes up to twice as long for the few query
heads of a KV head. Shapes: as in `epd.stages.attention.pieces`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from epd.stages.attention.pieces import Attended, Rows, is_one_piece, scratch
from epd.stages.kernels.scaled_values import is_scaled, unscaled
from epd.types import Int64Array, ceil_div


@dataclass(frozen=True, slots=True)
class OwnSpan:
    """Locates keys that one segment of a piece reads in place: they follow each other in memory.

    segment: its number in the piece. column: of the piece's scores, where its first key has its own.
    slot: of the first key.
    """

    segment: int
    column: int
    slot: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class GatheredPiece:
    """Lets S segments of Q rows each attend blocks that are copied side by side, and what is theirs alone.

    blocks: int64 [S, blocks of each], padded.
    unwritten: int64 [2, U], segment and place of copied keys that may hold anything. They are cleared: what
    is not a number would spread in spite of the mask.
    mask: float32 [S, 1, Q, W], minus infinity where a row does not attend; W keys of each segment are used.
    is_masked: whether there is any such place.
    own: what segments read in place; all of their rows attend all of it.
    """

    rows: Rows
    merges: bool
    blocks: Int64Array
    unwritten: Int64Array
    mask: Tensor
    is_masked: bool
    own: tuple[OwnSpan, ...] = ()
    _made: dict[tuple[int, ...], _Workspace] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_segments(self) -> int:
        return len(self.blocks)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        num_rows, num_heads, group, dim = query.shape
        num_segments, num_each = self.num_segments, num_rows // self.num_segments
        shape = (num_segments, num_heads, group, num_each)
        work = self._workspace(query, keys)
        folded = query.view(num_segments, num_each, num_heads, group, dim).permute(0, 2, 3, 1, 4)
        torch.mul(folded.float(), scale, out=work.query)
        gathered_keys, gathered_values = work.gather(keys, values, self.blocks)
        torch.bmm(work.query_of_heads, gathered_keys.transpose(1, 2), out=work.loose)
        if self.is_masked:
            work.loose.view(*shape, -1).add_(self.mask[:, :, None])
        for views in work.spans:
            torch.bmm(views.query, views.read(keys).transpose(1, 2), out=views.scores)
        torch.softmax(work.scores, -1, out=work.weights)
        torch.bmm(work.loose_weights, gathered_values, out=work.out)
        for views in work.spans:
            views.out.baddbmm_(views.weights, views.read(values))
        log_sums = work.scores.logsumexp(-1).view(shape) if self.merges else None
        return Attended(
            work.out.view(*shape, dim).permute(0, 3, 1, 2, 4).flatten(0, 1).to(query.dtype),
            None if log_sums is None else log_sums.permute(0, 3, 1, 2).flatten(0, 1),
        )

    def _workspace(self, query: Tensor, cache: Tensor) -> _Workspace:
        """Returns what all layers of these shapes use, one after the other."""
        key = (*query.shape, cache.shape[0])
        work = self._made.get(key)
        if work is None:
            work = self._made[key] = _Workspace.of(self, query, cache)
        return work


@dataclass(frozen=True, slots=True)
class _SpanViews:
    """Holds the parts of a workspace that belong to a span: [Hkv, G * Q, ...] each.

    place: shape, strides and offset of its keys in a cache; None where blocks lie apart.
    """

    span: OwnSpan
    place: tuple[tuple[int, ...], tuple[int, ...], int] | None
    query: Tensor
    scores: Tensor
    weights: Tensor
    out: Tensor

    @classmethod
    def of(cls, span: OwnSpan, cache: Tensor, query: Tensor, parts: tuple[Tensor, ...]) -> _SpanViews:
        """Takes query, and scores, weights and out of a workspace, by segment and head."""
        scores, weights, out = parts
        columns = slice(span.column, span.column + span.num_tokens)
        at, place = span.segment, None
        if is_one_piece(cache):
            token, head = cache.stride()[1:3]
            place = (cache.shape[2], span.num_tokens, cache.shape[3]), (head, token, 1), span.slot * token
        return cls(span, place, query[at], scores[at, ..., columns], weights[at, ..., columns], out[at])

    def read(self, cache: Tensor) -> Tensor:
        """Returns float32 [Hkv, num_tokens, D]; where blocks lie apart, or of another type, a copy."""
        if self.place is not None and not is_scaled(cache):
            shape, strides, offset = self.place
            return cache.as_strided(shape, strides, cache.storage_offset() + offset).float()
        first, block_size = self.span.slot // cache.shape[1], cache.shape[1]
        blocks = cache[first : first + ceil_div(self.span.num_tokens, block_size)]
        tokens = blocks.flatten(0, 1)[: self.span.num_tokens].transpose(0, 1)
        return unscaled(tokens, torch.float32).float()


@dataclass(frozen=True, slots=True)
class _Workspace:
    """Holds the memory of a piece and views of it, which are made once for all layers.

    query: [S, Hkv, G, Q, D], scaled. query_of_heads: the same, [S * Hkv, G * Q, D]. out: likewise.
    scores, weights: [S, Hkv, G * Q, own columns + W].
    loose, loose_weights: their last W columns, [S * Hkv, G * Q, W].
    blocks_by_head: int64, of a cache that lies by head, the blocks to copy for each head of each segment.
    cleared: int64, tokens of the copies, keys before values.
    copied: [2, S * Hkv, tokens, D], of which W tokens are used.
    """

    query: Tensor
    query_of_heads: Tensor
    scores: Tensor
    weights: Tensor
    loose: Tensor
    loose_weights: Tensor
    out: Tensor
    spans: list[_SpanViews]
    blocks_by_head: Tensor
    cleared: Tensor
    copied: Tensor
    is_by_head: bool

    @classmethod
    def of(cls, piece: GatheredPiece, query: Tensor, cache: Tensor) -> _Workspace:
        num_heads, group, dim = query.shape[1:]
        num_segments, width = piece.num_segments, piece.mask.shape[-1]
        num_each = len(query) // num_segments
        folded = torch.empty(num_segments, num_heads, group, num_each, dim)
        num_own = max((span.column + span.num_tokens for span in piece.own), default=0)
        shape = (num_segments, num_heads, group * num_each, num_own + width)
        scores = torch.full(shape, -torch.inf) if num_own else torch.empty(shape)
        weights = torch.empty(shape)
        out = torch.empty(num_segments * num_heads, group * num_each, dim)
        rows, cleared = _places(piece, cache)
        taken = scratch.take(
            (2, num_segments * num_heads, piece.blocks.shape[1] * cache.shape[1], dim), cache.dtype
        )
        of_heads = folded.view(out.shape)
        queries, outs = folded.flatten(2, 3), out.view(num_segments, num_heads, -1, dim)
        return cls(
            folded,
            of_heads,
            scores,
            weights,
            scores[..., num_own:].flatten(0, 1),
            weights[..., num_own:].flatten(0, 1),
            out,
            [_SpanViews.of(span, cache, queries, (scores, weights, outs)) for span in piece.own],
            rows,
            cleared,
            taken,
            cache.permute(2, 0, 1, 3).is_contiguous(),
        )

    def gather(self, keys: Tensor, values: Tensor, blocks: Int64Array) -> tuple[Tensor, Tensor]:
        """Copies keys and values of blocks [S, n] side by side, float32 [S * Hkv, W, D] each."""
        num_blocks, block_size, num_heads, dim = keys.shape
        for cache, copy in zip((keys, values), self.copied, strict=True):
            if self.is_by_head and not is_scaled(cache):
                shape = (num_heads * num_blocks, block_size * dim)
                by_head = cache.as_strided(shape, (block_size * dim, 1), cache.storage_offset())
                torch.index_select(by_head, 0, self.blocks_by_head, out=copy.view(-1, block_size * dim))
            else:
                chosen = cache.index_select(0, torch.from_numpy(blocks.ravel()))
                chosen = chosen.view(*blocks.shape, *cache.shape[1:]).permute(0, 3, 1, 2, 4)
                copy.view(*chosen.shape[:4], dim).copy_(unscaled(chosen, copy.dtype))
        if self.cleared.shape[0]:
            self.copied.view(-1, dim).index_fill_(0, self.cleared, 0.0)
        used = self.copied[:, :, : self.loose.shape[-1]].float()
        return used[0], used[1]


def _places(piece: GatheredPiece, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `blocks_by_head` and `cleared` of a workspace."""
    num_blocks, block_size, num_heads, _ = cache.shape
    heads = np.arange(num_heads)[:, None]
    rows = (piece.blocks[:, None] + heads * num_blocks).ravel()
    num_each = piece.blocks.shape[1] * block_size
    segments, tokens = piece.unwritten
    cleared = ((segments * num_heads + heads) * num_each + tokens).ravel()
    both = np.concatenate([cleared, cleared + rows.size * block_size])
    return torch.from_numpy(rows), torch.from_numpy(both)
