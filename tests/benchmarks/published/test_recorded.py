"""The page of all published rows: each scenario is on it, and its counts are those of its rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planning.epd_paper import NAMED, page, recorded, row_of, summary
from benchmarks.published import encoder_calls, figure6_study, memory, paper, table7
from benchmarks.published.figure6_each import FACTORS
from benchmarks.published.scenarios import SCENARIOS
from benchmarks.published.tables import Row
from tests import ROOT
from tests.benchmarks.published.recorded import assert_recorded, records

# Where rows are named: (scenario, system, case, metric), or how many there are.
NUM_FITTED = {
    "epd-table7": len(table7.FITTED_ROWS),
    "epd-table7-study": 1,
    "epd-table5-study": 1,
    "epd-fig6-study": len(figure6_study.FITTED_ROWS) + 3,  # and the cuts that a factor was chosen in view of
    "epd-fig6-each": len(FACTORS),
    "epd-encoder-calls": len(encoder_calls.FITTED_ROWS),
    "vllm-blog": 4,
}


def test_the_page_is_that_of_the_rows() -> None:
    found = recorded()
    assert list(found) == list(SCENARIOS) == list(NAMED)
    assert (ROOT / "benchmarks/results/epd_paper.md").read_text() == page(found)


@pytest.mark.parametrize("name", SCENARIOS)
def test_as_many_rows_are_fitted_as_were_named(name: str) -> None:
    named = {row for row in paper.FITTED_ROWS | memory.FITTED_ROWS if row[0] == name}
    fitted = {(name, row.system, row.case, row.metric) for row in recorded()[name] if row.is_fitted}
    if name in NUM_FITTED:
        assert len(fitted) == NUM_FITTED[name]
    else:
        assert fitted == named


def test_fitted_rows_are_in_no_count_of_rows_within_a_fifth() -> None:
    far, near = Row("a", "b", "c", 5, 1), Row("a", "b", "c", 1.1, 1)
    counts = summary("epd-table1", [far, near, replace(near, is_fitted=True)])
    assert [counts[name] for name in ("rows", "fitted", "held out", "within 20 %")] == [3, 1, 2, 1]


def test_a_row_comes_back_as_it_was_written() -> None:
    for row in (Row("a", "b", "c", 1.5, 2.0, True), Row("a", "b", "c", 1.5, 2.0, bound="most")):
        assert row_of(row.record()) == row


def test_rows_that_differ_from_the_file_are_found() -> None:
    (*rows, last) = recorded()["epd-table4"]
    assert_recorded("epd-table4", [*rows, last])
    assert_recorded("epd-table4", rows, is_all=False)
    moved = replace(last, simulated=last.simulated + 0.001)
    for others, is_all in (([*rows, moved], True), (rows, True), ([moved], False)):
        with pytest.raises(AssertionError):
            assert_recorded("epd-table4", others, is_all=is_all)
    assert len(records()) == len(SCENARIOS)
