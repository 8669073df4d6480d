"""Plans the questions of an evaluation, and which of them remain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from epd.errors import RequestError
from epd.eval.items import EvalCase, EvalSetting
from epd.eval.verdicts import VerdictLog


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
