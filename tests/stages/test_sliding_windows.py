"""Models whose layers have sliding windows: tokens equal `generate`, however the work is cut and moved."""

from __future__ import annotations

import random

import pytest

from epd.kv.scheduling import SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.stages.decoder.decoder import FusedDecoder
from tests.stages.conftest import Subject
from tests.stages.prompts import Drive
from tests.stages.split_deployment import GREEDY, Deployment
from tests.stages.test_moving import run_moving


def check(subject: Subject, drive: Drive, count: int) -> None:
    """All requests of the mix get the tokens of `generate`, and nothing is left behind."""
    prompts = subject.mix(count)
    tokens = drive.run(prompts)
    assert tokens == {name: prompt.expected for name, prompt in prompts.items()}
    assert drive.engine.kv.usage == 0


@pytest.mark.parametrize(("count", "chunk"), [(1, 4096), (4, 4096), (4, 1), (16, 7), (16, 64)])
def test_tokens_equal_generate(windowed: Subject, count: int, chunk: int) -> None:
    config = SchedulerConfig(max_chunk_tokens=chunk, max_num_batched_tokens=max(chunk, 32))
    engine = windowed.engine(config=config, enable_prefix_caching=False)
    check(windowed, Drive(engine, seed=chunk + count), count)
    assert isinstance(engine._runner._decoder, FusedDecoder)


@pytest.mark.parametrize("mode", ["recompute", "offload"])
@pytest.mark.parametrize("caching", [False, True], ids=["no prefix cache", "prefix cache"])
def test_preemption_changes_no_token(windowed: Subject, mode: str, caching: bool) -> None:
    longest = max(len(prompt.plan) for prompt in windowed.prompts)
    config = SchedulerConfig(max_chunk_tokens=32, preemption=mode)  # type: ignore[arg-type]
    engine = windowed.engine(
        config=config, block_size=4, num_kv_tokens=2 * longest + 24, enable_prefix_caching=caching
    )
    for seed in range(2):
        check(windowed, Drive(engine, seed), 12)
    assert engine.scheduler.num_preempted > 0, "the pool was meant to be too small"


def test_several_answers_share_their_prompt(windowed: Subject) -> None:
    prompt = windowed.prompts[2]
    sampling = SamplingParams(max_tokens=10, temperature=1.0, n=4)
    together = Drive(windowed.engine(), seed=0).run({"r": prompt}, sampling=sampling, seed=5)["r"]
    alone: tuple[int, ...] = ()
    for seed in range(5, 9):
        single = SamplingParams(max_tokens=10, temperature=1.0)
        alone += Drive(windowed.engine(), seed=1).run({"r": prompt}, sampling=single, seed=seed)["r"]
    assert together == alone
    assert len(set(alone)) > 4, "different seeds should give different answers"


@pytest.mark.parametrize("seed", range(2))
def test_answers_go_on_at_decode_workers_and_move_between_them(windowed: Subject, seed: int) -> None:
    prompts = windowed.mix(8)
    deployment = Deployment(windowed, 3, random.Random(seed))
    assert run_moving(deployment, prompts, GREEDY) > 5
    assert {name: deployment.tokens(name) for name in prompts} == {
        name: prompt.expected for name, prompt in prompts.items()
    }
