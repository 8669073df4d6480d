"""docs/works-with.md is true: drawn pairs of features answer as they should, or are refused at start."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.works_with import FEATURES, Feature, Trials, pairs

_PAGE = Path(__file__).parent.parent / "docs" / "works-with.md"
_NUM_DRAWN = 4
_NAMED = {each.name: each for each in FEATURES}


def rows(heading: str) -> Iterator[list[str]]:
    """The cells of the first table behind a line, without its head."""
    lines = _PAGE.read_text(encoding="utf-8").partition(heading)[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def refused_pairs() -> set[tuple[str, str]]:
    found = (product(row[0].split(", "), row[1].split(", ")) for row in rows("## Refused"))
    return {pair for each in found for pair in each}


REFUSED = sorted(refused_pairs())
WORKING = [pair for pair in pairs() if (pair[0].name, pair[1].name) not in REFUSED]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("pairs"))


def test_the_page_names_all_features() -> None:
    listed = {name for row in rows("# What works with what") for name in row[0].split(", ")}
    assert listed == set(_NAMED)


@pytest.mark.parametrize(
    "pair", random.Random(41).sample(WORKING, _NUM_DRAWN), ids=lambda pair: f"{pair[0].name} + {pair[1].name}"
)
def test_a_drawn_pair_answers_as_the_features_that_change_answers(
    trials: Trials, pair: tuple[Feature, Feature]
) -> None:
    given = trials.given(pair)
    assert given.refusal == ""
    assert given.texts == trials.expected(pair).texts != frozenset()


@pytest.mark.parametrize("names", REFUSED, ids=" + ".join)
def test_a_refused_pair_is_refused_in_one_line(trials: Trials, names: tuple[str, str]) -> None:
    refusal = trials.given([_NAMED[name] for name in names]).refusal
    assert "allowed: " in refusal
    assert "\n" not in refusal
