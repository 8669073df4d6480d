"""Fleets compared for a buyer: sizes, ranks, budgets, mixes, what-ifs, the page, and what is refused.

Modules: `epd/planning/asked.py`, `epd/planning/question.py`, `epd/planning/report.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from epd.errors import InfeasibleError, RequestError
from epd.planning.asked import plan as planned
from epd.planning.files import load_plan
from epd.planning.offers import EXPECTED_ERROR, Fleet, FleetPart, Offer, Wanted, compare
from epd.planning.plan import Plan
from epd.planning.question import Films, rate_of
from epd.planning.report import Answer, page
from epd.serve_app.cli.program import app
from tests import ROOT

PRICES = {"h100": 3.0, "l40s": 1.0, "l4": 0.7}


@pytest.fixture(scope="module")
def plan_of() -> Callable[[int, str], Plan]:
    """Plans for short texts, of few requests: the same for each number and kind, made once."""
    made: dict[tuple[int, str], Plan] = {}

    def of(num_devices: int, device: str) -> Plan:
        if (num_devices, device) not in made:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr("epd.planning.asked.MOST_REQUESTS", 20)
                options = {"slo_ttft_s": 2.0, "slo_tpot_s": 0.08, "workload": "text"}
                made[num_devices, device] = planned(num_devices, profile=f"qwen2.5-vl-7b@{device}", **options)
        return made[num_devices, device]

    return of


def offers(plan_of: Callable[[int, str], Plan], *fleets: str, **wanted: Any) -> list[Offer]:
    return compare([Fleet.parse(each) for each in fleets], Wanted(**wanted), plan_of, PRICES.__getitem__)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("20", 20.0), ("20/s", 20.0), ("30/min", 0.5), ("1800/h", 0.5), ("43200/day", 0.5), (4.0, 4.0)],
)
def test_rates_are_read_as_people_write_them(text: str | float, rate: float) -> None:
    assert rate_of(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "20/week", "0", "-1/min", "nan", "inf/s", "1/2/3"])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="try 20/min"):
        rate_of(text)


def test_fleets_are_read_and_refused() -> None:
    assert Fleet.parse("8xh100").parts == (FleetPart(8, "h100"),)
    assert Fleet.parse("4 x h100 + 8xl40s").parts == (FleetPart(4, "h100"), FleetPart(8, "l40s"))
    assert Fleet.parse("a100-80gb").parts == (FleetPart(None, "a100-80gb"),)
    for text in ("", "0xh100", "257xh100", "x h100", "8xh100+l40s", "8 h100"):
        with pytest.raises(RequestError, match="received the fleet"):
            Fleet.parse(text)


def test_fleets_that_serve_the_rate_come_first_and_the_cheapest_of_them(
    plan_of: Callable[[int, str], Plan],
) -> None:
    one, many = plan_of(1, "l40s"), plan_of(2, "h100")
    assert one.goodput < many.goodput
    names = lambda found: [offer.name for offer in found]  # noqa: E731 # one line
    low, high = 0.5 * one.goodput, 1.1 * one.goodput
    assert names(offers(plan_of, "2xh100", "1xl40s", rate_per_s=low)) == ["1 x l40s", "2 x h100"]
    assert names(offers(plan_of, "1xl40s", "2xh100", rate_per_s=high)) == ["2 x h100", "1 x l40s"]
    assert names(offers(plan_of, "1xl40s", "2xh100", objective="throughput"))[0] == "2 x h100"
    cheapest = offers(plan_of, "1xl40s", "2xh100")[0]
    assert cheapest.cost_per_thousand == pytest.approx(cheapest.price_per_hour / cheapest.goodput / 3.6)


def test_a_kind_without_a_number_gets_as_many_as_the_rate_needs(plan_of: Callable[[int, str], Plan]) -> None:
    alone = plan_of(1, "l40s")
    for asked in (0.9 * alone.goodput, 1.5 * alone.goodput):
        (offer,) = offers(plan_of, "l40s", rate_per_s=asked)
        assert offer.serves(asked)
        assert offer.plans[0].num_devices - 1 <= asked / alone.goodput + 1e-9
    (most,) = offers(plan_of, "l40s", budget_per_hour=2.5)
    assert most.plans[0].num_devices == 2
    with pytest.raises(RequestError, match="without a number"):
        offers(plan_of, "l40s")
    with pytest.raises(InfeasibleError, match=r"about \d+ x l40s would be needed"):
        offers(plan_of, "l40s", rate_per_s=1e6 * alone.goodput)


def test_a_budget_leaves_out_what_costs_more(plan_of: Callable[[int, str], Plan]) -> None:
    found = offers(plan_of, "2xh100", "1xl40s", budget_per_hour=5.0)
    assert [bool(offer.plans) for offer in found] == [True, False]
    assert found[1].reason == "2 x h100 costs 6 an hour, the budget is 5"
    with pytest.raises(InfeasibleError, match=r"the budget is 0\.5"):
        offers(plan_of, "2xh100", budget_per_hour=0.5)


def test_a_mix_adds_up(plan_of: Callable[[int, str], Plan]) -> None:
    (mix,) = offers(plan_of, "1xh100+2xl40s")
    assert mix.goodput == plan_of(1, "h100").goodput + plan_of(2, "l40s").goodput
    assert (mix.price_per_hour, mix.name) == (5.0, "1 x h100 + 2 x l40s")
    assert mix.power_kw == pytest.approx(0.7 + 2 * 0.35)


class _Page(HTMLParser):
    """Collects the tags and what a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]


