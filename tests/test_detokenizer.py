"""Streamed text: no half characters, nothing lost, nothing twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.detokenizer import IncrementalDetokenizer, StreamedText
from tests.tiny_models import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()


def pieces_of(token_ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


@given(st.text())
def test_pieces_of_valid_text_are_whole_characters(text: str) -> None:
    pieces = pieces_of(TOKENIZER(text)["input_ids"])
    assert "".join(pieces) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
def test_pieces_of_any_tokens_add_up_to_their_text(token_ids: list[int]) -> None:
    whole = TOKENIZER.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(pieces_of(token_ids)) == whole


def test_a_character_of_four_bytes_comes_at_once() -> None:
    assert pieces_of(TOKENIZER("a🙂b")["input_ids"]) == ["a", "", "", "", "🙂", "b", ""]


def test_work_per_token_does_not_grow_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    decode = TOKENIZER.decode

    def watched(token_ids: list[int], **options: bool) -> str:
        lengths.append(len(token_ids))
        text: str = decode(token_ids, **options)
        return text

    monkeypatch.setattr(TOKENIZER, "decode", watched)
    pieces_of(TOKENIZER("a long answer, " * 20)["input_ids"])
    assert max(lengths) <= 2


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    assert "".join(pieces_of(TOKENIZER("ok🙂")["input_ids"][:-1])) == "ok\N{REPLACEMENT CHARACTER}"


def test_streamed_text_passes_on_what_it_has_when_it_has_it() -> None:
    heard: list[str] = []
    text = StreamedText(TOKENIZER, heard.append, start=0.0)
    tokens = iter(TOKENIZER("hé")["input_ids"])

    def watched():  # type: ignore[no-untyped-def]
        for token_id, known in zip(tokens, ([], ["h"], ["h"]), strict=True):
            assert heard == known
            yield token_id

    text.consume(watched())

    assert heard == ["h", "é"]
    assert text.text == "hé"
    assert text.ttft_s > 0


@pytest.mark.parametrize("token", ["<|im_end|>", "<|vision_start|>"])
def test_special_tokens_have_no_text(token: str) -> None:
    assert "".join(pieces_of(TOKENIZER(f"a{token}b")["input_ids"])) == "ab"
