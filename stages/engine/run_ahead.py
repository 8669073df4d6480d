"""Launches the next pass of decodes before the tokens of the one before it are read.

    device  | pass 1 ........ | pass 2 ........ | pass 3 ........ |
    host    launch 1, launch 2 | read 1, book, launch 3 | read 2, ...

The tokens that a pass chooses are the inputs of the next one on the device. What a request is known to hold
changes only when a token is booked, so a pass may be dropped at any time: its tokens are computed again, into
the same places of the cache. That is done where a token was not the right one after all, and for requests
that have ended, left or moved meanwhile. Only steps that do nothing but decode run ahead, for sequences whose
next token depends on logits alone: no drafts, no grammars.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epd.encoders.device import to_device
from epd.kv.kv_cache import KVCacheManager
from epd.kv.scheduled_request import ScheduledRequest
from epd.kv.scheduler_output import Chunk
from epd.kv.scheduling import Scheduler
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.packed_pass import PackedPass, following_pass
from epd.stages.engine.sequence import ComputedChunk, TokenSequence
from epd.stages.sampling.sampler import TokensAhead, sample_ahead

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Flight:
    """Holds a pass that has been launched: a chunk of one token for each sequence, and what it chooses.

    rows: of the pass, in which each request is.
    """

    chunks: Sequence[Chunk]
    sequences: Sequence[TokenSequence]
    rows: Mapping[ScheduledRequest, int]
    packed: PackedPass
    tokens: TokensAhead


class RunAhead:
    """Keeps one pass of decodes under way while the tokens of the one before are booked."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, kv: KVCacheManager) -> None:
        self._runner, self._scheduler, self._kv = runner, scheduler, kv
        self._flight: _Flight | None = None

    def step(self, sequences: Mapping[str, TokenSequence]) -> list[ComputedChunk]:
        """Returns the tokens of a pass, with the next one under way.

        sequences: all that are not over, by id. Returns nothing where a step must do more than decode, and
        no pass is under way.
        """
        flight = self._flight or self._launch(sequences)
        self._flight = None
        if flight is None:
            return []
        following = self._launch(sequences, flight)
        try:
            tokens, were_right = flight.tokens.read()
        except Exception:
            logger.exception("a pass that ran ahead has failed; its tokens are computed again")
            return []
        self._flight = following if were_right else None
        return [
            ComputedChunk(chunk, [sequence], [token])
            for chunk, sequence, token in zip(flight.chunks, flight.sequences, tokens, strict=True)
            if sequences.get(chunk.request.request_id) is sequence
        ]

    def _launch(
        self, sequences: Mapping[str, TokenSequence], before: _Flight | None = None
    ) -> _Flight | None:
        """Launches the next pass, after one whose tokens have not been read; None if it may not run ahead."""
        if not all(sequence.sampling.is_foreseeable for sequence in sequences.values()):
            return None
        chunks = self._scheduler.schedule_ahead(num_unread=int(before is not None))
        if not chunks:
            return None
        try:
            if before is None:
                return self._first(chunks, [sequences[chunk.request.request_id] for chunk in chunks])
            rows = [before.rows.get(chunk.request, -1) for chunk in chunks]
            return None if -1 in rows else self._next(chunks, before, rows)
        except Exception:  # a step that does not run ahead finds out whose fault it is
            logger.debug("a pass could not run ahead", exc_info=True)
            return None

    def _first(self, chunks: Sequence[Chunk], sequences: Sequence[TokenSequence]) -> _Flight:
        """Launches a pass of which all inputs are known."""
        segments = [
            sequence.segment(chunk.start, chunk.stop, 1, self._kv)
            for chunk, sequence in zip(chunks, sequences, strict=True)
        ]
        rows = {chunk.request: row for row, chunk in enumerate(chunks)}
        return self._launched(chunks, sequences, rows, self._runner.packed(segments))

    def _next(self, chunks: Sequence[Chunk], before: _Flight, rows: list[int]) -> _Flight:
        """Launches the pass behind one whose tokens are not read yet, of which these rows go on."""

        def block_at(group: int, row: int, index: int) -> int:
            return self._kv.block_table(chunks[row].request.request_id, group)[index]

        unread = before.tokens.ids
        if rows == list(range(len(before.chunks))):
            packed = following_pass(before.packed, None, block_at)
            return self._launched(chunks, before.sequences, before.rows, packed, unread)
        packed = following_pass(before.packed, rows, block_at)
        unread = unread.index_select(0, to_device(torch.tensor(rows), unread.device))
        numbers = {chunk.request: row for row, chunk in enumerate(chunks)}
        return self._launched(chunks, [before.sequences[row] for row in rows], numbers, packed, unread)

    def _launched(
        self,
        chunks: Sequence[Chunk],
        sequences: Sequence[TokenSequence],
        rows: Mapping[ScheduledRequest, int],
        packed: PackedPass,
        unread: Tensor | None = None,
    ) -> _Flight:
        """Launches a pass. unread: the tokens that it computes, if they are not read yet."""
        with torch.inference_mode():
            logits = self._runner.run_decodes(packed, unread)
            tokens = sample_ahead(logits, [sequence.sampling for sequence in sequences], unread)
        return _Flight(chunks, sequences, rows, packed, tokens)
