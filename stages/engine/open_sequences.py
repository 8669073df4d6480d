"""Makes the sequences of requests, keeps those that are not over, and records what a pass has computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epd.kv.drafting import Drafting
from epd.kv.kv_cache import KVCacheManager
from epd.kv.scheduled_request import Chunk, ScheduledRequest
from epd.kv.scheduling import Scheduler
from epd.stages.engine.block_moves import BlockMoves
from epd.stages.engine.generation import EngineCounts, Extent, GenerateRequest, StepResult
from epd.stages.engine.kv_store import KVStore
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.sequence import ComputedChunk, TokenSequence
from epd.stages.grammar.matcher import GrammarBuilder
from epd.stages.sampling.detokenizer import AnswerEnds, TextStream
from epd.stages.sampling.sampler import SampledToken
from epd.stages.visual_inputs import VisualInputs
from epd.types import ceil_div


class OpenSequences(dict[str, TokenSequence]):
    """Maps ids to sequences that wait, or run, in a scheduler.

    store: brings keys and values back before a sequence is queued; None where nothing is kept.
    """

    def __init__(self, scheduler: Scheduler, moves: BlockMoves) -> None:
        super().__init__()
        self.counts = EngineCounts()
        self.store: KVStore | None = None
        self._scheduler = scheduler
        self._moves = moves

    def of_request(self, request_id: str) -> list[TokenSequence]:
        """Lists the sequences of a request."""
        return [sequence for sequence in self.values() if sequence.request.request_id == request_id]

    def of_chunk(self, chunk: Chunk) -> TokenSequence:
        """Returns the sequence that a chunk computes tokens of."""
        return self[chunk.request.request_id]

    def num_rows(self, chunk: Chunk) -> int:
        """Counts the rows of logits that a chunk needs: its last, and one before it for each draft."""
        wanted = self.of_chunk(chunk).request.extent is not Extent.MEDIA
        return 1 + chunk.num_drafts if chunk.is_sampled and wanted else 0

    def draft_by_head(self, runner: ModelRunner, max_draft: int, decoding: Sequence[TokenSequence]) -> None:
        """Lets the model's head propose up to max_draft next tokens of sequences that decode.

        One that has just come from another worker has no drafts yet, nor has one without room.
        """
        drafted = [each for each in decoding if self._may_draft_by_head(each, max_draft)]
        if not drafted:
            return
        rows = torch.stack([each.hidden for each in drafted if each.hidden is not None])
        ids, found = None, list[Tensor]()
        for number in range(min(max_draft, max(each.draft_room for each in drafted))):
            segments = [each.head_segment(number, self._scheduler.kv) for each in drafted]
            ids, rows = runner.draft(segments, rows, ids)
            found.append(ids)
        for each, tokens in zip(drafted, torch.stack(found, dim=1).tolist(), strict=True):
            each.put_drafts(tokens[: each.draft_room])

    def _may_draft_by_head(self, sequence: TokenSequence, max_draft: int) -> bool:
        """Takes its last drafts, and makes room for rows of the head; returns whether there is any."""
        sequence.put_drafts(())
        if sequence.hidden is None or sequence.draft_room < 1 or not sequence.may_sample:
            return False
        num_tokens = sequence.scheduled.num_tokens - 2 + max_draft
        return self._scheduler.make_room_ahead(sequence.scheduled, num_tokens)

    def remove(self, sequence: TokenSequence, *, hold: bool = False) -> None:
        """Takes a sequence out of the queues, whatever state it is in. hold: its blocks are kept."""
        del self[sequence.request_id]
        self._moves.forget(sequence.request_id)
        if self.store is not None and self.store.forget(sequence.request_id):
            return  # it is not in a queue yet
        self._scheduler.remove(sequence.scheduled, hold=hold)
        if sequence.request.sampling.n > 1 and not hold and not self.of_request(sequence.request.request_id):
            self._scheduler.prompts.forget(sequence.request.request_id)

    def record(self, computed: ComputedChunk, result: StepResult) -> None:
        """Records a chunk that has been run: tokens that are in the cache, and those that were sampled."""
        chunk, sequence, tokens = computed.chunk, computed.family[0], computed.tokens
        if tokens and sequence.num_generated:
            self._continue(chunk, sequence, tokens, result)
            return
        result.computed.append(sequence.request.request_id)
        self._note_guarded(chunk, sequence)
        self._scheduler.advance(chunk.request, chunk.stop)
        if self.store is not None:
            self.store.keep(sequence)
        self._drop_tokens(sequence)
        self._drop_embeddings(sequence)
        if tokens:
            self.begin(computed.family, tokens, result)
        elif sequence.request.extent is Extent.MEDIA and chunk.stop == sequence.scheduled.num_prompt_tokens:
            self._hold(sequence, result)

    def _continue(
        self, chunk: Chunk, sequence: TokenSequence, tokens: list[SampledToken], result: StepResult
    ) -> None:
        """Takes the sampled token, and those after it for which the draft before was right."""
        if sequence.source is None and chunk.num_inputs == 1:
            self.go_on(sequence, tokens[0], result)
            return
        result.computed.append(sequence.request.request_id)
        self._take_drafts(chunk, sequence, tokens, result)
        if sequence.finish_reason is not None:
            self.remove(sequence)

    def go_on(self, sequence: TokenSequence, token: SampledToken, result: StepResult) -> None:
        """Records the token after the one that a sequence has computed."""
        result.computed.append(sequence.request.request_id)
        result.outputs.append(sequence.push(token))
        self._scheduler.advance_one(sequence.scheduled)
        if sequence.finish_reason is not None:
            self.remove(sequence)

    def _take_drafts(
        self, chunk: Chunk, sequence: TokenSequence, tokens: list[SampledToken], result: StepResult
    ) -> None:
        drafts = sequence.drafts[: chunk.num_drafts]
        num_right = next((i for i, draft in enumerate(drafts) if draft != tokens[i].token_id), len(drafts))
        known, num_kept = sequence.known_ids, 0
        while sequence.finish_reason is None and num_kept <= num_right:
            result.outputs.append(sequence.push(tokens[num_kept]))
            num_kept += 1
        sequence.learn(known, drafts, tokens, num_kept - 1)
        self.counts.num_drafts += bool(drafts)
        self.counts.num_drafted_tokens += len(drafts)
        self.counts.num_accepted_tokens += num_kept - 1
        self._scheduler.advance_drafted(chunk, num_kept - 1)

    def begin(
        self, family: Sequence[TokenSequence], first: Sequence[SampledToken], result: StepResult
    ) -> None:
        """Gives every sequence its first token; those that continue share the prompt's blocks.

        One that has a reason to finish is over already.
        """
        sequence = family[0]
        pairs = zip(family, first, strict=True)
        result.outputs += [each.push(token) for each, token in pairs if each.finish_reason is None]
        if sequence.request.extent is Extent.FIRST_TOKEN:
            self._hold(sequence, result)
            return
        for each in family[1:]:
            if each.finish_reason is None:
                copies = self._scheduler.fork(sequence.scheduled, each.scheduled)
                self[each.request_id] = each
                self._moves.copy(copies)
        sequence.forget_tables()
        if sequence.finish_reason is not None:
            self.remove(sequence)

    def keep_prompt(self, family: Sequence[TokenSequence]) -> None:
        """Keeps a computed prompt of several answers where these would not: see `KeptPrompts`."""
        grown = [each for each in family if each.finish_reason is None]
        kv, most = self._scheduler.kv, self._scheduler.config.max_num_seqs
        if kv.spec.keeps_states and grown and 1 < len(family) <= most:
            request_id = family[0].request.request_id
            self._moves.copy(self._scheduler.prompts.keep(request_id, grown[0].request_id))

    def _hold(self, sequence: TokenSequence, result: StepResult) -> None:
        """Takes a prefilled request out of the queues and keeps its blocks."""
        del self[sequence.request_id]
        self._scheduler.remove(sequence.scheduled, hold=True)
        result.prefilled.append(sequence.request.request_id)

    def _note_guarded(self, chunk: Chunk, sequence: TokenSequence) -> None:
        """Notes which tokens just computed no question may drop, before others can find them."""
        if (is_key := sequence.tokens.is_key) is not None and chunk.start < len(is_key):
            table = self._scheduler.kv.block_table(chunk.request.request_id)
            self._moves.guarded.write(table, chunk.start, is_key[chunk.start : chunk.stop])

    def _drop_tokens(self, sequence: TokenSequence) -> None:
        """Keeps of a prompt that is just computed what its question has chosen."""
        scheduled = sequence.scheduled
        if sequence.view is None or scheduled.num_computed != scheduled.num_prompt_tokens:
            return
        survivors = sequence.view.survivors(scheduled.num_prompt_tokens)
        self._moves.copy_behind(scheduled.request_id, survivors)
        self._scheduler.drop(scheduled)
        sequence.forget_tables()

    def _drop_embeddings(self, sequence: TokenSequence) -> None:
        """Drops embeddings after use, unless computed tokens may have to be computed again."""
        if self._scheduler.config.preemption == "offload":
            sequence.visual.drop(sequence.scheduled.num_computed)


class SequenceMaker:
    """Makes sequences of a worker's requests."""

    def __init__(
        self,
        kv: KVCacheManager,
        tokenizer: Any,
        eos_ids: frozenset[int],
        drafting: Drafting | None,
        *,
        attends_both_ways: bool,
    ) -> None:
        """attends_both_ways: whether the model lets visual tokens attend those after them."""
        self.grammars = GrammarBuilder(tokenizer, eos_ids)
        self.drafting = drafting
        self._kv = kv
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._attends_both_ways = attends_both_ways

    def first(self, request: GenerateRequest) -> TokenSequence:
        """Returns the sequence that prefills a request's prompt."""
        ends = AnswerEnds.of(request.sampling, self._eos_ids)
        return self._made(request, 0, VisualInputs(request.prompt, request.num_prompt_tokens), ends)

    def siblings(self, sequence: TokenSequence) -> list[TokenSequence]:
        """Returns the other answers to the request of its first sequence."""
        siblings = [
            self._made(sequence.request, index, sequence.visual, sequence.text.ends)
            for index in range(1, sequence.request.sampling.n)
        ]
        for each in siblings:
            each.tokens.place_as(sequence.tokens)
        return siblings

    def _made(
        self, request: GenerateRequest, index: int, visual: VisualInputs, ends: AnswerEnds
    ) -> TokenSequence:
        grammar = "" if request.extent is Extent.MEDIA else request.sampling.grammar
        matcher = self.grammars.matcher(grammar) if grammar else None
        drafts = self.drafting.for_sequence() if self.drafting else None
        text = TextStream(self._tokenizer, request.sampling, ends)
        sequence = TokenSequence(request, index, text, visual, self._longest(request), matcher, drafts)
        if self._attends_both_ways:
            sequence.attend_both_ways()
        sequence.scheduled.state_stops = self._state_stops(request, sequence.scheduled)
        return sequence

    def _state_stops(self, request: GenerateRequest, scheduled: ScheduledRequest) -> tuple[int, ...]:
        """Returns after which tokens the state, or the window, is kept, for prompts that begin alike.

        The last whole blocks of what all questions about the media share, and of the prompt.
        """
        if not self._kv.spec.keeps_states or not self._kv.enable_prefix_caching:
            return ()
        last = request.num_prompt_tokens - 1
        stops = {self._whole(scheduled, length) for length in (request.prompt.prefix_length, last)}
        return tuple(sorted(stops - {0}))

    def _whole(self, scheduled: ScheduledRequest, num_tokens: int) -> int:
        """Returns the most of the first tokens that are whole blocks, and cut nothing computed at once."""
        size = self._kv.block_size
        whole = num_tokens // size * size
        uncut = scheduled.uncut(whole)
        return whole if uncut == whole else self._whole(scheduled, uncut)

    def _longest(self, request: GenerateRequest) -> int:
        """Returns the limit of prompt and answer in the empty cache.

        Beside a parent a block is copied; where the question drops tokens, what it keeps lies behind all.
        """
        spec, num_dropped = self._kv.spec, request.prompt.num_dropped
        num_prompt_blocks = ceil_div(request.num_prompt_tokens, spec.block_size) if num_dropped else 0
        num_blocks = min(spec.num_blocks[: spec.num_full]) - (request.parent is not None) - num_prompt_blocks
        return num_blocks * spec.block_size + num_dropped + request.num_dropped
