"""Tracks one growing answer: its tokens, where they lie, and whether it has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from epd.encoders.device import rows_of
from epd.encoders.plans import PromptPlan
from epd.kv.draft_gain import ChosenDrafts
from epd.kv.drafting import AllDrafts
from epd.kv.kv_cache import KVCacheManager
from epd.kv.scheduled_request import Chunk, PrunedRange, ScheduledRequest
from epd.stages.engine.generation import Extent, FinishReason, GenerateRequest, TokenOutput
from epd.stages.engine.packed_pass import Segment
from epd.stages.grammar.matcher import TokenMatcher
from epd.stages.reduction.propagation import GoingOn
from epd.stages.reduction.pruning import WindowInputs, window_inputs
from epd.stages.reduction.question_views import QuestionView, view_of
from epd.stages.sampling.detokenizer import TextStream
from epd.stages.sampling.sampler import SampledToken, sample
from epd.stages.sampling.sampling_state import SamplingRow, SamplingState, bad_words_of
from epd.stages.visual_inputs import VisualInputs
from epd.types import BoolArray, Int32Array, Int64Array

_SPARE_TOKENS = 64


class TokenRows:
    """Stores ids: int64 [T], and positions: int64 [rows, T], as planned, then one more for each token.

    T is what has room, not what is known: see `reserve`.
    is_key: bool [num_prompt], the prompt's tokens that no question may drop; None until any has come.
    """

    __slots__ = ("_next_position", "_num_prompt", "ids", "is_key", "positions")

    def __init__(self, prompt: PromptPlan) -> None:
        self._num_prompt = len(prompt)
        self._next_position = prompt.next_position
        self.ids: Int64Array = np.array(prompt.token_ids, dtype=np.int64)
        self.positions: Int64Array = np.array(prompt.positions, dtype=np.int64)
        self.is_key: BoolArray | None = None
        self.reserve(len(prompt) + 1)

    def place(self, indices: Int64Array, positions: Int64Array | None, is_key: BoolArray | None) -> None:
        """Takes what comes with visual tokens at `indices`: their positions, and which of them must stay."""
        if positions is not None:
            self.positions[:, indices] = positions
        if is_key is not None:
            if self.is_key is None:
                self.is_key = np.zeros(self._num_prompt, dtype=bool)
            self.is_key[indices] = is_key

    def place_as(self, other: TokenRows) -> None:
        """Takes what came with the visual tokens of another answer to the same prompt."""
        self.positions[:, : self._num_prompt] = other.positions[:, : self._num_prompt]
        self.is_key = other.is_key

    def reserve(self, num_tokens: int) -> None:
        """Makes room for tokens [0, num_tokens), and for as many again, so that growing costs little."""
        room = len(self.ids)
        if num_tokens <= room:
            return
        added = max(num_tokens - room, room - self._num_prompt, _SPARE_TOKENS)
        first = self._next_position + room - self._num_prompt
        generated = np.broadcast_to(
            np.arange(first, first + added, dtype=np.int64), (len(self.positions), added)
        )
        self.ids = np.concatenate([self.ids, np.zeros(added, dtype=np.int64)])
        self.positions = np.concatenate([self.positions, generated], axis=1)


class TokenSequence:
    """Tracks one of the `sampling.n` answers to a request; the first of them prefills the prompt for all."""

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        text: TextStream,
        visual: VisualInputs,
        capacity: int,
        matcher: TokenMatcher | None = None,
        source: AllDrafts | ChosenDrafts | None = None,
    ) -> None:
        """Starts an answer.

        text: of the answer, with what ends it. capacity: most tokens of prompt and answer in the KV cache.
        matcher: of the grammar that it follows, if any. source: of its drafts, if any.
        """
        self.request = request
        self.index = index
        self._matcher = matcher
        self.visual = visual
        num_prompt = request.num_prompt_tokens
        is_reduced = request.prompt.reduction is not None
        windows = list(window_inputs(request.prompt)) if is_reduced and not request.parent else []
        self.view = view_of(request.prompt) if is_reduced and request.extent is not Extent.MEDIA else None
        self._windows = {window.pruned.start: window for window in windows}
        self.scheduled = ScheduledRequest(
            request_id=sequence_id(request.request_id, index),
            identity=request.identity.copy(),
            num_prompt_tokens=num_prompt,
            max_total_tokens=min(num_prompt + _longest_answer(request), capacity),
            num_ready=visual.num_ready,
            num_copies=request.sampling.n if index == 0 and request.extent is Extent.ANSWER else 1,
            parent=request.parent,
            priority=request.priority,
            num_dropped=request.num_dropped,
            num_to_drop=request.prompt.num_dropped if self.view is not None else 0,
            pruned=tuple(_uncut_ranges(windows, self.view, num_prompt)),
            may_sample=self.may_sample,
        )
        self.tokens = TokenRows(request.prompt)
        self.drafts: tuple[int, ...] = ()
        self.hidden: Tensor | None = None  # [C], of the token before the last, for a head that drafts
        self.source = source
        self.sampling = SamplingState(
            request.sampling,
            request.seed + index,
            request.prompt.token_ids,
            ending_ids=text.ends.token_ids,
            matcher=matcher,
            bad_words=bad_words_of(request.sampling.bad_token_ids or ()),
        )
        self.text = text
        self.finish_reason: FinishReason | None = None
        self._both_ways: frozenset[int] = frozenset()
        self._tables: list[Int32Array] = []

    @property
    def request_id(self) -> str:
        """Returns the id of this answer in scheduler and cache."""
        return self.scheduled.request_id

    @property
    def may_sample(self) -> bool:
        """Returns whether its grammar, if it has one, has been built or cannot be."""
        return self._matcher is None or self._matcher.is_ready

    @property
    def num_generated(self) -> int:
        return self.scheduled.num_tokens - self.scheduled.num_prompt_tokens

    @property
    def known_ids(self) -> Int64Array:
        """Returns prompt and answer so far, int64 [num_tokens]."""
        return self.tokens.ids[: self.scheduled.num_tokens]

    def attend_both_ways(self) -> None:
        """Lets the visual tokens of each run attend each other, so that a run is computed at once.

        Where those of the whole prompt do, from the first to the last.
        """
        runs = [] if self.request.parent else list(_runs_both_ways(self.request.prompt))
        runs = [run for run in runs if run.stop <= self.scheduled.num_prompt_tokens]
        self.scheduled.pruned = tuple(PrunedRange(run.start, run.stop, len(run)) for run in runs)
        self._both_ways = frozenset(run.start for run in runs)

    def draft(self, num_sequences: int) -> None:
        """Guesses tokens that may follow, to be computed along with the last one in a pass of so many."""
        if self.source is None:
            return
        self.put_drafts(self.source.propose(self.known_ids, self.draft_room, num_sequences))

    @property
    def draft_room(self) -> int:
        """Returns how many drafts may become tokens, besides the one that is sampled behind them."""
        return self.scheduled.max_total_tokens - self.scheduled.num_tokens - 1

    def put_drafts(self, drafts: Sequence[int]) -> None:
        """Takes tokens that may follow, in the place of those before."""
        num_tokens = self.scheduled.num_tokens
        self.drafts, self.scheduled.num_drafts = tuple(drafts), len(drafts)
        if not drafts:
            return
        self.tokens.reserve(num_tokens + len(drafts))
        self.tokens.ids[num_tokens : num_tokens + len(drafts)] = drafts

    def learn(
        self, known: Int64Array, drafts: Sequence[int], sampled: Sequence[SampledToken], num_held: int
    ) -> None:
        """Lets later drafts learn what was sampled after the known tokens, and after each of the drafts.

        num_held: drafts that gave tokens of the answer, which may have ended before the others.
        """
        if self.source is not None:
            num_open = num_held + (self.finish_reason is None)
            self.source.learn(known, drafts, [token.token_id for token in sampled], num_open)

    def head_segment(self, num_drafted: int, kv: KVCacheManager) -> Segment:
        """Returns the place of the head's row for the next draft, with the token after it."""
        place = self.scheduled.num_tokens - 2 + num_drafted
        self.tokens.reserve(place + 2)
        return Segment(
            token_ids=self.tokens.ids[place + 1 : place + 2],
            positions=self.tokens.positions[:, place : place + 1],
            num_cached=[place],
            block_tables=[self._table(kv, 0)],
        )

    def segment(self, start: int, stop: int, num_logits: int, kv: KVCacheManager) -> Segment:
        """Returns tokens [start, stop) for the model to compute, or the whole window of which they stay."""
        self.tokens.reserve(stop + 1)
        num_groups = len(kv.spec.num_blocks)
        visual = self.visual.part(start, stop) if start < self.scheduled.num_prompt_tokens else None
        segment = Segment(
            token_ids=self.tokens.ids[start:stop],
            positions=self.tokens.positions[:, start:stop],
            num_cached=self._lengths(kv, start - self.scheduled.num_dropped),
            block_tables=[self._table(kv, group) for group in range(num_groups)],
            visual=visual,
            num_logits=num_logits,
            states=_states(kv, self.request_id, max(num_logits - 1, 0)),
            both_ways=self._marks(start, stop),
            lora=self.request.sampling.lora,
            num_prompt=max(0, min(stop, self.scheduled.num_prompt_tokens) - start),
            view=self.view if self.view is not None and start == self.view.start else None,
            next_id=int(self.tokens.ids[stop]),
        )
        window = self._windows.get(start)
        return segment if window is None else _of_window(segment, window)

    def _marks(self, start: int, stop: int) -> BoolArray | None:
        """Returns which of tokens [start, stop) attend each other, bool [n]; None without any."""
        if start not in self._both_ways:
            return None
        marks = self.request.prompt.both_ways
        return np.ones(stop - start, dtype=bool) if marks is None else marks[start:stop]

    def _lengths(self, kv: KVCacheManager, start: int) -> list[int]:
        """Counts the tokens in the cache by layer group, `start` in the first; in pruned layers fewer."""
        num_groups = len(kv.spec.num_blocks)
        if num_groups == 1:
            return [start]
        pruned = start - kv.num_tokens(self.request_id)
        return [kv.num_tokens(self.request_id, group) + pruned for group in range(num_groups)]

    def _table(self, kv: KVCacheManager, group: int) -> Int32Array:
        """Returns the block table as int32; converted again only when it has changed."""
        blocks = kv.block_table(self.request_id, group)
        while len(self._tables) <= group:
            self._tables.append(np.empty(0, dtype=np.int32))
        table = self._tables[group]
        if len(table) != len(blocks):
            table = self._tables[group] = np.array(blocks, dtype=np.int32)
        return table

    def forget_tables(self) -> None:
        """Discards the tables, since the blocks are others from now on."""
        self._tables = []

    def push(self, token: SampledToken) -> TokenOutput:
        """Takes one token; sets `finish_reason` if the answer ends with it."""
        scheduled, token_id = self.scheduled, token.token_id
        num_tokens = scheduled.num_tokens
        index = num_tokens - scheduled.num_prompt_tokens
        if num_tokens == len(self.tokens.ids):
            self.tokens.reserve(num_tokens + 1)
        self.tokens.ids[num_tokens] = token_id
        scheduled.identity.append(token_id)
        scheduled.num_tokens = num_tokens + 1
        self.sampling.append(token_id)
        text = self._text_with(token_id, may_end=index >= self.request.sampling.min_tokens)
        return TokenOutput(self.request.request_id, self.index, index, token, text, self.finish_reason)

    def _text_with(self, token_id: int, *, may_end: bool) -> str:
        """Returns the text that becomes readable with a token, which is known already."""
        ends = self.text.ends
        if token_id in (ends.token_ids if may_end else ends.format_ids):
            self.finish_reason = "stop"
            return self.text.end(token_id)
        text = self.text.push(token_id, may_stop=may_end)
        if self.text.is_stopped:
            self.finish_reason = "stop"
        elif self.scheduled.num_tokens >= self.scheduled.max_total_tokens:
            self.finish_reason = "length"
            text += self.text.finish()
        return text


