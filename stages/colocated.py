"""All stages in one process: from media and a question to streamed tokens, group by group.

    video threads   | decode g0 | decode g1 | decode g2 |
    this thread           | g0: patches, tower, prefill | g1 ... | g2 ... | question | token | token ...

The first group is being prefilled while later ones are still being decoded, and only a few groups are
held. This is the reference that every split topology must equal, token for token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Literal, Protocol

import numpy as np
import torch
from torch import nn

from encoders import Adapter, MediaItem, MediaPlan, PromptPlan, Sampling, check_question, load_adapter
from encoders.adapter import PatchRun
from epd.errors import ModelError, RequestError
from epd.types import Answer, StageTimings, Usage
from stages.detokenizer import OnText, StreamedText
from stages.greedy import GenerationSettings, generate_greedily
from stages.kv_cache import KVCache
from stages.loader import load_model, use_threads
from stages.media import PlannedMedia, UnitRun, plan_media, unit_runs
from stages.model_runner import ModelRunner, PlacedEmbeddings
from stages.timing import busy

logger = logging.getLogger(__name__)

DEFAULT_GROUP_TOKENS = 256
# Any question will do to lay out the part of the prompt that comes before it.
_SOME_QUESTION = "?"


class Progress(Protocol):
    """Told after each group how many of all frames have been prefilled."""

    def __call__(self, num_done: int, num_frames: int) -> None: ...


class MediaContext:
    """Media that has been decoded, encoded and prefilled once, for any number of questions, one at a time.

    The cache holds [system][media]; an answer appends to it and cuts it back. `timings` is what that took.
    """

    def __init__(
        self, plans: tuple[MediaPlan, ...], prompt: PromptPlan, cache: KVCache, timings: StageTimings
    ) -> None:
        self.plans = plans
        self.prefix_ids = prompt.token_ids[: prompt.prefix_length]
        self.cache = cache
        self.timings = timings

    @property
    def num_frames(self) -> int:
        return sum(plan.num_frames for plan in self.plans)

    def check_prefix_of(self, prompt: PromptPlan) -> None:
        """Raises ModelError when the chat template lets the question change what comes before the media."""
        if not np.array_equal(self.prefix_ids, prompt.token_ids[: len(self.prefix_ids)]):
            raise ModelError("the chat template puts the question before the media; it must come after them")


class ColocatedPipeline:
    """One checkpoint, loaded to answer questions. Not for several threads at once."""

    def __init__(
        self,
        model: nn.Module,
        adapter: Adapter,
        *,
        settings: GenerationSettings,
        group_tokens: int = DEFAULT_GROUP_TOKENS,
    ) -> None:
        self.adapter = adapter
        self._runner = ModelRunner(model, adapter)
        self._tower = adapter.vision_tower(model)
        self._settings = settings
        self._group_tokens = group_tokens

    @classmethod
    def load(
        cls,
        model_path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        num_threads: int | None = None,
        group_tokens: int = DEFAULT_GROUP_TOKENS,
    ) -> ColocatedPipeline:
        """Loads the folder `model_path`, in Hugging Face layout.

        num_threads: of torch, for the whole process; by default OMP_NUM_THREADS or all cores.
        group_tokens: about how many visual tokens are encoded and prefilled at a time.
        Raises ModelNotFoundError, UnsupportedModelError, ModelError.
        """
        adapter = load_adapter(model_path)
        use_threads(num_threads)
        model = load_model(Path(model_path), dtype)
        settings = GenerationSettings.of(model.generation_config, adapter.tokenizer.eos_token_id)
        return cls(model, adapter, settings=settings, group_tokens=group_tokens)

    def ask(
        self,
        media: Sequence[str | Path],
        question: str,
        *,
        fps: float | None = None,
        num_frames: int | None = None,
        max_tokens: int | None = None,
        on_text: OnText | None = None,
        progress: Progress | None = None,
    ) -> Answer:
        """Answers one question about media, or about none. Options as in `prefill_media` and `answer`."""
        start = perf_counter()
        limit = self._check(question, max_tokens)
        context = self.prefill_media(media, fps=fps, num_frames=num_frames, progress=progress)
        return self._answer(context, question, limit, on_text, start, context.timings)

    @torch.inference_mode()
    def prefill_media(
        self,
        media: Sequence[str | Path],
        *,
        fps: float | None = None,
        num_frames: int | None = None,
        progress: Progress | None = None,
    ) -> MediaContext:
        """Decodes, encodes and prefills images and videos, in the order given, before any question is known.

        fps, num_frames: which frames of each video, one of the two or neither: then as the processor has it.
        Raises MediaError, RequestError.
        """
        timings = StageTimings()
        with busy(timings, "total_s"):
            with busy(timings, "probe_s"):
                planned = [plan_media(self.adapter, source, Sampling(fps, num_frames)) for source in media]
            plans = tuple(item.plan for item in planned)
            prompt = self.adapter.plan_prompt(plans, _SOME_QUESTION)
            cache = self._runner.new_cache(len(prompt) + self._settings.max_tokens)
            context = MediaContext(plans, prompt, cache, timings)
            self._prefill_groups(context, planned, prompt, progress)
        return context

    def _prefill_groups(
        self,
        context: MediaContext,
        planned: Sequence[PlannedMedia],
        prompt: PromptPlan,
        progress: Progress | None,
    ) -> None:
        """Works through all groups of all items in order; whatever happens, no decoding is left behind."""
        num_done = 0
        for media, item in zip(planned, prompt.media, strict=True):
            with closing(unit_runs(media, self._group_tokens, context.timings)) as runs:
                for run in runs:
                    visual = self._encode(item, run, context.timings)
                    with busy(context.timings, "prefill_s"):
                        self._runner.prefill(context.cache, prompt, int(visual.indices[-1]) + 1, visual)
                    num_done += run.num_frames
                    if progress:
                        progress(num_done, context.num_frames)

    def _encode(self, item: MediaItem, run: UnitRun, timings: StageTimings) -> PlacedEmbeddings:
        with busy(timings, "preprocess_s"):
            patches = self.adapter.preprocess(run.frames, item.plan)
        with busy(timings, "encode_s"):
            patch_run = PatchRun(item.plan.kind, patches, item.plan.grid.cut(run.stop - run.start))
            (encoded,) = self.adapter.encode_batch(self._tower, [patch_run])
            embeddings = self.adapter.join(encoded, item.plan, run.start, run.stop)
        return PlacedEmbeddings(embeddings, item.token_indices(run.start, run.stop))

    def answer(
        self,
        context: MediaContext,
        question: str,
        *,
        max_tokens: int | None = None,
        on_text: OnText | None = None,
    ) -> Answer:
        """Answers a question about prefilled media, greedily, and leaves the context as it was.

        max_tokens: of the answer; by default the checkpoint's. on_text: called with each piece of text.
        The answer's timings and ttft_s count from this call. Raises RequestError.
        """
        start = perf_counter()
        limit = self._check(question, max_tokens)
        return self._answer(context, question, limit, on_text, start, StageTimings())

    def _check(self, question: str, max_tokens: int | None) -> int:
        """The cap on the answer's tokens. Raises RequestError for a request that makes no sense."""
        check_question(question)
        if max_tokens is not None and max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {max_tokens}")
        return max_tokens or self._settings.max_tokens

    @torch.inference_mode()
    def _answer(
        self,
        context: MediaContext,
        question: str,
        max_tokens: int,
        on_text: OnText | None,
        start: float,
        timings: StageTimings,
    ) -> Answer:
        prompt = self.adapter.plan_prompt(context.plans, question)
        context.check_prefix_of(prompt)
        try:
            with busy(timings, "prefill_s"):
                logits = self._runner.prefill(context.cache, prompt, len(prompt))
            with busy(timings, "decode_s"):
                tokens = generate_greedily(self._runner, context.cache, prompt, logits, self._settings)
                text = StreamedText(self.adapter.tokenizer, on_text, start)
                text.consume(islice(tokens, max_tokens))
        finally:
            context.cache.crop(len(context.prefix_ids))
        timings.total_s = perf_counter() - start
        return self._finished(text, prompt, context, timings)

    def _finished(
        self, text: StreamedText, prompt: PromptPlan, context: MediaContext, timings: StageTimings
    ) -> Answer:
        token_ids = tuple(text.token_ids)
        usage = Usage(context.num_frames, prompt.num_visual_tokens, len(prompt), len(token_ids))
        reason: Literal["stop", "length"] = "stop" if token_ids[-1] in self._settings.eos_ids else "length"
        logger.info(
            "answered: %s, first token after %.3f s, %.3f s in all", usage, text.ttft_s, timings.total_s
        )
        return Answer(text.text, token_ids, reason, text.ttft_s, timings, usage)
