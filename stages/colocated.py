"""All stages in one process: from media and a question to streamed tokens, group by group.

    video threads   | decode g0 | decode g1 | decode g2 |
    this thread           | g0: patches, tower, prefill | g1 ... | g2 ... | question | token | token ...

The first group is being prefilled while later ones are still being decoded, and only a few groups are
held. This is the reference that every split topology must equal, token for token.
"""

from __future__ import annotations

import logging
import math
import uuid
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from encoders import Adapter, Embeddings, FrameSampling, MediaPlan, PromptPlan, check_question, load_adapter
from encoders.batch import FrameEncoder
from encoders.groups import DEFAULT_GROUP_TOKENS
from encoders.identity import prompt_identity
from encoders.reduction import reduce_prompt
from epd.errors import InfeasibleError
from epd.reduction import KEEP_ALL, ReductionPolicy
from epd.sampling_params import SamplingParams
from epd.types import Answer, StageTimings
from stages.encode.splicing import EmbeddingSplicer
from stages.engine.generation import (
    Extent,
    GenerateRequest,
    GenerationSettings,
    StepResult,
    TokenOutput,
    context_tokens,
)
from stages.engine.setup import build_engine
from stages.loader import load_model, use_threads
from stages.media import PlannedMedia, UnitRun, plan_media, unit_runs
from stages.sampling.detokenizer import OnText
from stages.timing import busy

logger = logging.getLogger(__name__)

# Of a reduced video a group leaves few tokens: a pass waits for this share of what a whole group has.
_PASS_SHARE = 0.75
# Any question will do to lay out the part of the prompt that comes before it.
_SOME_QUESTION = "?"


class Progress(Protocol):
    """Told after each group how many of all frames have been prefilled."""

    def __call__(self, num_done: int, num_frames: int, /) -> None: ...


class MediaContext:
    """Media that has been decoded, encoded and prefilled once, for any number of questions.

    The engine holds the blocks of [system][media] as long as this object lives; answers share them. `timings`
    is what it took to get there. request_id: of the held blocks, None without media. reduction: of tokens.
    num_substituted_frames: those that could not be decoded and show a neighbour.
    """

    def __init__(
        self,
        plans: tuple[MediaPlan, ...],
        prompt: PromptPlan,
        request_id: str | None,
        reduction: ReductionPolicy,
    ) -> None:
        self.plans = plans
        self.reduction = reduction
        self.prefix_ids = prompt.token_ids[: prompt.prefix_length]
        self.request_id = request_id
        self.mm_hashes = [uuid.uuid4().hex for _ in plans]
        self.timings = StageTimings()
        self.num_substituted_frames = 0

    @property
    def num_frames(self) -> int:
        return sum(plan.num_frames for plan in self.plans)


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """Units [start, stop) of item `item`, encoded.

    num_frames: of its source. num_substituted: of those, the ones that show a neighbour.
    """

    item: int
    start: int
    stop: int
    embeddings: Embeddings
    num_frames: int
    num_substituted: int


@dataclass(frozen=True, slots=True)
class EncodedMedia:
    """Media that has been decoded and encoded once, to be prefilled any number of times. Holds it all."""

    plans: tuple[MediaPlan, ...]
    groups: tuple[EncodedGroup, ...]
    timings: StageTimings


