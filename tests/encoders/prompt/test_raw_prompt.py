"""A prompt of tokens is laid out as a text prompt of the same tokens is, in every family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from epd.encoders import load_adapter
from epd.encoders.prompt.prompt import plan_tokens
from tests.tiny_models import BUILDERS


@pytest.mark.parametrize("name", [*BUILDERS, "shapes-vl"])
def test_tokens_have_the_positions_of_a_text(checkpoints: dict[str, Path], name: str) -> None:
    adapter = load_adapter(checkpoints[name])
    asked = adapter.plan_prompt((), "What is it?")
    plan = plan_tokens(adapter, asked.token_ids.tolist())
    assert np.array_equal(plan.token_ids, asked.token_ids)
    assert np.array_equal(plan.positions, asked.positions)
    assert plan.token_ids.dtype == asked.token_ids.dtype
    assert (plan.next_position, plan.media) == (asked.next_position, ())
