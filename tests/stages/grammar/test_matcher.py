"""A matcher knows what may follow, for the answer and for drafts, in whatever order it is asked."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import AutoTokenizer

from epd.errors import RequestError
from epd.models import embedded_model_path
from epd.stages.grammar.matcher import GrammarBuilder, TokenMatcher
from tests.stages.grammar.formats import SHAPE, WORDS, regex

NUM_WORDS = 16


@pytest.fixture(scope="module")
def builder() -> GrammarBuilder:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path(), local_files_only=True)
    return GrammarBuilder(tokenizer, frozenset([467, 468]))


def matcher_of(builder: GrammarBuilder, grammar: str) -> TokenMatcher:
    matcher = builder.matcher(grammar)
    assert matcher is not None
    return matcher


def bits_of(matcher: TokenMatcher, drafted: tuple[int, ...] = ()) -> NDArray[np.int32]:
    return np.frombuffer(matcher.mask(drafted), np.int32)


def allowed(bits: NDArray[np.int32]) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("grammar", [SHAPE, WORDS, regex("(ab|abc){1,5}d?")])
@pytest.mark.parametrize("seed", range(3))
def test_any_walk_ends_in_the_language_and_drafts_change_nothing(
    builder: GrammarBuilder, grammar: str, seed: int
) -> None:
    rng = random.Random(seed)
    asked, plain = matcher_of(builder, grammar), matcher_of(builder, grammar)
    walked: list[int] = []
    for _ in range(400):
        now = allowed(bits_of(asked))
        assert now, f"nothing may follow {walked}"
        token_id = rng.choice(now)
        drafts = (token_id, *rng.choices(range(512), k=2))
        behind = bits_of(asked, drafts[:1])
        bits_of(asked, drafts)
        asked.append(token_id)
        walked.append(token_id)
        if token_id in (467, 468):
            break
        assert bits_of(asked).tolist() == behind.tolist()
    for token_id in walked[:-1]:
        plain.append(token_id)  # all at once, as at a worker that takes the answer over
    assert walked[-1] in allowed(bits_of(plain))
    assert {467, 468} <= set(allowed(bits_of(plain)))


@pytest.mark.parametrize(("grammar", "least"), [(SHAPE, 10), (WORDS, 0), (regex("(ab|abc){1,5}d?"), 0)])
@pytest.mark.parametrize("has_masks", [False, True])
def test_an_only_token_is_all_that_the_mask_allows(
    builder: GrammarBuilder, grammar: str, least: int, has_masks: bool
) -> None:
    rng = random.Random(5)
    asked, twin = matcher_of(builder, grammar), matcher_of(builder, grammar)
    num_only = 0
    for _ in range(60):
        now = allowed(bits_of(twin))
        drafts: list[int] = []
        while (only := asked.only_token(drafts)) is not None:
            assert allowed(bits_of(twin, tuple(drafts))) == [only]
            assert asked.only_token([*drafts, only ^ 1]) is None
            drafts.append(only)
            num_only += 1
        if has_masks:  # of a row that reports about other tokens
            assert allowed(bits_of(asked)) == now
        token_id = rng.choice(now)
        if token_id in (467, 468):
            break
        asked.append(token_id)
        twin.append(token_id)
    assert num_only >= least


def test_a_token_beside_the_only_one_is_an_error_later(builder: GrammarBuilder) -> None:
    matcher = matcher_of(builder, SHAPE)
    only = matcher.only_token()
    assert only is not None
    matcher.append(only ^ 1)
    with pytest.raises(RequestError, match="cannot be followed behind 0 tokens"):
        matcher.mask()


def test_behind_a_draft_that_may_not_come_everything_is_allowed(builder: GrammarBuilder) -> None:
    matcher = matcher_of(builder, SHAPE)
    before = bits_of(matcher).tolist()
    assert bits_of(matcher, (allowed(bits_of(matcher))[0], 70, 70)).tolist() == [-1] * NUM_WORDS
    assert bits_of(matcher).tolist() == before


def test_a_token_that_is_not_allowed_is_an_error_of_the_request(builder: GrammarBuilder) -> None:
    matcher = matcher_of(builder, SHAPE)
    matcher.append(70)
    with pytest.raises(RequestError, match="cannot be followed behind 0 tokens"):
        bits_of(matcher)


def test_a_grammar_that_cannot_be_built_is_an_error_of_the_request(builder: GrammarBuilder) -> None:
    with pytest.raises(RequestError, match="cannot be followed"):
        bits_of(matcher_of(builder, regex("(a")))


def test_a_grammar_is_built_once_and_kept(builder: GrammarBuilder) -> None:
    assert builder.start(WORDS) is builder.start(WORDS)
    first = builder.start(WORDS)
    for number in range(64):
        builder.start(regex(f"a{{{number}}}"))
    assert builder.start(WORDS) is not first


def test_without_an_end_token_no_format_can_be_followed() -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path(), local_files_only=True)
    with pytest.raises(RequestError, match="no token that ends an answer"):
        bits_of(matcher_of(GrammarBuilder(tokenizer, frozenset()), WORDS))
