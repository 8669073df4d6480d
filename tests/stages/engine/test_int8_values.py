"""Values in 8 bits: what is left of them, and the same tokens whatever becomes of their blocks.

Modules: `stages/kernels/scaled_values.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epd.kv.pass_limits import PreemptionMode, SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.stages.engine.engine import LanguageEngine
from epd.stages.kernels.scaled_values import scaled, unscaled
from tests.stages.conftest import Subject
from tests.stages.prompts import Drive, Prompt
from tests.stages.split_deployment import GREEDY, Deployment
from tests.stages.test_moving import run_moving

DRAWN = SamplingParams(max_tokens=8, temperature=1.0, n=3)


@dataclass(frozen=True)
class Eight:
    """A trained model whose engines keep values in 8 bits."""

    subject: Subject

    def engine(self, **options: Any) -> LanguageEngine:
        return self.subject.engine(kv_cache_dtype="int8_values", **options)

    def mix(self, count: int) -> dict[str, Prompt]:
        return self.subject.mix(count)


@pytest.fixture
def eight(subjects: Callable[[str], Subject]) -> Eight:
    return Eight(subjects("shapes-vl"))


@given(
    rows=st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=8, max_size=8), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_value_is_off_by_half_a_step_at_most(rows: list[list[float]], dtype: torch.dtype) -> None:
    """A step is 1/127 of the largest value of its row."""
    values = torch.tensor(rows).to(dtype)
    left = unscaled(scaled(values), torch.float32)
    steps = values.float().abs().amax(-1, keepdim=True) / 127
    assert bool(((left - values.float()).abs() <= steps * 0.5001).all())


def test_rows_by_hand() -> None:
    rows = scaled(torch.tensor([[127.0, -254.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert rows[:, :4].tolist() == [[64, -127, 1, 0], [0, 0, 0, 0]]
    assert rows[:, 4:].view(torch.float32).flatten().tolist() == [2.0, 0.0]
    assert unscaled(rows, torch.float32).tolist() == [[128.0, -254.0, 2.0, 0.0], [0.0] * 4]


def test_blocks_hold_codes_that_answers_are_computed_from(eight: Eight) -> None:
    engine, plain = eight.engine(), eight.subject.engine()
    for each in (engine, plain):
        Drive(each, seed=0).run(eight.mix(1))
    (keys, values), (_, exact) = engine.pools.layer(0), plain.pools.layer(0)
    assert (keys.dtype, values.dtype) == (torch.float32, torch.int8)
    assert bool(values.any())
    left = unscaled(values, torch.float32)
    assert torch.equal(left.any(-1), exact.any(-1))
    steps = exact.abs().amax(-1, keepdim=True) / 127
    assert bool(((left - exact).abs() <= steps * 0.51 + 1e-6).all())


@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_preemption_prefix_hits_and_other_blocks_change_no_token(eight: Eight, mode: PreemptionMode) -> None:
    expected = Drive(eight.engine(), seed=0).run(eight.mix(8))
    longest = max(len(prompt.plan) for prompt in eight.subject.prompts)
    config = SchedulerConfig(max_chunk_tokens=32, preemption=mode)
    options = {"block_size": 4, "num_kv_tokens": 2 * longest + 24, "enable_prefix_caching": True}
    engine = eight.engine(config=config, **options)
    for seed in range(2):
        assert Drive(engine, seed).run(eight.mix(8)) == expected
    assert engine.scheduler.num_preempted > 0, "the pool was meant to be too small"


def test_answers_that_fork_are_those_alone(eight: Eight) -> None:
    prompts = eight.mix(2)
    together = Drive(eight.engine(block_size=8), seed=0).run(prompts, sampling=DRAWN, seed=5)
    for name, prompt in prompts.items():
        single = SamplingParams(max_tokens=8, temperature=1.0)
        alone: tuple[int, ...] = ()
        for seed in range(5, 8):
            alone += Drive(eight.engine(), seed=1).run({name: prompt}, sampling=single, seed=seed)[name]
        assert together[name] == alone


def test_answers_that_are_handed_over_and_moved_are_the_same(eight: Eight) -> None:
    prompts = eight.mix(6)
    expected = Drive(eight.engine(), seed=0).run(prompts)
    deployment = Deployment(eight, 3, random.Random(1))
    assert run_moving(deployment, prompts, GREEDY) > 5
    assert {name: deployment.tokens(name) for name in prompts} == expected
