"""Plans the questions of an evaluation, and which remain; draws videos of the shapes world with questions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from epd.errors import RequestError
from epd.eval.items import EvalCase, EvalItem, EvalSetting, EvalVideo
from epd.eval.verdicts import VerdictLog
from epd.shapes import Question, Scene, make_questions, make_scene

# Seeds from here on are never drawn in training; the first billion of them is that of the model card.
HELD_OUT_SEED = 2_000_000_000
_SEEDS_PER_RUN = 1_000_000_000
_SEEDS_PER_SECOND = 100_000
# A time in a question is this far from any change: twice the gap between frames at one a second.
TIME_MARGIN_S = 2.0
_MAX_DURATION_S = _SEEDS_PER_RUN // _SEEDS_PER_SECOND - 1


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """Plans every case with every setting.

    max_tokens: of an answer.
    num_cold_videos: how many videos of each number of frames are also asked cold, timed.
    Raises RequestError for invalid numbers.
    """

    cases: tuple[EvalCase, ...]
    settings: tuple[EvalSetting, ...]
    max_tokens: int = 16
    num_cold_videos: int = 3

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.num_cold_videos < 0:
            raise RequestError(
                f"--max-tokens is {self.max_tokens} and --ttft-videos {self.num_cold_videos}; "
                "give at least 1 and 0"
            )

    @property
    def cold_cases(self) -> tuple[EvalCase, ...]:
        """Returns the first cases of each number of frames."""
        frames = dict.fromkeys(case.num_frames for case in self.cases)
        return tuple(
            case
            for each in frames
            for case in [case for case in self.cases if case.num_frames == each][: self.num_cold_videos]
        )


@dataclass(frozen=True, slots=True)
class Todo:
    """Lists the unknown results of one case. untimed: settings to ask cold with, in this order."""

    case: EvalCase
    unjudged: tuple[EvalSetting, ...]
    untimed: tuple[EvalSetting, ...]

    def __len__(self) -> int:
        return len(self.unjudged) + len(self.untimed)


def todos(plan: EvalPlan, log: VerdictLog) -> Iterator[Todo]:
    """Yields the results missing in the log, case by case; skips complete cases."""
    cold_cases = plan.cold_cases
    for case in plan.cases:
        unjudged = tuple(each for each in plan.settings if not log.has_verdicts(case, each))
        untimed: tuple[EvalSetting, ...] = ()
        if case in cold_cases:
            turned = _turned(plan.settings, cold_cases.index(case), plan.num_cold_videos)
            untimed = tuple(each for each in turned if not log.has_sample(case, each))
        if unjudged or untimed:
            yield Todo(case, unjudged, untimed)


def _turned(settings: tuple[EvalSetting, ...], number: int, num_all: int) -> tuple[EvalSetting, ...]:
    """Returns the settings rotated by the video's number, so that none is always timed first."""
    first = number * len(settings) // num_all % len(settings)
    return settings[first:] + settings[:first]


def demo_cases(
    num_questions: int,
    num_frames: Sequence[int],
    seed: int,
    duration_s: float | None = None,
    num_per_kind: int = 1,
) -> list[EvalCase]:
    """Returns videos with `num_questions` questions in all, for each number of frames.

    duration_s: of every video, which are then the same for each number of frames; by default one second for
        each frame.
    num_per_kind: most questions of one kind about a video.
    Raises RequestError for numbers that make no sense.
    """
    if min(num_questions, num_per_kind) < 1 or seed < 0:
        raise RequestError(
            f"--demo is {num_questions}, --per-kind {num_per_kind} and --seed {seed}; "
            "draw at least 1 question of a kind from a seed of 0 or more"
        )
    return [
        EvalCase(video, frames)
        for frames in num_frames
        for video in _videos(num_questions, seed, duration_s or float(frames), num_per_kind)
    ]


def _videos(num_questions: int, seed: int, duration_s: float, num_per_kind: int) -> list[EvalVideo]:
    """Returns videos with questions of every kind; the last video has the rest of them."""
    if not 2 <= duration_s <= _MAX_DURATION_S:
        raise RequestError(
            f"videos of {duration_s:g} s cannot be drawn; ask for 2 to {_MAX_DURATION_S}, by --seconds"
        )
    first = HELD_OUT_SEED + (seed + 1) * _SEEDS_PER_RUN + int(duration_s) * _SEEDS_PER_SECOND
    videos: list[EvalVideo] = []
    for number in count():
        if num_questions <= 0:
            break
        videos.append(_video(first + number, duration_s, num_per_kind, num_questions))
        num_questions -= len(videos[-1].items)
    return videos


def _video(seed: int, duration_s: float, num_per_kind: int, max_questions: int) -> EvalVideo:
    """Returns one video; questions that were drawn twice are asked once."""
    scene = make_scene(seed, duration_s)
    name = f"shapes-{duration_s:g}s-{seed}"
    drawn = drawn_items(scene, random.Random(seed), num_per_kind)
    once = list({(each.earlier, each.question): each for each in drawn}.values())[:max_questions]
    items = tuple(replace(each, item_id=f"{name}-{index}") for index, each in enumerate(once))
    return EvalVideo(name, scene, items)


def drawn_items(scene: Scene, rng: random.Random, num_per_kind: int) -> list[EvalItem]:
    """Draws questions of each kind about a scene, without ids."""
    return list(map(item_of, make_questions(scene, rng, num_per_kind, TIME_MARGIN_S)))


def item_of(question: Question) -> EvalItem:
    """Returns a drawn question, without an id."""
    return EvalItem(
        "",
        question.text,
        question.answer,
        kind=str(question.kind),
        earlier=question.earlier,
        judge=question.is_answered_by,
    )
