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
from epd.kv.scheduler_output import Chunk
from epd.kv.scheduling import Scheduler
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.sequence import ComputedChunk, TokenSequence
from epd.stages.sampling.sampler import TokensAhead, sample_ahead

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Flight:
    """Holds a pass that has been launched: a chunk of one token for each sequence, and what it chooses."""

    chunks: Sequence[Chunk]
    sequences: Sequence[TokenSequence]
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
            if sequences.get(sequence.request_id) is sequence
        ]

    def _launch(
        self, sequences: Mapping[str, TokenSequence], before: _Flight | None = None
    ) -> _Flight | None:
        """Launches the next pass, after one whose tokens have not been read; None if it may not run ahead."""
        if not all(sequence.sampling.is_foreseeable for sequence in sequences.values()):
            return None
        chunks = self._scheduler.schedule_ahead(num_unread=int(before is not None))
        rows = None if before is None else _rows_of(chunks, before, sequences)
        if not chunks or (before is not None and rows is None):
            return None
        decoding = [sequences[chunk.request.request_id] for chunk in chunks]
        try:
            return self._launched(chunks, decoding, before.tokens.ids if before else None, rows)
        except Exception:  # a step that does not run ahead finds out whose fault it is
            logger.debug("a pass could not run ahead", exc_info=True)
            return None

    def _launched(
        self,
        chunks: Sequence[Chunk],
        sequences: Sequence[TokenSequence],
        unread: Tensor | None,
        rows: list[int] | None,
    ) -> _Flight:
        """Launches a pass. unread: the tokens before it, if they are not read yet, of which `rows` go on."""
        if unread is not None and rows is not None and rows != list(range(len(unread))):
            unread = unread.index_select(0, to_device(torch.tensor(rows), unread.device))
        segments = [
            sequence.segment(chunk.start, chunk.stop, 1, self._kv)
            for chunk, sequence in zip(chunks, sequences, strict=True)
        ]
        with torch.inference_mode():
            logits = self._runner.run_decodes(segments, unread)
            tokens = sample_ahead(logits, [sequence.sampling for sequence in sequences], unread)
        return _Flight(chunks, sequences, tokens)


def _rows_of(
    chunks: Sequence[Chunk], before: _Flight, sequences: Mapping[str, TokenSequence]
) -> list[int] | None:
    """Returns in which row of the pass before the token of each chunk is chosen; None if one is in none."""
    rows = {
        sequence.request_id: row
        for row, sequence in enumerate(before.sequences)
        if sequences.get(sequence.request_id) is sequence
    }
    found = [rows.get(chunk.request.request_id) for chunk in chunks]
    return [row for row in found if row is not None] if None not in found else None
