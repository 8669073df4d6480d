"""Windows that the language model computes whole and keeps in part, against transformers' own cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from transformers import AttentionInterface, DynamicCache

from epd.encoders import PromptPlan, load_adapter
from epd.encoders.reduction.merging import MergedNeighbours
from epd.engine_config import EngineConfig
from epd.errors import InfeasibleError
from epd.kv.kv_cache import KVCacheManager
from epd.kv.kv_room import KVCacheSpec
from epd.kv.pass_limits import SchedulerConfig
from epd.kv.prefix_cache import token_identity
from epd.kv.scheduled_request import PrunedRange, ScheduledRequest, SchedulerOutput
from epd.kv.scheduling import Scheduler
from epd.models import embedded_model_path
from epd.reduction import ReductionPolicy, layer_counts
from epd.stages.engine.generation import GenerationSettings
from epd.stages.reduction.pruning import smallest_keys
from epd.stages.reduction.question_views import QuestionView
from tests.colocated import ColocatedPipeline, EncodedMedia
from tests.kv.test_scheduler_machine import VOCABULARY, SchedulerMachine
from tests.stages.kv_values import tokens_at
from tests.stages.prompts import Prompt
from tests.stages.reduction.conftest import NUM_FRAMES
from tests.stages.reduction.prompts import (
    DRAWN,
    SMALL_WINDOW_TOKENS,
    Engines,
    answered_alone,
    drive,
    expected,
    placed,
    reduced_plan,
)
from tests.stages.test_split_stages import Deployment

# The slow twin

Keep = Callable[[DynamicCache, int, int], None]  # cuts a cache: tokens before the window, tokens kept of it


def keep_smallest(cache: DynamicCache, num_before: int, num_kept: int) -> None:
    """Of each layer's keys past `num_before`, those of least norm: ranked in plain Python."""
    for layer in cache.layers:
        new = layer.keys[0, :, num_before:].double()
        norms = (new**2).sum((0, 2)).sqrt().tolist()
        golden = 0.6180339887498949
        ranks = sorted(range(len(norms)), key=lambda i: (rounded(norms[i]), i * golden % 1))
        kept = torch.tensor([*range(num_before), *(num_before + i for i in sorted(ranks[:num_kept]))])
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]


def keep_as(ours: torch.Tensor) -> Keep:
    """Keep the tokens that are in `ours` ([layers, 2, T, Hkv, D]), which must be those of least norm.

    Norms that lie within one step of the rounding may come in either order: matrix products of two processors
    differ in their last bits.
    """

    def keep(cache: DynamicCache, num_before: int, num_kept: int) -> None:
        for index, layer in enumerate(cache.layers):
            new = layer.keys[0, :, num_before:].transpose(0, 1).flatten(1).double()
            held = ours[index, 0, num_before : num_before + num_kept].flatten(1).double()
            chosen = torch.cdist(held, new).argmin(1)
            assert (chosen.diff() > 0).all()
            torch.testing.assert_close(held, new[chosen], atol=2e-3, rtol=1e-3)
            is_kept = torch.zeros(len(new), dtype=torch.bool).index_fill_(0, chosen, True)
            norms = new.norm(dim=1)
            assert norms[is_kept].max() <= norms[~is_kept].min() * (1 + 2**-11)
            kept = torch.cat([torch.arange(num_before), num_before + chosen])
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]

    return keep


def rounded(norm: float) -> float:
    """To 12 binary digits, halves up."""
    exponent = np.floor(np.log2(norm))
    return float(np.floor(norm / 2.0**exponent * 2**11 + 0.5) * 2.0**exponent)


@torch.inference_mode()
def their_answers(
    model: Any, encoded: EncodedMedia, prompts: list[PromptPlan], count: int, keep: Keep = keep_smallest
) -> list[tuple[int, ...]]:
    """Window by window through transformers' decoder, each layer of its cache cut; then every question."""
    (group_rows,) = (torch.cat([embeddings.rows for _, embeddings in encoded.groups]),)
    cache, prompt = DynamicCache(), prompts[0]
    (item,), (positions,) = prompt.media, prompt.reduction.positions if prompt.reduction else ()
    first = item.units[0].offset
    embed = model.get_input_embeddings()
    forward(model, cache, embed(torch.from_numpy(prompt.token_ids[:first])), prompt.positions[:, :first])
    start = 0
    for window, place in zip(item.windows, item.units, strict=True):
        stop = start + window.num_tokens
        forward(model, cache, group_rows[start:stop], positions[:, start:stop])
        keep(cache, place.offset, window.num_kept)
        start = stop
    return [their_answer(model, cache, each, count) for each in prompts]


