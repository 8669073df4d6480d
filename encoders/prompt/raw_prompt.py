"""Lays out a prompt that is given as tokens: no template, and no media."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from epd.encoders.adapter import Adapter
from epd.encoders.plans import PromptPlan


def plan_tokens(adapter: Adapter, token_ids: Sequence[int]) -> PromptPlan:
    """Plans a prompt of exactly these tokens, each one position after the last, on every axis."""
    num_tokens, num_rows = len(token_ids), len(adapter.plan_prompt((), "?").positions)
    positions = np.tile(np.arange(num_tokens, dtype=np.int64), (num_rows, 1))
    return PromptPlan(np.asarray(token_ids, dtype=np.int64), positions, num_tokens, ())
