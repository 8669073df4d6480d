"""Tests that a family's module imports: answers of the engine, however its passes are cut, are `generate`'s.

The module has a fixture `subject`, with at least three prompts and their expected tokens, and `folder`. For
answers of workers it has `mixes`: media of any kinds, and the tokens that answer QUESTION about 6 frames.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from epd import LLM
from epd.encoders import load_adapter
from epd.kv.pass_limits import SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.serve_app.verification import verify
from tests.stages.conftest import Subject, check
from tests.stages.prompts import Drive
from tests.stages.split_deployment import GREEDY, Deployment
from tests.stages.test_moving import run_moving
from tests.test_tile_families import handed_over

Mixes = list[tuple[list[Path], tuple[int, ...]]]
QUESTION = "What is shown? Ä, 漢"


@pytest.mark.parametrize(("count", "chunk"), [(1, 4096), (5, 4096), (5, 1), (10, 7)])
def test_chunked_and_packed(subject: Subject, count: int, chunk: int) -> None:
    """A chunk of 1 has one kind of token. Media that attend each other are computed at once."""
    config = SchedulerConfig(max_chunk_tokens=chunk, max_num_batched_tokens=max(chunk, 32))
    check(subject, Drive(subject.engine(config=config, enable_prefix_caching=False), seed=chunk), count)


@pytest.mark.parametrize("mode", ["recompute", "offload"])
@pytest.mark.parametrize("caching", [False, True], ids=["no prefix cache", "prefix cache"])
def test_preemption_changes_no_token(subject: Subject, mode: Any, caching: bool) -> None:
    longest = max(len(prompt.plan) for prompt in subject.prompts)
    config = SchedulerConfig(max_chunk_tokens=32, preemption=mode)
    options: dict[str, Any] = {"block_size": 4, "num_kv_tokens": longest + 48}
    engine = subject.engine(config=config, enable_prefix_caching=caching, **options)
    check(subject, Drive(engine, 0), 10)
    assert engine.scheduler.num_preempted > 0, "the pool was meant to be too small"


def test_several_answers_share_their_prompt(subject: Subject) -> None:
    prompt = {"r": subject.prompts[2]}
    sampling = SamplingParams(max_tokens=8, temperature=1.0, n=3)
    together = Drive(subject.engine(), seed=0).run(prompt, sampling=sampling, seed=5)["r"]
    single, alone = SamplingParams(max_tokens=8, temperature=1.0), tuple[int, ...]()
    for seed in range(5, 8):
        alone += Drive(subject.engine(), seed=1).run(prompt, sampling=single, seed=seed)["r"]
    assert together == alone


def test_answers_move_between_decode_workers(subject: Subject) -> None:
    prompts = subject.mix(6)
    deployment = Deployment(subject, 3, random.Random(0))
    assert run_moving(deployment, prompts, GREEDY) > 3
    assert {name: deployment.tokens(name) for name in prompts} == {
        name: prompt.expected for name, prompt in prompts.items()
    }


@pytest.mark.parametrize("topology", ["1epd", "1e1p1d"])
def test_answers_of_workers_and_from_their_caches(mixes: Mixes, folder: Path, topology: str) -> None:
    tokenizer, asked = load_adapter(folder).tokenizer, [*mixes, mixes[0], mixes[-1]]
    with LLM(folder, topology=topology, max_chunk_tokens=16, num_kv_tokens=4096) as llm:
        answers = [handed_over(llm, paths, QUESTION) for paths, _ in asked]
    assert answers == [tokenizer.decode(tokens, skip_special_tokens=True) for _, tokens in asked]


def test_epd_verify_says_equal(folder: Path, media: dict[str, Path]) -> None:
    reports = verify(folder, [media["image"], media["video"]])
    assert [report.is_equal for report in reports] == [True] * 3