def test_a_page_shows_every_fleet_and_loads_nothing(plan_of: Callable[[int, str], Plan]) -> None:
    asked = 1.1 * plan_of(1, "l40s").goodput
    found = offers(plan_of, "1xl40s", "2xh100", rate_per_s=asked)
    answer = Answer("<qwen>", "texts & answers", tuple(found), asked, (("frames=64", found[0]),))
    text = page(answer)
    shown = _Page(text)
    assert (shown.tags.count("circle"), shown.tags.count("svg"), shown.loads) == (2, 1, [])
    assert "script" not in shown.tags
    for words in ("&lt;qwen&gt;", "texts &amp; answers", "With frames=64: 2 x h100", EXPECTED_ERROR[:40]):
        assert words.lower() in text.lower(), words
    heights = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', text)]
    line = float(re.findall(r'y2="([\d.]+)" stroke="#b54708"', text)[0])
    assert heights[0] < line < heights[1], "the fleet that serves the rate is above the line"


def test_a_buyer_is_told_what_the_rate_that_is_asked_for_costs_and_that_less_would_do(
    plan_of: Callable[[int, str], Plan],
) -> None:
    """Two H100 cost 6 USD an hour; a thousand requests at the rate asked for more than with all busy."""
    asked = 0.3 * plan_of(2, "h100").goodput
    found = offers(plan_of, "2xh100", rate_per_s=asked)
    answer = Answer("qwen", "texts", tuple(found), asked)
    assert answer.advice == ["about 1 of the 2 would do: --fleet h100 plans as many as are needed"]
    cost = f"{6 / asked / 3.6:.4g} USD"
    assert f"at 6 USD an hour, {cost} per thousand requests" in answer.conclusion
    assert f'<td class="n">{cost}<td class="n">' in page(answer)
    assert not Answer("qwen", "texts", tuple(found), 0.6 * found[0].goodput).advice
    plan = found[0].plans[0]
    for share, is_bound in ((0.95, True), (0.5, False)):  # of the rate at which threads have no time left
        busy = replace(plan.binding, rate_per_s=plan.winner.goodput / share, grows=False)
        offer = replace(found[0], plans=(replace(plan, binding=busy),))
        told = Answer("qwen", "videos", (offer,), None).advice
        assert any("no fleet is limited by its devices" in line for line in told) == is_bound


