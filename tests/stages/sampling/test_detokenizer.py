"""Streamed text: no half characters, nothing lost, nothing twice; never part of a stop string."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from epd.sampling_params import SamplingParams
from epd.stages.sampling.detokenizer import (
    AnswerEnds,
    ByteLevelDecoder,
    IncrementalDetokenizer,
    StopChecker,
    TextStream,
    TokenBytes,
    WindowDecoder,
)
from tests.tiny_models import byte_level_tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def tokenizer_with_added_tokens() -> PreTrainedTokenizerFast:
    """Added tokens that are not special: one in letters of the byte alphabet, one in others."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["<tool>", "é", "日本"])
    return tokenizer


TOKENIZER = tokenizer_with_added_tokens()
DECODERS = {
    "byte-level": lambda: ByteLevelDecoder(TokenBytes(TOKENIZER.backend_tokenizer)),
    "window": lambda: WindowDecoder(TOKENIZER),
}
ID_OF_BYTE = {byte: TOKENIZER.convert_tokens_to_ids(token) for byte, token in bytes_to_unicode().items()}
every_decoder = pytest.mark.parametrize("kind", DECODERS)


def pieces_of(token_ids: Iterable[int], kind: str = "byte-level") -> list[str]:
    decoder = DECODERS[kind]()
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.finish()]


def decoded(token_ids: list[int]) -> str:
    return TOKENIZER.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# Hypothesis draws string constants of our modules too; special tokens are left out of decoded text.
plain_text = st.text().filter(lambda text: not any(each in text for each in TOKENIZER.all_special_tokens))


@every_decoder
@given(plain_text)
def test_pieces_of_valid_text_are_whole_characters(kind: str, text: str) -> None:
    token_ids = byte_level_tokenizer()(text)["input_ids"]
    pieces = pieces_of(token_ids, kind)
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@every_decoder
@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
def test_pieces_of_any_tokens_add_up_to_their_text(kind: str, token_ids: list[int]) -> None:
    assert "".join(pieces_of(token_ids, kind)) == decoded(token_ids)


@given(st.binary(max_size=12))
@example(b"\xf0\x9f\x99")
@example(b"\xe2\x82\xe2\x82\xac")
@example(b"\xed\xa0\x80\xc0\xaf\xf5")
def test_any_bytes_become_the_text_that_the_tokenizer_makes_of_them(data: bytes) -> None:
    """Invalid UTF-8 has many readings; both count one replacement for each longest start of a character."""
    token_ids = [ID_OF_BYTE[byte] for byte in data]
    assert "".join(pieces_of(token_ids)) == decoded(token_ids) == data.decode("utf-8", "replace")


@every_decoder
def test_a_character_of_four_bytes_comes_at_once(kind: str) -> None:
    assert pieces_of(TOKENIZER("a🙂b")["input_ids"], kind) == ["a", "", "", "", "🙂", "b", ""]


@every_decoder
def test_half_a_character_at_the_end_is_shown_as_such(kind: str) -> None:
    assert "".join(pieces_of(TOKENIZER("ok🙂")["input_ids"][:-1], kind)) == f"ok{REPLACEMENT}"


@every_decoder
@pytest.mark.parametrize("token", ["<|im_end|>", "<|vision_start|>"])
def test_special_tokens_have_no_text(kind: str, token: str) -> None:
    assert "".join(pieces_of(TOKENIZER(f"a{token}b")["input_ids"], kind)) == "ab"


def test_ids_without_a_token_have_no_text() -> None:
    assert pieces_of([len(TOKENIZER), 2**31]) == ["", "", ""]


def test_work_per_token_does_not_grow_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    decode = TOKENIZER.decode

    def watched(token_ids: list[int], **options: bool) -> str:
        lengths.append(len(token_ids))
        text: str = decode(token_ids, **options)
        return text

    monkeypatch.setattr(TOKENIZER, "decode", watched)
    pieces_of(TOKENIZER("a long answer, " * 20)["input_ids"], "window")
    assert max(lengths) <= 2


def test_byte_level_tokenizers_are_never_asked_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "decode", None)
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert "".join(map(detokenizer.push, TOKENIZER("hello")["input_ids"])) == "hello"


def test_other_tokenizers_decode_as_they_do() -> None:
    """WordPiece joins words by rules of its own: a space depends on what came before."""
    words = Tokenizer(models.WordLevel({"the": 0, "red": 1, "##dish": 2, "circle": 3}, unk_token="the"))
    words.decoder = decoders.WordPiece()
    detokenizer = IncrementalDetokenizer(PreTrainedTokenizerFast(tokenizer_object=words))
    assert [detokenizer.push(token_id) for token_id in (0, 1, 2, 3)] == ["the", " red", "dish", " circle"]
    assert detokenizer.finish() == ""


