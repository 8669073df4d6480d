"""Turns a checked request into everything that workers need to know, before a frame is decoded."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from epd.control.recent import Recent
from epd.control.request_budget import RequestLimits, check_num_pixels
from epd.encode.sharding import GROUP_TOKENS
from epd.encoders import Adapter, FrameSampling, MediaPlan, PixelLimits, load_adapter
from epd.encoders.groups import plan_groups, prompt_identity, salted
from epd.encoders.plans import PromptPlan
from epd.encoders.prompt.prompt import plan_tokens
from epd.errors import MediaError, RequestError
from epd.lora_modules import LoRAModule
from epd.models import knowledge_of
from epd.pixel_settings import AUTHORS_LIMITS, PixelSettings
from epd.sampling_params import TYPICAL_TOKENS, SamplingParams
from epd.serve_app.orchestration.live_answer import AnswerPlan
from epd.serve_app.service import AnswerRequest, MediaSource, ModelCard
from epd.serve_app.token_text import TokenTexts
from epd.stages.engine.generation import generation_settings
from epd.stages.loading.weight_files import weights_revision
from epd.stages.media import BudgetedMedia, PromptRoom, plan_video, plan_within

_MAX_SEED = 2**31
# Number of video plans kept, by content: a second question about a video does not list its frames again.
_MAX_KNOWN_PLANS = 256
# What is planned at once, in about a millisecond, instead of by a thread that must be woken for it.
_MAX_SHORT_CHARS = 2000
_MAX_SHORT_MESSAGES = 16
_MAX_SHORT_WORDS = 16
_MAX_SHORT_VISUAL_TOKENS = 1024
# Tokens at the end of a prompt among which a mark is looked for.
_MARK_TOKENS = 16
# Content, frame sampling and size; the model is fixed for a planner.
_PlanKey = tuple[str, FrameSampling, PixelLimits]


class _Adapters:
    """Holds one adapter per tokenising thread: a fast tokenizer can be borrowed by one thread at a time."""

    def __init__(self, model_path: Path, first: Adapter, pixels: PixelSettings) -> None:
        self._model_path = model_path
        self._pixels = pixels
        self._idle = deque([first])

    @contextmanager
    def borrowed(self) -> Iterator[Adapter]:
        """Lends an adapter exclusively until the block is left, opening one if needed."""
        with self.idle() as adapter:
            if adapter is not None:
                yield adapter
                return
        adapter = load_adapter(self._model_path, pixels=self._pixels)
        try:
            yield adapter
        finally:
            self._idle.append(adapter)

    @contextmanager
    def idle(self) -> Iterator[Adapter | None]:
        """Lends an adapter that is open, exclusively until the block is left; None if others have all."""
        try:
            adapter = self._idle.pop()
        except IndexError:
            yield None
            return
        try:
            yield adapter
        finally:
            self._idle.append(adapter)


class RequestPlanner:
    """Plans requests to one model, without its weights. Methods block; several threads may call them."""

    def __init__(
        self,
        model_path: Path,
        name: str | None = None,
        *,
        group_tokens: int = GROUP_TOKENS,
        limits: RequestLimits | None = None,
        pixels: PixelSettings = AUTHORS_LIMITS,
        lora_modules: Sequence[LoRAModule] = (),
        thought_mark: str = "",
    ) -> None:
        """Opens the model's folder. Raises ModelError.

        name: requests use it for the model; by default the folder's name
        limits: see `self.limits`
        pixels: of images and frames; the workers must have the same
        lora_modules: adapters that the workers have, too
        thought_mark: with which a prompt ends that leaves a model thinking; empty to look for none
        """
        self.adapter = load_adapter(model_path, pixels=pixels)
        self.settings = generation_settings(model_path, self.adapter)
        self.texts = TokenTexts(self.adapter.tokenizer)
        self._adapters = _Adapters(model_path, self.adapter, pixels)
        self._plans: Recent[_PlanKey, MediaPlan] = Recent(_MAX_KNOWN_PLANS)
        self._group_tokens = group_tokens
        self._thought_mark = thought_mark
        self.card = ModelCard(
            name or model_path.name,
            int(time.time()),
            self.settings.context_tokens,
            knowledge_of(model_path),
            revision=weights_revision(model_path),
        )
        self.cards = (
            self.card,
            *(self.card.with_adapter(each.name, str(each.path)) for each in lora_modules),
        )
        # Ceilings of one request, lowered to what can fit the model's context.
        self.limits = _limits_of(self.card.max_model_len, self.adapter.tokenizer, limits or RequestLimits())

    def _adapter_of(self, model: str) -> str:
        """Returns the adapter that a request names as its model; empty for the model alone."""
        return model if any(card.name == model and card.parent for card in self.cards) else ""

    def _ends_in_thought(self, prompt: PromptPlan, tokenizer: Any) -> bool:
        if not self._thought_mark:
            return False
        end: str = tokenizer.decode(prompt.token_ids[-_MARK_TOKENS:].tolist())
        return end.rstrip().endswith(self._thought_mark)

    def plan(self, request: AnswerRequest, images: Mapping[int, MediaPlan] | None = None) -> AnswerPlan:
        """Plans a request. Raises MediaError, RequestError.

        images: the plans of all its images and clips of sound, by place, and of videos that have one
        """
        with self._adapters.borrowed() as adapter:
            return self._planned(adapter, request, images or {})

    def plan_at_once(
        self, request: AnswerRequest, images: Mapping[int, MediaPlan] | None = None
    ) -> AnswerPlan | None:
        """Plans a short request in about a millisecond, as `plan` does; None if it may take longer."""
        if not self._is_short(request, images or {}):
            return None
        with self._adapters.idle() as adapter:
            return None if adapter is None else self._planned(adapter, request, images or {})

    def _is_short(self, request: AnswerRequest, images: Mapping[int, MediaPlan]) -> bool:
        """Returns whether a request has short texts, and few visual tokens of media that are planned."""
        if len(request.messages) > _MAX_SHORT_MESSAGES or any(each.tool_calls for each in request.messages):
            return False
        if len(request.sampling.bad_words) > _MAX_SHORT_WORDS:
            return False
        num_chars = sum(len(part.text) for each in request.messages for part in each.parts)
        num_chars += sum(map(len, request.sampling.bad_words))
        if num_chars + len(request.prompt or ()) > _MAX_SHORT_CHARS:
            return False
        num_tokens, frame_sampling = 0, replace(request.frame_sampling, max_frames=self.limits.max_frames)
        for place, source in enumerate(request.media):
            plan = images.get(place) or self._plans.get((source.mm_hash, frame_sampling, source.pixels))
            if plan is None:
                return False
            num_tokens += plan.num_tokens
        return num_tokens <= _MAX_SHORT_VISUAL_TOKENS

    def _planned(
        self, adapter: Adapter, request: AnswerRequest, images: Mapping[int, MediaPlan]
    ) -> AnswerPlan:
        start = time.perf_counter()
        self.check_images(request)
        self._check_ids(request.prompt or (), len(adapter.tokenizer))
        self._check_options(request.sampling, len(adapter.tokenizer))
        made = self._within_budget(adapter, request, images)
        plans, prompt = made.plans, made.prompt
        sampling = self.settings.completed(request.sampling, len(prompt), adapter.tokenizer)
        sampling = replace(sampling, lora=self._adapter_of(request.model))
        hashes = tuple(salted(source.mm_hash, request.cache_salt) for source in request.media)
        groups = plan_groups(
            plans,
            hashes,
            model=self.card.revision,
            group_tokens=self._group_tokens,
            tower_shares=prompt.tower_shares,
            cache_salt=request.cache_salt,
            client=request.client,
        )
        seed = request.sampling.seed
        return AnswerPlan(
            prompt=prompt,
            identity=prompt_identity(prompt, hashes, request.cache_salt, sampling.lora, request.client),
            groups=tuple(groups),
            media=plans,
            mm_hashes=hashes,
            sampling=sampling,
            expected_tokens=self.settings.expected_tokens(request.sampling, len(prompt)),
            seed=secrets.randbelow(_MAX_SEED) if seed is None else seed,
            plan_s=time.perf_counter() - start,
            priority=request.priority,
            notes=(self.adapter.limits_line, *(plan.line for plan in plans)) if request.wants_spans else (),
            choice=made.line,
            thinks=self._ends_in_thought(prompt, adapter.tokenizer),
        )

    def tokens_of(self, text: str, with_special: bool) -> tuple[int, ...]:
        """Returns the tokens of a text. with_special: with those that the tokenizer adds around it."""
        with self._adapters.borrowed() as adapter:
            return tuple(adapter.tokenizer(text, add_special_tokens=with_special)["input_ids"])

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens. Raises RequestError for one outside the vocabulary."""
        with self._adapters.borrowed() as adapter:
            self._check_ids(token_ids, len(adapter.tokenizer))
            return str(adapter.tokenizer.decode(list(token_ids)))

    def names_of(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Returns tokens as the vocabulary writes them."""
        with self._adapters.borrowed() as adapter:
            return tuple(adapter.tokenizer.convert_ids_to_tokens(list(token_ids)))

    def _check_options(self, sampling: SamplingParams, num_tokens: int) -> None:
        """Checks tokens that options name, of which those that pad the model's vocabulary are some."""
        biased = [token_id for token_id, _ in sampling.logit_bias]
        num_rows = max(num_tokens, self.settings.num_embeddings)
        self._check_ids([*biased, *sampling.stop_token_ids], num_rows)

    def _check_ids(self, token_ids: Sequence[int], num_tokens: int) -> None:
        wrong = next((each for each in token_ids if not 0 <= each < num_tokens), None)
        if wrong is not None:
            raise RequestError(
                f"received the token {wrong}; allowed: 0 to {num_tokens - 1}, of a vocabulary of "
                f"{num_tokens}; correct it"
            )

    def check_images(self, request: AnswerRequest) -> None:
        """Raises RequestError for limits of pixels that cannot be, RequestBudgetError for too many in total.

        To be called before images are decoded.
        """
        wanted = [(source.kind, source.pixels) for source in request.media]
        self.adapter.check_pixels(wanted, self.limits.max_resize_pixels)
        check_num_pixels(sum(map(_image_pixels, request.media)), self.limits)

    def _within_budget(
        self, adapter: Adapter, request: AnswerRequest, images: Mapping[int, MediaPlan]
    ) -> BudgetedMedia:
        """Plans the media and the prompt. What can never fit is refused before it is listed or laid out."""
        most = (
            self.settings.max_tokens if request.sampling.max_tokens is None else request.sampling.max_tokens
        )
        return plan_within(
            [
                images[place] if place in images else partial(self._video_plan, source)
                for place, source in enumerate(request.media)
            ],
            replace(request.frame_sampling, max_frames=self.limits.max_frames),
            request.reduction,
            request.budget,
            PromptRoom(self.card.max_model_len, min(most or TYPICAL_TOKENS, TYPICAL_TOKENS)),
            lambda plans: _laid_out(adapter, plans, request),
        )

    def _video_plan(self, source: MediaSource, frame_sampling: FrameSampling) -> MediaPlan:
        """Plans a video. Raises MediaError, RequestError."""
        key = (source.mm_hash, frame_sampling, source.pixels)
        plan = self._plans.get(key)
        if plan is None:
            try:
                plan = plan_video(self.adapter, source.facts, frame_sampling, source.pixels)
            except MediaError as error:
                raise type(error)(f"{source.label}: {error}") from error
            self._plans.set(key, plan)
        return plan


def _laid_out(adapter: Adapter, plans: Sequence[MediaPlan], request: AnswerRequest) -> PromptPlan:
    if request.prompt is None:
        return adapter.plan_chat(plans, request.messages)
    return plan_tokens(adapter, request.prompt)


def _image_pixels(source: MediaSource) -> int:
    """Returns the number of pixels, at least those that it is enlarged to; 0 for what is no image."""
    if source.kind != "image":
        return 0
    return max(source.facts.height * source.facts.width, source.pixels.least)


def _limits_of(context_tokens: int | None, tokenizer: Any, limits: RequestLimits) -> RequestLimits:
    if context_tokens is None:
        return limits
    return limits.for_model(context_tokens, max(len(token.encode()) for token in tokenizer.get_vocab()))
