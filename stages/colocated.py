"""Runs all stages in one process: from media and a question to streamed tokens, group by group.

    video threads   | decode g0 | decode g1 | decode g2 |
    this thread           | g0: patches, tower, prefill | g1 ... | g2 ... | question | token | token ...

The first group is prefilled while later ones are being decoded, and only a few groups are held. This is the
reference that every split topology must equal, token for token.
"""

from __future__ import annotations

import logging
import math
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from epd.chat import ChatMessage, one_turn
from epd.encoders import FrameSampling, MediaPlan
from epd.errors import InfeasibleError, check_question
from epd.kv.answer_length import TYPICAL_TOKENS
from epd.reduction import KEEP_ALL, NO_BUDGET, ReductionPolicy, VisualBudget
from epd.sampling_params import SamplingParams
from epd.stages.engine.generation import GenerateRequest, StepResult, TokenOutput
from epd.stages.group_driver import FailedJob, GroupDriver, MediaJob
from epd.stages.media import EncodedGroup
from epd.stages.media_prefix import MediaPrefix
from epd.stages.pipeline import Pipeline
from epd.stages.sampling.detokenizer import OnText
from epd.stages.timing import StageSeconds, busy
from epd.types import Answer, Int64Array, MediaKind, StageTimings

logger = logging.getLogger(__name__)

# Of a reduced video a group leaves few tokens: a pass waits for this share of what a whole group has.
_PASS_SHARE = 0.75
_SOUND: MediaKind = "audio"

# A question about media, or a conversation that begins with them.
Asked = str | Sequence[ChatMessage]


class Progress(Protocol):
    """Reports after each group how many of all frames have been prefilled."""

    def __call__(self, num_done: int, num_frames: int, /) -> None: ...


class MediaContext:
    """Holds media that has been decoded, encoded and prefilled once, for any number of questions.

    The engine holds the blocks of [system][media] as long as this object lives; answers share them.

    plans: of each item.
    prefix: what all prompts begin with.
    timings: what it took to get there.
    num_substituted_frames: those that could not be decoded and show a neighbour.
    """

    def __init__(self, plans: tuple[MediaPlan, ...], prefix: MediaPrefix, timings: StageTimings) -> None:
        self.plans = plans
        self.prefix = prefix
        self.timings = timings
        self.num_substituted_frames = 0

    @property
    def prefix_ids(self) -> Int64Array:
        return self.prefix.token_ids

    @property
    def request_id(self) -> str | None:
        """Returns the request id of the held blocks; None without media."""
        return self.prefix.parent

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        return tuple(plan.kind for plan in self.plans)

    @property
    def num_frames(self) -> int:
        return sum(plan.num_frames for plan in self.plans)


@dataclass(frozen=True, slots=True)
class EncodedMedia:
    """Holds media that has been decoded and encoded once, to be prefilled any number of times."""

    job: MediaJob
    groups: tuple[EncodedGroup, ...]

    @property
    def plans(self) -> tuple[MediaPlan, ...]:
        return self.job.plans


