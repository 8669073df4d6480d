"""Orders requests of one priority: which of those that wait is next. Shared by scheduler and simulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

RequestOrder = Literal["fcfs", "shortest", "least_slack"]


def rank_of(order: RequestOrder, num_tokens: int, latest_start_s: float) -> float:
    """Returns what requests are sorted by before their arrival, the lowest first.

    num_tokens: of the prompt
    latest_start_s: when it must start to be in time, on any clock that all requests share
    """
    ranks: Mapping[RequestOrder, float] = {"shortest": num_tokens, "least_slack": latest_start_s}
    return ranks.get(order, 0.0)
