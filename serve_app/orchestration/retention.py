"""Lowers and raises retention as traffic changes: each request is planned with the current level.

requests, first tokens --> PromptLoadEstimator --PromptLoad--> RetentionController --> level
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from epd.control.elasticity.rates import RoundCost
from epd.control.recent import DecayedMean
from epd.control.retention import PromptLoad, RetentionConfig, RetentionController
from epd.serve_app.orchestration.live_answer import AnswerPlan
from epd.serve_app.orchestration.requests import Attempt, Shared
from epd.serve_app.service import AnswerRequest
from epd.serve_app.service_status import RetentionStatus

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_COST_MEMORY_S = 20.0  # seconds of work
_RATE_MEMORY_S = 5.0
_SHAPE_MEMORY = 20.0  # requests
_LEADS = 20  # of idle workers: their median, as one may hold the stall of a burst that follows it


class LoadRetention:
    """Drives the `RetentionController` with what the server knows."""

    def __init__(self, config: RetentionConfig, shared: Shared) -> None:
        """Starts without load."""
        self.controller = RetentionController(config)
        self.estimator = PromptLoadEstimator()
        self._shared = shared
        self._clock = shared.requests.clock

    def reduced(self, request: AnswerRequest) -> AnswerRequest:
        """Returns the request with the share of visual tokens that the load allows now."""
        reduction = request.reduction.clamped(self._look(), request.retention_min or 0.0)
        return replace(request, reduction=reduction)

    def arrived(self, plan: AnswerPlan) -> None:
        prompt = plan.prompt
        num_text_tokens = len(prompt) - prompt.num_visual_tokens
        self.estimator.arrived(self._clock(), num_text_tokens, prompt.num_visual_tokens_before)

    def first_token(self, attempt: Attempt) -> None:
        """Notes that an attempt's prompt is computed."""
        answer = attempt.answer
        self.estimator.first_token(
            self._clock(),
            attempt.prefill_worker,
            attempt.started_s,
            len(answer.plan.prompt),
            answer.timings.prefill_s,
        )

    @property
    def status(self) -> RetentionStatus:
        """Returns the current level."""
        controller = self.controller
        return RetentionStatus(
            controller.level, controller.predicted_ttft_s, controller.num_changes, tuple(controller.changes)
        )

    async def run(self) -> None:
        """Updates the level periodically, so that it also rises while no requests come."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._look()

    def _look(self) -> float:
        """Updates and returns the level."""
        before = self.controller.level
        level = self.controller.look(self._clock(), self._load())
        if level != before:
            logger.info("retention %g -> %g: %s", before, level, self.controller.changes[-1].reason)
        return level

    def _load(self) -> PromptLoad:
        requests = self._shared.requests
        ahead = [
            len(each.answer.plan.prompt) for each in requests.attempts.values() if not each.answer.has_begun
        ]
        ahead += [self.estimator.tokens_at(self.controller.level)] * requests.num_planning
        names = [info.name for info in self._shared.fleet.workers.values() if info.takes("prefill")]
        usages = [load.kv_usage or 0.0 for load in requests.loads.values()]
        return self.estimator.load(
            self._clock(),
            ahead,
            num_workers=max(1, len(names)),
            num_waiting=len(self._shared.queue),
            kv_usage=max(usages, default=0.0),
        )


class PromptLoadEstimator:
    """Observes every prompt and every first token. Times in seconds on one clock.

    first tokens of one worker   t0 ---- t1 ------- t2            busy: a prompt takes the time between them
                                         ^ came alone, after t0   idle: only its own prefill is counted

    The time between first tokens of a busy worker includes everything that delays the next prompt: decode
    steps and encoding too, where it runs those. An idle worker delays no other prompt.
    """

    def __init__(self) -> None:
        self._cost = RoundCost(_COST_MEMORY_S)
        self._text, self._visual = DecayedMean(_SHAPE_MEMORY), DecayedMean(_SHAPE_MEMORY)
        self._leads: deque[float] = deque(maxlen=_LEADS)
        self._rate = 0.0
        self._arrived_s = -math.inf
        self._first_s: dict[str, float] = {}

    def arrived(self, now_s: float, num_text_tokens: int, num_visual_tokens: int) -> None:
        """Counts a prompt that arrived, with its visual tokens before reduction."""
        self._rate = self._rate_at(now_s) + 1 / _RATE_MEMORY_S
        self._arrived_s = now_s
        self._text.add(num_text_tokens, 1, 1)
        self._visual.add(num_visual_tokens, 1, 1)

    def first_token(
        self, now_s: float, worker: str, placed_s: float, num_tokens: int, prefill_s: float
    ) -> None:
        """Records that a prompt of num_tokens, which the worker got at placed_s, is computed.

        prefill_s: of passes with parts of it, other prompts' parts included.
        """
        last_s = self._first_s.get(worker, -math.inf)
        self._first_s[worker] = now_s
        if placed_s < last_s:
            self._cost.add(1, num_tokens, max(0.0, now_s - last_s))
        else:
            took_s = min(prefill_s, now_s - placed_s)
            self._cost.add(1, num_tokens, took_s)
            self._leads.append(now_s - placed_s - took_s)

    def load(
        self,
        now_s: float,
        ahead: Iterable[int],
        *,
        num_workers: int,
        num_waiting: int = 0,
        kv_usage: float = 0.0,
    ) -> PromptLoad:
        """Returns the load. ahead: tokens of each waiting prompt. num_workers: that prefill, at least 1."""
        fixed_s, token_s = self._cost.line or (0.0, 0.0)
        backlog_s = sum(fixed_s + token_s * tokens for tokens in ahead) / num_workers
        return PromptLoad(
            wait_s=max(backlog_s, median(self._leads) if self._leads else 0.0),
            fixed_s=fixed_s + token_s * (self._text.value or 0.0),
            visual_s=token_s * (self._visual.value or 0.0),
            rate=self._rate_at(now_s) / num_workers,
            num_waiting=num_waiting,
            kv_usage=kv_usage,
        )

    def tokens_at(self, retention: float) -> int:
        """Returns the tokens of the mean prompt with that share of its visual tokens."""
        return round((self._text.value or 0.0) + (self._visual.value or 0.0) * retention)

    def _rate_at(self, now_s: float) -> float:
        """Returns prompts per second: older ones count for less."""
        return self._rate * math.exp(-max(0.0, now_s - self._arrived_s) / _RATE_MEMORY_S)
