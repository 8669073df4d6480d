"""The plain loop that every topology must equal, token for token: one thread, each stage after the other.

    decode g0 | encode g0 | prefill g0 | decode g1 | ... | question | token | token ...

[system][media] is prefilled once, and its blocks are held for any number of questions:

    blocks     [system][media     )
    question a [      shared      )[question a][answer
    question b [      shared      )[question b][answer
"""

from __future__ import annotations

import math
import uuid
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from epd import video
from epd.chat import ChatMessage, one_turn
from epd.encode.sharding import BATCH_PATCHES
from epd.encoders import OWN_LIMITS, Adapter, Embeddings, FrameSampling, MediaPlan, PixelLimits, load_adapter
from epd.encoders.device import device_of
from epd.encoders.groups import FrameEncoder, MediaGroup, plan_groups, prompt_identity
from epd.encoders.reduction import reduce_prompt
from epd.engine_config import DEFAULT_ENGINE, EngineConfig
from epd.errors import InfeasibleError, MediaLimitError, UnsupportedMediaError, check_question
from epd.kv.pass_limits import SchedulerConfig
from epd.reduction import KEEP_ALL, ReductionPolicy
from epd.stages.encode.encoder_pool import EmbeddingSplicer
from epd.stages.engine.generation import (
    Extent,
    GenerateRequest,
    GenerationSettings,
    StepResult,
    TokenOutput,
    generation_settings,
)
from epd.stages.engine.setup import build_engine
from epd.stages.media import PlannedMedia, audio_part, plan_clip, plan_pixels, plan_video
from epd.stages.memory_sizing import LargestPasses, MemoryShare, measured_kv_tokens
from epd.stages.placement import Placement, use_threads
from epd.stages.rank import RankGroup
from epd.stages.ranks.group import load_with_ranks
from epd.types import Answer, Int64Array, MediaKind, StageTimings
from tests.conversations import plan_prefix

# Of a reduced video a group leaves few tokens: a pass waits for this share of what a whole group has.
_PASS_SHARE = 0.75
# Patches that at most become one visual token, of the families here.
_PATCHES_OF_TOKEN = 16

Stage = Literal["probe_s", "decode_video_s", "preprocess_s", "encode_s", "prefill_s", "decode_s", "total_s"]
# A question about media, or a conversation that begins with them.
Asked = str | Sequence[ChatMessage]
Progress = Callable[[int, int], None]
# A group and its embeddings.
EncodedGroup = tuple[MediaGroup, Embeddings]


@contextmanager
def busy(timings: StageTimings, stage: Stage) -> Iterator[None]:
    """Adds the seconds spent in the block to one field of `timings`."""
    start = perf_counter()
    try:
        yield
    finally:
        setattr(timings, stage, getattr(timings, stage) + perf_counter() - start)


# Media, from their files on


@dataclass(frozen=True, slots=True)
class DecodedGroup:
    """A group and its frames, uint8 [N, h, w, 3], of which some could not be decoded and show a neighbour."""

    group: MediaGroup
    frames: Tensor
    num_substituted: int = 0


def plan_media(
    adapter: Adapter, source: str | Path, frame_sampling: FrameSampling, pixels: PixelLimits = OWN_LIMITS
) -> PlannedMedia:
    """Inspects and plans one source. Raises MediaError, and RequestError for a useless frame_sampling."""
    facts = video.look(source)
    if facts.kind == "image":
        image = video.load_image(source)
    elif facts.kind == "audio":
        with _named(source):
            part = audio_part(adapter, frame_sampling.start_s, frame_sampling.end_s)
        samples = video.load_audio(source, part)
    with _named(source):
        if facts.kind == "image":
            return plan_pixels(adapter, source, image, pixels)
        if facts.kind == "audio":
            return plan_clip(adapter, source, samples, frame_sampling.start_s)
        plan = plan_video(adapter, facts, frame_sampling, pixels)
    return PlannedMedia(source, adapter.compressed(plan, _all_frames(source, plan)))


def _all_frames(source: str | Path, plan: MediaPlan) -> Iterator[Tensor]:
    """The frames of a video in parts of three, decoded if an adapter looks at them."""
    sizes = [len(plan.times_s[at : at + 3]) for at in range(0, len(plan.times_s), 3)]
    with video.stream(source, plan.times_s, plan.size, group_sizes=sizes) as decoded:
        for each in decoded:
            yield torch.from_numpy(each.frames.data)


