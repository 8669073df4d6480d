"""Streams, stop strings and grammars with vocabularies as large as published ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from epd.sampling_params import SamplingParams
from epd.stages.grammar.matcher import GrammarBuilder
from epd.stages.sampling.detokenizer import AnswerEnds, IncrementalDetokenizer, TextStream
from tests.models.real_tokenizer import qwen_tokenizer
from tests.stages.grammar.formats import schema
from tests.stages.sampling.large_vocabularies import ADDED, SPECIAL, byte_fallback, byte_level

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXT = "A naïve 世界 of 漢字, 한국어, ßmall 👩‍👩‍👧 families 🙂👍 and <tool_call>s: ¿qué?  \n\tÄ́ done"
both = pytest.mark.parametrize("made", [byte_level, byte_fallback])


@cache
def published() -> PreTrainedTokenizerFast:
    """Qwen's merges, with the special and added tokens of the others."""
    tokenizer = qwen_tokenizer(SPECIAL)
    tokenizer.add_tokens(list(ADDED))
    return tokenizer


all_three = pytest.mark.parametrize("made", [byte_level, byte_fallback, published])
Made = Callable[[], PreTrainedTokenizerFast]


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def pieces_of(tokenizer: PreTrainedTokenizerFast, token_ids: list[int]) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer)
    return [*(stream.push(each) for each in token_ids), stream.finish()]


@all_three
def test_a_stream_has_whole_characters_and_loses_none(made: Made) -> None:
    tokenizer = made()
    assert len(tokenizer) > 100_000
    token_ids = ids_of(tokenizer, TEXT)
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == TEXT == tokenizer.decode(token_ids)
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "" in pieces[:-1], "some token was to end within a character"
    assert {tokenizer.convert_tokens_to_ids(each) for each in ADDED[1:]} & set(token_ids)


@both
@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=12).filter(lambda text: "\u2581" not in text))
def test_any_text_comes_back(made: Made, text: str) -> None:
    assert "".join(pieces_of(made(), ids_of(made(), text))) == text


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_pieces_of_any_tokens_add_up_to_what_transformers_decodes(data: st.DataObject) -> None:
    """Of bytes alone: where tokens of bytes make no text, transformers drops those before them, too."""
    tokenizer = byte_level()
    ids = st.one_of(st.integers(0, len(tokenizer) - 1), st.integers(0, 300))
    token_ids = data.draw(st.lists(ids, max_size=12))
    expected = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(pieces_of(tokenizer, token_ids)) == expected


@all_three
@pytest.mark.parametrize("stop", ["世界", "界 of", "👧", "🙂", "qué", "ßm", "l_call", "\n\t"])
def test_a_stop_string_ends_a_text_wherever_tokens_are_cut(made: Made, stop: str) -> None:
    tokenizer = made()
    sampling = SamplingParams(stop=(stop,))
    stream = TextStream(tokenizer, sampling, AnswerEnds.of(sampling, frozenset()))
    said = ""
    for token_id in ids_of(tokenizer, TEXT):
        said += stream.push(token_id, may_stop=True)
        if stream.is_stopped:
            break
    assert stream.is_stopped
    assert said == TEXT[: TEXT.index(stop)]


@all_three
def test_a_grammar_of_any_script_is_held_token_by_token(made: Made) -> None:
    """A walk of random tokens that the grammar allows ends in JSON of the schema."""
    tokenizer, rng = made(), random.Random(3)
    words = ["世界", "한국어", "👩‍👩‍👧", "naïve", "漢字"]
    grammar = schema(
        {"type": "object", "properties": {"a": {"enum": words}, "b": {"type": "integer", "maximum": 9}},
         "required": ["a", "b"], "additionalProperties": False}
    )  # fmt: skip
    end = tokenizer.convert_tokens_to_ids(SPECIAL[0])
    builder = GrammarBuilder(tokenizer, frozenset([end]))
    for _ in range(3):
        matcher, walked = builder.matcher(grammar), list[int]()
        assert matcher is not None
        while not walked or walked[-1] != end:
            bits = np.unpackbits(np.frombuffer(matcher.mask(()), np.uint8), bitorder="little")
            walked.append(rng.choice(np.flatnonzero(bits).tolist()))
            matcher.append(walked[-1])
        assert json.loads("".join(pieces_of(tokenizer, walked[:-1])))["a"] in words
