"""Models whose layers have sliding windows: tokens equal `generate`, however the work is cut and moved."""

from __future__ import annotations

import copy

import pytest
import torch

from epd.errors import RequestError, UnsupportedModelError
from epd.kv.block_pool import FREED
from epd.kv.pass_limits import SchedulerConfig
from epd.sampling_params import SamplingParams
from epd.stages.decoder.decoder import FusedDecoder
from epd.stages.decoder.rank_cut import check_divisible
from epd.stages.memory_sizing import text_request
from epd.types import ceil_div
from tests.encoders.tiny_gemma import WINDOW
from tests.stages.conftest import Subject, check
from tests.stages.prompts import Drive


def test_decodes_that_are_launched_ahead_change_no_token(windowed: Subject) -> None:
    check(windowed, Drive(windowed.engine(async_scheduling=True, block_size=4), seed=2), 8)


@pytest.mark.parametrize("draft", ["prompt-lookup", "recycling"])
def test_drafts_change_no_token(windowed: Subject, draft: str) -> None:
    """Small random models repeat themselves when they go on for long."""
    engine, prompts, long = windowed.engine(draft=draft), windowed.mix(8), SamplingParams(max_tokens=150)
    check(windowed, Drive(engine, seed=2), 8)
    expected = Drive(windowed.engine(), seed=0).run(prompts, sampling=long)
    assert Drive(engine, seed=3).run(prompts, sampling=long) == expected
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
    with pytest.raises(UnsupportedModelError, match="4 heads and 2 of keys and values; allowed: 1, 2; set"):
        check_divisible(windowed.model, 4)
    engine = windowed.engine()
    with pytest.raises(RequestError, match="where others have a sliding window; allowed: a method"):
        engine._runner.run([Dropping()])  # type: ignore[list-item]
    decoder = engine._runner._decoder
    assert isinstance(decoder, FusedDecoder)
    assert decoder.waits, "passes are not captured"


class Dropping:
    """A segment of which layers keep some tokens alone."""

    is_whole = False
