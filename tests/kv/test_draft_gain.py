"""Requests draft where drafts have paid, as many tokens as pay, and stop where they do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from epd.engine_config import EngineConfig
from epd.errors import RequestError
from epd.kv.draft_gain import ChosenDrafts, DraftStatistics, HoldRate, PassCost
from epd.kv.drafting import AllDrafts, DraftConfig, Drafting, DraftMethod
from epd.types import Int64Array

KNOWN: Int64Array = np.zeros(4, dtype=np.int64)


class Fixed:
    """Proposes 1, 2, 3, ...; how many of them hold is up to the pass."""

    def __init__(self, *, proposes: bool = True) -> None:
        self.proposes = proposes
        self.num_learnt = 0

    def propose(self, token_ids: Int64Array, max_draft: int) -> list[int]:  # noqa: ARG002 # the protocol's
        return list(range(1, max_draft + 1)) if self.proposes else []

    def learn(
        self,
        token_ids: Int64Array,  # noqa: ARG002
        drafts: Sequence[int],  # noqa: ARG002
        sampled: Sequence[int],  # noqa: ARG002
    ) -> None:
        self.num_learnt += 1


def run_passes(
    requests: Sequence[ChosenDrafts],
    statistics: DraftStatistics,
    num_passes: int,
    seconds: Callable[[int], float],
    num_held: Callable[[int], int],
) -> list[int]:
    """Returns how many tokens the first request drafted in each pass.

    seconds: of a pass with so many tokens. num_held: how many tokens would hold in a pass's drafts.
    """
    lengths = []
    for number in range(num_passes):
        drafts = [request.propose(KNOWN, 99, len(requests)) for request in requests]
        if not statistics.pays(len(requests)):
            drafts = [[] for _ in requests]
        num_tokens = sum(1 + len(each) for each in drafts)
        statistics.cost.record(len(requests), num_tokens - len(requests), seconds(num_tokens))
        for request, each in zip(requests, drafts, strict=True):
            held = num_held(number)
            sampled = [token if token <= held else 0 for token in range(1, len(each) + 2)]
            request.learn(KNOWN, each, sampled)
        lengths.append(len(drafts[0]))
    return lengths


def chosen(num_requests: int, max_draft: int = 8) -> tuple[list[ChosenDrafts], DraftStatistics]:
    statistics = DraftStatistics(max_draft)
    return [ChosenDrafts({"fixed": Fixed()}, statistics) for _ in range(num_requests)], statistics


def memory_bound(num_tokens: int) -> float:
    """Weights take 10 ms to read whatever is computed; a token adds 0.1 ms."""
    return 10e-3 + 0.1e-3 * num_tokens


def compute_bound(num_tokens: int) -> float:
    return 1e-3 * num_tokens


def test_drafts_that_hold_are_made_long_where_tokens_are_cheap() -> None:
    assert set(run_passes(*chosen(1), 200, memory_bound, lambda _: 8)[40:]) == {8}


def test_where_a_token_costs_as_much_as_the_first_nothing_is_drafted() -> None:
    """All drafts hold, so they are tried, once in a thousand passes."""
    lengths = run_passes(*chosen(4), 3000, compute_bound, lambda _: 8)
    assert 0 < sum(length > 0 for length in lengths) < 60


def test_drafts_that_never_hold_are_never_drafted() -> None:
    assert set(run_passes(*chosen(4), 2000, memory_bound, lambda _: 0)) == {0}


def test_shorter_drafts_where_fewer_hold() -> None:
    def seconds(num_tokens: int) -> float:
        return 4e-3 + 1e-3 * num_tokens

    often = run_passes(*chosen(1), 1000, seconds, lambda number: number % 4)
    always = run_passes(*chosen(1), 1000, seconds, lambda _: 8)
    assert 0 < np.mean(often[500:]) < 4 < np.mean(always[500:])


def test_a_request_stops_when_its_text_changes_and_begins_again() -> None:
    requests, statistics = chosen(1)
    lengths = run_passes(
        requests, statistics, 900, memory_bound, lambda number: 0 if 300 <= number < 600 else 8
    )
    assert min(lengths[100:300]) > 0
    assert set(lengths[450:600]) == {0}
    assert min(lengths[750:]) > 0


def test_requests_draft_each_for_themselves() -> None:
    """One repeats itself, the other never does: only the first drafts."""
    requests, statistics = chosen(2)
    lengths = np.zeros((400, 2))
    for number in range(400):
        drafts = [request.propose(KNOWN, 99, 2) for request in requests]
        if not statistics.pays(2):
            drafts = [[], []]
        lengths[number] = [len(each) for each in drafts]
        statistics.cost.record(2, int(lengths[number].sum()), memory_bound(2 + int(lengths[number].sum())))
        requests[0].learn(KNOWN, drafts[0], [*range(1, len(drafts[0]) + 2)])
        requests[1].learn(KNOWN, drafts[1], [0] * (len(drafts[1]) + 1))
    assert (lengths[200:, 0] > 0).all()
    assert not lengths[200:, 1].any()


def test_more_sequences_make_drafts_pay_less() -> None:
    def seconds(num_tokens: int) -> float:
        return 4e-3 + 0.5e-3 * num_tokens

    alone = run_passes(*chosen(1), 600, seconds, lambda number: number % 3)
    many = run_passes(*chosen(32), 600, seconds, lambda number: number % 3)
    assert np.count_nonzero(alone[300:]) > 250
    assert np.count_nonzero(many[300:]) < 30


def test_gains_between_the_two_thresholds_change_nothing() -> None:
    """At a gain of about 1.06 a request that drafts goes on, and one that does not stays so."""
    for drafts_before in (False, True):
        requests, statistics = chosen(1)
        before = (lambda _: 8) if drafts_before else (lambda _: 0)
        run_passes(requests, statistics, 200, memory_bound, before)
        for _ in range(100):
            statistics.cost.record(1, 8, 0.0101 * 1.06)
            statistics.cost.record(1, 0, 0.0101)
        rate = 0.08
        requests[0]._own["fixed"] = HoldRate(1.0, 1.0, rate)
        gain = statistics.best_length(rate, 1)[1]
        assert 1.02 < gain < 1.10
        assert bool(requests[0]._decide(1)) is drafts_before


def test_a_source_that_proposes_nothing_leaves_the_pass_to_the_next() -> None:
    statistics = DraftStatistics(4)
    sources = {"silent": Fixed(proposes=False), "fixed": Fixed()}
    request = ChosenDrafts(sources, statistics)
    lengths = run_passes([request], statistics, 100, memory_bound, lambda _: 4)
    assert set(lengths[40:]) == {4}
    (num_learnt,) = {source.num_learnt for source in sources.values()}
    assert num_learnt >= 60, "from every pass with drafts"


def test_costs_are_predicted_for_passes_that_were_not_measured() -> None:
    cost = PassCost()
    for num_sequences, num_drafted in ((1, 0), (4, 0), (4, 8), (1, 4), (2, 0), (8, 8)):
        extra = 2e-3 if num_drafted else 0.0
        cost.record(num_sequences, num_drafted, 1e-3 + 5e-4 * num_sequences + extra + 1e-4 * num_drafted)
    assert cost.seconds(3, 0) == pytest.approx(2.5e-3)
    assert cost.seconds(3, 6) == pytest.approx(5.1e-3)


def test_a_rate_counts_tokens_up_to_the_first_that_fails() -> None:
    rate = HoldRate(memory=1.0)
    rate.record(5, 2)
    assert (rate.tried, rate.held) == (3, 2)
    rate.record(2, 2)
    assert (rate.tried, rate.held) == (5, 4)
    assert rate.rate == pytest.approx(4 / 5)


def test_a_named_source_always_drafts() -> None:
    drafts = AllDrafts(Fixed(), 6)
    assert drafts.propose(KNOWN, 99, 32) == [1, 2, 3, 4, 5, 6]
    assert drafts.propose(KNOWN, 2, 1) == [1, 2]


def test_nothing_is_drafted_and_no_memory_taken_by_default() -> None:
    drafting = Drafting(DraftConfig(), 100_000)
    assert drafting.for_sequence() is None
    assert drafting._table._rows.nbytes == 0


@pytest.mark.parametrize(
    ("method", "num_rows"),
    [("none", 0), ("prompt-lookup", 0), ("recycling", 1000), ("auto", 1000), ("mtp", 0)],
)
def test_successors_of_the_whole_vocabulary_are_kept_where_they_are_drafted_from(
    method: DraftMethod, num_rows: int
) -> None:
    drafting = Drafting(DraftConfig(method), 1000)
    assert len(drafting._table._rows) == num_rows


@pytest.mark.parametrize("method", ["none", "prompt-lookup", "recycling", "auto", "mtp"])
def test_only_a_draft_that_is_chosen_by_its_gain_is_dropped_for_it(method: DraftMethod) -> None:
    """Passes with drafts are shown to cost ten times as much: no draft of a token pays."""
    drafting = Drafting(DraftConfig(method), 1000)
    for number in range(60):
        num_drafted = (0, 8, 40)[number % 3]
        drafting.record_pass(8, num_drafted, 0.1 if num_drafted else 0.01)
    drafting.statistics.wish(1, 0.9)
    assert drafting.statistics.cost.is_measured is (method == "auto"), "nobody asks what passes cost"
    assert drafting.pays(8) is (method != "auto")


class Gain(DraftStatistics):
    """Says that three tokens gain so much, whatever was measured."""

    gain = 0.0

    def best_length(self, rate: float, num_sequences: int) -> tuple[int, float]:  # noqa: ARG002 # the same
        return 3, self.gain


def test_drafts_begin_at_a_gain_of_a_tenth_and_stay_down_to_a_fiftieth() -> None:
    """Both limits belong to the side of drafting."""

    def lengths(gains: Sequence[float]) -> list[int]:
        statistics = Gain(8)
        request, found = ChosenDrafts({"fixed": Fixed()}, statistics), []
        for gain in gains:
            statistics.gain = gain  # decisions are made at passes 2, 8, 16, 24, ...
            found.append(len(request.propose(KNOWN, 99, 1)))
            request.learn(KNOWN, [], [1])
            statistics.pays(1)
        return found

    assert lengths([1.0999] * 20)[16] == 0
    assert lengths([1.10] * 20)[16] == 3
    assert lengths([1.10] * 10 + [1.02] * 10)[16] == 3
    assert lengths([1.10] * 10 + [1.0199] * 10)[16] == 0


@pytest.mark.parametrize(
    ("method", "max_draft", "message"),
    [
        ("trees", 8, "a draft of 'trees'; allowed: none, prompt-lookup, recycling, auto"),
        ("auto", 0, "a max_draft of 0; allowed: 1 to 32"),
        ("auto", 33, "a max_draft of 33; allowed: 1 to 32"),
    ],
)
def test_what_is_not_allowed_is_refused(method: str, max_draft: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        EngineConfig.checked({"draft": method, "max_draft": max_draft})


def test_drafts_behind_the_end_of_an_answer_have_not_held() -> None:
    """They agree with what was sampled, and gave the answer no token."""
    requests, statistics = chosen(1)
    run_passes(requests, statistics, 40, lambda num_tokens: 1.0 + 0.01 * num_tokens, lambda _: 99)
    drafts = requests[0].propose(KNOWN, 99, 1)
    before = statistics.shared_rate("fixed", 1).held
    requests[0].learn(KNOWN, drafts, [*drafts, 99], 1)
    memory = statistics.shared_rate("fixed", 1).memory
    assert len(drafts) > 2
    assert statistics.shared_rate("fixed", 1).held == pytest.approx(
        (before * memory + 1) * memory
    )  # one did, one not


def measured(max_draft: int = 8) -> DraftStatistics:
    """A pass takes 10 ms, with drafts 5 ms more and 0.01 ms for each token."""
    statistics = DraftStatistics(max_draft)
    for number in range(60):
        num_drafted = (0, 8, 40)[number % 3]
        more_s = 5e-3 + 1e-5 * num_drafted if num_drafted else 0.0
        statistics.cost.record(8, num_drafted, 10e-3 + more_s)
    return statistics


def test_a_pass_has_drafts_if_those_of_all_pay_together() -> None:
    statistics = measured()
    statistics.wish(1, 0.9)
    assert not statistics.pays(8), "0.9 tokens more of 8, and a pass half as long again"
    for _ in range(8):
        statistics.wish(1, 0.9)
    assert statistics.pays(8)
    assert statistics.pays(8), "nothing is wished"


def test_an_answer_of_two_passes_has_no_drafts() -> None:
    statistics = measured()
    statistics.shared_rate("fixed", 0).record(50, 50)
    request = ChosenDrafts({"fixed": Fixed()}, statistics)
    assert run_passes([request], statistics, 3, memory_bound, lambda _: 8) == [0, 0, 8]


def test_the_cost_of_drafts_is_measured_with_few_of_them() -> None:
    requests, statistics = chosen(32)
    most = 0
    for _ in range(60):
        drafts = [request.propose(KNOWN, 99, 32) for request in requests]
        assert statistics.pays(32), "none is known to cost too much"
        most = max(most, sum(map(len, drafts)))
        statistics.cost.record(32, 0, 1e-3)
        for request, each in zip(requests, drafts, strict=True):
            request.learn(KNOWN, each, [*range(1, len(each) + 2)])
    assert 0 < most < 16 + 6


def test_a_pass_that_was_interrupted_counts_as_little_longer() -> None:
    cost = PassCost()
    for number in range(200):
        cost.record(1, 0, 10.0 if number == 150 else 10e-3)
    assert cost.seconds(1, 0) < 11e-3


def test_what_is_compared_with_the_end_of_an_answer_has_not_held() -> None:
    """To have drafted the last token would have saved nothing."""
    requests, _ = chosen(1)
    for _ in range(6):
        assert requests[0].propose(KNOWN, 99, 1) == []
    requests[0].learn(KNOWN, [], [1], num_open=0)
    own = requests[0]._own["fixed"]
    assert (own.tried, own.held) == (pytest.approx(1.0 * own.memory + 1.0), 0.0)
