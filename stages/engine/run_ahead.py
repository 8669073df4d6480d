"""Launches the next pass before the tokens of the one before it are read.

    device  | pass 1 ........ | pass 2 ........ | pass 3 ........ |
    host    launch 1, launch 2 | read 1, book, launch 3 | read 2, ...

The tokens that a pass chooses are the inputs of the next one on the device. Beside them are tokens that are
known: of requests that join, and of prompts. A request whose prompt ends in a pass decodes in the next one:

    device  | a b c | a b c + chunk of d | a b d | ...                                       c has ended

What a request is known to hold changes only when a token is booked, so what a pass computes of it may be
dropped at any time: its token is computed again, into the same place of the cache. That is done where a token
was not the right one after all, and for requests that have ended, left or moved meanwhile; the others' goes
on. A chunk that ends no prompt is booked when it is launched. Nothing runs ahead where a request must be
preempted, where a prompt has several answers or drops tokens in this pass, and with drafts.

Where a token depends on the one before it by more than logits, as grammars and penalties make it, a pass is
launched as early, and its tokens are chosen once those before them are booked:

    host    launch 1, launch 2 | read 1, book, choose 2, launch 3 | read 2, book, choose 3, ...

What a pass needs stays from one to the next, and only what a token changes is written. The scheduler is asked
about a request where it begins a block, and about all where one has come, ended or left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from epd.encoders import Embeddings
from epd.encoders.device import arrays_to_device, rows_of
from epd.kv.kv_cache import KVCacheManager
from epd.kv.scheduled_request import Chunk, ScheduledRequest
from epd.kv.scheduling import Scheduler
from epd.stages.engine.generation import Extent
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.open_sequences import OpenSequences
from epd.stages.engine.packed_pass import (
    PackedPass,
    Segment,
    go_on,
    joined_pass,
    pass_of_rows,
    rows_begun,
    visual_of,
)
from epd.stages.engine.sequence import ComputedChunk, TokenSequence
from epd.stages.sampling.sampler import SampledToken, SamplerAhead, TokensAhead
from epd.types import Int64Array

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Batch:
    """Holds what is computed in a pass, and goes on in later ones if that is decodes alone.

    sequences: one for each row of logits, of decodes, then of prompts that end.
    chunks: of prompts. ends: those that end one, by its sequence.
    running, others: of the scheduler, when it was asked about all: all, and those that did not decode.
    num_left: passes until the first of the sequences has all its tokens; none where a prompt is beside them.
    packed: of the decodes alone, in memory of its own; None where some of them have left.
    """

    sequences: list[TokenSequence]
    chunks: list[Chunk]
    ends: dict[TokenSequence, Chunk]
    running: list[ScheduledRequest]
    others: list[ScheduledRequest]
    num_left: int
    packed: PackedPass | None
    sampler: SamplerAhead


@dataclass(frozen=True, slots=True)
class _Flight:
    """Holds a pass that has been launched: logits [R, V] of its rows.

    tokens: what it chooses, one for each row; None before that may be done.
    wrong: sequences whose inputs were not what they had to be.
    """

    batch: _Batch
    logits: Tensor
    tokens: TokensAhead | None
    wrong: frozenset[TokenSequence] = frozenset()

    @property
    def unread(self) -> dict[TokenSequence, int]:
        """Maps those that may go on behind their tokens to their rows."""
        rows = {each: row for row, each in enumerate(self.batch.sequences) if each not in self.wrong}
        for each in self.batch.ends:
            if each.request.extent is not Extent.ANSWER:
                rows.pop(each, None)
        return rows

    @property
    def decoded(self) -> dict[TokenSequence, int]:
        """Maps those that decoded, and may go on, to their rows."""
        packed = self.batch.packed
        num_rows = 0 if packed is None else len(packed.token_ids)
        return {each: row for each, row in self.unread.items() if row < num_rows}

    def live(self, sequences: Mapping[str, TokenSequence]) -> list[tuple[int, TokenSequence]]:
        """Lists rows whose tokens are of use, with their sequences. sequences: that are not over."""
        return [
            (row, each)
            for row, each in enumerate(self.batch.sequences)
            if sequences.get(each.request_id) is each and each not in self.wrong
        ]


@dataclass(frozen=True, slots=True)
class AheadStep:
    """Holds what is to be booked. decoded: next tokens of decodes. chunks: of prompts."""

    decoded: list[tuple[TokenSequence, SampledToken]]
    chunks: list[ComputedChunk]

    @property
    def num_tokens(self) -> int:
        """Returns how many tokens were computed."""
        return len(self.decoded) + sum(each.chunk.num_inputs for each in self.chunks)


class _Packing:
    """Packs passes of decodes and of chunks, and finds room for their tokens."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, kv: KVCacheManager) -> None:
        self._runner, self._scheduler, self._kv = runner, scheduler, kv

    def decode_pass(
        self,
        decodes: Sequence[TokenSequence],
        unread: Collection[TokenSequence],
        before: _Flight | None,
        rows: Sequence[int],
    ) -> PackedPass:
        """Packs decodes, the first of which have these rows in the pass before."""
        joining = [self.decode_segment(each, each in unread) for each in decodes[len(rows) :]]
        packed = self._runner.packed(joining) if joining else None
        if before is None or before.batch.packed is None or not rows:
            assert packed is not None
            return pass_of_rows(packed, range(len(joining)))
        kept = self.gone_on(decodes[: len(rows)], pass_of_rows(before.batch.packed, rows))
        return kept if packed is None else joined_pass(kept, packed)

    def decode_segment(self, sequence: TokenSequence, is_unread: bool) -> Segment:
        place = _place(sequence, is_unread)
        return sequence.segment(place, place + 1, 1, self._kv)

    def chunk_segment(self, sequences: OpenSequences, chunk: Chunk) -> Segment:
        sequence, num_rows = sequences.of_chunk(chunk), sequences.num_rows(chunk)
        return sequence.segment(chunk.start, chunk.stop, num_rows, self._kv)

    def has_room_for_all(self, sequences: Sequence[TokenSequence], packed: PackedPass) -> bool:
        """Makes room for the next tokens of a pass; False if that lacks for one."""
        begun = {row for rows in rows_begun(packed) for row in rows}
        lens = packed.batches[0].context_lens
        return all(self.has_room(sequences[row], int(lens[row]) + 1) for row in begun)

    def gone_on(self, sequences: Sequence[TokenSequence], packed: PackedPass) -> PackedPass:
        """Moves a pass of decodes on by a token, for which there is room."""

        def block_at(group: int, row: int, index: int) -> int:
            return self._kv.block_table(sequences[row].request_id, group)[index]

        return go_on(packed, rows_begun(packed), block_at)

    def has_room(self, sequence: TokenSequence, num_tokens: int) -> bool:
        return self._scheduler.make_room_ahead(sequence.scheduled, num_tokens)


