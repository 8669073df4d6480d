"""Reported tokens have the bytes that they stand for, in vocabularies of either form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from epd.serve_app.token_text import TokenTexts
from epd.stages.sampling.sampler import SampledToken
from tests.stages.sampling.large_vocabularies import byte_fallback, byte_level

TEXT = "A 世界 of 漢字, 한국어, ßmall 👩‍👩‍👧 families 🙂👍"


@pytest.mark.parametrize("made", [byte_level, byte_fallback])
def test_the_bytes_of_tokens_are_those_of_the_text(made: Callable[[], PreTrainedTokenizerFast]) -> None:
    tokenizer = made()
    texts, token_ids = TokenTexts(tokenizer), tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    data = [texts.logprob(SampledToken(each, -1.0, ())).data for each in token_ids]
    assert b"".join(data) == TEXT.encode()
    assert len(data) > len(TEXT.split())
