"""Models with layers of several kinds: tokens equal `generate`, however the work is cut and moved.

What one kind has alone is in `test_sliding_windows.py` and `test_recurrent_states.py`.
"""

from __future__ import annotations

import random

import pytest

from epd.kv.pass_limits import SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.stages.decoder.decoder import FusedDecoder
from tests.stages.conftest import Subject, check
from tests.stages.prompts import Drive
from tests.stages.split_deployment import GREEDY, Deployment
from tests.stages.test_moving import run_moving


@pytest.mark.parametrize(("count", "chunk"), [(1, 4096), (None, 4096), (None, 1), (16, 7), (16, 64)])
def test_tokens_equal_generate(other_layers: Subject, count: int | None, chunk: int) -> None:
    """count: None for each prompt once."""
    count = count or len(other_layers.prompts)
    config = SchedulerConfig(max_chunk_tokens=chunk, max_num_batched_tokens=max(chunk, 32))
    engine = other_layers.engine(config=config, enable_prefix_caching=False)
    check(other_layers, Drive(engine, seed=chunk + count), count)
    assert isinstance(engine._runner._decoder, FusedDecoder)


@pytest.mark.parametrize("mode", ["recompute", "offload"])
@pytest.mark.parametrize("caching", [False, True], ids=["no prefix cache", "prefix cache"])
def test_preemption_changes_no_token(other_layers: Subject, mode: str, caching: bool) -> None:
    longest = max(len(prompt.plan) for prompt in other_layers.prompts)
    config = SchedulerConfig(max_chunk_tokens=32, preemption=mode)  # type: ignore[arg-type]
    engine = other_layers.engine(
        config=config, block_size=4, num_kv_tokens=longest + 48, enable_prefix_caching=caching
    )
    for seed in range(2):
        check(other_layers, Drive(engine, seed), 12)
    assert engine.scheduler.num_preempted > 0, "the pool was meant to be too small"


def test_several_answers_share_their_prompt(other_layers: Subject) -> None:
    prompt = other_layers.prompts[2]
    sampling = SamplingParams(max_tokens=10, temperature=1.0, n=4)
    together = Drive(other_layers.engine(), seed=0).run({"r": prompt}, sampling=sampling, seed=5)["r"]
    alone: tuple[int, ...] = ()
    for seed in range(5, 9):
        single = SamplingParams(max_tokens=10, temperature=1.0)
        alone += Drive(other_layers.engine(), seed=1).run({"r": prompt}, sampling=single, seed=seed)["r"]
    assert together == alone
    assert len(set(alone)) > 4, "different seeds should give different answers"


@pytest.mark.parametrize("seed", range(2))
def test_answers_go_on_at_decode_workers_and_move_between_them(other_layers: Subject, seed: int) -> None:
    """A state travels with the last of the keys and values."""
    prompts = other_layers.mix(8)
    deployment = Deployment(other_layers, 3, random.Random(seed))
    assert run_moving(deployment, prompts, GREEDY) > 5
    assert {name: deployment.tokens(name) for name in prompts} == {
        name: prompt.expected for name, prompt in prompts.items()
    }


def test_several_answers_go_on_at_a_decode_worker(other_layers: Subject) -> None:
    sampling = SamplingParams(max_tokens=10, temperature=1.0, n=3)
    prompts = {"r": other_layers.prompts[2]}
    together = Drive(other_layers.engine(), seed=0).run(prompts, sampling=sampling, seed=3)
    deployment = Deployment(other_layers, 1, random.Random(0))
    assert deployment.run(prompts, sampling) == together
    deployment.settle()
