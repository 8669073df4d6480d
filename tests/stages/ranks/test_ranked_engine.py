"""An engine of two ranks gives the tokens and logits of one, whatever is scheduled, and holds half of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.encoders import FrameSampling, load_adapter
from epd.engine_config import EngineConfig
from epd.kv.pass_limits import SchedulerConfig
from epd.reduction import ReductionPolicy
from epd.sampling_params import SamplingParams
from epd.stages.decoder.rank_cut import cut_model
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerationSettings
from epd.stages.engine.setup import build_engine
from epd.stages.loading.weights import load_role
from epd.stages.placement import CPU_FLOAT32
from epd.stages.rank import Rank
from tests.colocated import ColocatedPipeline
from tests.engine_options import parted
from tests.stages.prompts import MAX_TOKENS, QUESTIONS, Drive, Prompt, prompt_of
from tests.stages.ranks.thread_ranks import ThreadRanks, recorded

# Of the largest logit: sums are taken in another order.
TOLERANCE = 1e-5
SETTINGS = GenerationSettings(eos_ids=frozenset())  # every answer is as long as may be


@dataclass(slots=True)
class Pair:
    """One checkpoint in one rank, and in two. prompts: by name."""

    adapter: Any
    whole: Any
    part: Any
    ranks: ThreadRanks
    prompts: dict[str, Prompt]

    def engines(self, **options: Any) -> tuple[LanguageEngine, LanguageEngine]:
        config, others = parted(options)
        build = partial(build_engine, adapter=self.adapter, settings=SETTINGS, options=config, **others)
        return build(self.whole), build(self.part, ranks=self.ranks)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "shapes-vl"])
def pair(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    media: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    path = checkpoints[request.param]
    adapter, whole = load_adapter(path), load_role(path, "whole", CPU_FLOAT32).model
    cut = partial(cut_model, rank=Rank(0, 2))
    part = load_role(path, "whole", CPU_FLOAT32, cut=cut).model
    ranks = ThreadRanks(path, gloo_folder=tmp_path_factory.mktemp("ranks"))
    mix: list[list[str]] = [[], ["image"], ["video"], ["wide_image", "image"]]
    sampling = FrameSampling(num_frames=4)
    prompts = {
        f"r{index}": prompt_of(
            adapter, whole, [media[name] for name in names], QUESTIONS[index % 3], sampling, 20
        )
        for index, names in enumerate(mix)
    }
    yield Pair(adapter, whole, part, ranks, prompts)
    ranks.close()


def check(pair: Pair, one: LanguageEngine, two: LanguageEngine, times: int = 1, **options: Any) -> None:
    """Both engines give the same tokens in the same passes, of logits that are close."""
    ours, theirs = recorded(two), recorded(one)
    prompts = {f"{name}-{time}": prompt for name, prompt in pair.prompts.items() for time in range(times)}
    tokens = Drive(one, seed=3).run(prompts, **options)
    assert Drive(two, seed=3).run(prompts, **options) == tokens
    assert all(len(answer) >= MAX_TOKENS for answer in tokens.values())
    assert len(ours) == len(theirs)
    for mine, their in zip(ours, theirs, strict=True):
        assert mine.shape == their.shape
        if len(their):
            difference = float((mine - their).abs().max() / their.abs().max())
            assert difference <= TOLERANCE, f"{difference:.1e}"
    assert two.kv.usage == 0


def test_chunked_prefill_and_batched_decode(pair: Pair) -> None:
    config = SchedulerConfig(max_chunk_tokens=24, max_num_batched_tokens=40)
    check(pair, *pair.engines(config=config, num_kv_tokens=4096))


def test_preempted(pair: Pair) -> None:
    config = SchedulerConfig(max_chunk_tokens=32, preemption="offload")
    longest = max(len(prompt.plan.token_ids) for prompt in pair.prompts.values())
    one, two = pair.engines(config=config, block_size=4, num_kv_tokens=2 * longest + 24)
    check(pair, one, two, times=2)
    assert two.scheduler.num_preempted > 0
    assert {"OffloadTokens", "RestoreTokens"} <= set(pair.ranks.steps)


def test_several_answers_to_a_prompt_share_its_blocks(pair: Pair) -> None:
    pair.ranks.steps.clear()
    sampling = SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=MAX_TOKENS)
    check(pair, *pair.engines(num_kv_tokens=4096, enable_prefix_caching=True), sampling=sampling)
    assert "CopyBlocks" in pair.ranks.steps


def test_each_rank_holds_half(pair: Pair) -> None:
    one, two = pair.engines(num_kv_tokens=4096)
    assert two.kv.spec == one.kv.spec
    follower = pair.ranks.follower
    pair.ranks.add_up(torch.zeros(0))
    assert two.pools.shape.num_bytes == one.pools.shape.num_bytes // 2
    whole = sum(each.nbytes for each in _language(pair.whole))
    for held in (sum(each.nbytes for each in _language(pair.part)), follower.weight_bytes):
        assert 0.49 < held / whole < 0.51


def _language(model: Any) -> list[torch.Tensor]:
    held = {**dict(model.get_decoder().named_parameters()), "head": model.get_output_embeddings().weight}
    return list({each.data_ptr(): each for each in held.values()}.values())


@pytest.mark.parametrize("method", ["quickprefill", "fastkv", "mustdrop"])
def test_what_the_language_model_drops_is_chosen_by_the_heads_of_both(
    pair: Pair, method: str, media: dict[str, Path]
) -> None:
    config, policy = EngineConfig(num_kv_tokens=4096), ReductionPolicy(method, 0.5)
    one = ColocatedPipeline(pair.whole, pair.adapter, settings=SETTINGS, config=config)
    two = ColocatedPipeline(pair.part, pair.adapter, settings=SETTINGS, config=config, ranks=pair.ranks)
    ours, theirs = recorded(two.engine), recorded(one.engine)
    answers = [each.ask([media["video"]], "what?", reduction=policy, max_tokens=8) for each in (one, two)]
    assert answers[0].token_ids == answers[1].token_ids
    for mine, their in zip(ours, theirs, strict=True):
        assert not len(their) or float((mine - their).abs().max() / their.abs().max()) <= TOLERANCE
