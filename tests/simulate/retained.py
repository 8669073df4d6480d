"""Simulates retention by load: the live controller sets the level of each request when it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.score.calibrating import kept_job
from epd.control.retention import RetentionConfig, RetentionController
from epd.profiles.profile import Profile
from epd.serve_app.orchestration.retention import PromptLoadEstimator
from epd.simulate import Deployment, Job, Simulation
from epd.simulate.clock import seconds_of
from epd.simulate.requests import RequestState


class SimulatedRetention:
    """Sets the level when requests come, and not between them. levels: of each request, by its index."""

    def __init__(self, config: RetentionConfig, num_prefillers: int) -> None:
        self.controller = RetentionController(config)
        self.levels: dict[int, float] = {}
        self._estimator = PromptLoadEstimator()
        self._num_prefillers = num_prefillers
        self._ahead: dict[str, int] = {}  # tokens of prompts that are not computed

    def reduced(self, now: int, job: Job, *, num_waiting: int, kv_usage: float) -> Job:
        """Returns the job with its kept tokens. now: ticks."""
        now_s = seconds_of(now)
        load = self._estimator.load(
            now_s,
            self._ahead.values(),
            num_workers=self._num_prefillers,
            num_waiting=num_waiting,
            kv_usage=kv_usage,
        )
        level = self.levels[job.index] = self.controller.look(now_s, load)
        self._estimator.arrived(now_s, job.text_tokens, job.num_visual_tokens)
        kept = kept_job(job, level)
        self._ahead[str(job.index)] = kept.num_prompt_tokens
        return kept

    def first_token(self, state: RequestState) -> None:
        placed_s, first_s = seconds_of(state.placed), seconds_of(state.first_token)
        begun_s = seconds_of(max(state.placed, state.encoded))
        tokens = state.job.num_prompt_tokens
        self._estimator.first_token(first_s, state.prefill_worker, placed_s, tokens, first_s - begun_s)
        self._ahead.pop(state.request_id, None)

    def ended(self, state: RequestState) -> None:
        self._ahead.pop(state.request_id, None)


class RetainingSimulation(Simulation):
    """A simulation whose requests keep as many visual tokens as the load allows."""

    def __init__(self, profile: Profile, deployment: Deployment, retention: SimulatedRetention) -> None:
        super().__init__(profile, deployment)
        self._retention = retention

    def _arrive(self, job: Job, source: Iterator[Job]) -> None:
        prefillers = [self._workers[name].language_side for name in self._candidates.taking("prefill")]
        usage = max((side.kv.usage for side in prefillers), default=0.0)
        waiting = self._placer.num_waiting
        kept = self._retention.reduced(self.events.now, job, num_waiting=waiting, kv_usage=usage)
        super()._arrive(kept, source)

    def _record(self, state: RequestState, **options: Any) -> None:
        self._retention.ended(state)
        super()._record(state, **options)

    def _first_token(self, worker: Any, state: RequestState) -> None:
        super()._first_token(worker, state)
        self._retention.first_token(state)
