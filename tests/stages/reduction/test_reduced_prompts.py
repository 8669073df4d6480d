"""Reduced prompts answer as transformers does with just the kept tokens, at the positions that they had."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from epd.encode.encoder_cache import CachedGroup
from epd.encoders import FrameSampling, PromptPlan
from epd.encoders.groups import prompt_identity
from epd.encoders.reduction import reduce_prompt
from epd.models import embedded_model_path
from epd.reduction import SELECTION_METHODS, ReductionPolicy
from epd.stages.encode.encoder_pool import EmbeddingSplicer, EncoderPool
from epd.transfer.connectors import Ticket
from tests.colocated import ColocatedPipeline, EncodedMedia
from tests.encoders.families import QUESTION, Family
from tests.serve_app.deployments import Question, deployed
from tests.stages.encode.workers import SAMPLING, clip_of
from tests.stages.reduction.conftest import NUM_FRAMES

MAX_TOKENS = 6

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


def kept_inputs(
    pipeline: ColocatedPipeline, encoded: EncodedMedia, prompt: PromptPlan, model: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings [1, T, C] and positions [3, 1, T] of the prompt, with the kept tokens in their places."""
    embeds = model.get_input_embeddings()(torch.from_numpy(prompt.token_ids))
    positions = torch.from_numpy(prompt.positions.copy())
    splicer = EmbeddingSplicer(pipeline.adapter, prompt)
    for group, embeddings in encoded.groups:
        placed = splicer.push(group, embeddings)
        if placed is not None:
            assert placed.positions is not None
            embeds[placed.indices] = placed.embeddings.rows
            positions[:, placed.indices] = torch.from_numpy(placed.positions)
    return embeds[None], positions[:, None]


