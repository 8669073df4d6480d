"""Models whose layers have a recurrent state: tokens equal `generate`, however the work is cut and moved."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from epd.errors import UnsupportedModelError
from epd.kv.drafting import DraftConfig
from epd.kv.pass_limits import PreemptionMode, SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.stages.decoder.decoder import FusedDecoder
from epd.stages.decoder.rank_cut import check_divisible
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerateRequest
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.packed_pass import Segment
from tests.stages.conftest import Subject, check
from tests.stages.engine.test_drafted_answers import DRAWN, HOT, PENALISED
from tests.stages.prompts import Drive, draft_in_part, expected_texts
from tests.stages.split_deployment import GREEDY, Deployment
from tests.stages.test_moving import run_moving


def test_prefix_hits_give_the_same_tokens_and_save_work(recurrent: Subject) -> None:
    """A prompt that comes again begins with the state after its last whole block."""
    engine = recurrent.engine(enable_prefix_caching=True)
    check(recurrent, Drive(engine, seed=1), 5)
    first = engine.counts.num_computed_tokens
    check(recurrent, Drive(engine, seed=2), 5)
    again = engine.counts.num_computed_tokens - first
    size, prompts = engine.kv.block_size, recurrent.prompts
    rest = sum(len(prompt.plan) - (len(prompt.plan) - 1) // size * size for prompt in prompts)
    assert again == rest + sum(len(prompt.expected) - 1 for prompt in prompts)


@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_drafts_that_hold_are_taken_by_the_state_of_the_next_pass(
    recurrent: Subject, mode: PreemptionMode
) -> None:
    """With prefix hits, answers that give way, and passes with less room than the drafts that held."""
    prompts = recurrent.mix(8)
    longest = max(len(prompt.plan) for prompt in prompts.values())
    engine = recurrent.engine(
        drafting=DraftConfig("recycling"),
        config=SchedulerConfig(max_num_batched_tokens=12, max_chunk_tokens=12, preemption=mode),
        num_kv_tokens=longest + 48,
        block_size=4,
        enable_prefix_caching=True,
    )
    draft_in_part(engine, expected_texts(prompts))
    for seed in range(2):
        check(recurrent, Drive(engine, seed), 8)
    counts = engine.counts
    assert counts.num_drafted_tokens > counts.num_accepted_tokens > 0
    assert counts.num_cached_tokens > 0
    assert engine.scheduler.num_preempted > 0


@pytest.mark.parametrize("sampling", [DRAWN, PENALISED, HOT], ids=["drawn", "with penalties", "hot"])
def test_drafts_change_no_token(recurrent: Subject, sampling: SamplingParams) -> None:
    """Of several answers to a prompt, each has a state of its own."""
    prompts, plain = recurrent.mix(5), Drive(recurrent.engine(), seed=0)
    expected = plain.run(prompts, sampling=sampling, seed=11)
    answers = {key: tuple(each.token.token_id for each in outputs) for key, outputs in plain.outputs.items()}
    engine = recurrent.engine(drafting=DraftConfig("recycling"))
    draft_in_part(engine, [(prompts[name], tokens) for (name, _), tokens in answers.items()])
    assert Drive(engine, seed=1).run(prompts, sampling=sampling, seed=11) == expected
    assert engine.counts.num_drafted_tokens > engine.counts.num_accepted_tokens > 0
    assert engine.counts.num_steps < plain.engine.counts.num_steps


def test_drafts_that_hold_go_with_answers_that_move(
    recurrent: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, sampling, engine = recurrent.mix(6), SamplingParams(max_tokens=40), type(recurrent).engine
    expected = Drive(recurrent.engine(), seed=0).run(prompts, sampling=sampling)
    texts = [(prompt, expected[name]) for name, prompt in prompts.items()]

    def drafting(subject: Subject, **options: object) -> LanguageEngine:
        made = engine(subject, drafting=DraftConfig("recycling"), **options)
        draft_in_part(made, texts)
        return made

    monkeypatch.setattr(type(recurrent), "engine", drafting)
    deployment, moved_behind = Deployment(recurrent, 3, random.Random(1)), list[int]()
    adopt = LanguageEngine.adopt

    def noting(engine: LanguageEngine, request: GenerateRequest, *known: Any) -> None:
        adopt(engine, request, *known)
        scheduled = next(each for each in engine.scheduler.running if each.request_id == request.request_id)
        moved_behind.append(scheduled.num_tokens - 1 - scheduled.num_computed)

    monkeypatch.setattr(LanguageEngine, "adopt", noting)
    assert run_moving(deployment, prompts, sampling) > 5
    assert {name: deployment.tokens(name) for name in prompts} == expected
    assert max(moved_behind) > 0, "drafts that held were to be repeated elsewhere"


def test_a_second_question_begins_with_the_state_after_the_media(recurrent: Subject) -> None:
    prompt = recurrent.prompts[2]
    engine = recurrent.engine(enable_prefix_caching=True)
    Drive(engine, seed=0).run({"first": prompt})
    plans = [item.plan for item in prompt.plan.media]
    other = type(prompt)(
        recurrent.adapter.plan_prompt(plans, "And where?"), prompt.mm_hashes, prompt.groups, ()
    )
    alone = Drive(recurrent.engine(enable_prefix_caching=False), seed=0).run({"second": other})
    before = engine.counts.num_cached_tokens
    assert Drive(engine, seed=0).run({"second": other}) == alone
    size = engine.kv.block_size
    assert engine.counts.num_cached_tokens - before == other.plan.prefix_length // size * size > 0


def test_what_cannot_be_computed_is_refused_in_one_line(recurrent: Subject) -> None:
    with pytest.raises(UnsupportedModelError, match="4 heads and 2 of keys and values; allowed: 1, 2; set"):
        check_divisible(recurrent.model, 4)
    with pytest.raises(UnsupportedModelError, match="of another kind; allowed"):
        recurrent.engine(by_modules=True)


def test_a_pass_that_raises_after_it_was_computed_reads_the_same_states_again(
    recurrent: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a pass has written counts once it is booked, so it is computed again in halves."""
    computed: list[int] = []
    run = ModelRunner.run

    def failing(runner: ModelRunner, segments: Sequence[Segment]) -> Tensor:
        logits = run(runner, segments)
        computed.append(len(segments))
        if len(segments) > 1:
            raise RuntimeError("after the states were written")
        return logits

    monkeypatch.setattr(ModelRunner, "run", failing)
    check(recurrent, Drive(recurrent.engine(enable_prefix_caching=True), seed=3), 5)
    assert max(computed) > 1


