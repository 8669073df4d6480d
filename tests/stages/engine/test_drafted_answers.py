"""Drafts change no token: whoever proposes, whatever is asked for, in any batch, preempted or moved."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from epd.kv.drafting import DraftConfig
from epd.kv.pass_limits import PreemptionMode, SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.stages.engine.engine import LanguageEngine
from epd.types import Int64Array
from tests.stages.conftest import Subject
from tests.stages.prompts import Drive
from tests.stages.test_moving import run_moving
from tests.stages.test_split_stages import Deployment

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

METHODS = ("prompt-lookup", "recycling", "auto")
GREEDY = SamplingParams(max_tokens=60)
DRAWN = SamplingParams(max_tokens=60, temperature=0.3, min_p=0.2)
PENALISED = SamplingParams(
    max_tokens=60, repetition_penalty=1.2, frequency_penalty=0.2, stop=("the",), min_tokens=9, logprobs=1
)
HOT = SamplingParams(max_tokens=80, temperature=1.7, top_k=40, top_p=0.95, presence_penalty=0.3, n=2)
LONG = SamplingParams(max_tokens=150)
KINDS = {"greedy": GREEDY, "drawn": DRAWN, "with penalties": PENALISED, "hot": HOT}


# By family, number of prompts and sampling: each method is held against the same answers.
_PLAIN: dict[tuple[str, int, SamplingParams], Drive] = {}


def plain_drive(subject: Subject, count: int, sampling: SamplingParams) -> Drive:
    """Returns what was answered to so many prompts without drafts; `tokens` by name."""
    key = subject.name, count, sampling
    if key not in _PLAIN:
        _PLAIN[key] = Drive(subject.engine(), seed=0)
        _PLAIN[key].run(subject.mix(count), sampling=sampling, seed=7)
    return _PLAIN[key]


def plain_tokens(subject: Subject, count: int, sampling: SamplingParams) -> dict[str, tuple[int, ...]]:
    drive = plain_drive(subject, count, sampling)
    return {name: drive.tokens(name) for name in subject.mix(count)}


def drafting_engine(subject: Subject, method: str, max_draft: int = 5, **options: object) -> LanguageEngine:
    """With `auto`, costs are set such that drafts always pay, for as long as any of their tokens holds."""
    engine = subject.engine(drafting=DraftConfig(method, max_draft), **options)
    assert engine._drafting is not None
    engine._drafting.statistics.cost = Free()  # type: ignore[assignment]
    return engine


class Free:
    """Costs of passes that take as long with drafts as without."""

    is_measured = True

    def record(self, num_sequences: int, num_drafted: int, seconds: float) -> None: ...

    def seconds(self, num_sequences: int, num_drafted: int) -> float:  # noqa: ARG002 # as PassCost has it
        return 1.0


@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_token(a_family: Subject, method: str, sampling: SamplingParams) -> None:
    plain, drafted = plain_drive(a_family, 5, sampling), Drive(drafting_engine(a_family, method), seed=0)
    expected = plain_tokens(a_family, 5, sampling)
    assert drafted.run(a_family.mix(5), sampling=sampling, seed=7) == expected
    for key, outputs in plain.outputs.items():
        with_drafts = drafted.outputs[key]
        assert [each.text for each in with_drafts] == [each.text for each in outputs]
        assert [each.finish_reason for each in with_drafts] == [each.finish_reason for each in outputs]
        for ours, theirs in zip(with_drafts, outputs, strict=True):
            assert ours.token.logprob == pytest.approx(theirs.token.logprob, abs=1e-4)
    counts = drafted.engine.counts
    assert counts.num_drafted_tokens >= counts.num_drafts > 0 or method == "auto"
    assert drafted.engine.kv.usage == 0


@pytest.mark.parametrize("method", METHODS)
def test_drafts_that_hold_save_passes(a_family: Subject, method: str) -> None:
    """Small random models repeat themselves when they go on for long: what drafting is for."""
    engine = drafting_engine(a_family, method)
    Drive(engine, seed=0).run(a_family.mix(5), sampling=LONG, seed=7)
    assert 0 < engine.counts.num_accepted_tokens <= engine.counts.num_drafted_tokens
    assert engine.counts.num_steps < plain_drive(a_family, 5, LONG).engine.counts.num_steps


@pytest.mark.parametrize("mode", ["recompute", "offload"])
@pytest.mark.parametrize("method", METHODS)
def test_preempted_answers_draft_on(a_family: Subject, method: str, mode: PreemptionMode) -> None:
    sampling = SamplingParams(max_tokens=60, temperature=0.4)
    expected = plain_tokens(a_family, 8, sampling)
    config = SchedulerConfig(preemption=mode)
    engine = drafting_engine(a_family, method, num_kv_tokens=512, config=config)
    assert Drive(engine, seed=1).run(a_family.mix(8), sampling=sampling, seed=7) == expected
    assert engine.scheduler.num_preempted > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_of_32_and_a_small_budget_give_the_same(a_family: Subject, method: str) -> None:
    """With fewer tokens in a pass than drafts, some are cut and some decodes wait."""
    sampling = replace(DRAWN, max_tokens=24)
    expected = plain_tokens(a_family, 32, sampling)
    config = SchedulerConfig(max_num_batched_tokens=48, max_chunk_tokens=32)
    engine = drafting_engine(a_family, method, max_draft=7, config=config)
    assert Drive(engine, seed=2).run(a_family.mix(32), sampling=sampling, seed=7) == expected


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_split_and_moved_answers_draft_on(
    a_family: Subject, method: str, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = a_family.mix(6)
    expected = Deployment(a_family, 1, random.Random(0)).run(prompts, sampling)
    engine = type(a_family).engine

    def drafting(subject: Subject, **options: object) -> LanguageEngine:
        made = engine(subject, drafting=DraftConfig(method, 4), **options)
        made._drafting.statistics.cost = Free()  # type: ignore[union-attr,assignment]
        return made

    monkeypatch.setattr(type(a_family), "engine", drafting)
    deployment = Deployment(a_family, 2, random.Random(1))
    assert run_moving(deployment, prompts, sampling) > 5
    assert {name: deployment.tokens(name) for name in prompts} == expected
    num_drafted = sum(stage.engine.counts.num_drafted_tokens for stage in deployment.decode.values())
    assert num_drafted > 0 or method == "auto"


class WrongDrafts:
    """Proposes tokens at random, and too many."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def propose(self, token_ids: Int64Array, room: int, num_sequences: int) -> list[int]:  # noqa: ARG002
        return [self._rng.randrange(200) for _ in range(min(room, self._rng.randrange(32)))]

    def learn(
        self,
        token_ids: Int64Array,  # noqa: ARG002
        drafts: Sequence[int],
        sampled: Sequence[int],
        num_open: int | None = None,  # noqa: ARG002
    ) -> None:
        assert len(sampled) == len(drafts) + 1


@pytest.mark.parametrize("seed", range(3))
def test_wrong_drafts_cost_passes_alone(a_family: Subject, seed: int) -> None:
    engine = drafting_engine(a_family, "recycling")
    assert engine._drafting is not None
    engine._drafting.for_sequence = lambda: WrongDrafts(seed)  # type: ignore[method-assign]
    prompts = a_family.mix(10)
    assert Drive(engine, seed=seed).run(prompts) == {name: each.expected for name, each in prompts.items()}
    assert engine.counts.num_drafted_tokens > 10 * engine.counts.num_accepted_tokens