@contextmanager
def _named(source: str | Path) -> Iterator[None]:
    """Names the source in errors about what the model takes."""
    try:
        yield
    except (MediaLimitError, UnsupportedMediaError) as error:
        raise type(error)(f"'{source}': {error}") from error


def decode_groups(
    media: Sequence[PlannedMedia],
    group_tokens: int,
    timings: StageTimings,
    tower_shares: Sequence[float | None] | None = None,
) -> Generator[DecodedGroup, None, None]:
    """Decodes all items in order, group by group; each group has about `group_tokens` visual tokens.

    To stop the threads of the stream early, close the generator.
    """
    plans = [item.plan for item in media]
    hashes = [""] * len(plans)
    groups = plan_groups(plans, hashes, model="", group_tokens=group_tokens, tower_shares=tower_shares)
    for item, its_groups in groupby(groups, lambda group: group.item):
        image = media[item].image
        if image is None:
            yield from _decode_video(media[item], list(its_groups), timings)
        else:
            for group in its_groups:
                yield DecodedGroup(group, image[group.start : group.stop])


def _decode_video(
    media: PlannedMedia, groups: Sequence[MediaGroup], timings: StageTimings
) -> Iterator[DecodedGroup]:
    sizes = [group.num_frames for group in groups]
    with video.stream(media.source, media.plan.times_s, media.plan.size, group_sizes=sizes) as decoded:
        for group in groups:
            with busy(timings, "decode_video_s"):
                frames = next(decoded).frames
            yield DecodedGroup(group, torch.from_numpy(frames.data), frames.num_substituted)


@torch.inference_mode()
def encode_group(encoder: FrameEncoder, decoded: DecodedGroup, timings: StageTimings) -> EncodedGroup:
    """Preprocesses the frames of a group and encodes them."""
    with busy(timings, "preprocess_s"):
        patches = encoder.patches(decoded.frames, decoded.group.plan)
    with busy(timings, "encode_s"):
        (embeddings,) = encoder.encode([patches], decoded.group.spec.key.tower_share)
    return decoded.group, embeddings


@dataclass(frozen=True, slots=True)
class EncodedMedia:
    """Media that have been decoded and encoded once, to be prefilled any number of times."""

    plans: tuple[MediaPlan, ...]
    groups: tuple[EncodedGroup, ...]


class MediaContext:
    """Media that have been decoded, encoded and prefilled once, for any number of questions.

    The engine holds the blocks of [system][media] as long as this object lives; answers share them.
    """

    def __init__(self, name: str, plans: tuple[MediaPlan, ...], pipeline: ColocatedPipeline) -> None:
        self.plans = plans
        self.timings = StageTimings()
        self.num_substituted_frames = 0
        self.name = name
        self.mm_hashes = [uuid.uuid4().hex for _ in plans]
        self.reduction = KEEP_ALL
        self._adapter = pipeline.adapter
        self._settings = pipeline.settings

    def lay_out(self, reduction: ReductionPolicy) -> Self:
        """Lays out the prefix, with what is kept of the media."""
        self.reduction = reduction
        self.prompt = reduce_prompt(plan_prefix(self._adapter, self.plans), reduction)
        self.splicer = EmbeddingSplicer(self._adapter, self.prompt)
        return self

    @property
    def prefix_ids(self) -> Int64Array:
        return self.prompt.token_ids[: self.prompt.prefix_length]

    @property
    def request_id(self) -> str | None:
        """The request that holds the blocks; None without media."""
        return self.name if self.prompt.media else None

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        return tuple(plan.kind for plan in self.plans)

    @property
    def num_frames(self) -> int:
        return sum(plan.num_frames for plan in self.plans)

    def request(self) -> GenerateRequest:
        """The request to prefill the media as their embeddings come."""
        identity = prompt_identity(self.prompt, self.mm_hashes)
        return GenerateRequest(self.name, self.prompt, identity, self._settings.defaults, extent=Extent.MEDIA)

    def question(self, request_id: str, asked: Asked, max_tokens: int | None) -> GenerateRequest:
        """The request to answer a question, greedily. Raises RequestError."""
        if isinstance(asked, str):
            check_question(asked)
        messages = one_turn(self.kinds, asked) if isinstance(asked, str) else asked
        prompt = reduce_prompt(self._adapter.plan_chat(self.plans, messages), self.reduction)
        assert np.array_equal(self.prefix_ids, prompt.token_ids[: len(self.prefix_ids)])
        identity = prompt_identity(prompt, self.mm_hashes)
        options = {} if max_tokens is None else {"max_tokens": max_tokens}
        sampling = self._settings.defaults.with_options(options)
        sampling = self._settings.completed(sampling, len(prompt), self._adapter.tokenizer)
        return GenerateRequest(request_id, prompt, identity, sampling, parent=self.request_id)


