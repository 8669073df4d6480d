"""Plans media whose facts, pixels or samples are known, and prompts within a budget of visual tokens.

    default sampling --> plans --> prompt: has room?  --yes--> as it is
                                       |no
                         choose_frames: frames and retention --> plans --> prompt

One process, workers and estimates plan with this. Nothing is decoded, and no list is longer than what the
thinnest level can bring into the context.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from epd import video
from epd.control.request_budget import check_visual_tokens
from epd.control.visual_budget import (
    LEAST_FRAMES,
    FrameChoice,
    allowed_levels,
    choose_frames,
    no_room,
    room_for_media,
    share_frames,
)
from epd.encoders import OWN_LIMITS, Adapter, FrameSampling, MediaPlan, PixelLimits, VideoFacts
from epd.encoders.plans import PromptPlan
from epd.encoders.reduction import reduce_prompt
from epd.errors import RequestBudgetError
from epd.reduction import ReductionPolicy, VisualBudget
from epd.types import Float32Array, UInt8Array

logger = logging.getLogger(__name__)
# A plan of an image, or what plans a video by a sampling.
PlanOf = Callable[[FrameSampling], MediaPlan]
LayOut = Callable[[Sequence[MediaPlan]], PromptPlan]
# The kept tokens are rounded for each window, never to less than half the share.
_ROUNDING = 2


@dataclass(frozen=True, slots=True)
class PlannedMedia:
    """Holds a source and its plan.

    image: its units at planned size, uint8 [N, h, w, 3], or the bytes of a clip's samples, uint8 [1, B]; not
        for a video.
    """

    source: str | Path
    plan: MediaPlan
    image: Tensor | None = None


def plan_video(
    adapter: Adapter,
    facts: video.MediaFacts,
    frame_sampling: FrameSampling,
    pixels: PixelLimits = OWN_LIMITS,
) -> MediaPlan:
    """Plans a video that was inspected. Raises MediaLimitError, RequestError."""
    known = VideoFacts(facts.num_frames, facts.fps, facts.height, facts.width, facts.is_frame_list)
    return adapter.plan_video(known, frame_sampling, pixels)


def plan_pixels(
    adapter: Adapter, source: str | Path, image: UInt8Array, pixels: PixelLimits = OWN_LIMITS
) -> PlannedMedia:
    """Plans a decoded image, uint8 [H, W, 3], and resizes it to its planned size. Raises MediaLimitError."""
    plan = adapter.plan_image(image.shape[0], image.shape[1], pixels)
    return PlannedMedia(source, plan, adapter.resize(torch.from_numpy(image), plan))


def audio_part(adapter: Adapter, start_s: float, end_s: float | None) -> video.AudioSlice:
    """Returns which samples of a medium the model hears. Raises UnsupportedMediaError if it hears nothing."""
    spec = adapter.audio
    return video.AudioSlice(spec.rate, spec.max_samples, start_s, end_s)


def plan_clip(adapter: Adapter, source: str | Path, samples: Float32Array, start_s: float) -> PlannedMedia:
    """Plans a clip of sound, float32 [N] at the model's rate. Raises MediaLimitError."""
    plan = adapter.plan_audio(len(samples), start_s)
    return PlannedMedia(source, plan, torch.from_numpy(samples.copy().view(np.uint8))[None])


@dataclass(frozen=True, slots=True)
class BudgetedMedia:
    """Holds planned media, their prompt, and how much of them it keeps.

    prompt: as laid out, reduced.
    num_wanted: frames that would have been taken without a budget, an image as one.
    asked_retention: the share that would have been kept.
    """

    plans: tuple[MediaPlan, ...]
    reduction: ReductionPolicy
    prompt: PromptPlan
    num_wanted: int
    asked_retention: float

    @property
    def line(self) -> str:
        """Returns what was chosen, for people; empty where everything was kept as it was asked for."""
        usage = self.prompt.usage(0)
        if (usage.num_frames, self.reduction.retention) == (self.num_wanted, self.asked_retention):
            return ""
        return (
            f"{usage.num_frames} of {self.num_wanted} frames at retention {self.reduction.retention:g}: "
            f"{usage.visual_tokens} of {usage.visual_tokens_before} visual tokens"
        )