def _uncut_ranges(
    windows: Sequence[WindowInputs], view: QuestionView | None, num_prompt: int
) -> Iterator[PrunedRange]:
    """Returns windows, and the text of a question that chooses what it reads; these stay whole."""
    yield from (window.pruned for window in windows)
    if view is not None:
        yield PrunedRange(view.start, num_prompt, num_prompt - view.start)


def _runs_both_ways(prompt: PromptPlan) -> Iterator[range]:
    """Yields the prompt tokens of visual tokens that follow each other without any between.

    Where the plan says which tokens attend each other: from the first to the last of these.
    """
    if prompt.both_ways is not None:
        yield prompt.both_ways_range
        return
    units = [unit for item in prompt.media for unit in item.units if unit.length]
    start = stop = units[0].offset if units else 0
    for unit in units:
        if unit.offset > stop:
            yield range(start, stop)
            start = unit.offset
        stop = unit.stop
    if stop > start:
        yield range(start, stop)


def sequence_id(request_id: str, index: int) -> str:
    return request_id if index == 0 else f"{request_id}#{index}"


def _longest_answer(request: GenerateRequest) -> int:
    return 0 if request.extent is Extent.MEDIA else request.max_tokens


@dataclass(frozen=True, slots=True)
class ComputedChunk:
    """Holds a chunk that has been run.

    family: the sequences that its logits serve: at the end of a prompt all of the request, else one.
    tokens: one for each of several sequences, else for each row.
    hidden: [rows, C], what the last layer gives for its rows of logits, for a head that drafts.
    """

    chunk: Chunk
    family: list[TokenSequence]
    tokens: list[SampledToken]
    hidden: Tensor | None = None

    def keep_hidden(self, num_before: int) -> None:
        """Lets its sequences have the row that their last token was sampled from.

        num_before: tokens of their answers before this pass.
        """
        if not self.tokens or self.hidden is None:
            return
        for each in self.family:
            each.hidden = self.hidden[each.num_generated - num_before - 1]


