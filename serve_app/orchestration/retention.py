"""Lowers and raises retention as traffic changes: each request is planned with the current level.

requests, first tokens --> PromptLoadEstimator --PromptLoad--> RetentionController --> level
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from epd.control.prompt_load import PromptLoadEstimator
from epd.control.retention import PromptLoad, RetentionConfig, RetentionController
from epd.serve_app.orchestration.live_answer import AnswerPlan
from epd.serve_app.orchestration.requests import Attempt, Shared
from epd.serve_app.service import AnswerRequest, RetentionStatus

logger = logging.getLogger(__name__)

_LOOK_S = 0.5


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