def test_a_second_prompt_at_a_decode_worker_gets_what_is_new_and_its_state(recurrent: Subject) -> None:
    deployment = Deployment(recurrent, 1, random.Random(0))
    prompt = recurrent.prompts[2]
    for name in ("first", "second"):
        request = prompt.request(name)
        ticket = deployment.decode["d0"].reserve(name, "p0", request.identity, GREEDY)
        assert ticket is not None
        assert (ticket.num_cached > 0) == (name == "second")
        deployment.prefill.submit(request, ticket)
        for group in prompt.groups:
            deployment.prefill.engine.add_embeddings(name, group)
        while not deployment.is_over(name):
            deployment.step()
        assert deployment.tokens(name) == prompt.expected
    deployment.settle()


def test_kernels_are_launched_before_requests_and_leave_the_caches_as_they_were(recurrent: Subject) -> None:
    """By a layer with attention, the fourth. Layers with states do not keep passes from being captured."""
    runner = recurrent.engine()._runner
    decoder, caches = runner._decoder, runner.pools.layer(0)
    assert isinstance(decoder, FusedDecoder)
    for cache in caches:
        cache.fill_(3.0)
    with torch.inference_mode():
        decoder.warm_up(caches)
    assert all((cache == 3.0).all() for cache in caches)
    assert not decoder.waits
