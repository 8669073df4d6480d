"""docs/works-with.md is true: drawn features together answer as they should, or are refused at start."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.stages.ranks.thread_ranks import StartedThreadRanks
from tests.works_with import FEATURES, LIKELIHOODS, Features, Given, Trials, by_server, together

_PAGE = Path(__file__).parent.parent / "docs" / "works-with.md"
_IS_SOAK = bool(os.environ.get("EPD_SOAK"))
# Of pairs, of triples, and of triples with tensor parallelism, each with a server of its own over HTTP.
_NUM_DRAWN = 30 if _IS_SOAK else 2
# Servers with so many features of theirs, which are asked with all that questions can have. `make soak`: all.
_NUM_SERVERS = {0: 1, 1: 12, 2: 12, 3: 17}
_NAMED = {each.name: each for each in FEATURES}
# Where tokens may differ, of the logarithms of their likelihoods: of trained weights, and of random ones.
_MAX_DISTANCE, _MAX_DISTANCE_RANDOM = 0.5, 1.0


def rows(heading: str) -> Iterator[list[str]]:
    """The cells of the first table behind a line, without its head."""
    lines = _PAGE.read_text(encoding="utf-8").partition(heading)[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def pairs_below(heading: str) -> list[tuple[str, str]]:
    found = (product(row[0].split(", "), row[1].split(", ")) for row in rows(heading))
    return sorted({pair for each in found for pair in each})


REFUSED, DIFFERING = map(pairs_below, ("## Refused", "## With other tokens"))


def has_one(pairs: list[tuple[str, str]], features: Features) -> bool:
    among = {frozenset(each.name for each in pair) for pair in combinations(features, 2)}
    return bool(among & set(map(frozenset, pairs)))


def working(count: int) -> list[Features]:
    """So many features of which no two are refused."""
    return [features for features in together(count) if not has_one(REFUSED, features)]


def to_ask(features: Features) -> Features:
    return (*features, LIKELIHOODS) if has_one(DIFFERING, features) else features


def is_right(features: Features, given: Given, expected: Given) -> bool:
    """Reports whether an answer is the expected one, or near it where the page lets tokens differ."""
    if LIKELIHOODS not in features:
        return given == expected
    is_random = any(each.checkpoint for each in features)
    return given.distance(expected) <= (_MAX_DISTANCE_RANDOM if is_random else _MAX_DISTANCE)


TRIPLES = working(3)
RANKED = [features for features in TRIPLES if "tensor parallelism" in {each.name for each in features}]
DRAWN = [
    features
    for among in (working(2), TRIPLES, RANKED)
    for features in random.Random(45).sample(among, _NUM_DRAWN)
]


def drawn_servers() -> dict[Features, list[Features]]:
    """Triples, without those of which each feature changes answers: these stand for themselves."""
    groups = by_server(each for each in TRIPLES if not all(one.changes_answers for one in each))
    rng = random.Random(45)
    drawn: list[Features] = []
    for size, number in _NUM_SERVERS.items():
        among = [server for server in groups if len(server) == size]
        drawn += among if _IS_SOAK else rng.sample(among, number)
    return {server: groups[server] for server in drawn}


SERVERS = drawn_servers()


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("pairs"))


def test_the_page_names_all_features() -> None:
    listed = {name for row in rows("# What works with what") for name in row[0].split(", ")}
    assert listed == set(_NAMED)


@pytest.mark.parametrize("features", DRAWN, ids=lambda drawn: " + ".join(each.name for each in drawn))
def test_drawn_features_answer_as_those_that_change_answers(trials: Trials, features: Features) -> None:
    asked = to_ask(features)
    given, expected = trials.given(asked), trials.expected(asked)
    assert given.refusal == ""
    assert is_right(asked, given, expected), (given, expected)
    assert given.texts


def test_so_many_triples_are_drawn() -> None:
    assert sum(map(len, SERVERS.values())) >= (3000 if _IS_SOAK else 300)


@pytest.mark.parametrize(
    "server", SERVERS, ids=lambda drawn: " + ".join(each.name for each in drawn) or "none"
)
def test_triples_of_one_server_answer_as_those_that_change_answers(
    trials: Trials, server: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server is asked all at once, if that changes no token.

    A second rank is a process in `DRAWN` and the soak, here a thread.
    """
    if not _IS_SOAK:
        monkeypatch.setattr("epd.stages.ranks.group.ProcessRanks", StartedThreadRanks)
    triples = [to_ask(each) for each in SERVERS[server]]
    changing = [tuple(each for each in features if each.changes_answers) for features in triples]
    for plain, asked in by_server(changing).items():
        trials.ask_at_once(plain, asked)
    trials.ask_at_once(server, triples)
    told = {each: (trials.given(each), trials.expected(each)) for each in triples}
    wrong = {each: pair for each, pair in told.items() if not is_right(each, *pair)}
    assert {", ".join(one.name for one in each): pair for each, pair in wrong.items()} == {}
    assert all(trials.given(each).texts for each in triples)


@pytest.mark.parametrize("names", REFUSED, ids=" + ".join)
def test_a_refused_pair_is_refused_in_one_line(trials: Trials, names: tuple[str, str]) -> None:
    refusal = trials.given([_NAMED[name] for name in names]).refusal
    assert "allowed: " in refusal
    assert "\n" not in refusal
