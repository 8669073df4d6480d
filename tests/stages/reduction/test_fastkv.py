"""FastKV's propagation against transformers' own layers, run one by one with a cache of plain tensors."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from typer.testing import CliRunner

from epd.batch.lines import CHAT_URL, LineDefaults, parse_line
from epd.encoders import Embeddings, PromptPlan, concatenated, load_adapter
from epd.encoders.groups import prompt_identity
from epd.encoders.reduction import reduce_prompt
from epd.engine_config import RECURRENT_FAMILIES
from epd.errors import RequestError
from epd.kv.kv_cache import KVCacheManager
from epd.kv.kv_room import KVCacheSpec
from epd.kv.pass_limits import SchedulerConfig
from epd.kv.prefix_cache import TokenIdentity
from epd.models import embedded_model_path
from epd.reduction import KEEP_ALL, ReductionPolicy
from epd.serve_app.app_args import AppArgs
from epd.serve_app.cli.program import app
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.requests.request_parsing import reduction_policy
from epd.stages.decoder.decoder import FusedDecoder
from epd.stages.engine.generation import GenerationSettings
from epd.stages.engine.model_runner import ModelRunner
from epd.stages.engine.packed_pass import Segment
from tests.colocated import ColocatedPipeline, EncodedMedia, MediaContext
from tests.encoders.families import Family
from tests.serve_app.deployments import NUM_FRAMES as APP_FRAMES
from tests.serve_app.deployments import Question, deployed
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
)
from tests.stages.reduction.test_prefill_methods import rounded
from tests.stages.test_moving import run_moving
from tests.stages.test_split_stages import Deployment
from tests.tiny_models import build_qwen3_vl, load_reference

NUM_OBSERVING = 32

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


# The slow twin


class TheirLayers:
    """transformers' decoder layers in a loop, with eager attention, whose weights can be seen."""

    def __init__(self, path: Path, method: str, num_deepstack: int) -> None:
        self.model = load_reference(path)
        self.model.set_attn_implementation({"text_config": "eager"})
        self.text = self.model.get_decoder()
        self.method = method
        self.num_whole = max(len(self.text.layers) // 3, num_deepstack, 1)
        self.cache = DynamicCache()
        self._weights: list[Tensor] = []
        for layer in self.text.layers:
            layer.self_attn.register_forward_hook(lambda _, __, outputs: self._weights.append(outputs[1]))

    def embed(self, token_ids: np.ndarray) -> Tensor:
        return self.model.get_input_embeddings()(torch.from_numpy(token_ids))

    def text_rows(self, token_ids: np.ndarray, positions: np.ndarray) -> Tensor:
        """What the last layer gives for text, [1, n, C]."""
        hidden, places = self.embed(token_ids)[None], torch.from_numpy(positions)
        for layer in self.text.layers:
            hidden = self._layer(layer, hidden, places)
        return self.text.norm(hidden)

    def window(self, visual: Embeddings, positions: np.ndarray, num_kept: int, num_later: int) -> None:
        """All tokens of a window through the first layers, those that they choose through the rest.

        num_later: how many these are; of them each of the rest keeps its own.
        """
        hidden, places = visual.rows[None], torch.from_numpy(positions)
        num_before = self.cache.get_seq_length()
        for index, layer in enumerate(self.text.layers):
            hidden = self._layer(layer, hidden, places)
            if index < len(visual.deepstack):
                hidden = hidden + visual.deepstack[index]
            if hidden.shape[1] == num_kept:
                continue
            order = self._order(index, num_before)
            kept, later = sorted(order[:num_kept]), sorted(order[:num_later])
            held = self.cache.layers[index]
            at = torch.tensor([*range(num_before), *(num_before + i for i in kept)])
            held.keys, held.values = held.keys[:, :, at], held.values[:, :, at]
            if self.method == "fastkv" and index + 1 == self.num_whole:
                hidden, places = hidden[:, later], places[:, later]

    def _layer(self, layer: Any, hidden: Tensor, places: Tensor) -> Tensor:
        num_new = hidden.shape[1]
        past = self.cache.get_seq_length(layer.self_attn.layer_idx)
        is_seen = torch.arange(past + num_new)[None] <= past + torch.arange(num_new)[:, None]
        mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, -torch.inf)[None, None]
        position_ids = places if len(places) == 1 else places[:, None]
        rotary = self.text.rotary_emb(hidden, position_ids)
        return layer(
            hidden,
            attention_mask=mask,
            position_embeddings=rotary,
            past_key_values=self.cache,
            use_cache=True,
        )

    def _order(self, index: int, num_before: int) -> list[int]:
        """Tokens of the window, the first to keep first, by what the layer has just computed."""
        if self.method == "quickprefill":
            keys = self.cache.layers[index].keys[0, :, num_before:].double()
            norms = (keys**2).sum((0, 2)).sqrt().tolist()
            golden = 0.6180339887498949
            return sorted(range(len(norms)), key=lambda i: (rounded(norms[i]), i * golden % 1))
        paid = self._weights[-1][0].double().mean(0)[:, num_before:]
        size = len(paid)
        rows = [(i + 1) * size // min(NUM_OBSERVING, size) - 1 for i in range(min(NUM_OBSERVING, size))]
        scores = [float(paid[[row for row in rows if row >= i], i].mean()) for i in range(size)]
        return sorted(range(len(scores)), key=lambda i: (-rounded(scores[i]), i))


@torch.inference_mode()
def their_context(path: Path, prompt: PromptPlan, visual: Embeddings, method: str = "fastkv") -> TheirLayers:
    """Everything before the question. visual: all visual tokens, in order."""
    theirs = TheirLayers(path, method, len(visual.deepstack))
    (item,) = prompt.media
    assert prompt.reduction is not None
    (positions,) = prompt.reduction.positions
    at = start = 0
    for window, place in zip(item.windows, item.units, strict=True):
        if place.offset > at:
            theirs.text_rows(prompt.token_ids[at : place.offset], prompt.positions[:, at : place.offset])
        stop = start + window.num_tokens
        num_later = window.num_tokens if window.num_later is None else window.num_later
        theirs.window(visual.cut(start, stop), positions[:, start:stop], window.num_kept, num_later)
        start, at = stop, place.stop
    return theirs


@torch.inference_mode()
def their_answer(theirs: TheirLayers, prompt: PromptPlan, count: int) -> tuple[int, ...]:
    """The context's cache stays as it is."""
    context, theirs.cache = theirs.cache, DynamicCache()
    for index, layer in enumerate(context.layers):
        theirs.cache.update(layer.keys, layer.values, index)
    at, tokens = prompt.prefix_length, list[int]()
    hidden = theirs.text_rows(prompt.token_ids[at:], prompt.positions[:, at:])
    while True:
        tokens.append(int(theirs.model.get_output_embeddings()(hidden[:, -1]).argmax()))
        if len(tokens) == count:
            break
        place = np.full((len(prompt.positions), 1), prompt.next_position + len(tokens) - 1)
        hidden = theirs.text_rows(np.array(tokens[-1:]), place)
    theirs.cache = context
    return tuple(tokens)


def reduced_prompt(
    pipeline: ColocatedPipeline, encoded: EncodedMedia, question: str, policy: ReductionPolicy
) -> PromptPlan:
    return reduce_prompt(pipeline.adapter.plan_prompt(encoded.plans, question), policy)


def visual_tokens(pipeline: ColocatedPipeline, encoded: EncodedMedia, prompt: PromptPlan) -> Embeddings:
    return concatenated([part.embeddings for part in placed(pipeline, encoded, prompt)])


def cached(pipeline: ColocatedPipeline, context: MediaContext) -> Tensor:
    """[layers, 2, T, Hkv, D]: all that the context holds."""
    assert context.request_id is not None
    kv, (pool,) = pipeline.engine.kv, pipeline.engine.pools.groups
    table = torch.tensor(kv.block_table(context.request_id))
    slots = (table[:, None] * pool.block_size + torch.arange(pool.block_size)).flatten()
    return tokens_at(pool, slots[: kv.num_tokens(context.request_id)])


def assert_same_cache(ours: Tensor, theirs: TheirLayers) -> None:
    for index, layer in enumerate(theirs.cache.layers):
        held = torch.stack([layer.keys[0], layer.values[0]]).transpose(1, 2)
        torch.testing.assert_close(ours[index], held, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("retention", "compute_share"), [(0.5, None), (0.25, None), (0.1, None), (0.1, 0.2), (0.25, 1.0)]
)
def test_tokens_and_cache_equal_transformers_layers_in_a_loop(
    retention: float,
    compute_share: float | None,
    pipeline: ColocatedPipeline,
    encoded: EncodedMedia,
    questions: list[str],
) -> None:
    """Of several windows and, over one prefix, several questions. A tenth of a fifth is as published."""
    policy = ReductionPolicy("fastkv", retention, compute_share)
    context = pipeline.prefill_encoded(encoded, reduction=policy)
    prompts = [reduced_prompt(pipeline, encoded, question, policy) for question in questions]
    assert len(prompts[0].media[0].windows) >= 3
    visual = visual_tokens(pipeline, encoded, prompts[0])
    theirs = their_context(embedded_model_path(), prompts[0], visual)
    assert_same_cache(cached(pipeline, context), theirs)
    answers = [pipeline.answer(context, question).token_ids for question in questions]
    assert answers == [
        their_answer(theirs, prompt, len(answer)) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    assert_same_cache(cached(pipeline, context), theirs)
    together = [answer.token_ids for answer in pipeline.answer_all(context, questions)]
    assert together == answers


@pytest.mark.parametrize("method", ["fastkv", "quickprefill"])
def test_every_family_keeps_what_transformers_layers_choose(
    method: str, family: Family, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-VL's rows are chosen behind the last layer that deepstack features are added to."""
    monkeypatch.setattr("epd.encoders.reduction.reading.WINDOW_TOKENS", 24)
    pipeline = ColocatedPipeline.load(family.path)
    encoded = pipeline.encode_media([clip], num_frames=12)
    policy = ReductionPolicy(method, 0.4, 0.6 if method == "fastkv" else None)
    if family.name in RECURRENT_FAMILIES:
        with pytest.raises(RequestError, match="where others have a recurrent state of all; allowed"):
            pipeline.prefill_encoded(encoded, reduction=policy)
        return
    context = pipeline.prefill_encoded(encoded, reduction=policy)
    prompt = reduced_prompt(pipeline, encoded, "What is shown?", policy)
    assert len(prompt.media[0].windows) >= 2
    assert prompt.num_visual_tokens <= 0.5 * prompt.num_visual_tokens_before
    theirs = their_context(family.path, prompt, visual_tokens(pipeline, encoded, prompt), method)
    assert_same_cache(cached(pipeline, context), theirs)
    answer = pipeline.answer(context, "What is shown?", max_tokens=8).token_ids
    assert answer == their_answer(theirs, prompt, len(answer))


# What is computed and held


@contextmanager
def rows_of_layers(num_layers: int) -> Iterator[list[int]]:
    """Counts the rows that attend in each layer."""
    counts = [0] * num_layers
    attend = FusedDecoder._attend

    def counted(decoder: FusedDecoder, index: int, residual: Tensor, *inputs: Any) -> Tensor:
        counts[index] += len(residual)
        return attend(decoder, index, residual, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedDecoder, "_attend", counted)
        yield counts


def test_later_layers_compute_only_what_goes_on(pipeline: ColocatedPipeline, encoded: EncodedMedia) -> None:
    rows = {}
    num_visual = encoded.plans[0].num_tokens
    for method in ("quickprefill", "fastkv"):
        with rows_of_layers(6) as counts:
            context = pipeline.prefill_encoded(encoded, reduction=ReductionPolicy(method, 0.1))
        rows[method] = counts
    num_kept = round(0.1 * num_visual)
    num_text = len(context.prefix_ids) - num_kept
    assert rows["quickprefill"] == [num_text + num_visual] * 6
    assert rows["fastkv"] == [num_text + num_visual] * 2 + [num_text + num_kept] * 4
    assert sum(rows["fastkv"]) < 0.5 * sum(rows["quickprefill"])
    with rows_of_layers(6) as counts:
        same = pipeline.prefill_encoded(encoded, reduction=ReductionPolicy("fastkv", 0.1, 0.2))
    assert counts == [num_text + num_visual] * 2 + [num_text + round(0.2 * num_visual)] * 4
    assert len(same.prefix_ids) == len(context.prefix_ids), "what is kept does not depend on it"


@pytest.mark.parametrize(
    ("retention", "compute_share"), [(0.5, None), (0.25, None), (0.05, None), (0.1, 0.3)]
)
def test_cache_holds_what_was_planned_in_every_layer(
    retention: float, compute_share: float | None, pipeline: ColocatedPipeline, clip: Path
) -> None:
    engine = pipeline.engine
    policy = ReductionPolicy("fastkv", retention, compute_share)
    whole = pipeline.prefill_media([clip], num_frames=NUM_FRAMES)
    reduced = pipeline.prefill_media([clip], num_frames=NUM_FRAMES, reduction=policy)
    num_tokens = whole.plans[0].num_tokens
    num_dropped = num_tokens - round(retention * num_tokens)
    held = cached(pipeline, whole).nbytes - cached(pipeline, reduced).nbytes
    assert held == num_dropped * engine.pools.bytes_per_token
    assert (cached(pipeline, reduced).abs().sum((1, 3, 4)) > 0).all(), "no slot of any layer is empty"
    assert reduced.request_id is not None
    tokens = engine.kv.num_tokens(reduced.request_id)
    assert len(engine.kv.block_table(reduced.request_id)) == -(-(tokens + 1) // engine.kv.block_size)
    usage = pipeline.answer(reduced, "How many shapes are there?", max_tokens=1).usage
    assert (usage.visual_tokens, usage.visual_tokens_before) == (num_tokens - num_dropped, num_tokens)


@pytest.mark.parametrize("retention", [1.0, 0.9999])
def test_windows_that_keep_all_change_no_token(
    retention: float, pipeline: ColocatedPipeline, encoded: EncodedMedia, questions: list[str]
) -> None:
    whole = pipeline.answer_all(pipeline.prefill_encoded(encoded), questions)
    context = pipeline.prefill_encoded(encoded, reduction=ReductionPolicy("fastkv", retention))
    same = pipeline.answer_all(context, questions)
    assert [answer.token_ids for answer in same] == [answer.token_ids for answer in whole]


# Among other requests


@dataclass
class Passes:
    """The passes of every runner, as they are asked for."""

    segments: list[list[Segment]]

    @classmethod
    def watch(cls, monkeypatch: pytest.MonkeyPatch) -> Passes:
        passes, run = cls([]), ModelRunner.run

        def watched(runner: ModelRunner, segments: Sequence[Segment]) -> Tensor:
            passes.segments.append(list(segments))
            return run(runner, segments)

        monkeypatch.setattr(ModelRunner, "run", watched)
        return passes

    def has_mixed(self) -> bool:
        """Whether some pass computed windows of two requests that propagate, and tokens that all go on."""
        going_on = [[segment.going_on is not None for segment in segments] for segments in self.segments]
        return any(sum(each) >= 2 and not all(each) for each in going_on)


@pytest.fixture(scope="module")
def mix(
    pipeline: ColocatedPipeline, engines: Engines, short: EncodedMedia, questions: list[str]
) -> dict[str, Prompt]:
    """Questions under several policies, and what each is answered alone."""
    policies = {
        "half": ReductionPolicy("fastkv", 0.5),
        "tenth": ReductionPolicy("fastkv", 0.1),
        "tenth of a third": ReductionPolicy("fastkv", 0.1, 0.33),
        "quick": ReductionPolicy("quickprefill", 0.2),
        "chosen": ReductionPolicy("mustdrop", 0.2),
        "whole": ReductionPolicy(),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("epd.encoders.reduction.reading.WINDOW_TOKENS", SMALL_WINDOW_TOKENS)
        return answered_alone(engines, pipeline, short, questions[:2], policies)


@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize("caching", [False, True], ids=["no prefix cache", "prefix cache"])
def test_any_batch_and_chunking_gives_the_same_tokens(
    chunk: int, caching: bool, engines: Engines, mix: dict[str, Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes.watch(monkeypatch)
    config = SchedulerConfig(max_chunk_tokens=chunk, max_num_batched_tokens=max(chunk, 20))
    engine = engines.engine(config=config, enable_prefix_caching=caching)
    assert drive(engine, chunk, mix) == expected(mix)
    assert engine.kv.usage == 0
    assert passes.has_mixed() == (chunk > 7)


def test_layers_that_all_have_deepstack_features_compute_all_rows_once(
    tmp_path: Path, clip: Path, questions: list[str]
) -> None:
    """Their norm is in the last one's output, also for answers that grow beside a window."""
    model = load_reference(build_qwen3_vl(tmp_path / "model", num_hidden_layers=2))
    settings = GenerationSettings(eos_ids=frozenset())
    pipeline = ColocatedPipeline(model, load_adapter(tmp_path / "model"), settings=settings)
    encoded, engines = pipeline.encode_media([clip], num_frames=12), Engines(model, pipeline)
    policies = {"half": ReductionPolicy("fastkv", 0.5), "whole": ReductionPolicy()}
    some = answered_alone(engines, pipeline, encoded, questions[:2], policies)
    for seed in range(3):
        assert drive(engines.engine(), seed, some) == expected(some)


@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_preemption_changes_no_token(mode: str, engines: Engines, mix: dict[str, Prompt]) -> None:
    config = SchedulerConfig(max_chunk_tokens=100, preemption=mode)  # type: ignore[arg-type]
    room = 2 * max(len(prompt.plan) for prompt in mix.values()) + 8
    engine = engines.engine(config=config, block_size=4, num_kv_tokens=room, enable_prefix_caching=False)
    for seed in range(1, 3):
        assert drive(engine, seed, mix) == expected(mix)
    assert engine.scheduler.num_preempted > 0, "the pool was meant to be too small"


def test_split_over_workers_gives_the_same_tokens(engines: Engines, mix: dict[str, Prompt]) -> None:
    deployment = Deployment(engines, 2, random.Random(1))  # type: ignore[arg-type]
    assert deployment.run(mix, DRAWN) == expected(mix)
    deployment.settle()


def test_answers_are_moved_in_their_middle(
    pipeline: ColocatedPipeline, engines: Engines, short: EncodedMedia, questions: list[str]
) -> None:
    policies = {"rates": ReductionPolicy("fastkv", 0.2, 0.5)}
    some = answered_alone(engines, pipeline, short, questions[:2], policies)
    deployment = Deployment(engines, 2, random.Random(2))  # type: ignore[arg-type]
    assert run_moving(deployment, some, DRAWN) > 0
    assert {name: deployment.tokens(name) for name in some} == expected(some)


def test_other_shares_find_nothing_of_a_video(
    pipeline: ColocatedPipeline, short: EncodedMedia, questions: list[str]
) -> None:
    """In a prefix cache, where the same share finds all of it."""
    kv = KVCacheManager(KVCacheSpec((16,), 16))

    def identity(compute_share: float | None) -> TokenIdentity:
        policy = ReductionPolicy("fastkv", 0.1, compute_share)
        prompt = reduced_prompt(pipeline, short, questions[0], policy)
        return prompt_identity(prompt, ("other shares",))

    first = identity(0.2)
    kv.open("first", first, max_cached=0)
    kv.allocate("first", len(first))
    kv.commit("first", first, len(first))
    kv.free("first")
    assert kv.num_cached(identity(0.2)) == len(first)
    text = reduced_prompt(pipeline, short, questions[0], KEEP_ALL).media[0].units[0].offset
    assert max(kv.num_cached(identity(share)) for share in (None, 0.1, 0.3, 1.0)) <= text


# Asked for


@pytest.mark.parametrize("topology", ["1epd", "1e1p1d"])
def test_the_app_answers_as_the_colocated_pipeline(
    topology: str, pipeline: ColocatedPipeline, clip: Path, questions: list[str]
) -> None:
    policy = ReductionPolicy("fastkv", 0.25, 0.5)
    wanted = [
        pipeline.ask([clip], text, num_frames=APP_FRAMES, reduction=policy, max_tokens=10).token_ids
        for text in questions[:2]
    ]

    async def run() -> None:
        async with deployed(embedded_model_path(), topology) as deployment:
            asked = [Question((clip,), text) for text in questions[:2]]
            answers = [await deployment.ask(each, reduction=policy) for each in asked]
            assert [answer.tokens for answer in answers] == wanted
            end = answers[1].end
            assert end is not None
            assert end.cached_tokens >= end.usage.visual_tokens, "the second question finds the video"
            await deployment.settle()

    asyncio.run(run())


def test_requests_and_commands_know_it(clip: Path) -> None:
    options = {"reduction": "fastkv", "retention": 0.25, "compute_share": 0.5}
    body = {"messages": [{"role": "user", "content": "What?"}], "epd": options}
    policy = ReductionPolicy("fastkv", 0.25, 0.5)
    assert reduction_policy(ChatRequest.model_validate(body), ReductionPolicy()) == policy
    assert AppArgs(**options).reduction_policy == policy
    asked = ["--retention", "0.25", "--reduction", "fastkv", "--compute-share", "0.5", "--frames", "24"]
    asked += ["--model", "shapes-vl"]
    result = CliRunner().invoke(app, ["ask", str(clip), "How many shapes are there?", *asked, "--json"])
    assert result.exit_code == 0, result.output
    usage = json.loads(result.stdout)["usage"]
    assert usage["visual_tokens"] == round(usage["visual_tokens_before"] / 4)
    for command in ("ask", "serve"):
        assert "fastkv" in CliRunner().invoke(app, [command, "--help"]).output


@pytest.mark.parametrize(
    ("own", "share"),
    [({}, 0.2), ({"compute_share": 0.5}, 0.5), ({"retention": 0.3}, None), ({"reduction": "evs"}, None)],
)
def test_a_default_share_goes_with_the_default_retention(own: dict[str, Any], share: float | None) -> None:
    """Of a server and of a batch."""
    default = ReductionPolicy("fastkv", 0.1, 0.2)
    asked = {"messages": [{"role": "user", "content": "What?"}], "epd": own}
    assert reduction_policy(ChatRequest.model_validate(asked), default).compute_share == share
    defaults = LineDefaults(Path(), retention=0.1, reduction="fastkv", compute_share=0.2)
    line = {"custom_id": "a", "method": "POST", "url": CHAT_URL, "body": asked}
    body = parse_line(json.dumps(line).encode(), 1, defaults).body
    assert body["epd"].get("compute_share") == share
    assert reduction_policy(ChatRequest.model_validate(body), KEEP_ALL).compute_share == share


def test_an_unknown_method_is_told_this_one() -> None:
    with pytest.raises(RequestError, match="fastkv"):
        ReductionPolicy("fast-kv", 0.5)