def test_the_error_to_expect_is_that_of_the_kept_results() -> None:
    score = (ROOT / "benchmarks/results/score.md").read_text(encoding="utf-8")
    last = [line.split("|") for line in score.splitlines() if "| both |" in line][-1]
    assert f"{last[4].strip()} off at the median" in EXPECTED_ERROR
    assert f"{last[5].strip()} at the 90th percentile" in EXPECTED_ERROR
    assert f"{last[2].strip()} predictions" in EXPECTED_ERROR
    h100 = (ROOT / "benchmarks/results/gpu_profile.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in h100.splitlines() if re.match(r"\| (prefill|decode) ", line)]
    ratios = [float(row[-2]) for row in rows if "256 new" not in row[2]]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times" in EXPECTED_ERROR


def test_films_are_counted_as_a_buyer_counts_them() -> None:
    """5 Mbit/s each: a third of one a second of ten minutes is 200 that play at once, a gigabit."""
    films = Films(20.0)
    assert films.rate_per_s == pytest.approx(1 / 3)
    assert films.gbit_per_s == pytest.approx(1.0, rel=0.01)
    assert films.workload["mix"][0]["video_s"] == "600"


@pytest.fixture
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.planning.asked.MOST_REQUESTS", 20)


def run(*options: str) -> object:
    return app(["plan", *options], standalone_mode=False)


def test_the_command_answers_a_buyer(
    few_requests: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The question again, ranked fleets, a what-if, the plan and the page; a file for each kind of a mix."""
    out, report = tmp_path / "plan.yaml", tmp_path / "plan.html"
    options = ["--videos-per-minute", "4", "--minutes", "1", "--model", "qwen2.5-vl-7b", "--frames", "32"]
    fleets = ["--fleet", "1xh100", "--fleet", "1xl4+1xl40s"]
    run(*options, *fleets, "--what-if", "frames=8", "--out", str(out), "--report", str(report), "--json")
    record = json.loads(capsys.readouterr().out)
    assert record["question"].startswith("4 videos a minute of 1 min, 1920x1080")
    assert record["question"].endswith("; 32 frames of a video read")
    assert "a request has 32 frames" in record["demands"][0]
    assert {offer["fleet"] for offer in record["offers"]} == {"1 x h100", "1 x l4 + 1 x l40s"}
    assert record["what_ifs"][0]["change"] == "frames=8"
    assert report.read_text().startswith("<!doctype html>")
    best = record["offers"][0]["fleet"]
    files = [out] if best == "1 x h100" else [tmp_path / "plan-l4.yaml", tmp_path / "plan-l40s.yaml"]
    assert [yaml.safe_load(each.read_text()) for each in files] == record["plans"]
    assert load_plan(files[0]).app_options()["topology"] == record["plans"][0]["topology"]


def test_a_rate_that_no_fleet_serves_is_exit_code_3(
    few_requests: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads bind: no device is advised. The table is printed all the same."""
    options = ["--videos-per-minute", "400", "--minutes", "10", "--frames", "8", "--fleet", "1xh100"]
    assert run(*options) == 3
    streams = capsys.readouterr()
    assert "1 x h100" in streams.out
    assert "none serves 400 requests a minute; 1 x h100 comes closest" in streams.err
    assert "raise --cpu-threads" in streams.err


def test_advice_is_printed(few_requests: None, capsys: pytest.CaptureFixture[str]) -> None:
    run("--videos-per-minute", "0.2", "--minutes", "1", "--frames", "8", "--fleet", "2xl4")
    assert "about 1 of the 2 would do: --fleet l4 plans as many as are needed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--videos-per-minute", "4", "--workload", "video"], "a workload or a trace"),
        (["--fps", "1", "--frames", "4"], "--fps 1 and --frames 4"),
        (["--fleet", "2xabacus"], "known are a100-80gb"),
        (["--fleet", "2xh100", "--model", "gpt-2"], "known are minicpm"),
        (["--fleet", "2xh100", "--rank-by", "colour"], "allowed: cost, throughput"),
        (["--fleet", "2xh100", "--what-if", "colour=3"], "allowed: frames, fps, max-visual-tokens"),
        (["--fleet", "2xh100", "--what-if", "frames=none"], "try frames=64"),
        (["--fleet", "2xh100", "--profile", "mine.json"], "allowed: --model with fleets"),
        (["--budget", "often", "--fleet", "h100"], "try 20/min"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*options) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