def their_answer(model: Any, prefix: DynamicCache, prompt: PromptPlan, count: int) -> tuple[int, ...]:
    cache = DynamicCache()
    for index, layer in enumerate(prefix.layers):
        cache.update(layer.keys, layer.values, index)
    embed, at, tokens = model.get_input_embeddings(), prompt.prefix_length, list[int]()
    rows, positions = embed(torch.from_numpy(prompt.token_ids[at:])), prompt.positions[:, at:]
    while len(tokens) < count:
        hidden = forward(model, cache, rows, positions)
        tokens.append(int(model.lm_head(hidden[:, -1]).argmax()))
        rows = embed(torch.tensor([tokens[-1]]))
        positions = np.full((3, 1), prompt.next_position + len(tokens) - 1)
    return tuple(tokens)


def forward(model: Any, cache: DynamicCache, rows: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
    outputs = model.model.language_model(
        inputs_embeds=rows[None],
        position_ids=torch.from_numpy(positions)[:, None],
        past_key_values=cache,
        use_cache=True,
    )
    hidden: torch.Tensor = outputs.last_hidden_state
    return hidden


@pytest.mark.parametrize("retention", [0.5, 0.25, 0.1])
def test_tokens_equal_transformers_with_its_cache_cut(
    retention: float,
    pipeline: ColocatedPipeline,
    encoded: EncodedMedia,
    questions: list[str],
    reference: Any,
) -> None:
    policy = ReductionPolicy("quickprefill", retention)
    context = pipeline.prefill_encoded(encoded, reduction=policy)
    answers = [answer.token_ids for answer in pipeline.answer_all(context, questions)]
    prompts = [reduced_plan(pipeline, encoded, question, policy) for question in questions]
    assert len(prompts[0].media[0].windows) >= 3
    theirs = their_answers(reference, encoded, prompts, max(map(len, answers)))
    assert answers == [tokens[: len(ours)] for tokens, ours in zip(theirs, answers, strict=True)]


def test_each_layer_keeps_other_tokens_at_their_own_positions(
    pipeline: ColocatedPipeline, encoded: EncodedMedia, questions: list[str], reference: Any
) -> None:
    """Keys and values in the pool equal those in transformers' cut cache."""
    policy = ReductionPolicy("quickprefill", 0.2)
    context = pipeline.prefill_encoded(encoded, reduction=policy)
    assert context.request_id is not None
    prompt = reduced_plan(pipeline, encoded, questions[0], policy)
    kv, (pool,) = pipeline.engine.kv, pipeline.engine.pools.groups
    slots = torch.tensor(kv.block_table(context.request_id))[:, None] * 16 + torch.arange(16)
    ours = tokens_at(pool, slots.flatten()[: prompt.prefix_length])  # [layers, 2, T, Hkv, D]
    caches: list[DynamicCache] = []

    def remember(_: Any, cache: DynamicCache, *__: Any) -> tuple[int, ...]:
        caches.append(cache)
        return ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "their_answer", remember)
        their_answers(reference, encoded, [prompt], 1, keep_as(ours))
    for index, layer in enumerate(caches[0].layers):
        theirs = torch.stack([layer.keys[0], layer.values[0]]).transpose(1, 2)
        torch.testing.assert_close(ours[index], theirs, atol=2e-3, rtol=1e-3)


# What is held