class ColocatedPipeline:
    """Answers questions with one loaded checkpoint. Not thread-safe."""

    def __init__(
        self,
        model: Any,
        adapter: Adapter,
        *,
        settings: GenerationSettings,
        config: EngineConfig = DEFAULT_ENGINE,
        ranks: RankGroup | None = None,
    ) -> None:
        """Takes ownership of the model. ranks: that share the language model; the model has rank 0's part."""
        self.adapter = adapter
        self.settings = settings
        self.engine = build_engine(model, adapter, settings, options=config, ranks=ranks)
        tower = adapter.vision_tower(model)
        most = BATCH_PATCHES[device_of(tower).type]
        self.encoder = FrameEncoder(adapter, tower, config.skip_static, config.tower_merge, most)
        self.group_tokens = config.group_tokens
        self._ids = count()
        self._dropped: list[str] = []  # requests that hold the blocks of contexts that are gone

    @classmethod
    def load(cls, model_path: str | Path, config: EngineConfig = DEFAULT_ENGINE) -> Self:
        """Loads a folder in Hugging Face layout. Raises as a worker does."""
        path = Path(model_path)
        adapter = load_adapter(path, pixels=config.pixels)
        use_threads(config.num_threads, config.tensor_parallel_size)
        placement = Placement.resolve(config.device, config.dtype, path, config.quantization)
        model, ranks = load_with_ranks(path, "whole", placement, config.tensor_parallel_size)
        settings = generation_settings(path, adapter)
        if config.num_kv_tokens is None:
            scheduler = SchedulerConfig()
            most_seqs = 0 if config.enforce_eager else scheduler.max_num_seqs
            passes = LargestPasses(
                config.group_tokens * _PATCHES_OF_TOKEN, scheduler.max_chunk_tokens, most_seqs
            )
            share = MemoryShare(config, name=path.name)
            tower = adapter.vision_tower(model)
            room = measured_kv_tokens(model, tower, adapter, settings, placement, passes, share, ranks=ranks)
            config = config.model_copy(update={"num_kv_tokens": room})
        return cls(model, adapter, settings=settings, config=config, ranks=ranks)

    def ask(
        self,
        media: Sequence[str | Path],
        question: str,
        *,
        max_tokens: int | None = None,
        on_text: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Answer:
        """Answers one question about media, or about none. options: those of `prefill_media`."""
        start = perf_counter()
        check_question(question)
        context = self.prefill_media(media, **options)
        return self._answer(context, question, max_tokens, on_text, start, context.timings)

    def answer(
        self,
        context: MediaContext,
        question: str,
        *,
        max_tokens: int | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Answer:
        """Answers a question about prefilled media, greedily, and leaves the context as it was."""
        return self._answer(context, question, max_tokens, on_text, perf_counter(), StageTimings())

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
        """Decodes, encodes and prefills media, in the order given, before any question is known.

        progress: called after each group with how many of all frames have been prefilled.
        Raises MediaError, RequestError, InfeasibleError when the media do not fit into the KV cache.
        """
        timings = StageTimings()
        with busy(timings, "total_s"):
            planned = self._planned(media, FrameSampling(fps, num_frames, start_s, end_s), timings)
            context = self._context(planned).lay_out(reduction)
            context.timings = timings
            with closing(self._encoded(planned, context)) as groups:
                self._prefill(context, groups, progress, self.group_tokens * _PASS_SHARE)
        return context

    def encode_media(
        self,
        media: Sequence[str | Path],
        *,
        fps: float | None = None,
        num_frames: int | None = None,
        reduction: ReductionPolicy = KEEP_ALL,
    ) -> EncodedMedia:
        """Decodes and encodes as the first half of `prefill_media`, and holds all embeddings."""
        planned = self._planned(media, FrameSampling(fps, num_frames), StageTimings())
        context = self._context(planned).lay_out(reduction)
        return EncodedMedia(context.plans, tuple(self._encoded(planned, context)))

    def prefill_encoded(
        self, encoded: EncodedMedia, *, reduction: ReductionPolicy = KEEP_ALL
    ) -> MediaContext:
        """Prefills to the same context as `prefill_media`, in passes as large as the scheduler allows."""
        context = MediaContext(self._new_id(), encoded.plans, self).lay_out(reduction)
        with busy(context.timings, "total_s"):
            self._prefill(context, encoded.groups, None, math.inf)
        return context

    def _planned(
        self, media: Sequence[str | Path], sampling: FrameSampling, timings: StageTimings
    ) -> list[PlannedMedia]:
        with busy(timings, "probe_s"):
            return [plan_media(self.adapter, source, sampling) for source in media]

    def _context(self, planned: Sequence[PlannedMedia]) -> MediaContext:
        return MediaContext(self._new_id(), tuple(each.plan for each in planned), self)

    def _encoded(
        self, planned: Sequence[PlannedMedia], context: MediaContext
    ) -> Generator[EncodedGroup, None, None]:
        shares = context.prompt.tower_shares
        with closing(decode_groups(planned, self.group_tokens, context.timings, shares)) as decoded:
            for each in decoded:
                context.num_substituted_frames += each.num_substituted
                yield encode_group(self.encoder, each, context.timings)

    @torch.inference_mode()
    def _prefill(
        self,
        context: MediaContext,
        groups: Iterable[EncodedGroup],
        progress: Progress | None,
        pass_tokens: float,
    ) -> None:
        """Works through all groups of all items in order; if anything fails, nothing is left behind."""
        if not context.plans:
            return
        self._add(context.request())
        try:
            self._prefill_groups(context, groups, progress, pass_tokens)
        except BaseException:
            self.engine.abort(context.name)
            raise
        weakref.finalize(context, self._dropped.append, context.name)

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
                placed = context.splicer.push(*group)
                if placed is not None:
                    self.engine.add_embeddings(context.name, placed)
                    num_ready += len(placed.indices)
                if num_ready >= pass_tokens:
                    self._run_all()
                    num_ready = 0
            num_done += group[0].num_frames
            if progress:
                progress(num_done, context.num_frames)
        with busy(context.timings, "prefill_s"):
            self._run_all()

    def _run_all(self) -> None:
        while self._step().num_tokens:
            pass

    def _step(self) -> StepResult:
        """Runs one step of the engine. Raises what a request has failed with."""
        result = self.engine.step()
        for fault in result.faults:
            raise fault.cause
        return result

    def _answer(
        self,
        context: MediaContext,
        question: str,
        max_tokens: int | None,
        on_text: Callable[[str], None] | None,
        start: float,
        timings: StageTimings,
    ) -> Answer:
        request = context.question(self._new_id(), question, max_tokens)
        outputs: list[TokenOutput] = []
        ttft_s = 0.0
        for output in self._outputs([request], timings):
            ttft_s = ttft_s or perf_counter() - start
            outputs.append(output)
            if on_text and output.text:
                on_text(output.text)
        timings.total_s = perf_counter() - start
        return _as_answer(context, request, outputs, ttft_s, timings)

    def answer_all(
        self, context: MediaContext, questions: Sequence[Asked], *, max_tokens: int | None = None
    ) -> list[Answer]:
        """Answers several questions about prefilled media in common steps, each as `answer` does alone."""
        start = perf_counter()
        requests = [context.question(self._new_id(), asked, max_tokens) for asked in questions]
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
            stage: Stage = "prefill_s"
            num_open = len(requests)
            while num_open:
                with busy(timings, stage):
                    result = self._step()
                if not (result.num_tokens or result.admissions):
                    raise InfeasibleError(
                        "no question fits beside the contexts that are held; let go of some"
                    )
                if result.outputs:
                    stage = "decode_s"
                num_open -= sum(output.finish_reason is not None for output in result.outputs)
                yield from result.outputs
        finally:
            for request in requests:
                self.engine.abort(request.request_id)

    def _add(self, request: GenerateRequest) -> None:
        """Adds a request; raises InfeasibleError when it does not fit, or not beside the held contexts."""
        while self._dropped:
            self.engine.scheduler.release(self._dropped.pop())
        if request.parent is None and not self.engine.can_admit(request):
            raise InfeasibleError(
                f"{request.num_prompt_tokens} prompt tokens do not fit beside the contexts that are held; "
                "let go of some"
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
    """Assembles a complete answer from its outputs in order."""
    token_ids = tuple(output.token.token_id for output in outputs)
    usage = replace(
        request.prompt.usage(len(token_ids)), num_substituted_frames=context.num_substituted_frames
    )
    text = "".join(output.text for output in outputs)
    return Answer(text, token_ids, outputs[-1].finish_reason or "length", ttft_s, timings, usage)
