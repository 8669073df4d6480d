"""Sentences of documents are short, so that they are understood at the first reading."""

from __future__ import annotations

import pytest

from benchmarks.house.counts import documents, prose, sentence_lengths
from tests import ROOT

_ALLOWED = 25
# Words of the 90th percentile where a page has more than allowed. A figure may fall; nothing is added.
_LONGER: dict[str, int] = {}


def percentile_90(text: str) -> int:
    """Returns the words that nine sentences of ten do not exceed, 0 for a text without sentences."""
    lengths = sentence_lengths(text)
    return lengths[len(lengths) * 9 // 10] if lengths else 0


def test_nine_sentences_of_ten_are_short() -> None:
    found = {str(path.relative_to(ROOT)): percentile_90(path.read_text("utf-8")) for path in documents(ROOT)}
    assert len(found) > 15
    assert {name: count for name, count in found.items() if count > _LONGER.get(name, _ALLOWED)} == {}


def test_pages_that_are_short_by_now_stay_short() -> None:
    found = {str(path.relative_to(ROOT)): percentile_90(path.read_text("utf-8")) for path in documents(ROOT)}
    shorter = {name: found.get(name, 0) for name, count in _LONGER.items() if found.get(name, 0) < count}
    assert shorter == {}, "write these figures into _LONGER, and take pages out that are allowed"


def test_histories_are_exempt() -> None:
    names = {str(path.relative_to(ROOT)) for path in documents(ROOT)}
    assert {"README.md", "docs/engine.md"} <= names
    assert not {name for name in names if name.startswith(("docs/log", "docs/decisions/"))}
    assert "CHANGELOG.md" not in names


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("Set it. It is off by default: leave it out.", [2, 8]),
        ("# A heading of many words\n\nYou set `--retention 0.25` of [a page](a/long/address.md).", [7]),
        ("| a | table |\n|---|---|\n| of | words |", []),
        ("```\nepd serve --a --b\n```\n\nIt runs.", [2]),
        ("- One point\n- another point here\n1. and a step", [2, 3, 3]),
        ("It takes 2.5 s, e.g. at night. You wait.", [2, 7]),
    ],
)
def test_how_sentences_are_counted(text: str, lengths: list[int]) -> None:
    assert sentence_lengths(text) == lengths, list(prose(text))