@pytest.mark.parametrize("retention", [0.5, 0.25, 0.05])
def test_cache_holds_what_was_planned_and_no_more(
    retention: float, pipeline: ColocatedPipeline, clip: Path
) -> None:
    kv = pipeline.engine.kv
    whole = pipeline.prefill_media([clip], num_frames=NUM_FRAMES)
    reduced = pipeline.prefill_media(
        [clip], num_frames=NUM_FRAMES, reduction=ReductionPolicy("quickprefill", retention)
    )
    assert whole.request_id is not None
    assert reduced.request_id is not None
    num_tokens = whole.plans[0].num_tokens
    kept = round(retention * num_tokens)
    expected = kv.num_tokens(whole.request_id) - num_tokens + kept
    assert kv.num_tokens(reduced.request_id) == expected
    assert len(kv.block_table(reduced.request_id)) == -(-(expected + 1) // kv.block_size)
    usage = pipeline.answer(reduced, "How many shapes are there?", max_tokens=1).usage
    assert (usage.visual_tokens, usage.visual_tokens_before) == (kept, num_tokens)


def test_all_tokens_are_computed_and_some_kept(pipeline: ColocatedPipeline, encoded: EncodedMedia) -> None:
    counts = pipeline.engine.counts
    before = counts.num_computed_tokens
    context = pipeline.prefill_encoded(encoded, reduction=ReductionPolicy("quickprefill", 0.1))
    text = len(context.prefix_ids) - round(0.1 * encoded.plans[0].num_tokens)
    assert counts.num_computed_tokens - before == text + encoded.plans[0].num_tokens


@pytest.mark.parametrize("retention", [1.0, 0.9999])
def test_windows_that_keep_all_change_no_token(
    retention: float, pipeline: ColocatedPipeline, encoded: EncodedMedia, questions: list[str]
) -> None:
    whole = pipeline.answer_all(pipeline.prefill_encoded(encoded), questions)
    context = pipeline.prefill_encoded(encoded, reduction=ReductionPolicy("quickprefill", retention))
    same = pipeline.answer_all(context, questions)
    assert [answer.token_ids for answer in same] == [answer.token_ids for answer in whole]
    assert same[0].usage.visual_tokens == encoded.plans[0].num_tokens


def test_a_question_leaves_the_context_as_it_was(
    pipeline: ColocatedPipeline, encoded: EncodedMedia, questions: list[str]
) -> None:
    policy = ReductionPolicy("quickprefill", 0.15)

    def alone(question: str) -> tuple[int, ...]:
        return pipeline.answer(pipeline.prefill_encoded(encoded, reduction=policy), question).token_ids

    context = pipeline.prefill_encoded(encoded, reduction=policy)
    one_by_one = [pipeline.answer(context, question).token_ids for question in questions]
    together = [answer.token_ids for answer in pipeline.answer_all(context, questions)]
    assert one_by_one == together == [alone(question) for question in questions]


def test_least_norms_are_kept_and_equal_ones_are_spread() -> None:
    keys = torch.ones(100, 2, 4)
    keys[[3, 50, 51]] = 0.5
    keys[::2] += 1e-5  # within rounding
    kept = smallest_keys(keys, 13).tolist()
    assert kept == sorted(kept)
    assert {3, 50, 51} <= set(kept)
    gaps = np.diff([0, *(each for each in kept if each not in (3, 50, 51)), 100])
    assert gaps.max() <= 20


# Among other requests


@pytest.fixture(scope="module")
def mix(
    pipeline: ColocatedPipeline, engines: Engines, short: EncodedMedia, questions: list[str]
) -> dict[str, Prompt]:
    """Questions with and without reduction, and what each is answered alone, window by window."""
    policies = {
        "half": ReductionPolicy("quickprefill", 0.5),
        "tenth": ReductionPolicy("quickprefill", 0.1),
        "before": ReductionPolicy("balanced", 0.2),
        "whole": ReductionPolicy(),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("epd.encoders.reduction.reading.WINDOW_TOKENS", SMALL_WINDOW_TOKENS)
        return answered_alone(engines, pipeline, short, questions[:2], policies)


@pytest.fixture(scope="module")
def chosen(
    pipeline: ColocatedPipeline, engines: Engines, short: EncodedMedia, questions: list[str]
) -> dict[str, Prompt]:
    policies = {"mustdrop": ReductionPolicy("mustdrop", 0.2), "whole": ReductionPolicy()}
    return answered_alone(engines, pipeline, short, questions, policies)


@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize("caching", [False, True], ids=["no prefix cache", "prefix cache"])
def test_any_batch_and_chunking_gives_the_same_tokens(
    chunk: int, caching: bool, engines: Engines, mix: dict[str, Prompt]
) -> None:
    config = SchedulerConfig(max_chunk_tokens=chunk, max_num_batched_tokens=max(chunk, 20))
    engine = engines.engine(config=config, enable_prefix_caching=caching)
    assert drive(engine, chunk, mix) == expected(mix)
    assert engine.kv.usage == 0


@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_preemption_changes_no_token(mode: str, engines: Engines, mix: dict[str, Prompt]) -> None:
    config = SchedulerConfig(max_chunk_tokens=100, preemption=mode)  # type: ignore[arg-type]
    room = 2 * max(len(prompt.plan) for prompt in mix.values()) + 8
    engine = engines.engine(config=config, block_size=4, num_kv_tokens=room, enable_prefix_caching=False)
    for seed in range(2):
        assert drive(engine, seed, mix) == expected(mix)
    assert engine.scheduler.num_preempted > 0, "the pool was meant to be too small"


def test_split_over_workers_gives_the_same_tokens(engines: Engines, mix: dict[str, Prompt]) -> None:
    deployment = Deployment(engines, 2, random.Random(1))  # type: ignore[arg-type]
    assert deployment.run(mix, DRAWN) == expected(mix)
    deployment.settle()


# Questions that choose for themselves


class TheirView:
    """MustDrop in transformers' own attention: each layer told what to read by an index list."""

    def __init__(self, visual: np.ndarray, counts: tuple[int, ...], question: int, keys: set[int]) -> None:
        """keys: tokens that stay."""
        self.counts, self.question, self.keys = counts, question, keys
        self.reads = [list(visual)] * len(counts)
        self.visual = set(visual.tolist())
        self.read_by_question: list[list[int]] = []  # by each layer

    def attend(self, module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        layer, length, num_new = module.layer_idx, key.shape[2], query.shape[2]
        group = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        logits = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
        at = torch.arange(length - num_new, length)
        seen = torch.arange(length)[None] <= at[:, None]
        if length > self.question:
            gone = sorted(self.visual - set(self.reads[layer]))
            seen[:, gone] = False
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        if length - num_new == self.question and layer + 1 < len(self.counts):
            self.drop(layer, weights[0].mean(0))
        if length - num_new == self.question and layer + 1 == len(self.counts):
            self.read_by_question = [list(map(int, read)) for read in self.reads]
            self.reads = [self.reads[-1]] * len(self.counts)  # of every layer the last survivors stay
        return (weights @ value).transpose(1, 2), None

    def drop(self, layer: int, weights: torch.Tensor) -> None:
        read = self.reads[layer]
        score = {
            j: max(float(weights[:, j].sum() / weights[:, read].sum()), float(weights[:, j].max()))
            for j in read
        }
        best = sorted(read, key=lambda j: (j not in self.keys, -rounded(score[j]), j))
        self.reads[layer + 1] = sorted(best[: self.counts[layer + 1]])


def key_set(encoded: EncodedMedia, prompt: PromptPlan, visual: np.ndarray, positions: np.ndarray) -> set[int]:
    """Of each unit the twentieth least like its mean, found in the prompt by their places in the video."""
    (whole,) = prompt.reduction.positions if prompt.reduction else ()
    rows = torch.cat([embeddings.rows for _, embeddings in encoded.groups]).double()
    size = prompt.num_visual_tokens_before // encoded.plans[0].num_units
    places = set[tuple[int, ...]]()
    for start in range(0, len(rows), size):
        unit = [row / row.norm() for row in rows[start : start + size]]
        mean = sum(unit[1:], unit[0]) / size
        alike = sorted(range(size), key=lambda token: float(unit[token] @ mean))
        places |= {tuple(whole[:, start + token].tolist()) for token in alike[: max(1, round(size / 20))]}
    return {int(token) for token in visual if tuple(positions[:, token].tolist()) in places}


@torch.inference_mode()
def answered_by_view(
    model: Any,
    pipeline: ColocatedPipeline,
    encoded: EncodedMedia,
    prompt: PromptPlan,
    policy: ReductionPolicy,
    count: int,
) -> tuple[tuple[int, ...], TheirView]:
    visual = np.concatenate([item.token_indices(0, len(item.units)) for item in prompt.media])
    wanted = policy.retention * prompt.num_visual_tokens_before
    num_layers = len(model.model.language_model.layers)
    embed, at, cache = model.get_input_embeddings(), prompt.prefix_length, DynamicCache()
    rows, positions = embed(torch.from_numpy(prompt.token_ids[:at])), prompt.positions.copy()
    for part in placed(pipeline, encoded, prompt):
        assert part.positions is not None
        rows[part.indices], positions[:, part.indices] = part.embeddings.rows, part.positions
    if policy.method == "mustdrop":
        keys = key_set(encoded, prompt, visual, positions)
    else:
        keys = {int(at) for part in placed(pipeline, encoded, prompt) for at in part.indices[part.is_key]}
    view = TheirView(visual, layer_counts(len(visual), wanted, num_layers), prompt.prefix_length, keys)
    AttentionInterface.register("their_view", view.attend)
    model.set_attn_implementation({"text_config": "their_view"})
    forward(model, cache, rows, positions[:, :at])
    tokens = their_answer(model, cache, prompt, count)
    model.set_attn_implementation({"text_config": "sdpa"})
    return tokens, view


@pytest.mark.parametrize(
    ("method", "retention"),
    [*(("mustdrop", each) for each in (0.4, 0.15, 0.1, 0.078)), ("funnel", 0.25), ("funnel", 0.1)],
)
def test_questions_read_what_their_text_selects(
    method: str,
    retention: float,
    pipeline: ColocatedPipeline,
    encoded: EncodedMedia,
    questions: list[str],
    reference: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same tokens are read by each layer, and answered: few answers turn on which of them are read."""
    ours: list[list[list[int]]] = []
    survivors = QuestionView.survivors

    def noted(view: QuestionView, num_tokens: int) -> torch.Tensor:
        ours.append([view._visual[chosen].tolist() for chosen in view._chosen])
        return survivors(view, num_tokens)

    monkeypatch.setattr(QuestionView, "survivors", noted)
    policy = ReductionPolicy(method, retention)
    context = pipeline.prefill_encoded(encoded, reduction=policy)
    for question, answer in zip(questions, pipeline.answer_all(context, questions), strict=True):
        prompt = reduced_plan(pipeline, encoded, question, policy)
        theirs, view = answered_by_view(reference, pipeline, encoded, prompt, policy, len(answer.token_ids))
        assert len(view.keys) == (
            encoded.plans[0].num_units if method == "mustdrop" else len(view.reads[-1])
        ), "of a funnel, nothing but keys survives"
        assert view.keys <= set(view.reads[-1]), "they survive"
        assert answer.token_ids == theirs
        assert len(view.reads[-1]) < len(view.visual)
        read = [each[: len(view.counts)] for each in ours]
        assert view.read_by_question in read
        assert ours[read.index(view.read_by_question)][-1] == view.reads[-1]


def test_a_cache_for_all_questions_and_a_choice_for_each(
    pipeline: ColocatedPipeline, encoded: EncodedMedia, questions: list[str]
) -> None:
    policy = ReductionPolicy("mustdrop", 0.15)
    context = pipeline.prefill_encoded(encoded, reduction=policy)
    one_by_one = [pipeline.answer(context, question).token_ids for question in questions]
    together = [answer.token_ids for answer in pipeline.answer_all(context, questions)]
    fresh = [
        pipeline.answer(pipeline.prefill_encoded(encoded, reduction=policy), question).token_ids
        for question in questions
    ]
    assert one_by_one == together == fresh


@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_choices_outlast_chunks_batches_and_preemption(
    mode: str, engines: Engines, chosen: dict[str, Prompt]
) -> None:
    config = SchedulerConfig(max_chunk_tokens=9, max_num_batched_tokens=24, preemption=mode)  # type: ignore[arg-type]
    room = 2 * max(len(prompt.plan) for prompt in chosen.values()) + 8
    for caching in (False, True):
        engine = engines.engine(
            config=config, block_size=4, num_kv_tokens=room, enable_prefix_caching=caching
        )
        for seed in range(2):
            assert drive(engine, seed, chosen) == expected(chosen)
        assert engine.scheduler.num_preempted > 0


@pytest.mark.parametrize("num_layers", [1, 6])
def test_what_the_last_layers_read_survives(num_layers: int, chosen: dict[str, Prompt]) -> None:
    view, plan = QuestionView(chosen["mustdrop0"].plan), chosen["mustdrop0"].plan
    view.begin(num_layers)
    read: list[set[int]] = []
    for layer in range(num_layers):
        tokens = view.tokens(layer, len(plan))
        assert len(tokens) == len(plan) - plan.num_visual_tokens + view.num_read()[layer]
        read.append(set(tokens.tolist()))
        if view.is_choosing(layer):
            view.choose(layer, torch.rand(3, len(tokens)), tokens)
        else:
            view.keep(layer)
    survivors = view.survivors(len(plan)).tolist()
    assert survivors == sorted(survivors)
    assert len(survivors) == len(plan) - plan.num_dropped
    assert plan.num_visual_tokens - plan.num_dropped == round(0.2 * plan.num_visual_tokens_before)
    assert all(set(survivors) <= each for each in read)
    assert read[0] == set(range(len(plan)))
    if num_layers > 1:
        assert read[-1] == set(survivors)


def test_neighbours_that_look_alike_are_merged_first() -> None:
    units = torch.eye(24)[:, :20].repeat(1, 1).view(1, 24, 20).clone()
    units[0, :, :] += torch.linspace(0, 1, 24)[:, None]
    same = [0, 1, 2, 6, 7, 8, 12, 13, 14]  # the first block of a 4 x 6 grid
    units[0, same] = units[0, 0].clone()
    merging = MergedNeighbours(4, 6)
    chosen = merging.choose(units, 16)
    assert len(chosen) == 16
    rows = merging.merge(units[0], chosen)
    assert len(set(chosen.tolist()) & set(same)) == 1
    (place,) = (i for i, token in enumerate(chosen.tolist()) if token in same)
    torch.testing.assert_close(rows[place], units[0, 0])
    for budget in (1, 2, 5, 24):
        assert len(merging.choose(units, budget)) == budget


# Frames that do not change


def test_a_frozen_video_is_encoded_once_a_group(model: Any, clip: Path) -> None:
    adapter = load_adapter(embedded_model_path())
    settings = GenerationSettings.of(model.generation_config, adapter.tokenizer.eos_token_id)
    pipelines = [
        ColocatedPipeline(model, adapter, settings=settings, config=EngineConfig(skip_static=each))
        for each in (None, 0.0, 100.0)
    ]
    first, exact, one = [each.encode_media([clip], num_frames=24) for each in pipelines]
    assert [each.encoder.num_skipped for each in pipelines[::2]] == [0, 12 - len(one.groups)]
    for (_, ours), (_, theirs) in zip(exact.groups, first.groups, strict=True):
        torch.testing.assert_close(ours.rows, theirs.rows, rtol=1e-5, atol=1e-5)


# The scheduler


def scheduled(name: str, tokens: list[int], *pruned: PrunedRange) -> ScheduledRequest:
    count = len(tokens)
    return ScheduledRequest(name, token_identity(tokens), count, count + 2, count, pruned=pruned)


def spans(output: SchedulerOutput) -> list[tuple[str, int, int, int]]:
    return [(each.request.request_id, each.start, each.stop, each.num_inputs) for each in output.chunks]


def test_a_prefix_that_ends_inside_a_window_is_computed_from_its_start() -> None:
    queue = Scheduler(SchedulerConfig(), KVCacheManager(KVCacheSpec((16,), 4)))
    first = scheduled("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], PrunedRange(3, 9, 14))
    queue.add(first)
    assert spans(queue.schedule()) == [("a", 0, 3, 3)]
    queue.advance(first, 3)
    assert spans(queue.schedule()) == [("a", 3, 9, 14)]
    queue.advance(first, 9)
    queue.remove(first)
    queue.add(scheduled("b", [1, 2, 3, 4, 5, 6, 70, 80, 90, 10], PrunedRange(3, 9, 14)))
    queue.add(scheduled("c", [1, 2, 3, 4, 5, 6, 7, 8, 9, 70], PrunedRange(3, 9, 14)))
    output = queue.schedule()
    assert spans(output) == [("b", 3, 9, 14), ("c", 9, 10, 1)]
    queue.kv.copied(output.copies)
    queue.check_integrity()


def test_a_window_waits_for_room_in_the_pass_but_never_for_ever() -> None:
    queue = Scheduler(SchedulerConfig(max_num_batched_tokens=10), KVCacheManager(KVCacheSpec((16,), 4)))
    queue.add(scheduled("a", [1, 2, 3]))
    queue.add(scheduled("b", [4, 5, 6], PrunedRange(0, 2, 8)))
    queue.add(scheduled("c", [7, 8, 9], PrunedRange(0, 2, 12)))
    queue.add(scheduled("d", [1, 1, 1]))
    assert spans(queue.schedule()) == [("a", 0, 3, 3), ("d", 0, 3, 3)]
    for request in (queue.running[0], queue.running[3]):
        queue.remove(request)
    assert spans(queue.schedule()) == [("b", 0, 2, 8)]
    queue.remove(queue.running[0])
    assert spans(queue.schedule()) == [("c", 0, 2, 12)], "larger than a pass, so it comes alone"


class PrunedMachine(SchedulerMachine):
    """The same machine with prompts of which ranges are pruned, or that drop tokens in the end."""

    has_states = False  # a server refuses to drop tokens of models with a recurrent state

    @rule(
        tokens=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30),
        cuts=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 12)), max_size=4),
        max_new=st.integers(1, 12),
        ready=st.floats(0, 1),
    )
    def add_pruned(
        self, tokens: list[int], cuts: list[tuple[int, int, int]], max_new: int, ready: float
    ) -> None:
        self.num_started += 1
        ranges, at = [], 0
        for gap, kept, pruned in cuts:
            if at + gap + kept < len(tokens):
                ranges.append(PrunedRange(at + gap - 1, at + gap - 1 + kept, kept + pruned))
                at += gap - 1 + kept
        request = ScheduledRequest(
            request_id=f"p{self.num_started}",
            identity=token_identity([token + VOCABULARY * len(ranges) for token in tokens]),
            num_prompt_tokens=len(tokens),
            max_total_tokens=len(tokens) + max_new,
            num_ready=int(ready * len(tokens)),
            pruned=tuple(ranges),
        )
        needed = max([request.max_total_tokens, *(each.start + each.num_inputs for each in ranges)])
        spec = self.scheduler.kv.spec
        if -(-needed // spec.block_size) > min(spec.num_blocks):
            with pytest.raises(InfeasibleError):
                self.scheduler.add(request)
        else:
            self.scheduler.add(request)
            self.requests[request.request_id] = request

    @rule(
        tokens=st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=24),
        question=st.integers(1, 6),
        kept=st.floats(0, 1),
        max_new=st.integers(1, 12),
        ready=st.floats(0, 1),
        copies=st.sampled_from([1, 1, 3]),
    )
    def add_dropping(
        self, tokens: list[int], question: int, kept: float, max_new: int, ready: float, copies: int
    ) -> None:
        """A prompt that keeps only some of its tokens once its last ones are computed, all at once."""
        self.num_started += 1
        start = max(0, len(tokens) - question)
        num_to_drop = int((1 - kept) * start)
        request = ScheduledRequest(
            request_id=f"d{self.num_started}",
            identity=token_identity(tokens),
            num_prompt_tokens=len(tokens),
            max_total_tokens=len(tokens) + max_new,
            num_ready=int(ready * len(tokens)),
            num_copies=copies,
            pruned=(PrunedRange(start, len(tokens), len(tokens) - start),),
            num_to_drop=num_to_drop,
        )
        try:
            self.scheduler.add(request)
        except InfeasibleError:
            spec = self.scheduler.kv.spec
            behind = -(-len(tokens) // spec.block_size) * spec.block_size if num_to_drop else 0
            at_most = behind + len(tokens) - num_to_drop + max(max_new, 1 + (copies - 1) * spec.block_size)
            assert -(-at_most // spec.block_size) > min(spec.num_blocks)
        else:
            self.requests[request.request_id] = request

    def check(self, output: SchedulerOutput, decoding: list[ScheduledRequest]) -> None:
        pruned = [chunk for chunk in output.chunks if chunk.request.pruned_range(chunk.start)]
        whole = []  # of these, those that compute a window, which may be one that keeps all
        for chunk in pruned:
            place = chunk.request.pruned_range(chunk.start)
            assert place is not None
            is_whole = (chunk.start, chunk.stop, chunk.num_inputs) == (
                place.start,
                place.stop,
                place.num_inputs,
            )
            assert is_whole or (chunk.stop <= place.start and chunk.num_pruned == 0)
            whole += [chunk] * is_whole
            room = len(self.scheduler.kv.block_table(chunk.request.request_id)) * self.scheduler.kv.block_size
            assert chunk.start + chunk.num_inputs <= room
        limits = self.scheduler.config
        if output.num_tokens > limits.max_num_batched_tokens:
            first = next(chunk for chunk in output.chunks if chunk.request not in decoding)
            assert first in pruned
            assert first is output.chunks[-1], "only one that comes first goes beyond"
        elif not whole:
            super().check(output, decoding)


TestPrunedScheduler = PrunedMachine.TestCase
TestPrunedScheduler.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, phases=[Phase.explicit, Phase.generate]
)
