"""Simulates drafts: how many tokens a decode drafts, by the live statistics, and how many of them hold.

A drafted token holds with the same probability after all those before it did. Whether it does follows from
the request and its place in the answer, so that a run is always the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from epd.errors import RequestError
from epd.kv.draft_gain import DraftStatistics
from epd.kv.drafting import DEFAULT_MAX_DRAFT, DraftConfig
from epd.kv.scheduled_request import ScheduledRequest


def acceptance_of(tokens_per_pass: float, max_draft: int = DEFAULT_MAX_DRAFT) -> float:
    """Returns the acceptance with which passes that draft `max_draft` tokens have so many on average."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        is_less = DraftPlan(middle, max_draft).most_tokens < tokens_per_pass
        low, high = (middle, high) if is_less else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Says what drafts are worth. acceptance: how often a token holds; max_draft: see `DraftConfig`.

    units: that a drafted token costs a pass, in sequences
    """

    acceptance: float
    max_draft: int = DEFAULT_MAX_DRAFT
    units: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise RequestError(f"draft acceptance is {self.acceptance}, it must be 0 (no drafts) to 1")
        DraftConfig(max_draft=self.max_draft)  # raises for what is not allowed

    @property
    def most_tokens(self) -> float:
        """Returns the mean tokens of a pass that drafts as many as allowed."""
        return sum(self.acceptance**place for place in range(self.max_draft + 1))


class SimulatedDrafts:
    """Drafts for the requests of one worker, as `--draft auto` does once it knows how often tokens hold."""

    def __init__(self, plan: DraftPlan) -> None:
        self._acceptance = plan.acceptance
        self._statistics = DraftStatistics(plan.max_draft)

    def propose(self, decoding: Sequence[ScheduledRequest]) -> None:
        """Sets the drafts of the next pass: those that pay, if they pay together."""
        statistics, num_sequences = self._statistics, len(decoding)
        for request in decoding:
            length, _ = statistics.best_length(self._acceptance, num_sequences)
            room = request.max_total_tokens - request.num_tokens - 1
            request.num_drafts = max(0, min(length, room)) if statistics.may_wish else 0
            if request.num_drafts:
                statistics.wish(request.num_drafts, self._acceptance)
        if not statistics.pays(max(1, num_sequences)):
            for request in decoding:
                request.num_drafts = 0

    def num_held(self, request: ScheduledRequest, num_drafts: int) -> int:
        """Returns how many drafts of a pass hold, from the first on."""
        draw = random.Random(f"{request.request_id}/{request.num_tokens}").random
        return next((place for place in range(num_drafts) if draw() >= self._acceptance), num_drafts)

    def record_pass(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        """Learns what a pass cost that did nothing but decode."""
        self._statistics.cost.record(num_sequences, num_drafted, seconds)
