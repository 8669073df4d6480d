"""Drives the live controller and estimator of retention with the work of simulated workers.

A simulator need not know which tokens are kept: every group has its share of those that its job keeps.
"""

from __future__ import annotations

from dataclasses import replace

from epd.control.prompt_load import PromptLoadEstimator
from epd.control.retention import RetentionConfig, RetentionController
from epd.simulate.clock import seconds_of
from epd.simulate.requests import GroupWork, Job, RequestState


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


def kept_job(job: Job, retention: float) -> Job:
    """Returns the job with that share of its visual tokens, rounded, with at least one in each group."""
    groups: list[GroupWork] = []
    num_kept = num_before = 0
    for group in job.groups:
        num_before += group.media.num_tokens
        here = min(max(1, round(retention * num_before) - num_kept), group.media.num_tokens)
        groups.append(replace(group, media=replace(group.media, num_tokens=here)))
        num_kept += here
    return replace(job, groups=tuple(groups))