class ColocatedPipeline(Pipeline):
    """Answers questions with one loaded checkpoint. Not thread-safe."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Takes the same arguments as `Pipeline`."""
        super().__init__(*args, **options)
        self._ids = count()
        self._dropped: list[str] = []  # requests that hold the blocks of contexts that are gone

    @property
    def num_units_skipped(self) -> int:
        """Counts the units of frames not encoded, since they did not change: see `skip_static`."""
        return self.encoder.num_skipped

    def ask(
        self,
        media: Sequence[str | Path],
        question: str,
        *,
        fps: float | None = None,
        num_frames: int | None = None,
        start_s: float = 0.0,
        end_s: float | None = None,
        as_audio: bool = False,
        reduction: ReductionPolicy = KEEP_ALL,
        budget: VisualBudget = NO_BUDGET,
        max_tokens: int | None = None,
        on_text: OnText | None = None,
        progress: Progress | None = None,
        on_choice: Callable[[str], None] | None = None,
        on_plans: Callable[[Sequence[str]], None] | None = None,
    ) -> Answer:
        """Answers one question about media, or about none. Options as in `prefill_media` and `answer`.

        on_choice: called with what was chosen where not all frames and tokens have room.
        on_plans: called with what media are held to, and with the frames, size and tokens of each.
        """
        start = perf_counter()
        check_question(question)
        sampling = self._sampling(max_tokens)
        context = self.prefill_media(
            media,
            fps=fps,
            num_frames=num_frames,
            start_s=start_s,
            end_s=end_s,
            as_audio=as_audio,
            reduction=reduction,
            budget=budget,
            question=question,
            num_answer_tokens=self._expected_tokens(sampling),
            progress=progress,
            on_choice=on_choice,
            on_plans=on_plans,
        )
        return self._answer(context, question, sampling, on_text, start, context.timings)

    def answer(
        self,
        context: MediaContext,
        question: str,
        *,
        max_tokens: int | None = None,
        on_text: OnText | None = None,
    ) -> Answer:
        """Answers a question about prefilled media, greedily, and leaves the context as it was.

        max_tokens: of the answer; by default the checkpoint's, else all that context and KV cache have
        room for. on_text: called with each piece of text.
        The answer's timings and ttft_s count from this call. Raises RequestError.
        """
        start = perf_counter()
        sampling = self._sampling(max_tokens)
        return self._answer(context, question, sampling, on_text, start, StageTimings())

    def _expected_tokens(self, sampling: SamplingParams) -> int:
        """Estimates an answer, to leave room for it."""
        asked = self.settings.max_tokens if sampling.max_tokens is None else sampling.max_tokens
        return min(asked or TYPICAL_TOKENS, TYPICAL_TOKENS)

    def _sampling(self, max_tokens: int | None) -> SamplingParams:
        """Completes params as the checkpoint wants them. Raises RequestError for an invalid request."""
        said = {} if max_tokens is None else {"max_tokens": max_tokens}
        return self.settings.defaults.with_options(said)

    def prefill_media(
        self,
        media: Sequence[str | Path],
        *,
        fps: float | None = None,
        num_frames: int | None = None,
        start_s: float = 0.0,
        end_s: float | None = None,
        as_audio: bool = False,
        reduction: ReductionPolicy = KEEP_ALL,
        budget: VisualBudget = NO_BUDGET,
        question: str = "",
        num_answer_tokens: int = TYPICAL_TOKENS,
        progress: Progress | None = None,
        on_choice: Callable[[str], None] | None = None,
        on_plans: Callable[[Sequence[str]], None] | None = None,
    ) -> MediaContext:
        """Decodes, encodes and prefills images and videos, in the order given, before any question is known.

        fps, num_frames: which frames of each video, one of the two or neither: then as the processor has it.
        start_s, end_s: only of this part of each, by default of all of it.
        as_audio: the sound of each alone, which may be that of a video.
        reduction: which of their tokens are kept, by default all; where frames or retention are not asked
            for, as many as `budget` and context have room for beside a question and its answer.
        question: the longest that is to come, if it is known.
        on_choice, on_plans: see `ask`.
        Raises MediaError, RequestError, InfeasibleError when the media do not fit into the KV cache.
        """
        job = MediaJob(
            sources=media,
            frame_sampling=FrameSampling(fps, num_frames, start_s, end_s),
            kinds=(_SOUND,) * len(media) if as_audio else None,
            question=question,
            reduction=reduction,
            budget=budget,
            num_answer_tokens=num_answer_tokens,
        )
        with self._encoded(job) as groups:
            if on_plans:
                on_plans([self.adapter.limits_line, *(plan.line for plan in job.plans)])
            if on_choice and job.choice:
                on_choice(job.choice)
            return self._prefilled(job, groups, job.reduction, job.timings, progress)

    def encode_media(
        self, media: Sequence[str | Path], *, fps: float | None = None, num_frames: int | None = None
    ) -> EncodedMedia:
        """Decodes and encodes as the first half of `prefill_media`, and holds all embeddings."""
        job = MediaJob(sources=media, frame_sampling=FrameSampling(fps, num_frames))
        with self._encoded(job) as groups:
            return EncodedMedia(job, tuple(groups))

    def prefill_encoded(
        self, encoded: EncodedMedia, *, reduction: ReductionPolicy = KEEP_ALL
    ) -> MediaContext:
        """Prefills to the same context as `prefill_media`. Its timings count from this call."""
        timings = StageTimings()
        with busy(timings, "total_s"):
            return self._prefilled(encoded.job, encoded.groups, reduction, timings, has_all=True)

    @contextmanager
    def _encoded(self, job: MediaJob) -> Iterator[Iterator[EncodedGroup]]:
        """Plans the media; encodes their groups, in order, as they are asked for in the block."""
        driver = GroupDriver[MediaJob](
            self.adapter, self.encoder, self.group_tokens, context_tokens=self.settings.context_tokens
        )
        with busy(job.timings, "total_s"), closing(driver.run([job])) as items:
            _unfailed(next(items))
            yield (item for each in items if isinstance(item := _unfailed(each), tuple))

    def _prefilled(
        self,
        job: MediaJob,
        groups: Iterable[EncodedGroup],
        reduction: ReductionPolicy,
        timings: StageTimings,
        progress: Progress | None = None,
        *,
        has_all: bool = False,
    ) -> MediaContext:
        """Prefills groups. has_all: all are encoded; then passes are as large as the scheduler allows."""
        plans = job.plans
        mm_hashes = [uuid.uuid4().hex for _ in plans]
        prefix = MediaPrefix(self._new_id(), plans, mm_hashes, self.adapter, self.settings, reduction)
        context = MediaContext(plans, prefix, timings)
        if plans:
            self._prefill(context, groups, progress, math.inf if has_all else self.group_tokens * _PASS_SHARE)
        context.num_substituted_frames = job.num_substituted_frames
        return context

    @torch.inference_mode()
    def _prefill(
        self,
        context: MediaContext,
        groups: Iterable[EncodedGroup],
        progress: Progress | None,
        pass_tokens: float,
    ) -> None:
        """Works through all groups of all items in order; if anything fails, nothing is left behind."""
        name = context.prefix.name
        self._add(context.prefix.request())
        try:
            self._prefill_groups(context, groups, progress, pass_tokens)
        except BaseException:
            self.engine.abort(name)
            raise
        weakref.finalize(context, self._dropped.append, name)

    def _prefill_groups(
        self,
        context: MediaContext,
        groups: Iterable[EncodedGroup],
        progress: Progress | None,
        pass_tokens: float,
    ) -> None:
        num_done = num_ready = 0
        for group in groups:
            with busy(context.timings, "prefill_s"):
                num_ready += context.prefix.add(group, self.engine)
                if num_ready >= pass_tokens:
                    self._run_all()
                    num_ready = 0
            num_done += group[0].num_frames
            if progress:
                progress(num_done, context.num_frames)
        with busy(context.timings, "prefill_s"):
            self._run_all()

    def _run_all(self) -> None:
        """Computes everything that can be computed."""
        while self._stepped().num_tokens:
            pass

    def _stepped(self) -> StepResult:
        """Runs one step of the engine. Raises what a request has failed with."""
        result = self.engine.step()
        for fault in result.faults:
            raise fault.cause
        return result

    def _answer(
        self,
        context: MediaContext,
        question: str,
        sampling: SamplingParams,
        on_text: OnText | None,
        start: float,
        timings: StageTimings,
    ) -> Answer:
        request = self._request(context, question, sampling)
        outputs: list[TokenOutput] = []
        ttft_s = 0.0
        for output in self._outputs([request], timings):
            ttft_s = ttft_s or perf_counter() - start
            outputs.append(output)
            if on_text and output.text:
                on_text(output.text)
        timings.total_s = perf_counter() - start
        answer = _as_answer(context, request, outputs, ttft_s, timings)
        logger.info(
            "answered: %s, first token after %.3f s, %.3f s in all", answer.usage, ttft_s, timings.total_s
        )
        return answer

    def _request(self, context: MediaContext, asked: Asked, sampling: SamplingParams) -> GenerateRequest:
        """Builds the engine's request for one question. Raises RequestError, ModelError."""
        messages = one_turn(context.kinds, asked) if isinstance(asked, str) else asked
        return context.prefix.question(self._new_id(), messages, sampling)

    def answer_all(
        self, context: MediaContext, questions: Sequence[Asked], *, max_tokens: int | None = None
    ) -> list[Answer]:
        """Answers several questions about prefilled media in common steps, each as `answer` does alone.

        questions: each a text, or the messages of a conversation about the same media, as of `dialogue`.
        Every answer's timings and ttft_s count from this call; all share one total. Raises RequestError.
        """
        start = perf_counter()
        sampling = self._sampling(max_tokens)
        requests = [self._request(context, asked, sampling) for asked in questions]
        outputs: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
        first_s: dict[str, float] = {}
        for output in self._outputs(requests, StageTimings()):
            outputs[output.request_id].append(output)
            first_s.setdefault(output.request_id, perf_counter() - start)
        timings = StageTimings(total_s=perf_counter() - start)
        return [
            _as_answer(context, request, outputs[request.request_id], first_s[request.request_id], timings)
            for request in requests
        ]

    @torch.inference_mode()
    def _outputs(self, requests: Sequence[GenerateRequest], timings: StageTimings) -> Iterator[TokenOutput]:
        """Yields what the answers gain, step by step; if the consumer stops early, they are dropped."""
        try:
            for request in requests:
                self._add(request)
            stage: StageSeconds = "prefill_s"
            num_open = len(requests)
            while num_open:
                with busy(timings, stage):
                    outputs = self._step()
                if outputs:
                    stage = "decode_s"
                num_open -= sum(output.finish_reason is not None for output in outputs)
                yield from outputs
        finally:
            for request in requests:
                self.engine.abort(request.request_id)

    def _step(self) -> list[TokenOutput]:
        """Runs a step; raises InfeasibleError when no question finds room beside the held contexts."""
        result = self._stepped()
        if not (result.num_tokens or result.admissions):
            raise InfeasibleError(
                "no question fits beside the contexts that are held; let go of some, or enlarge the KV cache"
            )
        return result.outputs

    def _add(self, request: GenerateRequest) -> None:
        """Adds a request; raises InfeasibleError when it does not fit, or not beside the held contexts."""
        while self._dropped:
            self.engine.release(self._dropped.pop())
        if request.parent is None and not self.engine.can_admit(request):
            raise InfeasibleError(
                f"{request.num_prompt_tokens} prompt tokens do not fit beside the contexts that are held; "
                "let go of some, or enlarge the KV cache"
            )
        self.engine.add(request)

    def _new_id(self) -> str:
        return f"colocated-{next(self._ids)}"


def _unfailed(item: MediaJob | EncodedGroup | FailedJob[MediaJob]) -> MediaJob | EncodedGroup:
    """Returns an item of the driver. Raises what a stage has failed with."""
    if isinstance(item, FailedJob):
        raise item.error
    return item


def _as_answer(
    context: MediaContext,
    request: GenerateRequest,
    outputs: Sequence[TokenOutput],
    ttft_s: float,
    timings: StageTimings,
) -> Answer:
    """Assembles a complete answer from its outputs in order."""
    token_ids = tuple(output.token.token_id for output in outputs)
    usage = replace(
        request.prompt.usage(len(token_ids)), num_substituted_frames=context.num_substituted_frames
    )
    text = "".join(output.text for output in outputs)
    return Answer(text, token_ids, outputs[-1].finish_reason or "length", ttft_s, timings, usage)
