"""Models whose layers have sliding windows: tokens equal `generate`, however the work is cut and moved."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from epd.errors import RequestError, UnsupportedModelError
from epd.kv.block_pool import FREED
from epd.kv.scheduling import SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.stages.decoder.decoder import FusedDecoder
from epd.stages.decoder.rank_cut import check_divisible
from epd.stages.memory_sizing import text_request
from epd.types import ceil_div
from tests.encoders.tiny_gemma import WINDOW
from tests.stages.conftest import Subject, check
from tests.stages.prompts import Drive
from tests.stages.split_deployment import GREEDY, Deployment
from tests.stages.test_moving import run_moving


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


def test_several_answers_go_on_at_a_decode_worker(windowed: Subject) -> None:
    sampling = SamplingParams(max_tokens=10, temperature=1.0, n=3)
    prompts = {"r": windowed.prompts[2]}
    together = Drive(windowed.engine(), seed=0).run(prompts, sampling=sampling, seed=3)
    deployment = Deployment(windowed, 1, random.Random(0))
    assert deployment.run(prompts, sampling) == together
    deployment.settle()


def test_decodes_that_are_launched_ahead_change_no_token(windowed: Subject) -> None:
    check(windowed, Drive(windowed.engine(async_scheduling=True, block_size=4), seed=2), 8)


@pytest.mark.parametrize("draft", ["prompt-lookup", "recycling"])
def test_drafts_change_no_token(windowed: Subject, draft: str) -> None:
    engine = windowed.engine(draft=draft)
    check(windowed, Drive(engine, seed=2), 8)
    assert engine.counts.num_accepted_tokens > 0


def test_blocks_behind_the_window_are_freed(windowed: Subject) -> None:
    """A long prompt holds no more blocks of its windows than they and a chunk have, at any time."""
    chunk, num_tokens = 16, 700
    config = SchedulerConfig(max_chunk_tokens=chunk, max_num_batched_tokens=64)
    engine = windowed.engine(config=config, block_size=4, enable_prefix_caching=False)
    engine.add(text_request("r", windowed.adapter, num_tokens, max_tokens=40))
    most = [0, 0]
    while engine.has_work():
        engine.step()
        engine.check_integrity()
        for group in (0, 1) if "r" in engine.kv else ():
            table = engine.kv.block_table("r", group)
            most[group] = max(most[group], len(table) - list(table).count(FREED))
    ahead = engine.kv.spec.num_ahead
    assert most[0] == ceil_div(num_tokens + 40, 4)
    assert most[1] <= ceil_div(WINDOW - 1 + ahead, 4) + 1 < 20
    assert engine.kv.usage == 0


def test_a_pool_of_windows_is_smaller(windowed: Subject) -> None:
    """Many long prompts fit whose windows would not all fit whole, and answer as each does alone."""
    config = SchedulerConfig(max_chunk_tokens=16, max_num_batched_tokens=64, max_num_seqs=2)
    engine = windowed.engine(config=config, block_size=4, num_kv_tokens=4096, enable_prefix_caching=False)
    full, window = engine.kv.spec.num_blocks
    assert (full, window) == (1024, (2 + 8) * (6 + 1) + 4)
    for name in ("a", "b"):
        engine.add(text_request(name, windowed.adapter, 1500, max_tokens=4))
    outputs: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output.token.token_id)
    assert outputs["a"] == outputs["b"] == their_tokens(windowed, 1500, 4)


@torch.inference_mode()
def their_tokens(subject: Subject, num_tokens: int, max_tokens: int) -> list[int]:
    """Of transformers' `generate`, for the prompt of `text_request`."""
    model = copy.deepcopy(subject.model)
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([text_request("r", subject.adapter, num_tokens, max_tokens).prompt.token_ids.tolist()])
    settings = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens, "eos_token_id": []}
    sequences = model.generate(input_ids=ids, do_sample=False, **settings)
    return sequences[0, num_tokens:].tolist()  # type: ignore[no-any-return]


def test_prefix_hits_begin_where_a_window_was_kept(windowed: Subject) -> None:
    """After the last whole block of the prompt, and of what comes before its last image."""
    engine = windowed.engine(enable_prefix_caching=True, block_size=4)
    check(windowed, Drive(engine, seed=1), 4)
    first = engine.counts.num_computed_tokens
    check(windowed, Drive(engine, seed=2), 4)
    again = engine.counts.num_computed_tokens - first
    prompts = windowed.prompts
    rest = sum(len(prompt.plan) - (len(prompt.plan) - 1) // 4 * 4 for prompt in prompts)
    assert again == rest + sum(len(prompt.expected) - 1 for prompt in prompts)
    prompt = prompts[2]
    plans = [item.plan for item in prompt.plan.media]
    other = type(prompt)(
        windowed.adapter.plan_prompt(plans, "And where?"), prompt.mm_hashes, prompt.groups, ()
    )
    alone = Drive(windowed.engine(enable_prefix_caching=False), seed=0).run({"second": other})
    before = engine.counts.num_cached_tokens
    assert Drive(engine, seed=0).run({"second": other}) == alone
    last_image = other.plan.media[-1].units[0].offset
    assert engine.counts.num_cached_tokens - before == last_image // 4 * 4 > WINDOW


def test_what_cannot_be_computed_is_refused_in_one_line(windowed: Subject) -> None:
    with pytest.raises(UnsupportedModelError, match="has sliding windows; allowed: 1"):
        check_divisible(windowed.model, 2)
    engine = windowed.engine()
    with pytest.raises(RequestError, match="where others have a sliding window; allowed: a method"):
        engine._runner.run([Dropping()])  # type: ignore[list-item]
    decoder = engine._runner._decoder
    assert isinstance(decoder, FusedDecoder)
    assert decoder.waits, "passes are not captured"


class Dropping:
    """A segment of which layers keep some tokens alone."""

    is_whole = False
