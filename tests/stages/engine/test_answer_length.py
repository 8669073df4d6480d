"""Answers end where they are asked to, or where context or cache end; nothing is set aside for them."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from epd.encoders import PromptPlan
from epd.errors import EPDError, RequestError
from epd.kv.drafting import DraftConfig
from epd.kv.prefix_cache import token_identity
from epd.sampling_params import TYPICAL_TOKENS, SamplingParams, expected_tokens, held_to_context
from epd.stages.engine.generation import GenerateRequest, GenerationSettings
from epd.stages.engine.sequence import TokenRows
from tests.stages.conftest import Subject
from tests.stages.prompts import Drive


def text_request(name: str, sampling: SamplingParams, num_tokens: int = 10) -> GenerateRequest:
    ids = np.arange(num_tokens, dtype=np.int64)
    prompt = PromptPlan(ids, np.tile(ids, (3, 1)), num_tokens, ())
    return GenerateRequest(name, prompt, token_identity(ids.tolist()), sampling)


@pytest.mark.parametrize(("max_tokens", "num_choices"), [(10**7, 1), (2**62, 1), (2**62, 128)])
def test_nothing_is_allocated_for_an_answer_that_may_get_long(
    a_family: Subject, max_tokens: int, num_choices: int
) -> None:
    """A request of 90 bytes had five arrays of 8 GB written, or ended the worker by NumPy's ValueError."""
    engine = a_family.engine()
    request = text_request("r", SamplingParams(max_tokens=max_tokens, n=num_choices, temperature=1.0))
    tracemalloc.start()
    try:
        engine.can_admit(request)
        engine.add(request)
        for _ in range(3):
            engine.step()
        peak = tracemalloc.get_traced_memory()[1]
    except EPDError:
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        engine.abort("r")
    assert peak < 10 << 20
    engine.check_integrity()
    assert engine.kv.usage == 0


def test_an_answer_ends_where_the_cache_does(a_family: Subject) -> None:
    """It is as long as the cache has room for, and ends as one that has reached its own limit does."""
    engine = a_family.engine(num_kv_tokens=96, block_size=8)
    drive = Drive(engine, seed=0)
    engine.add(text_request("r", SamplingParams(max_tokens=10**6)))
    while engine.has_work():
        drive.step()
    outputs = drive.outputs["r", 0]
    assert (len(outputs), outputs[-1].finish_reason) == (96 - 10, "length")
    assert engine.kv.usage == 0


@pytest.mark.parametrize("include_stop", [False, True])
def test_the_text_of_a_stop_token_is_cut_off_or_included_as_a_stop_string_is(
    a_family: Subject, include_stop: bool
) -> None:
    """vLLM's detokenizer leaves the last token out unless `include_stop_str_in_output` is set."""
    prompt, tokenizer = a_family.prompts[0], a_family.adapter.tokenizer
    texts = [tokenizer.decode(prompt.expected[:stop], skip_special_tokens=True) for stop in range(13)]
    at = next(at for at in range(3, 12) if prompt.expected[at] not in prompt.expected[:at])
    assert texts[at + 1] != texts[at]
    sampling = SamplingParams(
        max_tokens=12, stop_token_ids=(prompt.expected[at],), include_stop_str_in_output=include_stop
    )
    drive = Drive(a_family.engine(), seed=0)
    tokens = drive.run({"r": prompt}, sampling=sampling)["r"]
    assert tokens == prompt.expected[: at + 1]
    assert "".join(each.text for each in drive.outputs["r", 0]) == texts[at + include_stop]
    assert drive.outputs["r", 0][-1].finish_reason == "stop"


def test_an_answer_that_outgrows_its_first_room_goes_on_the_same(a_family: Subject) -> None:
    """200 tokens pass the first room and the next: those of `generate` with a cache of its own."""
    request = text_request("r", SamplingParams(max_tokens=200))
    long = Drive(a_family.engine(), seed=0)
    long.engine.add(request)
    while long.engine.has_work():
        long.step()
    drafting = Drive(a_family.engine(drafting=DraftConfig("prompt-lookup", 4)), seed=0)
    drafting.engine.add(request)
    while drafting.engine.has_work():
        drafting.step()
    assert len(long.tokens("r")) == 200
    assert drafting.tokens("r") == long.tokens("r")


def test_rows_grow_by_doubling_and_keep_what_they_hold() -> None:
    prompt = text_request("r", SamplingParams()).prompt
    rows = TokenRows(prompt)
    sizes = set()
    for at in range(10, 2000):
        rows.reserve(at + 1)
        rows.ids[at] = 7 * at
        sizes.add(len(rows.ids))
    assert rows.ids[10:2000].tolist() == [7 * at for at in range(10, 2000)]
    assert rows.positions[:, :2000].tolist() == [list(range(2000))] * 3
    assert len(sizes) <= 7


@pytest.mark.parametrize(
    ("asked", "checkpoint", "context", "wanted"),
    [
        (None, None, 100, 70),
        (None, None, 32_768, 32_738),
        (None, 64, 100, 64),
        (None, 64, 80, 50),
        (20, 64, 100, 20),
        (500, 64, 100, 70),
        (2**62, None, 100, 70),
        (None, None, 31, 1),
        (500, None, None, 500),
    ],
)
def test_an_answer_is_held_to_the_context(
    asked: int | None, checkpoint: int | None, context: int | None, wanted: int
) -> None:
    held = held_to_context(SamplingParams(max_tokens=asked, top_k=7), 30, context, checkpoint)
    assert held == SamplingParams(max_tokens=wanted, top_k=7)


def test_a_prompt_as_long_as_the_context_is_refused() -> None:
    with pytest.raises(RequestError, match="the prompt has 30 tokens; allowed: fewer than 30; ask for less"):
        held_to_context(SamplingParams(), 30, 30)


def test_min_tokens_beyond_the_context_are_refused_and_raise_the_checkpoints_limit() -> None:
    with pytest.raises(RequestError, match="received min_tokens 71; allowed: at most 70"):
        held_to_context(SamplingParams(min_tokens=71), 30, 100)
    assert held_to_context(SamplingParams(min_tokens=69), 30, 100, 64).max_tokens == 69


@pytest.mark.parametrize(("asked", "wanted"), [(None, 2 * TYPICAL_TOKENS), (1000, 2000)])
def test_an_open_answer_is_planned_for_as_a_typical_one(asked: int | None, wanted: int) -> None:
    params = SamplingParams(max_tokens=asked, n=2)
    assert expected_tokens(held_to_context(params, 30, 32_768), asked) == wanted


def test_settings_take_the_context_and_the_checkpoints_own_limit() -> None:
    settings = GenerationSettings(frozenset(), context_tokens=100)
    assert settings.completed(SamplingParams(), 30, None).max_tokens == 70
    own = GenerationSettings(frozenset(), max_tokens=5, context_tokens=100)
    assert own.completed(SamplingParams(), 30, None).max_tokens == 5
    assert own.defaults.max_tokens is None
