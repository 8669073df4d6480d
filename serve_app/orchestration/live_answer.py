"""Assembles an answer while it is generated: tokens in order, each once, even if computed repeatedly.

tokens of a choice   0 1 2 3 | 4     6        passed on | 4 is next, 6 waits for 5
retried              0 1 2 3 4 5 6            0 to 3 are dropped by their index
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from epd.control.recent import RequestWork
from epd.encoders import MediaPlan
from epd.encoders.groups import MediaGroup
from epd.encoders.plans import PromptPlan
from epd.kv.prefix_cache import TokenIdentity
from epd.sampling_params import SamplingParams
from epd.serve_app.messages import Admitted, EmbeddingsReused, SpanDone
from epd.serve_app.orchestration.substituted import SubstitutedFrames
from epd.serve_app.service import (
    AnswerEnd,
    AnswerItem,
    AnswerRequest,
    FinishReason,
    StageName,
    StageSpan,
    TokenDelta,
)
from epd.serve_app.token_text import TokenTexts
from epd.serve_app.worker.media_feed import needed_groups
from epd.stages.engine.generation import GenerateRequest, TokenOutput
from epd.types import RequestStatus, Reuse, StageTimings, Usage, totals

_MOST_HELD = 64  # items that wait for others before their consumer is woken


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """A planned request.

    sampling: complete, with a seed that stays the same in every retry
    media: of each item
    groups: of all items, in order
    plan_s: seconds that planning took
    expected_tokens: of all answers, to plan for
    notes, choice: as of `StageSpan`
    thinks: as of `TokenDelta`
    """

    prompt: PromptPlan
    identity: TokenIdentity
    groups: tuple[MediaGroup, ...]
    media: tuple[MediaPlan, ...]
    mm_hashes: tuple[str, ...]
    sampling: SamplingParams
    seed: int
    plan_s: float
    expected_tokens: int
    priority: int = 0
    notes: tuple[str, ...] = ()
    choice: str = ""
    thinks: bool = False

    def generate_request(self, request_id: str) -> GenerateRequest:
        return GenerateRequest(
            request_id, self.prompt, self.identity, self.sampling, self.seed, priority=self.priority
        )

    @property
    def visual_tokens(self) -> tuple[tuple[str, int], ...]:
        """Returns (content and what is kept of it, visual tokens) of each item, for the router."""
        return tuple(
            (mm_hash + self.prompt.reduction_key, item.num_tokens)
            for mm_hash, item in zip(self.mm_hashes, self.prompt.media, strict=True)
        )

    @property
    def work(self) -> RequestWork:
        """Returns the work that it is at each stage."""
        num_patches = sum(group.spec.num_patches for group in self.groups)
        max_tokens = self.sampling.n * (self.sampling.max_tokens or 1)
        return RequestWork(num_patches, len(self.prompt), max_tokens, self.expected_tokens)

    def usage(self, num_completion_tokens: int) -> Usage:
        return self.prompt.usage(num_completion_tokens)

    def frames_of(self, item: int | None, group: int | None) -> int:
        """Returns the number of frames of a group."""
        return sum(each.num_frames for each in self.groups if (each.item, each.index) == (item, group))

    @property
    def retention(self) -> float:
        """Returns the share of the visual tokens that is kept."""
        return self.prompt.reduction.policy.retention if self.prompt.reduction else 1.0


class Reuses:
    """Collects what an answer found instead of having it computed, where something is kept on disk."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._plan = plan
        self._num_cached = 0
        self._found: list[Reuse] = []
        self._read: set[tuple[int, int]] = set()  # groups whose frames were read, by item and index
        self._kept: set[tuple[int, int]] = set()  # groups of which something was on disk

    def admitted(self, event: Admitted) -> None:
        """Notes the keys and values that were found."""
        num_in_memory = event.num_cached - sum(each.num for each in event.reused if each.tier != "left")
        memory = [Reuse("kv", "memory", num_in_memory)] if num_in_memory > 0 else []
        self._num_cached = event.num_cached
        self._found = [*memory, *event.reused]
        self._kept.clear()

    def embeddings(self, event: EmbeddingsReused) -> None:
        """Notes embeddings that an encoder found on disk."""
        self._found.append(event.reuse)
        self._kept.add((event.item, event.group))

    def read(self, item: int, group: int) -> None:
        """Notes that the frames of a group were read."""
        self._read.add((item, group))

    def add_to(self, usage: Usage) -> Usage:
        """Returns the usage with all of it. Embeddings that are needed, not read or on disk are in memory."""
        groups = self._plan.groups
        needed = needed_groups(self._plan.generate_request(""), groups, self._num_cached)
        unread = [group for group in groups if (group.item, group.index) not in self._read]
        in_memory = sum(
            groups[number].spec.num_embeddings
            for number in needed
            if (groups[number].item, groups[number].index) not in self._read | self._kept
        )
        memory = [Reuse("embeddings", "memory", in_memory)] if in_memory else []
        return replace(
            usage,
            num_unread_frames=sum(group.num_frames for group in unread),
            reused=totals([*memory, *self._found]),
        )


