"""Makes the sequences of requests, one for each answer, as long as the cache has room for."""

from __future__ import annotations

from typing import Any

from epd.kv.drafting import Drafting
from epd.kv.kv_cache import KVCacheManager
from epd.kv.scheduled_request import ScheduledRequest
from epd.stages.engine.generation import Extent, GenerateRequest
from epd.stages.engine.sequence import TokenSequence
from epd.stages.grammar.matcher import GrammarBuilder
from epd.stages.sampling.detokenizer import AnswerEnds
from epd.stages.visual_inputs import VisualInputs
from epd.types import ceil_div


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
            self._made(sequence.request, index, sequence.visual, sequence.ends)
            for index in range(1, sequence.request.sampling.n)
        ]
        for each in siblings:
            each.tokens.place_as(sequence.tokens)
        return siblings

    def _made(
        self, request: GenerateRequest, index: int, visual: VisualInputs, ends: AnswerEnds
    ) -> TokenSequence:
        matcher = self.grammars.matcher(
            request.sampling.grammar if request.extent is not Extent.MEDIA else ""
        )
        drafts = self.drafting.for_sequence() if self.drafting else None
        sequence = TokenSequence(
            request, index, self._tokenizer, ends, visual, self._longest(request), matcher, drafts
        )
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
