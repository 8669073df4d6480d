"""Lowers and raises retention as traffic changes: each request is planned with the current level.

requests, first tokens --> PromptLoadEstimator --PromptLoad--> RetentionController --> level
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from epd.control.admission import AdmissionQueue
from epd.control.prompt_load import PromptLoadEstimator
from epd.control.retention import PromptLoad, RetentionConfig, RetentionController, kept_share
from epd.serve_app.fleet import Fleet
from epd.serve_app.messages import WorkerLoad
from epd.serve_app.orchestration.attempt import Attempt
from epd.serve_app.orchestration.request_planner import AnswerPlan
from epd.serve_app.service import AnswerRequest, RetentionStatus
from epd.serve_app.task_group import Loops

logger = logging.getLogger(__name__)

_LOOK_S = 0.5


class LoadRetention:
    """Drives the `RetentionController` with what the server knows.

    attempts: those that have not ended, by id
    loads: the last report of each worker, by name
    num_planning: requests that are being planned
    clock: Unix time, seconds
    """

    def __init__(
        self,
        config: RetentionConfig | None,
        fleet: Fleet,
        queue: AdmissionQueue,
        attempts: Mapping[str, Attempt],
        loads: Mapping[str, WorkerLoad],
        num_planning: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        """Starts without load. config: None keeps what requests ask for."""
        self.controller = None if config is None else RetentionController(config)
        self.estimator = PromptLoadEstimator()
        self._fleet = fleet
        self._queue = queue
        self._attempts = attempts
        self._loads = loads
        self._num_planning = num_planning
        self._clock = clock

    def start(self, loops: Loops) -> None:
        if self.controller is not None:
            loops.start("retention", self._run, is_vital=False)

    def reduced(self, request: AnswerRequest) -> AnswerRequest:
        """Returns the request with the share of visual tokens that the load allows now."""
        level = self._look()
        share = kept_share(level, request.reduction.retention, request.retention_min or 0.0)
        return replace(request, reduction=request.reduction.with_retention(share))

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
    def status(self) -> RetentionStatus | None:
        """Returns the current level; None if retention does not follow the load."""
        if self.controller is None:
            return None
        controller = self.controller
        return RetentionStatus(
            controller.level, controller.predicted_ttft_s, controller.num_changes, tuple(controller.changes)
        )

    async def _run(self) -> None:
        """Updates the level periodically, so that it also rises while no requests come."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._look()

    def _look(self) -> float:
        """Updates and returns the level; 1 without a controller."""
        if self.controller is None:
            return 1.0
        before = self.controller.level
        level = self.controller.look(self._clock(), self._load())
        if level != before:
            logger.info("retention %g -> %g: %s", before, level, self.controller.changes[-1].reason)
        return level

    def _load(self) -> PromptLoad:
        assert self.controller is not None
        ahead = [
            len(each.answer.plan.prompt) for each in self._attempts.values() if not each.answer.has_begun
        ]
        ahead += [self.estimator.tokens_at(self.controller.level)] * self._num_planning()
        names = [info.name for info in self._fleet.workers.values() if info.takes("prefill")]
        usages = [load.kv_usage or 0.0 for load in self._loads.values()]
        return self.estimator.load(
            self._clock(),
            ahead,
            num_workers=max(1, len(names)),
            num_waiting=len(self._queue),
            kv_usage=max(usages, default=0.0),
        )
