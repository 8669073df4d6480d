"""Chooses the share of visual tokens to keep as the load rises and falls: a level, with hysteresis.

    predicted TTFT, share of its SLO
    high  - - - - - - - - - - - - -   above it at this level: falls at once to the first level that is not
    low   - - - - - - - - - - - - -   below it at the next higher level, for `dwell_s`: rises to that level

Each rise waits `dwell_s` from the last change in either direction; each fall follows a rise or a high start.
So there are never more than `max_changes` in any period: no load, however it swings, makes the level
oscillate faster. Time is passed in, in seconds on any one clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from epd.errors import RequestError
from epd.reduction import LEAST_RETENTION

LEVELS = (1.0, 0.5, 0.25, 0.15, 0.1)
_MAX_CHANGES = 32


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """Configures the levels and when each is used.

    slo_ttft_s: in which first tokens must come
    levels: shares of the visual tokens, the highest first
    high, low: shares of the SLO
    dwell_s: before the level rises
    down_gap_s: after a change, before it falls
    horizon_s: in which the queue is predicted to grow where a worker is busier than max_utilisation
    max_waiting, max_kv_usage: requests without room on any worker, and KV in use, above which the level falls
        too, by one each `dwell_s`
    least_gain: saving of a prompt's service at the lowest level that makes load lower the level: where other
        stages take all the time, dropping tokens does not help

    Raises RequestError for invalid levels.
    """

    slo_ttft_s: float
    levels: tuple[float, ...] = LEVELS
    high: float = 0.7
    low: float = 0.5
    dwell_s: float = 4.0
    down_gap_s: float = 0.5
    horizon_s: float = 3.0
    max_utilisation: float = 0.85
    max_waiting: int = 8
    max_kv_usage: float = 0.95
    least_gain: float = 0.1

    def __post_init__(self) -> None:
        is_falling = all(a > b for a, b in pairwise(self.levels))
        if not self.levels or not is_falling or not LEAST_RETENTION <= self.levels[-1] <= self.levels[0] <= 1:
            raise RequestError(
                f"received the levels of retention {self.levels}; allowed: one or more, each lower than the "
                f"one before, {LEAST_RETENTION} to 1"
            )
        if not (self.slo_ttft_s > 0 and 0 < self.low <= self.high):
            raise RequestError(
                f"received an SLO of {self.slo_ttft_s:g} s, marks at {self.low:g} and {self.high:g} of it; "
                "allowed: above 0, the low mark not above the high one"
            )
        if min(self.dwell_s, self.horizon_s, self.max_utilisation) <= 0 or self.down_gap_s < 0:
            raise RequestError(f"dwell, horizon and utilisation must be above 0, no gap below, got {self}")

    def max_changes(self, seconds: float) -> int:
        """Returns the most changes in that time: rises are dwell_s apart, falls follow one or the start."""
        num_rises = math.floor(seconds / self.dwell_s) + 1
        return 2 * num_rises + len(self.levels) - 1


def levels_down_to(least: float) -> tuple[float, ...]:
    """Returns the usual levels from 1 to `least`, which is the last one."""
    return (*(level for level in LEVELS if level > least), least)


@dataclass(frozen=True, slots=True)
class PromptLoad:
    """Describes the load for a prompt that comes now, as far as it is known; 0 elsewhere.

    wait_s: before it is computed
    fixed_s, visual_s: its own service: the part that no reduction shortens, and that of all its visual tokens
    rate: arriving prompts, per second and worker
    num_waiting: requests without room on any worker
    kv_usage: share of KV blocks in use, at the fullest worker
    """

    wait_s: float = 0.0
    fixed_s: float = 0.0
    visual_s: float = 0.0
    rate: float = 0.0
    num_waiting: int = 0
    kv_usage: float = 0.0

    def service_s(self, retention: float) -> float:
        return self.fixed_s + self.visual_s * retention


@dataclass(frozen=True, slots=True)
class LevelChange:
    """Records a change. ttft_s: predicted at the new level. reason: a line for people."""

    at_s: float
    before: float
    after: float
    ttft_s: float
    reason: str


class RetentionController:
    """Holds the level. Starts with the highest one."""

    def __init__(self, config: RetentionConfig) -> None:
        self.config = config
        self.num_changes = 0
        self.predicted_ttft_s = 0.0  # at the level, by the last look
        self._index = 0
        self._now_s = -math.inf
        self._changed_s = -math.inf
        self._calm_s: float | None = None  # since when the next higher level would do
        self._changes: deque[LevelChange] = deque(maxlen=_MAX_CHANGES)

    @property
    def level(self) -> float:
        return self.config.levels[self._index]

    @property
    def changes(self) -> Sequence[LevelChange]:
        """Returns the last changes, oldest first."""
        return tuple(self._changes)

    def look(self, now_s: float, load: PromptLoad) -> float:
        """Returns the level from now on. A clock that runs backwards is treated as stopped."""
        self._now_s = max(now_s, self._now_s)
        lower = self._lower(load)
        if lower is not None:
            self._calm_s = None
            self._move(*lower, load)
        elif self._has_been_calm(load):
            index = self._index - 1
            self._move(index, f"{self.ttft_s(load, self.config.levels[index]):.2f} s predicted there", load)
        self.predicted_ttft_s = self.ttft_s(load, self.level)
        return self.level

    def ttft_s(self, load: PromptLoad, retention: float) -> float:
        """Returns the predicted TTFT of prompts that keep that share, within the horizon."""
        service_s = load.service_s(retention)
        excess = max(0.0, load.rate * service_s - self.config.max_utilisation)
        return load.wait_s + service_s + self.config.horizon_s * excess

    # Down

    def _lower(self, load: PromptLoad) -> tuple[int, str] | None:
        """Returns the level to fall to and why; None to stay."""
        config, waited_s = self.config, self._now_s - self._changed_s
        if self._index == len(config.levels) - 1 or waited_s < config.down_gap_s:
            return None
        ttft_s, limit_s = self.ttft_s(load, self.level), config.high * config.slo_ttft_s
        if ttft_s > limit_s and self._saves(load, self.level):
            return self._fitting(load), f"{ttft_s:.2f} s predicted, limit {limit_s:.2f}"
        if waited_s < config.dwell_s:
            return None
        if load.num_waiting > config.max_waiting and (self._saves(load, self.level) or not load.service_s(1)):
            return self._index + 1, f"{load.num_waiting} requests wait, limit {config.max_waiting}"
        if load.kv_usage > config.max_kv_usage:
            return self._index + 1, f"{load.kv_usage:.2f} of the KV in use, limit {config.max_kv_usage:.2f}"
        return None

    def _fitting(self, load: PromptLoad) -> int:
        """Returns the highest lower level within the high mark, or below which savings are negligible."""
        limit_s = self.config.high * self.config.slo_ttft_s
        index = self._index + 1
        while self.ttft_s(load, self.config.levels[index]) > limit_s:
            if not self._saves(load, self.config.levels[index]):
                break
            index += 1
        return index

    def _saves(self, load: PromptLoad, level: float) -> bool:
        """Returns whether the lowest level makes prompts noticeably quicker than this one does."""
        lowest_s = load.service_s(self.config.levels[-1])
        return lowest_s < (1 - self.config.least_gain) * load.service_s(level)

    # Up

    def _has_been_calm(self, load: PromptLoad) -> bool:
        if not self._index or not self._is_calm(load):
            self._calm_s = None
            return False
        if self._calm_s is None:
            self._calm_s = self._now_s
        return self._now_s - max(self._calm_s, self._changed_s) >= self.config.dwell_s

    def _is_calm(self, load: PromptLoad) -> bool:
        """Returns whether the next higher level would meet its goals, or no lower one would help there."""
        config, higher = self.config, self.config.levels[self._index - 1]
        if load.num_waiting > config.max_waiting // 2:
            return False
        if load.kv_usage * higher / self.level > config.max_kv_usage:
            return False
        return not self._saves(load, higher) or self.ttft_s(load, higher) <= config.low * config.slo_ttft_s

    def _move(self, index: int, reason: str, load: PromptLoad) -> None:
        before, self._index = self.level, index
        self._changed_s, self._calm_s = self._now_s, None
        self.num_changes += 1
        predicted_s = self.ttft_s(load, self.level)
        self._changes.append(LevelChange(self._now_s, before, self.level, predicted_s, reason))