class ColocatedPipeline:
    """One checkpoint, loaded to answer questions. Not for several threads at once."""

    def __init__(
        self,
        model: Any,
        adapter: Adapter,
        *,
        settings: GenerationSettings,
        group_tokens: int = DEFAULT_GROUP_TOKENS,
        num_kv_tokens: int | None = None,
        skip_static: float | None = None,
    ) -> None:
        """Takes the model over: its attention function becomes ours. Options as in `load`."""
        self.adapter = adapter
        self.settings = settings
        self.engine = build_engine(model, adapter, settings, num_kv_tokens=num_kv_tokens)
        self._encoder = FrameEncoder(adapter, adapter.vision_tower(model), skip_static)
        self._group_tokens = group_tokens
        self._ids = count()
        self._given_up: list[str] = []

    @property
    def num_units_skipped(self) -> int:
        """Units of frames that were not encoded, since they did not change: see `skip_static` of `load`."""
        return self._encoder.num_skipped

    @classmethod
    def load(
        cls,
        model_path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        num_threads: int | None = None,
        group_tokens: int = DEFAULT_GROUP_TOKENS,
        num_kv_tokens: int | None = None,
        skip_static: float | None = None,
    ) -> ColocatedPipeline:
        """Loads the folder `model_path`, in Hugging Face layout.

        num_threads: of torch, for the whole process; by default OMP_NUM_THREADS or all cores.
        group_tokens: about how many visual tokens are encoded and prefilled at a time.
        num_kv_tokens: room for keys and values; by default what a quarter of the machine's memory holds, or
        less. Memory is taken when it is first used.
        skip_static: a unit of frames is not encoded if none of its preprocessed values differs by more than
        this from the unit before; by default all are.
        Raises RequestError, ModelNotFoundError, UnsupportedModelError, ModelError.
        """
        adapter = load_adapter(model_path)
        use_threads(num_threads)
        model: Any = load_model(Path(model_path), dtype)
        settings = GenerationSettings.of(
            model.generation_config, adapter.tokenizer.eos_token_id, context_tokens(model.config)
        )
        return cls(
            model,
            adapter,
            settings=settings,
            group_tokens=group_tokens,
            num_kv_tokens=num_kv_tokens,
            skip_static=skip_static,
        )

    def ask(
        self,
        media: Sequence[str | Path],
        question: str,
        *,
        fps: float | None = None,
        num_frames: int | None = None,
        start_s: float = 0.0,
        end_s: float | None = None,
        reduction: ReductionPolicy = KEEP_ALL,
        max_tokens: int | None = None,
        on_text: OnText | None = None,
        progress: Progress | None = None,
    ) -> Answer:
        """Answers one question about media, or about none. Options as in `prefill_media` and `answer`."""
        start = perf_counter()
        sampling = self._sampling(question, max_tokens)
        context = self.prefill_media(
            media,
            fps=fps,
            num_frames=num_frames,
            start_s=start_s,
            end_s=end_s,
            reduction=reduction,
            progress=progress,
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
        sampling = self._sampling(question, max_tokens)
        return self._answer(context, question, sampling, on_text, start, StageTimings())

    def _sampling(self, question: str, max_tokens: int | None) -> SamplingParams:
        """As the checkpoint wants it. Raises RequestError for a request that makes no sense."""
        check_question(question)
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
        reduction: ReductionPolicy = KEEP_ALL,
        progress: Progress | None = None,
    ) -> MediaContext:
        """Decodes, encodes and prefills images and videos, in the order given, before any question is known.

        fps, num_frames: which frames of each video, one of the two or neither: then as the processor has it.
        start_s, end_s: only of this part of each, by default of all of it.
        reduction: which of their tokens are kept, by default all.
        Raises MediaError, RequestError, InfeasibleError when the media do not fit into the KV cache.
        """
        timings = StageTimings()
        with busy(timings, "total_s"):
            planned = self._planned(media, FrameSampling(fps, num_frames, start_s, end_s), timings)
            with closing(self._encoded(planned, timings)) as groups:
                plans = [item.plan for item in planned]
                return self._prefilled(plans, groups, reduction, timings, progress)

    def encode_media(
        self, media: Sequence[str | Path], *, fps: float | None = None, num_frames: int | None = None
    ) -> EncodedMedia:
        """The first half of `prefill_media`: decodes and encodes, and holds all embeddings."""
        timings = StageTimings()
        with busy(timings, "total_s"):
            planned = self._planned(media, FrameSampling(fps, num_frames), timings)
            with closing(self._encoded(planned, timings)) as groups:
                return EncodedMedia(tuple(item.plan for item in planned), tuple(groups), timings)

    def prefill_encoded(
        self, encoded: EncodedMedia, *, reduction: ReductionPolicy = KEEP_ALL
    ) -> MediaContext:
        """The second half: the same context as `prefill_media` gives. Its timings count from this call."""
        timings = StageTimings()
        with busy(timings, "total_s"):
            return self._prefilled(encoded.plans, encoded.groups, reduction, timings, are_there=True)

    def _planned(
        self, media: Sequence[str | Path], frame_sampling: FrameSampling, timings: StageTimings
    ) -> list[PlannedMedia]:
        with busy(timings, "probe_s"):
            return [plan_media(self.adapter, source, frame_sampling) for source in media]

    def _encoded(
        self, planned: Sequence[PlannedMedia], timings: StageTimings
    ) -> Generator[EncodedGroup, None, None]:
        """All groups of all items, in order; later ones are being decoded meanwhile."""
        for number, media in enumerate(planned):
            with closing(unit_runs(media, self._group_tokens, timings)) as runs:
                for run in runs:
                    embeddings = self._encode(media.plan, run, timings)
                    amounts = (run.num_frames, run.num_substituted)
                    yield EncodedGroup(number, run.start, run.stop, embeddings, *amounts)

    def _prefilled(
        self,
        plans: Sequence[MediaPlan],
        groups: Iterable[EncodedGroup],
        reduction: ReductionPolicy,
        timings: StageTimings,
        progress: Progress | None = None,
        *,
        are_there: bool = False,
    ) -> MediaContext:
        """are_there: all groups; then passes are as large as the scheduler lets them be."""
        prompt = reduce_prompt(self.adapter.plan_prompt(plans, _SOME_QUESTION), reduction)
        context = MediaContext(tuple(plans), prompt, self._new_id() if plans else None, reduction)
        context.timings = timings
        if context.request_id is not None:
            pass_tokens = math.inf if are_there else self._group_tokens * _PASS_SHARE
            self._prefill(context, context.request_id, prompt, groups, progress, pass_tokens)
        return context

    @torch.inference_mode()
    def _prefill(
        self,
        context: MediaContext,
        request_id: str,
        prompt: PromptPlan,
        groups: Iterable[EncodedGroup],
        progress: Progress | None,
        pass_tokens: float,
    ) -> None:
        """Works through all groups of all items in order; whatever happens, nothing is left behind."""
        identity = prompt_identity(prompt, context.mm_hashes)
        sampling = self.settings.defaults
        self._add(GenerateRequest(request_id, prompt, identity, sampling, extent=Extent.MEDIA))
        try:
            self._prefill_groups(context, request_id, prompt, groups, progress, pass_tokens)
        except BaseException:
            self.engine.abort(request_id)
            raise
        weakref.finalize(context, self._given_up.append, request_id)

    def _prefill_groups(
        self,
        context: MediaContext,
        request_id: str,
        prompt: PromptPlan,
        groups: Iterable[EncodedGroup],
        progress: Progress | None,
        pass_tokens: float,
    ) -> None:
        num_done = num_ready = 0
        joiner = EmbeddingSplicer(self.adapter, prompt)
        for group in groups:
            with busy(context.timings, "prefill_s"):
                placed = joiner.push_units(group.item, group.start, group.stop, group.embeddings)
                if placed is not None:
                    self.engine.add_embeddings(request_id, placed)
                    num_ready += len(placed.indices)
                if num_ready >= pass_tokens:
                    self._run_all()
                    num_ready = 0
            num_done += group.num_frames
            context.num_substituted_frames += group.num_substituted
            if progress:
                progress(num_done, context.num_frames)
        with busy(context.timings, "prefill_s"):
            self._run_all()

    def _run_all(self) -> None:
        """Computes whatever can be."""
        while self._stepped().num_tokens:
            pass

    def _stepped(self) -> StepResult:
        """One step of the engine. Raises what a request has failed with."""
        result = self.engine.step()
        for fault in result.faults:
            raise fault.cause
        return result

    @torch.inference_mode()
    def _encode(self, plan: MediaPlan, run: UnitRun, timings: StageTimings) -> Embeddings:
        with busy(timings, "preprocess_s"):
            patches = self._encoder.patches(run.frames, plan, run.start, run.stop)
        with busy(timings, "encode_s"):
            (encoded,) = self._encoder.encode([patches])
        return encoded

    @torch.inference_mode()
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
        for output in self._outputs(request, timings):
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

    def _request(self, context: MediaContext, question: str, sampling: SamplingParams) -> GenerateRequest:
        """What to ask the engine for one question. Raises ModelError, see `PromptPlan.check_begins_with`."""
        prompt = reduce_prompt(self.adapter.plan_prompt(context.plans, question), context.reduction)
        prompt.check_begins_with(context.prefix_ids)
        identity = prompt_identity(prompt, context.mm_hashes)
        sampling = self.settings.completed(sampling, len(prompt))
        return GenerateRequest(self._new_id(), prompt, identity, sampling, parent=context.request_id)

    @torch.inference_mode()
    def answer_all(
        self, context: MediaContext, questions: Sequence[str], *, max_tokens: int | None = None
    ) -> list[Answer]:
        """Answers several questions about prefilled media in common steps, each as `answer` does alone.

        Every answer's timings and ttft_s count from this call; all share one total. Raises RequestError.
        """
        start = perf_counter()
        requests = [
            self._request(context, question, self._sampling(question, max_tokens)) for question in questions
        ]
        outputs: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
        first_s: dict[str, float] = {}
        try:
            for request in requests:
                self._add(request)
            while self.engine.has_work():
                for output in self._step():
                    outputs[output.request_id].append(output)
                    first_s.setdefault(output.request_id, perf_counter() - start)
        finally:
            for request in requests:
                self.engine.abort(request.request_id)
        timings = StageTimings(total_s=perf_counter() - start)
        return [
            _as_answer(context, request, outputs[request.request_id], first_s[request.request_id], timings)
            for request in requests
        ]

    def _outputs(self, request: GenerateRequest, timings: StageTimings) -> Iterator[TokenOutput]:
        """What the request's answer gains, step by step; a consumer that goes away ends it."""
        self._add(request)
        try:
            outputs: list[TokenOutput] = []
            while not outputs:
                with busy(timings, "prefill_s"):
                    outputs = self._step()
            while True:
                yield from outputs
                if outputs and outputs[-1].finish_reason:
                    return
                with busy(timings, "decode_s"):
                    outputs = self._step()
        finally:
            self.engine.abort(request.request_id)

    def _step(self) -> list[TokenOutput]:
        """Raises InfeasibleError when no question finds room beside the contexts that are held."""
        result = self._stepped()
        if not (result.num_tokens or result.admissions):
            raise InfeasibleError(
                "no question fits beside the contexts that are held; let go of some, or enlarge the KV cache"
            )
        return result.outputs

    def _add(self, request: GenerateRequest) -> None:
        """Raises InfeasibleError when the request does not fit, or not beside the contexts that are held."""
        while self._given_up:
            self.engine.release(self._given_up.pop())
        if request.parent is None and not self.engine.can_admit(request):
            raise InfeasibleError(
                f"{request.num_prompt_tokens} prompt tokens do not fit beside the contexts that are held; "
                "let go of some, or enlarge the KV cache"
            )
        self.engine.add(request)

    def _new_id(self) -> str:
        return f"colocated-{next(self._ids)}"


def _as_answer(
    context: MediaContext,
    request: GenerateRequest,
    outputs: Sequence[TokenOutput],
    ttft_s: float,
    timings: StageTimings,
) -> Answer:
    """An answer that is complete, from its outputs in order."""
    token_ids = tuple(output.token.token_id for output in outputs)
    usage = replace(
        request.prompt.usage(len(token_ids)), num_substituted_frames=context.num_substituted_frames
    )
    text = "".join(output.text for output in outputs)
    return Answer(text, token_ids, outputs[-1].finish_reason or "length", ttft_s, timings, usage)