class RunAhead:
    """Keeps one pass under way while the tokens of the one before are booked."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, kv: KVCacheManager) -> None:
        self._runner, self._scheduler = runner, scheduler
        self._packing = _Packing(runner, scheduler, kv)
        self._flight: _Flight | None = None
        self._begun: list[Chunk] = []  # launched in this step, and end no prompt

    @torch.inference_mode()
    def step(self, sequences: OpenSequences) -> AheadStep | None:
        """Returns what a pass has computed, with the next one under way.

        Returns None where a step must do what does not run ahead; no pass is under way then.
        """
        self._begun = []
        before = self._flight
        flight = self._tried(lambda: self._chosen(sequences, before) if before else self._next(sequences))
        self._flight = None
        if flight is None or flight.tokens is None:
            return None
        following = self._tried(lambda: self._next(sequences, flight))
        try:
            tokens, are_right = flight.tokens.read()
        except Exception:
            logger.exception("a pass that ran ahead has failed; its tokens are computed again")
            return None
        if following is not None and not all(are_right):
            pairs = zip(flight.batch.sequences, are_right, strict=True)
            following = replace(following, wrong=frozenset(each for each, is_right in pairs if not is_right))
        self._flight = following
        found = self._found(sequences, flight, tokens)
        if found.num_tokens:
            return found
        return self.step(sequences) if following is not None else None

    def _found(self, sequences: OpenSequences, flight: _Flight, tokens: Sequence[SampledToken]) -> AheadStep:
        """Returns what is to be booked: tokens of a pass, and chunks that were launched in this step."""
        ends = flight.batch.ends
        pairs = [(each, tokens[row]) for row, each in flight.live(sequences)]
        chunks = [ComputedChunk(chunk, [sequences.of_chunk(chunk)], []) for chunk in self._begun]
        if ends:
            chunks += [ComputedChunk(ends[each], [each], [token]) for each, token in pairs if each in ends]
            pairs = [pair for pair in pairs if pair[0] not in ends]
        return AheadStep(pairs, chunks)

    def _tried(self, launch: Callable[[], _Flight | None]) -> _Flight | None:
        """Launches a pass, or what is left of it; None if it may not run ahead."""
        try:
            return launch()
        except Exception:  # a step that does not run ahead finds out whose fault it is
            logger.debug("a pass could not run ahead", exc_info=True)
            return None

    def _chosen(self, sequences: OpenSequences, flight: _Flight) -> _Flight | None:
        """Chooses the tokens of a pass, if that has not been done: all tokens before them are known."""
        if flight.tokens is not None:
            return flight
        batch, logits, live = flight.batch, flight.logits, flight.live(sequences)
        if not live:
            return None
        if len(live) < len(batch.sequences):
            chosen = [each for _, each in live]
            sampler = SamplerAhead([each.sampling for each in chosen], [0] * len(chosen))
            batch = replace(batch, sequences=chosen, sampler=sampler, num_left=0, packed=None)
            logits = rows_of(logits, [row for row, _ in live])
        return _Flight(batch, logits, batch.sampler.sample(logits))

    def _next(self, sequences: OpenSequences, before: _Flight | None = None) -> _Flight | None:
        """Launches a pass. before: the one whose tokens are not read yet, if there is one."""
        if before is None or before.tokens is None or before.wrong or not self._lasts(before.batch):
            return self._anew(sequences, before)
        batch = before.batch
        if batch.packed is None or not self._packing.has_room_for_all(batch.sequences, batch.packed):
            return None
        batch.packed = self._packing.gone_on(batch.sequences, batch.packed)
        return self._launched(batch, batch.packed, before.tokens.ids)

    def _lasts(self, batch: _Batch) -> bool:
        """Returns whether the same decodes go on, and nothing else."""
        is_same = batch.num_left > 0 and self._scheduler.running == batch.running
        is_alone = is_same and all(each.num_computable <= 0 for each in batch.others)
        return is_alone and not self._scheduler.may_admit()

    def _anew(self, sequences: OpenSequences, before: _Flight | None) -> _Flight | None:
        """Launches a pass of all that decode, with chunks of prompts beside them."""
        unread = {} if before is None else before.unread
        decodes = [] if self._scheduler.may_admit() else self._decodes(sequences, unread)
        chunks = self._chunks(sequences, len(decodes), before) if decodes else None
        if chunks is None:
            return None
        rows = {} if before is None else before.decoded
        kept = [each for each in decodes if each in rows]
        decodes = [*kept, *(each for each in decodes if each not in rows)]
        segments = [self._packing.chunk_segment(sequences, chunk) for chunk in chunks]
        own = self._packing.decode_pass(decodes, unread, before, [rows[each] for each in kept])
        packed = own
        if segments and all(each.is_whole and each.both_ways is None for each in segments):
            packed = joined_pass(own, self._runner.packed(segments))
        elif segments:
            decoded = [self._packing.decode_segment(each, each in unread) for each in decodes]
            packed = self._runner.packed([*decoded, *segments])
        batch = self._batch(sequences, decodes, chunks, unread, own)
        chosen = np.array([unread.get(each, -1) for each in decodes])
        return self._launched(batch, packed, _token_ids(packed, chosen, before), visual_of(segments))

    def _decodes(self, sequences: OpenSequences, unread: Mapping[TokenSequence, int]) -> list[TokenSequence]:
        """Lists those that decode in the next pass; none where one of them finds no room."""
        requests = self._scheduler.decodes_ahead({each.scheduled for each in unread})
        decodes = [sequences[each.request_id] for each in requests]
        has_room = all(
            self._packing.has_room(each, _place(each, each in unread) + 1 - each.scheduled.num_dropped)
            for each in decodes
        )
        return decodes if has_room else []

    def _chunks(
        self, sequences: OpenSequences, num_decodes: int, before: _Flight | None
    ) -> list[Chunk] | None:
        """Cuts chunks for a pass of so many decodes; None where one of them does not run ahead."""
        under_way = [*self._begun, *(before.batch.ends.values() if before is not None else ())]
        chunks = self._scheduler.prefills_ahead(num_decodes, {each.request for each in under_way})
        if chunks is None:
            return None
        return chunks if all(_has_one_answer(sequences, each) for each in chunks) else None

    def _batch(
        self,
        sequences: OpenSequences,
        decodes: list[TokenSequence],
        chunks: list[Chunk],
        unread: Collection[TokenSequence],
        packed: PackedPass,
    ) -> _Batch:
        """Returns a batch that is launched for the first time."""
        ends = {sequences.of_chunk(each): each for each in chunks if sequences.num_rows(each)}
        rows, running = [*decodes, *ends], list(self._scheduler.running)
        sampler = SamplerAhead([each.sampling for each in rows], [each in unread for each in rows])
        going_on = {each.scheduled for each in decodes}
        others = [each for each in running if each not in going_on]
        left = [_num_left(each) - (each in unread) for each in decodes] if not chunks else [0]
        return _Batch(rows, chunks, ends, running, others, min(left), packed, sampler)

    def _launched(
        self, batch: _Batch, packed: PackedPass, token_ids: Tensor | None, visual: Embeddings | None = None
    ) -> _Flight:
        """Launches a pass. token_ids: int64 [T], on the device, if some of them are not read yet."""
        batch.num_left -= 1
        logits = self._runner.run_ahead(packed, visual, token_ids)
        if token_ids is not None and batch.chunks:
            token_ids = rows_of(token_ids, packed.logit_rows.tolist())
        may_choose = token_ids is None or batch.sampler.is_foreseeable
        tokens = batch.sampler.sample(logits, token_ids) if may_choose else None
        self._begun += [each for each in batch.chunks if each not in batch.ends.values()]
        return _Flight(batch, logits, tokens)


def _place(sequence: TokenSequence, is_unread: bool) -> int:
    """Returns the place of the token that is computed next, behind one that is not read or the last."""
    return sequence.scheduled.num_tokens - 1 + is_unread


def _num_left(sequence: TokenSequence) -> int:
    return sequence.scheduled.max_total_tokens - sequence.scheduled.num_tokens


def _has_one_answer(sequences: OpenSequences, chunk: Chunk) -> bool:
    """Returns whether a chunk gives a token of one sequence at most, and drops none of the prompt."""
    sequence = sequences.of_chunk(chunk)
    is_one = sequence.request.sampling.n == 1 or not sequences.num_rows(chunk)
    return is_one and (sequence.view is None or chunk.stop <= sequence.view.start)


def _token_ids(packed: PackedPass, rows: Int64Array, before: _Flight | None) -> Tensor | None:
    """Returns the tokens of a pass on the device, int64 [T]; None where all are those of `packed`.

    rows: int64 [D], of the pass before, that choose the first ones; -1 where they are known.
    """
    places = np.flatnonzero(rows >= 0)
    if before is None or before.tokens is None or not len(places):
        return None
    ids, at, chosen = arrays_to_device([packed.token_ids, places, rows[places]], before.logits.device)
    return ids.index_copy(0, at, before.tokens.ids.index_select(0, chosen))