def shown(pieces: Iterable[str], checker: StopChecker) -> str:
    """All that is let through until a stop string is found."""
    text = ""
    for piece in pieces:
        text += checker.push(piece)
        if checker.matched:
            return text
    return text + checker.finish()


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The end of the stop string that is complete first, and which: the plain way to look for it."""
    ends = [(end, stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    return min(ends, key=lambda end: (end[0], -len(end[1])), default=None)


few_letters = st.text("ab🙂", max_size=12)
some_stops = st.lists(st.text("ab🙂", min_size=1, max_size=5), max_size=3)


@given(few_letters, some_stops, st.lists(st.integers(0, 12), max_size=4), st.booleans())
def test_text_ends_with_the_first_complete_stop(
    text: str, stops: list[str], cuts: list[int], include_stop: bool
) -> None:
    pieces = [text[a:b] for a, b in pairwise([0, *sorted(cuts), len(text)])]
    checker = StopChecker(stops, include_stop=include_stop)
    found = first_stop(text, stops)
    if found is None:
        assert (shown(pieces, checker), checker.matched) == (text, None)
    else:
        end, stop = found
        expected = text[:end] if include_stop else text[: end - len(stop)]
        assert (shown(pieces, checker), checker.matched) == (expected, stop)


@given(few_letters, some_stops)
def test_only_what_may_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    checker, out = StopChecker(stops), ""
    for num_known, character in enumerate(text, start=1):
        out += checker.push(character)
        if checker.matched:
            return
        known = text[:num_known]
        starts = [k for stop in stops for k in range(len(stop)) if known.endswith(stop[:k])]
        assert out == known[: num_known - max(starts, default=0)]


def test_a_stop_that_comes_too_early_is_text_but_may_begin_there() -> None:
    """As in vLLM: with min_tokens, a stop string counts if its end comes after them."""
    checker = StopChecker(["END"])
    out = checker.push("an END, E", may_stop=False)
    assert (out, checker.matched) == ("an END, ", None)
    assert (checker.push("ND and more"), checker.matched) == ("", "END")


def test_a_stop_that_comes_too_early_may_be_the_start_of_the_next() -> None:
    checker = StopChecker(["abab"])
    assert checker.push("abab", may_stop=False) == "ab"
    assert (checker.push("ab"), checker.matched) == ("", "abab")


def test_of_two_stops_that_end_together_the_longer_counts() -> None:
    for stops in (["b", "ab"], ["ab", "b"]):
        checker = StopChecker(stops)
        assert (checker.push("cab"), checker.matched) == ("c", "ab")


def test_without_stop_strings_text_passes_untouched() -> None:
    checker = StopChecker(())
    assert [checker.push("a"), checker.push(""), checker.finish()] == ["a", "", ""]


def test_a_stream_stops_in_the_middle_of_a_token_run() -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop=("🙂!", "never")))
    out = [stream.push(token_id) for token_id in TOKENIZER("nà🙂!")["input_ids"] if not stream.is_stopped]
    assert "".join(out) == "nà"
    assert (stream.is_stopped, stream.finish()) == (True, "")


def test_a_stream_without_a_stop_gives_all_in_the_end() -> None:
    params = SamplingParams(stop=("never",), include_stop_str_in_output=True)
    stream = TextStream(TOKENIZER, params)
    out = [stream.push(token_id) for token_id in TOKENIZER("so nev🙂")["input_ids"][:-1]]
    assert "".join(out) == "so "
    assert stream.finish() == f"nev{REPLACEMENT}"
    assert not stream.is_stopped
    assert (stream.push(TOKENIZER("n")["input_ids"][0]), stream.finish()) == ("", "n")


@pytest.mark.parametrize("text", ["so it goes}", "nà🙂", "a<tool>", "<|im_end|>", "}"])
def test_the_token_that_ends_a_text_is_cut_off_or_included_as_a_stop_string_is(text: str) -> None:
    *before, last = TOKENIZER(text)["input_ids"]
    for include_stop, shown_ids in ((False, before), (True, [*before, last])):
        stream = TextStream(TOKENIZER, SamplingParams(include_stop_str_in_output=include_stop))
        out = [*(stream.push(token_id) for token_id in before), stream.end(last)]
        assert "".join(out) == decoded(shown_ids)


def test_a_stop_string_in_the_token_that_ends_a_text_ends_it_once() -> None:
    *before, last = TOKENIZER("on <tool>")["input_ids"]
    stream = TextStream(TOKENIZER, SamplingParams(stop=("<to", "so"), include_stop_str_in_output=True))
    out = [*(stream.push(token_id) for token_id in before), stream.end(last)]
    assert "".join(out) == "on <to"


def test_a_long_stop_string_costs_what_the_text_does() -> None:
    """16 stop strings of 100,000 characters for 128 answers: what is made of them follows the text alone."""
    stops = tuple(f"{number:02d}" * 50_000 for number in range(16))
    tracemalloc.start()
    try:
        ends = AnswerEnds.of(SamplingParams(stop=stops), frozenset())
        checkers = [StopChecker(ends.stops) for _ in range(128)]
        shown_text = [checker.push("0101015 and so on") for checker in checkers]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert set(shown_text) == {"0101015 and so on"}
    assert peak < 1 << 20
    assert sum(stop.num_prepared for stop in ends.stops) <= 16 * len("0101015 and so on")


def test_answers_to_one_request_share_what_ends_them() -> None:
    ends = AnswerEnds.of(SamplingParams(stop=("abab",), stop_token_ids=(7, 8)), frozenset([1]))
    assert ends.token_ids == {1, 7, 8}
    first, second = StopChecker(ends.stops), StopChecker(ends.stops)
    assert (first.push("aba"), second.push("ab")) == ("", "")
    assert (first.push("b"), first.matched) == ("", "abab")
    assert (second.push("c"), second.matched) == ("abc", None)
