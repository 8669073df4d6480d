"""Two ranks choose by the heads of both: the tokens of one rank, whatever is reduced, batched and moved."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from epd.kv.pass_limits import SchedulerConfig
from epd.models import embedded_model_path
from epd.reduction import ReductionPolicy
from epd.stages.engine.generation import GenerationSettings
from tests.colocated import ColocatedPipeline, EncodedMedia
from tests.stages.prompts import Prompt
from tests.stages.ranks.test_split_ranks import Ranked, group_of
from tests.stages.reduction.prompts import (
    DRAWN,
    SMALL_WINDOW_TOKENS,
    Engines,
    answered_alone,
    drive,
    expected,
)

POLICIES = {
    "quickprefill": ReductionPolicy("quickprefill", 0.3),
    "fastkv": ReductionPolicy("fastkv", 0.1, 0.33),
    "mustdrop": ReductionPolicy("mustdrop", 0.2),
    "funnel": ReductionPolicy("funnel", 0.25),
    "whole": ReductionPolicy(),
}


@pytest.fixture(scope="module")
def mix(
    pipeline: ColocatedPipeline, engines: Engines, short: EncodedMedia, questions: list[str]
) -> dict[str, Prompt]:
    """Questions under every policy, and what one rank answers to each alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("epd.encoders.reduction.reading.WINDOW_TOKENS", SMALL_WINDOW_TOKENS)
        return answered_alone(engines, pipeline, short, questions[:2], POLICIES)


@pytest.fixture(scope="module")
def ranked(model: Any, pipeline: ColocatedPipeline) -> Iterator[Ranked]:
    """The embedded model in one process, and in two groups of two ranks."""
    groups = [group_of(embedded_model_path()) for _ in range(2)]
    subject: Any = SimpleNamespace(
        model=model, adapter=pipeline.adapter, settings=GenerationSettings(eos_ids=frozenset())
    )
    yield Ranked(subject, (groups[0], groups[1]))
    for group in groups:
        group.ranks.close()


def engine_of(ranked: Ranked, **options: Any) -> Any:
    ranked.workers = [ranked.groups[1]]
    return ranked.engine(**options)


@pytest.mark.parametrize("chunk", [7, 4096])
def test_any_batch_and_chunking_gives_the_tokens_of_one_rank(
    chunk: int, ranked: Ranked, mix: dict[str, Prompt]
) -> None:
    config = SchedulerConfig(max_chunk_tokens=chunk, max_num_batched_tokens=max(chunk, 20))
    engine = engine_of(ranked, config=config, enable_prefix_caching=True)
    assert drive(engine, chunk, mix) == expected(mix)
    assert engine.kv.usage == 0


def test_preemption_changes_no_token(ranked: Ranked, mix: dict[str, Prompt]) -> None:
    config = SchedulerConfig(max_chunk_tokens=100, preemption="offload")
    room = 2 * max(len(prompt.plan) for prompt in mix.values()) + 8
    engine = engine_of(ranked, config=config, num_kv_tokens=room, block_size=4)
    for seed in range(1, 3):
        assert drive(engine, seed, mix) == expected(mix)
    assert engine.scheduler.num_preempted > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (1, 2)])
def test_split_over_workers_gives_the_tokens_of_one_rank(
    sizes: tuple[int, int], ranked: Ranked, mix: dict[str, Prompt]
) -> None:
    deployment = ranked.deployment(*sizes)
    assert deployment.run(mix, DRAWN) == expected(mix)
    deployment.settle()