def sample_chunks(
    chunks: Sequence[tuple[Chunk, list[TokenSequence], int]], logits: Tensor, hidden: Tensor | None = None
) -> list[ComputedChunk]:
    """Samples all chunks, each with its family and its rows of logits. logits [R, V], R = all rows.

    hidden: [R, C], see `ComputedChunk`.
    """
    num_rows = [count for *_, count in chunks]
    parts = [None] * len(chunks) if hidden is None else torch.split(hidden, num_rows)
    rows: list[SamplingRow] = []
    places: list[int] = []
    counts: list[int] = []
    at = 0
    for _, family, num_logits in chunks:
        num_before = len(rows)
        if len(family) > 1:
            rows += [SamplingRow(sequence.sampling) for sequence in family]
            places += [at] * len(family)
        elif num_logits:
            drafts = family[0].drafts
            rows += [SamplingRow(family[0].sampling, drafts[:i]) for i in range(num_logits)]
            places += range(at, at + num_logits)
        counts.append(len(rows) - num_before)
        at += num_logits
    if len(places) != len(logits):
        logits = rows_of(logits, places)
    tokens = iter(sample(logits, rows) if rows else ())
    return [
        ComputedChunk(chunk, family, [next(tokens) for _ in range(count)], part)
        for (chunk, family, _), count, part in zip(chunks, counts, parts, strict=True)
    ]


def _of_window(segment: Segment, window: WindowInputs) -> Segment:
    """Returns the same segment with all tokens of the window instead of those that stay."""
    return replace(
        segment,
        token_ids=np.repeat(segment.token_ids[:1], window.pruned.num_inputs),
        positions=window.positions,
        visual=window.placed(segment.visual),
        num_kept=len(segment.token_ids),
        method=window.method,
        num_prompt=window.pruned.num_inputs,
        going_on=None if window.num_later is None else GoingOn(window.num_later),
    )


def _states(kv: KVCacheManager, request_id: str, num_drafts: int) -> tuple[int | None, int, int] | None:
    following = kv.next_state(request_id)
    return None if following is None else (kv.current_state(request_id), following, num_drafts)