@torch.inference_mode()
def their_tokens(
    model: Any, embeds: torch.Tensor, positions: torch.Tensor, next_position: int, count: int
) -> list[int]:
    """Greedy, one token at a time, by transformers' own decoder and cache."""
    cache, tokens = DynamicCache(), []
    for number in range(count):
        hidden = model.model.language_model(
            inputs_embeds=embeds, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state
        tokens.append(int(model.lm_head(hidden[:, -1]).argmax()))
        embeds = model.get_input_embeddings()(torch.tensor([[tokens[-1]]]))
        positions = torch.full((3, 1, 1), next_position + number)
    return tokens


@pytest.mark.parametrize("method", SELECTION_METHODS)
def test_tokens_equal_transformers_with_the_kept_tokens_alone(
    method: str,
    pipeline: ColocatedPipeline,
    encoded: EncodedMedia,
    questions: list[str],
    reference: Any,
) -> None:
    policy = ReductionPolicy(method, 0.2)
    context = pipeline.prefill_encoded(encoded, reduction=policy)
    for question, answer in zip(questions, pipeline.answer_all(context, questions), strict=True):
        prompt = reduce_prompt(pipeline.adapter.plan_prompt(encoded.plans, question), policy)
        embeds, positions = kept_inputs(pipeline, encoded, prompt, reference)
        count = len(answer.token_ids)
        assert answer.token_ids == tuple(
            their_tokens(reference, embeds, positions, prompt.next_position, count)
        )


@pytest.mark.parametrize("retention", [0.5, 0.1])
def test_prompt_and_cache_shrink_by_what_is_dropped(
    retention: float, pipeline: ColocatedPipeline, encoded: EncodedMedia, clip: Path
) -> None:
    whole = pipeline.prefill_encoded(encoded)
    reduced = pipeline.prefill_media(
        [clip], num_frames=NUM_FRAMES, reduction=ReductionPolicy("evs", retention)
    )
    assert whole.request_id is not None
    assert reduced.request_id is not None
    kv = pipeline.engine.kv
    before, kept = encoded.plans[0].num_tokens, round(retention * encoded.plans[0].num_tokens)
    dropped = kv.num_tokens(whole.request_id) - kv.num_tokens(reduced.request_id)
    assert dropped == before - kept
    blocks = [len(kv.block_table(each.request_id)) for each in (whole, reduced) if each.request_id]
    assert abs(blocks[0] - blocks[1] - dropped / kv.block_size) <= 1
    usage = pipeline.answer(reduced, "How many shapes are there?", max_tokens=1).usage
    assert (usage.visual_tokens, usage.visual_tokens_before) == (kept, before)


def test_text_stays_where_it_was(family: Family) -> None:
    """Whatever the family puts between its frames, and however it numbers positions."""
    plan = family.plan(clip_of(family), SAMPLING)
    whole = family.adapter.plan_prompt([plan], QUESTION)
    reduced = reduce_prompt(whole, ReductionPolicy("evs", 0.5))
    if plan.is_joined_whole:
        assert np.array_equal(reduced.token_ids, whole.token_ids)
        return

    def text_of(prompt: PromptPlan) -> tuple[np.ndarray, np.ndarray]:
        is_text = np.ones(len(prompt), dtype=bool)
        for unit in prompt.media[0].units:
            is_text[unit.offset : unit.stop] = False
        return prompt.token_ids[is_text], prompt.positions[:, is_text]

    assert reduced.num_visual_tokens == pytest.approx(0.5 * plan.num_tokens, abs=0.5)
    assert all(
        np.array_equal(ours, theirs) for ours, theirs in zip(text_of(reduced), text_of(whole), strict=True)
    )
    assert reduced.next_position == whole.next_position


def test_all_tokens_kept_is_no_reduction(pipeline: ColocatedPipeline, encoded: EncodedMedia) -> None:
    prompt = pipeline.adapter.plan_prompt(encoded.plans, "How many?")
    assert reduce_prompt(prompt, ReductionPolicy("random", 1.0)) is prompt


def test_what_is_kept_is_part_of_what_tokens_are(pipeline: ColocatedPipeline, encoded: EncodedMedia) -> None:
    """No keys and values are shared between policies; between questions under one policy all are."""

    def identity(policy: ReductionPolicy, question: str = "How many?") -> np.ndarray:
        prompt = reduce_prompt(pipeline.adapter.plan_prompt(encoded.plans, question), policy)
        rows = prompt_identity(prompt, ["clip"]).rows[: prompt.prefix_length]
        return rows[rows[:, 0] < 0]

    rows = identity(ReductionPolicy("evs", 0.25))
    assert np.array_equal(rows, identity(ReductionPolicy("evs", 0.25), "What appears first?"))
    for other in (ReductionPolicy("random", 0.25), ReductionPolicy("evs", 0.3), ReductionPolicy("evs", 1.0)):
        others = identity(other)
        length = min(len(rows), len(others))
        assert not (rows[:length] == others[:length]).all(axis=1).any()


@pytest.mark.parametrize("topology", ["1epd", "2e1p1d"])
def test_the_app_answers_as_the_colocated_pipeline_under_every_policy(
    topology: str, pipeline: ColocatedPipeline, clip: Path, questions: list[str]
) -> None:
    """Also where the same video has been seen under another policy, or under the same one before."""
    policies = [ReductionPolicy("balanced", 0.25), ReductionPolicy(), ReductionPolicy("evs", 0.1)]
    asked = [(policy, text) for text in questions[:2] for policy in policies]
    wanted = [
        pipeline.ask([clip], text, num_frames=6, reduction=policy, max_tokens=10).token_ids
        for policy, text in asked
    ]

    async def run() -> None:
        async with deployed(embedded_model_path(), topology) as deployment:
            answers = [
                await deployment.ask(Question((clip,), text), reduction=policy) for policy, text in asked
            ]
            assert [answer.tokens for answer in answers] == wanted
            ends = [answer.end for answer in answers]
            assert all(end is not None for end in ends)
            shares = [end.usage.visual_tokens / end.usage.visual_tokens_before for end in ends if end]
            assert shares == pytest.approx([0.25, 1.0, 0.1] * 2, abs=0.02)
            repeated = [end.cached_tokens / end.usage.prompt_tokens for end in ends[3:] if end]
            assert min(repeated) > 0.3
            await deployment.settle()

    asyncio.run(run())


def test_tokens_sent_to_prefill_fall_with_retention_whatever_the_number_of_encoders(
    pipeline: ColocatedPipeline, clip: Path, questions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a method that chooses from each window alone, here a unit, as is a group."""
    monkeypatch.setattr("epd.encoders.reduction.reading.WINDOW_TOKENS", 15)
    policies = [ReductionPolicy("uniform", share) for share in (0.1, 0.25, 0.5, 1.0)]
    sampling = FrameSampling(num_frames=24)
    wanted = [
        pipeline.ask([clip], questions[0], num_frames=24, reduction=policy, max_tokens=10).token_ids
        for policy in policies
    ]
    received: list[int] = []
    receive = EncoderPool.receive

    def counted(pool: EncoderPool, ticket: Ticket, source: CachedGroup, source_pool: EncoderPool) -> None:
        received.append(source.num_embeddings)
        receive(pool, ticket, source, source_pool)

    monkeypatch.setattr(EncoderPool, "receive", counted)

    async def sent(topology: str) -> list[int]:
        async with deployed(embedded_model_path(), topology) as deployment:
            counts = []
            for policy, tokens in zip(policies, wanted, strict=True):
                received.clear()
                question = Question((clip,), questions[0], frame_sampling=sampling)
                answer = await deployment.ask(question, reduction=policy)
                assert answer.tokens == tokens
                assert answer.end is not None
                assert sum(received) == answer.end.usage.visual_tokens
                counts.append(sum(received))
            await deployment.settle()
            return counts

    alone = asyncio.run(sent("1e1pd"))
    assert alone == pytest.approx([0.1 * alone[3], 0.25 * alone[3], 0.5 * alone[3], alone[3]], abs=2)
    assert asyncio.run(sent("2e1pd")) == asyncio.run(sent("4e1p1d")) == alone