@dataclass(frozen=True, slots=True)
class PromptRoom:
    """Says what a prompt may take.

    context_tokens: of the model, None for any number.
    num_answer_tokens: expected of the answer.
    """

    context_tokens: int | None
    num_answer_tokens: int = 0


def plan_within(
    plan_ofs: Sequence[MediaPlan | PlanOf],
    frame_sampling: FrameSampling,
    reduction: ReductionPolicy,
    budget: VisualBudget,
    room: PromptRoom,
    lay_out: LayOut,
) -> BudgetedMedia:
    """Plans media with the frames and the retention that have room.

    plan_ofs: of each item, in order, its plan, or what makes it.
    reduction: its retention is kept where there is room.
    lay_out: makes the whole prompt.
    Frames that were asked for are kept, and so is a retention that was: without max_tokens nothing is chosen
    then. Raises RequestBudgetError where nothing that is allowed has room, and as the plans do.
    """
    return _Planning(plan_ofs, frame_sampling, reduction, budget, room, lay_out).planned()


class _Planning:
    """Works out one prompt; the arguments are those of `plan_within`."""

    def __init__(
        self,
        plan_ofs: Sequence[MediaPlan | PlanOf],
        frame_sampling: FrameSampling,
        reduction: ReductionPolicy,
        budget: VisualBudget,
        room: PromptRoom,
        lay_out: LayOut,
    ) -> None:
        self._plan_ofs = plan_ofs
        self._frame_sampling = frame_sampling
        self._reduction = reduction
        self._max_visual = math.inf if budget.max_tokens is None else budget.max_tokens
        self._context = math.inf if room.context_tokens is None else room.context_tokens
        self._budget = budget
        self._room = room
        self._lay_out = lay_out
        self._has_own_frames = (
            frame_sampling.fps is not None
            or frame_sampling.num_frames is not None
            or frame_sampling.listed is not None
            or frame_sampling.takes_all
        )
        self._fitting: dict[FrameChoice, bool] = {}
        self._last: tuple[FrameChoice, BudgetedMedia] | None = None
        self._default = self._default_plans()
        self._wanted = tuple(each.num_frames for each in self._default if each.kind == "video")

    def planned(self) -> BudgetedMedia:
        whole = FrameChoice(sum(self._wanted), self._reduction.retention)
        may_choose_frames = bool(self._wanted) and not self._has_own_frames
        if self._budget.max_tokens is None and not may_choose_frames:
            return self._made(whole)
        if self._fits(whole, self._context - 1):
            return self._made(whole)
        can_thin = any(plan.is_reducible for plan in self._default)
        levels = allowed_levels(self._budget, whole.retention, can_thin=can_thin)
        choice = self._choice(whole.num_frames, levels, may_choose_frames=may_choose_frames)
        if choice is None:
            raise self._no_room(levels[-1], may_choose_frames=may_choose_frames)
        made = self._made(choice)
        logger.info("chose %s", made.line)
        return made

    def _choice(
        self, num_wanted: int, levels: tuple[float, ...], *, may_choose_frames: bool
    ) -> FrameChoice | None:
        most = self._room_for_media(levels[-1])

        def fits(num_frames: int, retention: float) -> bool:
            choice = FrameChoice(num_frames, retention)
            if choice not in self._fitting:
                self._fitting[choice] = self._fits(choice, most)
            return self._fitting[choice]

        return choose_frames(num_wanted, levels, fits, may_choose=may_choose_frames)

    def _fits(self, choice: FrameChoice, most_tokens: float) -> bool:
        """Reports whether a choice is within the budget, and its prompt has at most so many tokens.

        A prompt is laid out only if its visual tokens alone are not too many.
        """
        num_tokens = sum(plan.num_tokens for plan in self._plans(choice.num_frames))
        least = num_tokens * choice.retention / (_ROUNDING if choice.retention < 1 else 1)
        if least > min(most_tokens, self._max_visual):
            return False
        prompt = self._made(choice).prompt
        return prompt.num_visual_tokens <= self._max_visual and len(prompt) <= most_tokens

    def _room_for_media(self, thinnest: float) -> float:
        """Returns the most tokens of a prompt: the context less what text and answer round up to."""
        if self._room.context_tokens is None:
            return math.inf
        prompt = self._made(self._least(thinnest)).prompt
        num_behind = len(prompt) - prompt.prefix_length
        room = room_for_media(self._room.context_tokens, num_behind + self._room.num_answer_tokens)
        return room + num_behind

    def _least(self, thinnest: float) -> FrameChoice:
        return FrameChoice(min(LEAST_FRAMES, sum(self._wanted)), thinnest)

    def _no_room(self, thinnest: float, *, may_choose_frames: bool) -> RequestBudgetError:
        num_frames = self._least(thinnest).num_frames if may_choose_frames else sum(self._wanted)
        num_tokens = sum(plan.num_tokens for plan in self._plans(num_frames))
        return no_room(
            max(1, round(num_tokens * thinnest)), self._budget.max_tokens, self._room.context_tokens
        )

    def _made(self, choice: FrameChoice) -> BudgetedMedia:
        """Lays out a choice. Raises RequestBudgetError for what can never fit, before it is laid out."""
        if self._last is not None and self._last[0] == choice:
            return self._last[1]
        plans = self._plans(choice.num_frames)
        if self._room.context_tokens is not None:
            num_tokens = sum(plan.num_tokens for plan in plans)
            check_visual_tokens(num_tokens, choice.retention, self._room.context_tokens)
        reduction = self._reduction.with_retention(choice.retention)
        prompt = self._lay_out(plans)
        prompt = reduce_prompt(prompt, reduction) if reduction.is_on else prompt
        num_wanted = sum(plan.num_frames for plan in self._default)
        made = BudgetedMedia(plans, reduction, prompt, num_wanted, self._reduction.retention)
        self._last = choice, made
        return made

    def _plans(self, num_frames: int) -> tuple[MediaPlan, ...]:
        """Plans the media with so many frames of all videos together."""
        if num_frames == sum(self._wanted):
            return self._default
        shares = zip(share_frames(num_frames, self._wanted), self._wanted, strict=True)
        return tuple(
            each if isinstance(each, MediaPlan) else each(self._with_frames(*next(shares)))
            for each in self._plan_ofs
        )

    def _with_frames(self, num_frames: int, num_wanted: int) -> FrameSampling:
        """Returns a sampling of fewer frames. They do not get larger, or fewer would have no more room."""
        listed = self._frame_sampling.listed
        if listed is not None and listed.frames_indices is not None:
            listed = replace(listed, frames_indices=listed.frames_indices[:num_frames])
        return replace(
            self._frame_sampling, fps=None, num_frames=num_frames, listed=listed, sized_among=num_wanted
        )

    def _default_plans(self) -> tuple[MediaPlan, ...]:
        """Plans the media by the request's sampling, or else the model's; `max_frames` is of all videos."""
        plans: list[MediaPlan] = []
        left = self._frame_sampling.max_frames
        num_videos = sum(not isinstance(each, MediaPlan) for each in self._plan_ofs)
        for each in self._plan_ofs:
            if isinstance(each, MediaPlan):
                plans.append(each)
                continue
            plans.append(self._default_plan(each, left, num_videos))
            num_videos -= 1
            left = None if left is None else left - plans[-1].num_frames
        return tuple(plans)

    def _default_plan(self, plan_of: PlanOf, left: int | None, num_videos: int) -> MediaPlan:
        """Plans a video; one of which the model's rule would take too many frames gets its part of them."""
        frame_sampling = replace(self._frame_sampling, max_frames=left)
        try:
            return plan_of(frame_sampling)
        except RequestBudgetError:
            if left is None or left < num_videos or self._has_own_frames:
                raise
            return plan_of(replace(frame_sampling, num_frames=left // num_videos))