@dataclass(slots=True)
class _Choice:
    """Holds one choice. num_passed: tokens passed on. early: tokens, by index, that wait for earlier ones."""

    num_passed: int = 0
    early: dict[int, TokenOutput] = field(default_factory=dict)
    finish_reason: FinishReason | None = None


class AnswerItems:
    """Passes items to one consumer, who may wait for them, up to AnswerEnd or an error."""

    def __init__(self) -> None:
        self._items: list[AnswerItem] = []  # not yet consumed
        self._error: Exception | None = None
        self._consumer: asyncio.Future[None] | None = None  # while it waits

    async def all(self) -> AsyncIterator[Sequence[AnswerItem]]:
        """Yields everything in order, up to AnswerEnd: what has come since, together.

        Raises the error that the answer failed with.
        """
        while self._error is None or self._items:
            if not self._items:
                self._consumer = asyncio.get_running_loop().create_future()
                await self._consumer
            if items := self._items:
                self._items = []
                yield items
                if isinstance(items[-1], AnswerEnd):
                    return
        raise self._error

    def put(self, item: AnswerItem, *, wakes: bool = True) -> None:
        """Adds an item. wakes: whether a consumer that waits gets it now, and not with some later ones."""
        self._items.append(item)
        if wakes or len(self._items) >= _MOST_HELD:
            self._wake()

    def fail(self, error: Exception) -> None:
        """Ends the answer with an error, after what has come before."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._consumer is not None and not self._consumer.done():
            self._consumer.set_result(None)


class LiveAnswer:
    """Passes an answer from the orchestrator to its one consumer.

    num_losses: workers that were lost with it, and attempts lost for other reasons
    """

    def __init__(
        self,
        request: AnswerRequest,
        plan: AnswerPlan,
        texts: TokenTexts,
        clock: Callable[[], float],
        substituted: SubstitutedFrames,
    ) -> None:
        """Starts without tokens. substituted: substituted frames of all answers."""
        self.request = request
        self.plan = plan
        self.substituted = substituted
        self.num_retries = 0
        self.num_losses = 0
        self.timings = StageTimings(probe_s=plan.plan_s)
        self.queued = StageTimings()
        self.cached_tokens = 0
        self.reuses: Reuses | None = None  # where something is kept on disk
        self.first_token_s: float | None = None
        self._start_s = clock()
        self._clock = clock
        self._texts = texts
        self._choices = [_Choice() for _ in range(plan.sampling.n)]
        self._num_prompt_tokens = plan.usage(0).prompt_tokens
        self.items = AnswerItems()
        self._report_plan()

    @cached_property
    def fingerprint(self) -> str:
        """Returns the fingerprint of the request, see `fingerprint` below."""
        return fingerprint(self.request)

    @property
    def status(self) -> RequestStatus:
        """Returns the progress of its tokens; `Attempt.status` knows whether workers have it."""
        reasons = {choice.finish_reason for choice in self._choices}
        if None in reasons:
            return RequestStatus.DECODING if self.has_begun else RequestStatus.PREFILLING
        return RequestStatus.FINISHED_LENGTH if "length" in reasons else RequestStatus.FINISHED_STOPPED

    @property
    def is_complete(self) -> bool:
        """Returns whether every choice has ended."""
        return all(choice.finish_reason for choice in self._choices)

    @property
    def has_begun(self) -> bool:
        """Returns whether every choice has its first token."""
        return all(choice.num_passed for choice in self._choices)

    def take(self, outputs: Sequence[TokenOutput]) -> None:
        """Takes tokens of this request from any worker, in any order between workers."""
        for output in outputs:
            choice = self._choices[output.choice]
            if output.index >= choice.num_passed:
                choice.early[output.index] = output
        for index, choice in enumerate(self._choices):
            if choice.early:
                self._pass_on(index, choice)

    def _pass_on(self, index: int, choice: _Choice) -> None:
        """Passes on all tokens that come next in one choice, as one piece."""
        outputs = []
        while choice.num_passed in choice.early:
            outputs.append(choice.early.pop(choice.num_passed))
            choice.num_passed += 1
        if not outputs:
            return
        is_first = self.first_token_s is None
        self.first_token_s = self.first_token_s or self._clock()
        choice.finish_reason = outputs[-1].finish_reason
        wants_logprobs = self.plan.sampling.logprobs is not None
        self.items.put(
            TokenDelta(
                index,
                "".join([output.text for output in outputs]),
                tuple([output.token.token_id for output in outputs]),
                tuple([self._texts.logprob(output.token) for output in outputs]) if wants_logprobs else (),
                choice.finish_reason,
                self._num_prompt_tokens,
                self.plan.thinks,
            ),
            wakes=self.request.streams or is_first,
        )

    def forget_early(self) -> None:
        """Drops early tokens: the request is retried from the start, so they will come again."""
        for choice in self._choices:
            choice.early.clear()

    def note(self, done: SpanDone) -> None:
        """Records a piece of work that a worker has reported."""
        span, stage = done.span, done.span.stage
        if stage == "encode":
            if self.request.wants_spans:
                span = replace(span, num_frames=self.plan.frames_of(span.item, span.group))
            self.timings.encode_s += done.service_s
            self.queued.encode_s = max(self.queued.encode_s, done.queued_s)
        elif stage == "prefill":
            self.timings.prefill_s += done.service_s
            self.queued.prefill_s += done.queued_s
        self._report(span)

    def note_span(
        self, stage: StageName, worker: str, start_s: float, item: int | None = None, group: int | None = None
    ) -> None:
        """Records a piece of work that ends now."""
        self._report(StageSpan(stage, worker, start_s, self._clock(), item, group))

    def _report_plan(self) -> None:
        """Says what is planned, and which frames of each video are looked at, to whom asks for spans."""
        if not (self.request.wants_spans and self.plan.media):
            return
        planned_s, plan = self._start_s - self.plan.plan_s, self.plan
        num_frames = sum(media.num_frames for media in plan.media)
        whole = StageSpan("probe", "media", planned_s, self._start_s, num_frames=num_frames)
        self._report(replace(whole, notes=plan.notes, choice=plan.choice))
        for item, media in enumerate(self.plan.media):
            if media.times_s:
                times_s = media.times_s
                self._report(
                    StageSpan("probe", "media", planned_s, self._start_s, item, frame_times_s=times_s)
                )

    def _report(self, span: StageSpan) -> None:
        if self.request.wants_spans:
            self.items.put(span)

    def finish(self, decode_worker: str) -> None:
        """Ends the answer after every choice has ended."""
        now_s = self._clock()
        first_s = self.first_token_s or now_s
        self.timings.decode_s = now_s - first_s
        self.timings.total_s = now_s - self._start_s + self.plan.plan_s
        self.note_span("decode", decode_worker, first_s)
        self.items.put(
            AnswerEnd(
                usage=self._usage(),
                timings=self.timings,
                cached_tokens=self.cached_tokens,
                retention=self.plan.retention,
                queued=self.queued,
                num_retries=self.num_retries,
                keeps_media=self.reuses is not None,
            )
        )

    def _usage(self) -> Usage:
        usage = self.plan.usage(sum(choice.num_passed for choice in self._choices))
        num_substituted = self.substituted.total(group.spec.key for group in self.plan.groups)
        num_unseen = sum(source.facts.num_unseen for source in self.request.media)
        usage = replace(usage, num_substituted_frames=num_substituted, num_unseen_frames=num_unseen)
        return usage if self.reuses is None else self.reuses.add_to(usage)


def fingerprint(request: AnswerRequest) -> str:
    """Returns a hash that is equal for requests with the same question, media and options."""
    media = [(source.mm_hash, source.pixels) for source in request.media]
    options = (request.sampling, request.frame_sampling)
    asked = (request.model, request.messages, request.prompt, media, *options)
    return hashlib.sha256(repr(asked).encode("utf-8", "surrogatepass")).hexdigest()
