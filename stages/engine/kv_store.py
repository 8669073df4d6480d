"""Keeps keys and values of media on disk, and brings them back before a request is admitted.

    add: what is on disk behind what is cached?   no  -> the scheduler's queue
                     | yes
    a thread reads pieces ahead  ->  step: into the prefix cache, in order  ->  the queue, as for any hit

    step: a chunk is computed  ->  whole pieces are copied to the host  ->  a thread writes them

Disks hold up no step, but a step waits for the copies of its pieces to the host. What cannot be read, or has
no room, is computed as ever. No question is kept: a prompt's pieces end with its last visual token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from epd.engine_config import EngineConfig
from epd.kv.kv_cache import KVCacheManager
from epd.stages.engine.kv_pool import KVPools, KVPoolsShape
from epd.stages.engine.sequence import TokenSequence
from epd.stages.kept_files import KV_KIND, kept_files
from epd.store.piece_files import PieceFiles
from epd.store.pieces import PIECE_TOKENS, Piece, pieces
from epd.store.write_behind import WriteBehind
from epd.types import Reuse, Tier, ceil_div, totals

# Pieces of a request that are read ahead of the pools.
_READ_AHEAD = 4


@dataclass(slots=True)
class _Restore:
    """Brings back a prompt's pieces.

    missing: that are not read yet. reading: that are, or are being read, in order, with where they were.
    """

    sequence: TokenSequence
    missing: deque[Piece]
    reading: deque[tuple[Piece, Future[tuple[Tensor, Tier] | None]]]


class KVStore:
    """Keeps the pieces of one engine. Not thread-safe."""

    def __init__(
        self, files: PieceFiles, kv: KVCacheManager, pools: KVPools, piece_tokens: int = PIECE_TOKENS
    ) -> None:
        """piece_tokens: of a piece, made whole blocks. kv: keeps nothing but keys and values of prompts."""
        self._kv = kv
        self._piece_tokens = ceil_div(piece_tokens, kv.block_size) * kv.block_size
        self._planes = [(group, plane) for group, pool in enumerate(pools.groups) for plane in pool.planes]
        self._bytes_per_block = [plane[0].nbytes for _, plane in self._planes]
        self._restores: dict[str, _Restore] = {}
        self._to_keep: dict[str, deque[Piece]] = {}  # of requests that are prefilled, the next one first
        self._reused: dict[str, list[Reuse]] = {}  # of requests that are not admitted
        self._reader = ThreadPoolExecutor(_READ_AHEAD, "read-kv")
        self._files = WriteBehind(files, KV_KIND)
        self.counts = self._files.counts

    @property
    def restoring(self) -> set[str]:
        """Returns the requests that wait for what is on disk."""
        return set(self._restores)

    # Back from disk

    def begin(self, sequence: TokenSequence) -> bool:
        """Starts to bring back a prompt's pieces. Returns False if there is none behind what is cached."""
        if not _is_kept(sequence):
            return False
        num_tokens = sequence.request.prompt.prefix_length
        every = list(pieces(sequence.scheduled.identity, num_tokens, self._piece_tokens))
        self._to_keep[sequence.request_id] = deque(every)
        missing = deque(self._behind_cached(sequence, every))
        if not missing:
            return False
        self._restores[sequence.request_id] = _Restore(sequence, missing, deque())
        self._read_ahead(self._restores[sequence.request_id])
        return True

    def _behind_cached(self, sequence: TokenSequence, every: list[Piece]) -> Iterator[Piece]:
        """Yields the pieces on disk that follow those in the prefix cache."""
        num_cached = self._kv.num_cached(sequence.scheduled.identity, every[-1].stop)
        for piece in every:
            if piece.stop <= num_cached:
                continue
            if piece.key not in self._files:
                return
            yield piece

    def _read_ahead(self, restore: _Restore) -> None:
        while restore.missing and len(restore.reading) < _READ_AHEAD:
            piece = restore.missing.popleft()
            restore.reading.append((piece, self._reader.submit(self._read, piece)))

    def _read(self, piece: Piece) -> tuple[Tensor, Tier] | None:
        payload = torch.empty(self._num_bytes(piece), dtype=torch.uint8)
        tier = self._files.read(piece.key, piece.index, payload.numpy().data)
        return (payload, tier) if tier else None

    def step(self) -> list[TokenSequence]:
        """Puts what was read into the prefix cache. Returns the requests that wait no longer."""
        over = [each.sequence for each in self._restores.values() if self._advance(each)]
        for sequence in over:
            del self._restores[sequence.request_id]
        return over

    def _advance(self, restore: _Restore) -> bool:
        """Takes what was read, in order. Returns whether the request is to be computed from there."""
        while restore.reading and restore.reading[0][1].done():
            piece, read = restore.reading.popleft()
            if not self._place(restore.sequence, piece, read.result()):
                return True
            self._read_ahead(restore)
        return not restore.reading

    def _place(self, sequence: TokenSequence, piece: Piece, read: tuple[Tensor, Tier] | None) -> bool:
        """Writes a piece to the pools. Returns False if it could not be."""
        if read is None:
            self.counts.num_failed += 1
            return False
        payload, tier = read
        blocks = self._kv.restore(sequence.scheduled.identity, piece.start, piece.stop)
        if blocks is None:
            return False
        sizes = [len(blocks) * num_bytes for num_bytes in self._bytes_per_block]
        for (group, plane), part in zip(self._planes, torch.split(payload, sizes), strict=True):
            ids = torch.tensor([each[group] for each in blocks], device=plane.device)
            values = part.view(plane.dtype).view(len(blocks), *plane.shape[1:])
            plane.index_copy_(0, ids, values.to(plane.device))
        found = self.counts.found(Reuse("kv", tier, piece.num_tokens, len(payload)))
        self._reused.setdefault(sequence.request_id, []).append(found)
        return True

    def take_reused(self, request_id: str) -> tuple[Reuse, ...]:
        """Returns what was brought back for a request, once."""
        return totals(self._reused.pop(request_id, ()))

    # To disk

    def keep(self, sequence: TokenSequence) -> None:
        """Keeps what has been computed of a prompt's pieces."""
        following = self._to_keep.get(sequence.request_id)
        if following is None:
            return
        while following and following[0].stop <= sequence.scheduled.num_computed:
            piece = following.popleft()
            if self._files.is_open and sequence.tokens.is_key is None and piece.key not in self._files:
                payload = self._kv_of(sequence.request_id, piece)
                self._files.add(piece.key, piece.index, payload.numpy().data)
        if not following:
            del self._to_keep[sequence.request_id]

    def _kv_of(self, request_id: str, piece: Piece) -> Tensor:
        """Copies a piece out of the pools, uint8 [bytes], on the host."""
        size = self._kv.block_size
        parts = []
        for group, plane in self._planes:
            table = self._kv.block_table(request_id, group)
            ids = torch.tensor(table[piece.start // size : ceil_div(piece.stop, size)])
            taken = plane.index_select(0, ids.to(plane.device))
            parts.append(taken.contiguous().cpu().flatten().view(torch.uint8))
        return torch.cat(parts)

    # Both

    def _num_bytes(self, piece: Piece) -> int:
        return ceil_div(piece.num_tokens, self._kv.block_size) * sum(self._bytes_per_block)

    def forget(self, request_id: str) -> bool:
        """Ends what is done for a request. Returns whether it waited for what is on disk."""
        self._to_keep.pop(request_id, None)
        self._reused.pop(request_id, None)
        restore = self._restores.pop(request_id, None)
        for _, read in restore.reading if restore is not None else ():
            read.cancel()
        return restore is not None

    def close(self) -> None:
        """Ends the threads, once what waits is written."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._files.close()


def kv_files(model: Path, options: EngineConfig, shape: KVPoolsShape, facts: Mapping[str, str]) -> PieceFiles:
    """Opens the files of a model's keys and values: see `kept_files`."""
    layouts = "; ".join(str(layout) for layout in shape.layouts)
    own = {"layouts": layouts, "block_size": str(shape.block_size), "model_impl": options.model_impl}
    return kept_files(model, options, KV_KIND, {**own, **facts})


def _is_kept(sequence: TokenSequence) -> bool:
    """Returns whether a prompt has media, and all of its layers keep all of its tokens."""
    scheduled, request = sequence.scheduled, sequence.request
    is_whole = not scheduled.pruned and not scheduled.num_to_drop and sequence.view is None
    return is_whole and request.parent is None and request.prompt.prefix_length > 0 and sequence.index == 0
