"""Chooses the frames of simulated videos as a server does: `choose_frames` where not all have room.

A server plans its prompts in `stages/media.py`. Both count with `epd.control.visual_budget`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from epd.control.visual_budget import (
    LEAST_FRAMES,
    FrameChoice,
    allowed_levels,
    choose_frames,
    no_room,
    room_for_media,
    share_frames,
)
from epd.profiles.media import MediaRule, MediaWork
from epd.profiles.profile import Profile
from epd.reduction import VisualBudget
from epd.sampling_params import TYPICAL_TOKENS
from epd.types import ceil_div
from epd.workload.requests import RequestShape


@dataclass(frozen=True, slots=True)
class VideoWishes:
    """Says what all requests name for their videos; None leaves it to the model or to the room.

    fps, num_frames: at most one of the two; frames that are named are kept
    max_visual_tokens: of all media of a request
    """

    fps: float | None = None
    num_frames: int | None = None
    max_visual_tokens: int | None = None

    @property
    def has_own_frames(self) -> bool:
        return self.fps is not None or self.num_frames is not None


NO_WISHES = VideoWishes()


@dataclass(frozen=True, slots=True)
class ChosenMedia:
    """Holds the groups of a request's videos, those of one after those of the other.

    text_tokens: between the frames of all
    num_frames: those that are taken, whose tokens keep `retention`
    """

    groups: tuple[tuple[MediaWork, ...], ...]
    text_tokens: int
    num_frames: int
    retention: float


class FrameChooser:
    """Chooses for the requests of a workload, with the model's context and what they name."""

    def __init__(self, profile: Profile, wishes: VideoWishes = NO_WISHES) -> None:
        self.rule = profile.media.asked(wishes.fps, wishes.num_frames)
        self._profile = profile
        self._wishes = wishes
        self._budget = VisualBudget(wishes.max_visual_tokens)

    def chosen(self, shape: RequestShape) -> ChosenMedia:
        """Returns the media of a request's videos.

        Raises RequestBudgetError, as a server does, where nothing that is allowed has room.
        """
        wanted = tuple(map(self.rule.num_sampled, shape.videos))
        videos = _Videos(self._profile, self.rule, shape, wanted)
        return videos.made(self._choice(videos))

    def _choice(self, videos: _Videos) -> FrameChoice:
        context = math.inf if self._profile.context_tokens is None else self._profile.context_tokens
        whole = FrameChoice(sum(videos.wanted), 1.0)
        if videos.fits(whole, context - 1, self._max_visual):
            return whole
        may_choose = bool(videos.wanted) and not self._wishes.has_own_frames
        levels = allowed_levels(self._budget, 1.0) if self._budget.max_tokens or may_choose else (1.0,)
        most = context if math.isinf(context) else videos.room(int(context))

        def fits(num_frames: int, retention: float) -> bool:
            return videos.fits(FrameChoice(num_frames, retention), most, self._max_visual)

        found = choose_frames(whole.num_frames, levels, fits, may_choose=may_choose)
        if found is None:
            least = min(LEAST_FRAMES, whole.num_frames) if may_choose else whole.num_frames
            num_tokens = videos.num_visual(FrameChoice(least, levels[-1]))
            raise no_room(num_tokens, self._budget.max_tokens, self._profile.context_tokens)
        return found

    @property
    def _max_visual(self) -> float:
        return math.inf if self._budget.max_tokens is None else self._budget.max_tokens


class _Videos:
    """Counts the tokens of one request. wanted: frames of each of its videos without a budget."""

    def __init__(
        self, profile: Profile, rule: MediaRule, shape: RequestShape, wanted: tuple[int, ...]
    ) -> None:
        self.wanted = wanted
        self._rule = rule
        self._shape = shape
        self._num_text = profile.prompt.num_tokens(shape.text_tokens)
        self._num_answer = min(shape.output_tokens, TYPICAL_TOKENS)
        self._of_images = sum(rule.image(size).num_tokens for size in shape.images)

    def room(self, context_tokens: int) -> int:
        """Returns the most tokens of a prompt of which not all media have room."""
        return room_for_media(context_tokens, self._num_text + self._num_answer) + self._num_text

    def fits(self, choice: FrameChoice, most_tokens: float, max_visual: float) -> bool:
        visual = self.num_visual(choice)
        text = self._num_text + self._text_between(choice.num_frames)
        return visual <= max_visual and visual + text <= most_tokens

    def num_visual(self, choice: FrameChoice) -> int:
        videos = (self._kept(video, choice.retention) for video in self._groups(choice.num_frames))
        of_videos = sum(each.num_tokens for video in videos for each in video)
        return of_videos + round(self._of_images * choice.retention)

    def made(self, choice: FrameChoice) -> ChosenMedia:
        groups = tuple(
            tuple(self._kept(video, choice.retention)) for video in self._groups(choice.num_frames)
        )
        return ChosenMedia(groups, self._text_between(choice.num_frames), choice.num_frames, choice.retention)

    def _kept(self, groups: tuple[MediaWork, ...], retention: float) -> Iterator[MediaWork]:
        """Yields groups with a share of their tokens; it is carried on, so that no rounding adds up.

        A token of each group is kept, and of each time step that has a text before it. Tokens behind the last
        frame are always kept.
        """
        num_before = num_kept = 0
        for place, group in enumerate(groups, 1):
            extra = self._rule.end_tokens if place == len(groups) else 0
            num_windows = ceil_div(group.num_frames, self._rule.frames_per_unit) if self._rule.is_timed else 1
            each, kept = (group.num_tokens - extra) // num_windows, extra
            for _ in range(num_windows):
                num_before += each
                here = min(max(1, round(retention * num_before) - num_kept), each)
                num_kept += here
                kept += here
            yield replace(group, num_tokens=kept)

    def _groups(self, num_frames: int) -> tuple[tuple[MediaWork, ...], ...]:
        shares = self._shares(num_frames)
        return tuple(map(self._rule.video, self._shape.videos, shares))

    def _text_between(self, num_frames: int) -> int:
        return sum(map(self._rule.text_tokens, self._shape.videos, self._shares(num_frames)))

    def _shares(self, num_frames: int) -> tuple[int, ...]:
        if num_frames == sum(self.wanted):
            return self.wanted
        return share_frames(num_frames, self.wanted)
