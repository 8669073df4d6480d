"""The events of a stream, made in the fast way: byte for byte those that the models of the protocol give."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.serve_app.http.answers.responses import ChunkBuilder, event
from epd.serve_app.observability.record import RequestRecord
from epd.serve_app.service import AnswerEnd, AnswerItem, StageSpan, TokenDelta, TokenLogprob
from epd.types import StageTimings, Usage

# Everything that JSON escapes, what it need not, and what looks like the end of an empty text.
HARD_TEXTS = (
    "", '""', '"', "\\", "\n\r\t\b\f", "\x00\x1f\x7f\x80", "</script>", "é漢🙂",
    "\u2028\u2029\ufeff", "{}%b",
)  # fmt: skip
END = AnswerEnd(Usage(0, 0, 4, 2, 0), StageTimings(total_s=0.5))
LOGPROBS = (TokenLogprob(7, "x", b"x", -0.5),)

texts = st.one_of(st.text(st.characters(exclude_categories=("Cs",))), st.sampled_from(HARD_TEXTS))
deltas = st.builds(
    TokenDelta,
    st.integers(0, 2),
    texts,
    st.just((7,)),
    st.sampled_from([(), LOGPROBS]),
    st.sampled_from([None, None, None, "stop", "length"]),
)
spans = st.just(StageSpan("encode", "e0", 1.0, 2.0, item=0, group=1))


def both_ways(
    items: Sequence[AnswerItem], *, model: str, includes_usage: bool, has_logprobs: bool
) -> tuple[list[bytes], list[bytes]]:
    """The events of each item, by `events` and by `chunks`."""
    record = RequestRecord(model=model)
    fast, plain = (
        ChunkBuilder(record, 2, includes_usage=includes_usage, has_logprobs=has_logprobs) for _ in range(2)
    )
    return (
        [fast.events(item) for item in items],
        [b"".join(map(event, plain.chunks(item))) for item in items],
    )


@given(st.lists(st.one_of(deltas, spans)), texts, st.booleans(), st.booleans())
def test_events_are_those_of_the_models(
    items: list[AnswerItem], model: str, includes_usage: bool, has_logprobs: bool
) -> None:
    fast, plain = both_ways(
        [*items, END], model=model, includes_usage=includes_usage, has_logprobs=has_logprobs
    )
    assert fast == plain


@pytest.mark.parametrize("text", HARD_TEXTS[1:])
def test_a_text_of_a_begun_choice_is_quoted_as_json_does(text: str) -> None:
    items = [TokenDelta(1, "The", (1,)), TokenDelta(1, text, (2,))]
    fast, plain = both_ways(items, model='a "" b', includes_usage=True, has_logprobs=False)
    assert fast == plain
    read = json.loads(fast[1].removeprefix(b"data: "))
    assert read["choices"][0]["delta"]["content"] == text
    assert "usage" in read


def test_only_the_last_end_of_several_choices_waits_for_the_report() -> None:
    builder = ChunkBuilder(RequestRecord(), 2, includes_usage=False, has_logprobs=False)
    first = [chunk.choices[0] for chunk in builder.chunks(TokenDelta(1, "b", (1,), (), "stop"))]
    assert [(one.delta.content, one.finish_reason) for one in first] == [("", None), ("b", "stop")]
    second = [chunk.choices[0] for chunk in builder.chunks(TokenDelta(0, "a", (1,), (), "length"))]
    assert [(one.delta.content, one.finish_reason) for one in second] == [("", None)]
    list(builder.chunks(END))
    (last,) = builder.last_chunks()
    assert (last.choices[0].delta.content, last.choices[0].finish_reason) == ("a", "length")
    assert last.epd
