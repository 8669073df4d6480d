"""Words that an answer may not contain: which tokens complete one, and what is chosen instead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from epd.errors import RequestError
from epd.models import embedded_model_path
from epd.sampling_params import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, SamplingParams
from epd.stages.sampling.sampler import sample
from epd.stages.sampling.sampling_state import BadWords, SamplingRow, SamplingState, with_bad_tokens
from tests.stages.sampling.test_allowed import Listed

VOCAB = 12
words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)
LOGITS = torch.arange(VOCAB, dtype=torch.float32).flip(0)[None]  # the lower, the likelier


@given(words, st.lists(st.integers(0, 3), max_size=8))
def test_a_token_completes_a_word_where_the_others_stand_before_it(
    words: Sequence[Sequence[int]], answer: list[int]
) -> None:
    found = BadWords(words)
    ends = {word[-1] for word in words if answer[max(0, len(answer) - len(word) + 1) :] == list(word[:-1])}
    assert found.completing(answer) == ends
    assert found.completing(answer[max(0, len(answer) - found.num_before) :]) == ends


def state(words: Sequence[Sequence[int]], output: Sequence[int] = (), **options: object) -> SamplingState:
    matcher = options.pop("matcher", None)
    params = SamplingParams(**options)  # type: ignore[arg-type]
    ids = params.ending_ids(frozenset([5]))
    return SamplingState(
        params, 0, np.array([1, 2]), output, ending_ids=ids, matcher=matcher, bad_words=BadWords(words)  # type: ignore[arg-type]
    )  # fmt: skip


def chosen(*rows: SamplingRow) -> list[int]:
    return [token.token_id for token in sample(LOGITS.expand(len(rows), -1), rows)]


def test_the_likeliest_token_that_completes_no_word_is_chosen() -> None:
    free = SamplingRow(SamplingState(SamplingParams(), 0, np.array([1])))
    assert chosen(free, SamplingRow(state([[0], [1]]))) == [0, 2]
    # The prompt ends with 1, 2: only the answer counts.
    assert chosen(SamplingRow(state([[2, 0]]))) == [0]
    assert chosen(SamplingRow(state([[2, 0]], [7, 2]))) == [1]
    assert chosen(SamplingRow(state([[2, 0]], [2, 7]))) == [0]


def test_drafted_tokens_count_as_if_they_had_come() -> None:
    drafted = state([[2, 0], [3, 4, 1]], [9, 3])
    rows = [SamplingRow(drafted, each) for each in [(), (4,), (4, 0), (2,), (4, 2)]]
    assert chosen(*rows) == [0, 0, 0, 1, 1]
    assert chosen(SamplingRow(state([[3, 4, 0]], [9, 3]), (4,))) == [1]


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_word_is_not_drawn_either(top_k: int, seed: int) -> None:
    params = SamplingParams(temperature=2.0, top_k=top_k)
    row = SamplingRow(SamplingState(params, seed, np.array([1]), [4], bad_words=BadWords([[4, 0], [1]])))
    assert chosen(*[row] * 2)[0] not in (0, 1)


def test_a_format_comes_before_words_and_words_before_a_length() -> None:
    held = {"matcher": Listed(0, 3)}
    assert chosen(SamplingRow(state([[0]], **held))) == [3]
    assert chosen(SamplingRow(state([[0], [3]], **held))) == [0]
    # 5 ends the answer, which may not end yet; the other token that its format allows completes a word.
    early = state([[0]], matcher=Listed(0, 5), min_tokens=4)
    assert chosen(SamplingRow(early)) == [5]
    assert chosen(SamplingRow(state([], matcher=Listed(4, 5), min_tokens=4))) == [4]
    assert chosen(SamplingRow(state([[0], [1]], min_tokens=4))) == [2]


def test_a_word_is_what_the_tokenizer_writes_with_and_without_a_space() -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    found = with_bad_tokens(SamplingParams(bad_words=("red", "  two")), tokenizer).bad_token_ids
    texts = ("red", " red", "two", " two")
    assert found == tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    assert len(set(found)) == 4
    plain = SamplingParams(max_tokens=3)
    assert with_bad_tokens(plain, tokenizer) is plain


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (("red", " "), "more than spaces"),
        (("",), "more than spaces"),
        (["red"], "must be strings"),
        (("a",) * (MAX_BAD_WORDS + 1), f"got {MAX_BAD_WORDS + 1}"),
        (("a" * (MAX_BAD_WORD_CHARS + 1),), f"of {MAX_BAD_WORD_CHARS + 1}"),
    ],
)
def test_what_is_no_word_and_too_many_are_refused(received: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(bad_words=received)  # type: ignore[arg-type]
