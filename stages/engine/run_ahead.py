"""Launches the next pass of decodes before the tokens of the one before it are read.

    device  | pass 1 ........ | pass 2 ........ | pass 3 ........ |
    host    launch 1, launch 2 | read 1, book, launch 3 | read 2, ...

The tokens that a pass chooses are the inputs of the next one on the device. What a request is known to hold
changes only when a token is booked, so a pass may be dropped at any time: its tokens are computed again, into
the same places of the cache. That is done where a token was not the right one after all, and for requests
that have ended, left or moved meanwhile. Only steps that do nothing but decode run ahead, without drafts.

Where a token depends on the one before it by more than logits, as grammars and penalties make it, a pass is
launched as early, and its tokens are chosen once those before them are booked:

    host    launch 1, launch 2 | read 1, book, choose 2, launch 3 | read 2, book, choose 3, ...

What a pass needs stays from one to the next, and only what a token changes is written. The scheduler is asked
about a request where it begins a block, and about all where one has come, ended or left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epd.encoders.device import rows_of
from epd.kv.kv_cache import KVCacheManager
from epd.kv.scheduled_request import ScheduledRequest
from epd.kv.scheduling import Scheduler
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.packed_pass import PackedPass, go_on, pass_of_rows, rows_begun
from epd.stages.engine.sequence import TokenSequence
from epd.stages.sampling.sampler import SampledToken, SamplerAhead, TokensAhead

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Batch:
    """Holds decodes that go on together.

    sequences: one for each row. running, others: of the scheduler, when it was asked about all.
    num_left: passes until the first of the sequences has all its tokens.
    """

    sequences: list[TokenSequence]
    running: list[ScheduledRequest]
    others: list[ScheduledRequest]
    num_left: int
    packed: PackedPass
    sampler: SamplerAhead


@dataclass(frozen=True, slots=True)
class _Flight:
    """Holds a pass that has been launched: logits [R, V] of its rows.

    tokens: what it chooses, one for each sequence of the batch; None before that may be done.
    """

    batch: _Batch
    logits: Tensor
    tokens: TokensAhead | None


class RunAhead:
    """Keeps one pass of decodes under way while the tokens of the one before are booked."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, kv: KVCacheManager) -> None:
        self._runner, self._scheduler, self._kv = runner, scheduler, kv
        self._flight: _Flight | None = None

    @torch.inference_mode()
    def step(self, sequences: Mapping[str, TokenSequence]) -> list[tuple[TokenSequence, SampledToken]]:
        """Returns the tokens of a pass, with the next one under way.

        sequences: all that are not over, by id. Returns nothing where a step must do more than decode, and
        no pass is under way.
        """
        flight = self._tried(self._chosen if self._flight else self._first, sequences, self._flight)
        self._flight = None
        if flight is None or flight.tokens is None:
            return []
        following = self._tried(self._next, sequences, flight)
        try:
            tokens, were_right = flight.tokens.read()
        except Exception:
            logger.exception("a pass that ran ahead has failed; its tokens are computed again")
            return []
        self._flight = following if were_right else None
        pairs = zip(flight.batch.sequences, tokens, strict=True)
        return [pair for pair in pairs if sequences.get(pair[0].request_id) is pair[0]]

    def _tried(self, launch: _Launch, sequences: Mapping[str, TokenSequence], before: Any) -> _Flight | None:
        """Launches a pass, or what is left of it; None if it may not run ahead."""
        try:
            return launch(sequences, before)
        except Exception:  # a step that does not run ahead finds out whose fault it is
            logger.debug("a pass could not run ahead", exc_info=True)
            return None

    def _chosen(self, sequences: Mapping[str, TokenSequence], flight: _Flight) -> _Flight | None:
        """Chooses the tokens of a pass, if that has not been done: all tokens before them are known."""
        batch, logits = flight.batch, flight.logits
        if flight.tokens is not None:
            return flight
        rows = [row for row, each in enumerate(batch.sequences) if sequences.get(each.request_id) is each]
        if not rows:
            return None
        if len(rows) < len(batch.sequences):
            batch = self._batch([batch.sequences[row] for row in rows], batch.packed, rows, num_unread=1)
            logits = rows_of(logits, rows)
        return _Flight(batch, logits, batch.sampler.sample(logits))

    def _first(self, sequences: Mapping[str, TokenSequence], _: None) -> _Flight | None:
        """Launches a pass of which all inputs are known."""
        chosen = self._decodes(sequences, num_unread=0)
        if not chosen or not all(self._has_room(each, each.scheduled.num_held + 1) for each in chosen):
            return None
        segments = []
        for sequence in chosen:
            start = sequence.scheduled.num_computed
            segments.append(sequence.segment(start, start + 1, 1, self._kv))
        packed = self._runner.packed(segments)
        return self._launched(self._batch(chosen, packed, range(len(chosen)), num_unread=0), None)

    def _next(self, sequences: Mapping[str, TokenSequence], before: _Flight) -> _Flight | None:
        """Launches the pass behind one whose tokens are not read yet."""
        assert before.tokens is not None
        batch, unread = before.batch, before.tokens.ids
        if self._scheduler.running != batch.running or not batch.num_left:
            places = {sequence: row for row, sequence in enumerate(batch.sequences)}
            chosen = self._decodes(sequences, num_unread=1)
            rows = [places.get(sequence, -1) for sequence in chosen]
            if not rows or -1 in rows:
                return None
            batch = self._batch(chosen, batch.packed, rows, num_unread=1)
            unread = rows_of(unread, rows)
        elif self._scheduler.may_do_more(batch.others):
            return None
        return self._launched(batch, unread) if self._goes_on(batch) else None

    def _decodes(self, sequences: Mapping[str, TokenSequence], num_unread: int) -> list[TokenSequence]:
        """Returns those that decode in the next pass; none where it may not run ahead."""
        return [sequences[each.request_id] for each in self._scheduler.decodes_ahead(num_unread)]

    def _batch(
        self, chosen: list[TokenSequence], packed: PackedPass, rows: Sequence[int], num_unread: int
    ) -> _Batch:
        """Returns the batch of these rows of a pass, whose last `num_unread` tokens are unknown."""
        left = [each.scheduled.max_total_tokens - each.scheduled.num_tokens for each in chosen]
        sampler = SamplerAhead([sequence.sampling for sequence in chosen], num_unread)
        running, others = list(self._scheduler.running), self._scheduler.others()
        return _Batch(chosen, running, others, min(left) - num_unread, pass_of_rows(packed, rows), sampler)

    def _goes_on(self, batch: _Batch) -> bool:
        """Moves the arrays of a batch on by a token; False, and none is changed, if it finds no room."""
        begun, packed = rows_begun(batch.packed), batch.packed
        for row in {row for rows in begun for row in rows}:
            if not self._has_room(batch.sequences[row], int(packed.batches[0].context_lens[row]) + 1):
                return False

        def block_at(group: int, row: int, index: int) -> int:
            return self._kv.block_table(batch.sequences[row].request_id, group)[index]

        batch.packed = go_on(packed, begun, block_at)
        return True

    def _has_room(self, sequence: TokenSequence, num_tokens: int) -> bool:
        return self._scheduler.make_room_ahead(sequence.scheduled, num_tokens)

    def _launched(self, batch: _Batch, unread: Tensor | None) -> _Flight:
        """Launches a pass. unread: the tokens that it computes, if they are not read yet."""
        batch.num_left -= 1
        logits = self._runner.run_decodes(batch.packed, unread)
        may_choose = unread is None or batch.sampler.is_foreseeable
        return _Flight(batch, logits, batch.sampler.sample(logits, unread) if may_choose else None)


_Launch = Callable[[Mapping[str, TokenSequence], Any], _Flight | None]
