"""Keeps keys and values of media on disk, and brings them back before a request is admitted.

    add: what is on disk behind what is cached?   no  -> the scheduler's queue
                     | yes
    a thread reads pieces ahead  ->  step: into the prefix cache, in order  ->  the queue, as for any hit

    step: a chunk is computed  ->  whole pieces are copied to the host  ->  a thread writes them

Disks hold up no step, but a step waits for the copies of its pieces to the host. What cannot be read, or has
no room, is computed as ever. So is what is quicker to compute (`epd.control.way_back`), which is asked before
pieces are read, and again while a disk does not answer. Whoever keeps keys and values of media keeps their
embeddings too: until it was measured how soon these come, they are taken to be in the same place.
No question is kept: a prompt's pieces end with its last visual token.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from epd.control.recent import Pace
from epd.control.way_back import PartCosts, cheapest
from epd.engine_config import EngineConfig
from epd.kv.kv_cache import KVCacheManager
from epd.stages.engine.kv_pool import KVPools, KVPoolsShape
from epd.stages.engine.sequence import TokenSequence
from epd.stages.kept_files import KV_KIND, kept_files
from epd.store.piece_files import PieceFiles
from epd.store.pieces import PIECE_TOKENS, Piece, pieces
from epd.store.write_behind import ReadPaces, WriteBehind
from epd.types import Reuse, Tier, ceil_div, totals

# Pieces of a request that are read ahead of the pools.
_READ_AHEAD = 4
# Of a piece, the tokens that passes compute at least to say how long they take.
_LEAST_SHARE = 0.25
# Seconds after which it is not known any more how soon embeddings come.
_FORGET_S = 60.0


@dataclass(frozen=True, slots=True)
class _Kept:
    """Is a piece, and where it was when it was looked for. num_visual: its visual tokens, of num_units."""

    piece: Piece
    tier: Tier
    num_units: int
    num_visual: int


@dataclass(slots=True)
class _Restore:
    """Brings back a prompt's pieces.

    missing: that are not read yet. reading: that are, or are being read, in order, with where they were.
    since_s: since when the first of these is awaited, by the monotonic clock.
    """

    sequence: TokenSequence
    missing: deque[_Kept]
    reading: deque[tuple[_Kept, Future[tuple[Tensor, Tier] | None]]]
    since_s: float


@dataclass(slots=True)
class _Coming:
    """Describes a prompt whose embeddings are not there yet.

    tier: where its keys and values are, and were left; None if nothing is kept.
    since_s: since when embeddings may come, by the monotonic clock; None before its admission.
    num_tokens: from then on, with the text between.
    """

    tier: Tier | None = None
    since_s: float | None = None
    num_tokens: int = 0


class KVStore:
    """Keeps the pieces of one engine. Not thread-safe.

    on_read: called by another thread, once a step has something to take.
    """

    def __init__(
        self,
        files: PieceFiles,
        kv: KVCacheManager,
        pools: KVPools,
        piece_tokens: int = PIECE_TOKENS,
        embedding_bytes: int = 0,
        paces: ReadPaces | None = None,
    ) -> None:
        """kv: keeps nothing but keys and values of prompts.

        piece_tokens: of a piece, made whole blocks. embedding_bytes: of a visual token, where they are kept.
        paces: see `WriteBehind`.
        """
        self._kv = kv
        self._piece_tokens = ceil_div(piece_tokens, kv.block_size) * kv.block_size
        self._planes = [(group, plane) for group, pool in enumerate(pools.groups) for plane in pool.planes]
        self._bytes_per_block = [plane[0].nbytes for _, plane in self._planes]
        self._restores: dict[str, _Restore] = {}
        self._to_keep: dict[str, deque[Piece]] = {}  # of requests that are prefilled, the next one first
        self._reused: dict[str, list[Reuse]] = {}  # of requests that are not admitted
        self._embedding_bytes = embedding_bytes
        self._coming: dict[str, _Coming] = {}
        self._prefilling = Pace()  # of tokens, once their embeddings are there
        self._passed_tokens, self._passed_s = 0, 0.0  # in passes whose results were not read yet
        self._arriving: dict[Tier | None, Pace] = {}  # of tokens until their embeddings are there, by tier
        self.on_read: Callable[[], None] = lambda: None
        self._reader = ThreadPoolExecutor(_READ_AHEAD, "read-kv")
        self._files = WriteBehind(files, KV_KIND, paces)
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
        self._coming[sequence.request_id] = _Coming()
        kept = self._behind_cached(sequence, every)
        missing = kept[: self._num_worth(kept)]
        self._leave(sequence, kept[len(missing) :])
        if not missing:
            return False
        restore = _Restore(sequence, deque(missing), deque(), time.monotonic())
        self._restores[sequence.request_id] = restore
        self._read_ahead(restore)
        return True

    def _behind_cached(self, sequence: TokenSequence, every: list[Piece]) -> list[_Kept]:
        """Returns the pieces that are kept and follow those in the prefix cache."""
        num_cached = self._kv.num_cached(sequence.scheduled.identity, every[-1].stop)
        units = [unit for item in sequence.request.prompt.media for unit in item.units]
        stops, lengths = [unit.stop for unit in units], [unit.length for unit in units]
        kept = []
        for piece in every:
            if piece.stop > num_cached:
                if (tier := self._files.tier_of(piece.key)) is None:
                    break
                first, last = bisect_right(stops, piece.start), bisect_right(stops, piece.stop)
                kept.append(_Kept(piece, tier, last - first, sum(lengths[first:last])))
        return kept

    def _num_worth(self, kept: Sequence[_Kept], waited_s: float = 0.0) -> int:
        """Counts the leading pieces that are quicker to read than to compute, as far as that is known.

        waited_s: for the first one. A disk that is late may never answer, and has embeddings no sooner.
        """
        is_late = bool(kept) and waited_s > self._read_s(kept[0])
        costs = [self._costs(each, is_late=is_late) for each in kept]
        if is_late:
            costs[0] = replace(costs[0], kv_s=waited_s)
        return cheapest(costs).num_kv

    def _costs(self, kept: _Kept, *, is_late: bool) -> PartCosts:
        """Returns the costs of a piece. Computing takes for ever, until it was measured."""
        num_tokens, kv_s = kept.piece.num_tokens, self._read_s(kept)
        prefill_s = self._prefilling.seconds(num_tokens, time.monotonic())
        if prefill_s is None:
            return PartCosts(kv_s)
        new_s, known_s = self._arrival_s(None, num_tokens), self._arrival_s(kept.tier, num_tokens)
        if is_late or known_s is None:
            read_s = self._embeddings_s(kept) if not is_late else math.inf
            return PartCosts(kv_s, read_s, encode_s=math.inf if new_s is None else new_s, prefill_s=prefill_s)
        return PartCosts(kv_s, known_s, prefill_s=prefill_s)

    def _read_s(self, kept: _Kept) -> float:
        return self._files.seconds(kept.tier, self._num_bytes(kept.piece))

    def _embeddings_s(self, kept: _Kept) -> float:
        """Returns the seconds to read the embeddings of a piece, if they are where the piece is."""
        if not self._embedding_bytes:
            return math.inf
        return self._files.seconds(kept.tier, kept.num_visual * self._embedding_bytes, kept.num_units)

    def _arrival_s(self, tier: Tier | None, num_tokens: int) -> float | None:
        """Returns the seconds until embeddings are there: see `_Coming`. None if that is not known."""
        pace = self._arriving.get(tier)
        return None if pace is None else pace.seconds(num_tokens, time.monotonic())

    def _leave(self, sequence: TokenSequence, kept: Sequence[_Kept]) -> None:
        """Notes pieces that are not read."""
        if kept:
            self._coming[sequence.request_id].tier = kept[0].tier
            left = Reuse("kv", "left", sum(each.piece.num_tokens for each in kept))
            self._reused.setdefault(sequence.request_id, []).append(self.counts.found(left))

    def _read_ahead(self, restore: _Restore) -> None:
        while restore.missing and len(restore.reading) < _READ_AHEAD:
            kept = restore.missing.popleft()
            read = self._reader.submit(self._read, kept.piece)
            read.add_done_callback(lambda _: self.on_read())
            restore.reading.append((kept, read))

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
            kept, read = restore.reading.popleft()
            restore.since_s = time.monotonic()
            if not self._place(restore.sequence, kept.piece, read.result()):
                return True
            self._read_ahead(restore)
        return not restore.reading or self._gives_up(restore)

    def _gives_up(self, restore: _Restore) -> bool:
        """Leaves what is awaited for longer than it takes to compute all that is not there."""
        waited_s = time.monotonic() - restore.since_s
        left = [*(kept for kept, _ in restore.reading), *restore.missing]
        if self._num_worth(left, waited_s):
            return False
        for _, read in restore.reading:
            read.cancel()
        self._files.note_read(left[0].tier, self._num_bytes(left[0].piece), restore.since_s)
        self._leave(restore.sequence, left)
        return True

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

    def admitted(self, sequence: TokenSequence) -> tuple[Reuse, ...]:
        """Notes that a request is admitted. Returns what was brought back for it, once."""
        coming = self._coming.get(sequence.request_id)
        if coming is not None and coming.since_s is None:
            coming.since_s = time.monotonic()
            coming.num_tokens = sequence.request.prompt.prefix_length - sequence.scheduled.num_computed
            self.arrived(sequence)
        return totals(self._reused.pop(sequence.request_id, ()))

    # What it takes to compute

    def arrived(self, sequence: TokenSequence) -> None:
        """Measures how soon the embeddings of a prompt came, if all are there and it was more than a few."""
        coming = self._coming.get(sequence.request_id)
        is_here = sequence.visual.num_ready >= sequence.request.prompt.prefix_length
        if coming is None or coming.since_s is None or not is_here:
            return
        del self._coming[sequence.request_id]
        if coming.num_tokens >= self._piece_tokens:
            forget_s = math.inf if coming.tier is None else _FORGET_S
            pace = self._arriving.setdefault(coming.tier, Pace(forget_s=forget_s))
            pace.add(coming.num_tokens, coming.since_s, time.monotonic())

    def note_pass(self, num_tokens: int, seconds: float, *, is_awaited: bool = True) -> None:
        """Notes how long a pass took, until now. Those of a few tokens say nothing.

        is_awaited: whether its results were read: a device may not be done with those before it until then.
        """
        self._passed_tokens += num_tokens
        self._passed_s += seconds
        if is_awaited:
            if self._passed_tokens >= _LEAST_SHARE * self._piece_tokens:
                now_s = time.monotonic()
                self._prefilling.add(self._passed_tokens, now_s - self._passed_s, now_s)
            self._passed_tokens, self._passed_s = 0, 0.0

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
                self._files.add({piece.key: payload.numpy().data}, piece.index)
        if not following:
            del self._to_keep[sequence.request_id]
            self._coming.pop(sequence.request_id, None)

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
        self._coming.pop(request_id, None)
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
    own |= {} if options.quantization is None else {"quantization": options.quantization}
    return kept_files(model, options, KV_KIND, {**own, **facts})


def _is_kept(sequence: TokenSequence) -> bool:
    """Returns whether a prompt has media, and all of its layers keep all of its tokens."""
    scheduled, request = sequence.scheduled, sequence.request
    is_whole = not scheduled.pruned and not scheduled.num_to_drop and sequence.view is None
    return is_whole and request.parent is None and request.prompt.prefix_length > 0 and sequence.index == 0
