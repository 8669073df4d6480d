"""What a comparison runs and says: equal devices, saturation, continuing, and who wins.

Modules: `epd/bench/compare_report.py`, `epd/workload/comparison.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epd.bench.bench import Client
from epd.bench.client import ChatReply
from epd.bench.compare import Comparison, Served, Turns, dump, load
from epd.bench.compare_report import cell_rows, goodput_rows, regret_rows, summary
from epd.bench.media import MediaLibrary
from epd.client.body import Body
from epd.errors import RequestError
from epd.workload.comparison import Layout, Outcome, Question, Round, Traffic, goodput
from epd.workload.config import WorkloadConfig
from epd.workload.metrics import SLO

PROFILE = "qwen2.5-vl-7b@a100-80gb"
MET, MISSED = Outcome("image", 0.5, 0.02, 1.0, 40), Outcome("image", 5.0, 0.02, 6.0, 40)


def traffic(*rates: float, name: str = "images", **part: Any) -> Traffic:
    mix = [{"images": 1, "text_tokens": 8, "output_tokens": 3, **part}]
    workload = WorkloadConfig.model_validate({"name": name, "num_requests": 4, "mix": mix})
    return Traffic(workload=workload, rates=rates, slo=SLO(1.0, 0.1))


def question(*layouts: str, of: Iterable[Traffic] = (), rounds: int = 1, **fields: Any) -> Question:
    known = {"profile": PROFILE, "is_paced": True, "patches": 16, "tokens": 16, **fields}
    return Question(layouts=layouts, traffic=tuple(of) or (traffic(1.0),), rounds=rounds, **known)


@pytest.mark.parametrize(
    ("text", "devices", "copies", "is_split"),
    [
        ("8x1epd", 8, 8, False),
        ("8epd", 8, 1, False),
        ("2x1e2pd", 6, 2, True),
        ("2e5p1d+roles", 8, 1, True),
        ("3epd+chunk=512", 3, 1, False),
        ("vllm=http://a:1,http://b:2", None, 2, False),
    ],
)
def test_a_layout_is_read(text: str, devices: int | None, copies: int, is_split: bool) -> None:
    layout = Layout.parse(text)
    assert (layout.num_devices, layout.num_copies, layout.is_split) == (devices, copies, is_split)
    assert layout.has_roles == ("roles" in text)
    assert layout.chunk_tokens == (512 if "chunk" in text else None)


@pytest.mark.parametrize("text", ["", "0x1epd", "8y", "2epd+fast", "2epd+chunk=0", "a=b"])
def test_another_layout_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(RequestError, match="allowed"):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("layouts", "fields", "told"),
    [
        (("2epd", "3epd"), {}, "unequal devices: 2epd with 2, 3epd with 3"),
        (("2epd", "2epd"), {}, "twice"),
        (("2epd",), {"is_paced": False}, "without paced devices"),
        (("2epd", "vllm=http://a:1"), {}, "with a URL"),
        (("2epd",), {"profile": None}, "without a profile"),
    ],
)
def test_a_comparison_that_would_mislead_is_refused(
    layouts: tuple[str, ...], fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(RequestError, match=told):
        question(*layouts, **fields).parsed()


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1.0, 1.0), (2.0, 0.95)], 2.0),  # all rates are met
        ([(1.0, 1.0), (2.0, 0.8)], 1.5),  # 0.9 lies halfway between 1.0 and 0.8
        ([(2.0, 0.8)], 1.0),
        ([(1.0, 0.5), (2.0, 0.4)], 0.2),
        ([(1.0, 0.5), (2.0, 1.0)], 2.0),
    ],
)
def test_goodput_lies_on_a_line_between_rates(points: list[tuple[float, float]], expected: float) -> None:
    assert goodput(points, 0.9) == pytest.approx(expected)


def test_a_request_without_an_answer_meets_nothing() -> None:
    assert MET.meets(SLO(1.0, 0.1))
    assert not MISSED.meets(SLO(1.0, 0.1))
    assert not Outcome("image", error="timeout").meets(SLO())
    assert Outcome("text", 0.5, None, 0.5).meets(SLO(1.0, 0.1))  # one token has no TPOT


def shares(share: float) -> tuple[Outcome, ...]:
    return (MET,) * round(10 * share) + (MISSED,) * round(10 - 10 * share)


def filled(asked: Question, told: dict[str, dict[float, list[float]]], **changed: Any) -> Comparison:
    """told: by layout and rate, the attainment of each round."""
    name = asked.traffic[0].name
    rounds = [
        Round(name, layout, rate, index, shares(share), **changed)
        for layout, rates in told.items()
        for rate, each in rates.items()
        for index, share in enumerate(each)
    ]
    found = Comparison(asked, rounds)
    found.simulated = {each.key: each for each in rounds}
    return found


TOLD = {
    "2x1epd": {1.0: [1.0, 1.0], 2.0: [0.5, 0.6]},
    "1e1pd": {1.0: [1.0, 1.0], 2.0: [1.0, 0.9]},
    "1ep1d": {1.0: [0.6, 0.7], 2.0: [0.4, 0.4]},
}


def two_rounds() -> Question:
    return question(*TOLD, of=[traffic(1.0, 2.0)], rounds=2, price_per_hour=1.8)


def test_losses_are_said_as_wins_are() -> None:
    rows = {each["layout"]: each for each in goodput_rows(filled(two_rounds(), TOLD))}
    assert rows["1e1pd"]["verdict"].startswith("wins: 1.")
    assert rows["1ep1d"]["verdict"].startswith("loses: 0.")
    assert rows["2x1epd"]["verdict"] == ""
    assert rows["1e1pd"]["goodput"] == ">= 2.00"
    assert rows["1e1pd"]["per 1000"] == f"{1000 * 1.8 * 2 / (3600 * 2.0):.3g}"


def test_a_ratio_has_the_range_of_rounds_with_equal_requests() -> None:
    """Plain replicas attain .5 and .6 at 2/s, so goodput of 1.2 and 1.25, beside 2.0 and 2.0."""
    rows = {each["layout"]: each for each in goodput_rows(filled(two_rounds(), TOLD))}
    assert rows["2x1epd"]["spread"] == "1.20-1.25"
    assert rows["1e1pd"]["verdict"] == "wins: 1.63 (1.60-1.67) x 2x1epd"
    alone = {**TOLD, "2x1epd": {1.0: [1.0], 2.0: [0.5]}, "1e1pd": {1.0: [1.0, 1.0], 2.0: [0.7, 1.0]}}
    rows = {each["layout"]: each for each in goodput_rows(filled(two_rounds(), alone))}
    assert rows["1e1pd"]["verdict"].endswith("(1.11-1.11) x 2x1epd")  # the second round has no other


def test_a_goodput_is_at_least_the_highest_rate_only_if_the_median_round_keeps_it() -> None:
    told = {**TOLD, "1e1pd": {1.0: [1.0, 1.0], 2.0: [1.0, 0.8]}}  # 0.9 of all, and 2.0 and 1.5 by round
    rows = {each["layout"]: each for each in goodput_rows(filled(two_rounds(), told))}
    assert (rows["1e1pd"]["goodput"], rows["1e1pd"]["spread"]) == ("1.75", "1.50-2.00")


def test_rounds_that_disagree_make_no_winner() -> None:
    told = {**TOLD, "1e1pd": {1.0: [1.0, 1.0], 2.0: [1.0, 0.5]}}
    rows = {each["layout"]: each for each in goodput_rows(filled(two_rounds(), told))}
    assert rows["1e1pd"]["verdict"].startswith("equal: ")


def test_a_missing_rate_is_said() -> None:
    told = {**TOLD, "1e1pd": {1.0: [1.0, 1.0]}}
    rows = {each["layout"]: each for each in goodput_rows(filled(two_rounds(), told))}
    assert (rows["1e1pd"]["verdict"], rows["1e1pd"]["goodput"]) == ("incomplete", "")
    assert rows["1ep1d"]["verdict"].startswith("loses: ")


def test_a_round_that_lacks_a_rate_has_no_goodput_of_its_own() -> None:
    told = {**TOLD, "1e1pd": {1.0: [1.0, 1.0], 2.0: [1.0]}}
    rows = {each["layout"]: each for each in goodput_rows(filled(two_rounds(), told))}
    assert (rows["1e1pd"]["goodput"], rows["1e1pd"]["spread"]) == (">= 2.00", "2.00-2.00")


def test_late_rounds_are_not_reported_and_are_run_again() -> None:
    late = filled(two_rounds(), TOLD, late_share=0.06)
    assert len(late.left_out) == 12
    assert {each["goodput"] for each in goodput_rows(late)} == {""}
    assert len(list(late.cases(TOLD))) == 12


def test_the_simulator_is_right_where_it_says_as_the_measurement() -> None:
    found = filled(two_rounds(), TOLD)
    assert {each["right"] for each in cell_rows(found)} == {"yes"}
    assert [each["regret"] for each in regret_rows(found)] == ["0.0%"]
    wrong = {key: replace(one, outcomes=shares(1.0)) for key, one in found.simulated.items()}
    found.simulated = wrong
    rows = {(each["layout"], each["rate"]): each["right"] for each in cell_rows(found)}
    assert rows["1e1pd", 1.0] == "yes"
    assert rows["1e1pd", 2.0] == rows["1ep1d", 1.0] == "no"


def test_layouts_take_turns_and_a_saturated_one_is_not_run_at_higher_rates() -> None:
    asked = question("2x1epd", "1e1pd", of=[traffic(2.0, 1.0)], rounds=2)
    order = [(each.index, each.rate, each.layout.name) for each in Comparison(asked).cases(asked.layouts)]
    assert order[:4] == [(0, 1.0, "2x1epd"), (0, 1.0, "1e1pd"), (0, 2.0, "2x1epd"), (0, 2.0, "1e1pd")]
    assert order[4:6] == [(1, 1.0, "1e1pd"), (1, 1.0, "2x1epd")]
    known = filled(asked, {"2x1epd": {1.0: [0.4]}})
    left = [(each.index, each.rate, each.layout.name) for each in known.cases(asked.layouts)]
    assert (0, 2.0, "2x1epd") not in left
    assert (0, 2.0, "1e1pd") in left
    assert {name for _, _, name in left} == {"2x1epd", "1e1pd"}
    assert {each.layout.name for each in known.cases(["1e1pd"])} == {"1e1pd"}


class FakeClient:
    """Answers at once, and notes what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.clock_s = 0.0

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def ask(self, body: Body) -> ChatReply:
        self.bodies.append(json.loads(b"".join(body.pieces)))
        now = self.now_s()
        return ChatReply(now, now + 0.03, [now + 0.01, now + 0.03], 40, 3)


class FakeServed:
    def __init__(self, clients: list[FakeClient]) -> None:
        self.clients: list[tuple[str, Client]] = [(f"m{n}", each) for n, each in enumerate(clients)]
        self.late_share, self.num_begun = 0.25, 0

    def begin(self) -> None:
        self.num_begun += 1


def draw_nothing(path: Path, seed: int, spec: object, on_frame: Callable[[], None]) -> None:
    raise AssertionError("no video is asked for")


def test_a_round_is_measured_on_the_clock_of_the_devices(tmp_path: Path) -> None:
    """Each server gets every other request, warmed up before; times are divided by the factor."""
    slow = traffic(100.0).model_copy(update={"dilate": 2.0})
    found = Comparison(question("2x1epd", of=[slow], warmup=1))
    case = next(found.cases(["2x1epd"]))
    clients = [FakeClient(), FakeClient()]
    served = FakeServed(clients)

    @asynccontextmanager
    async def serve(layout: Layout, of: Traffic) -> AsyncIterator[Served]:
        assert (layout.name, of) == ("2x1epd", slow)
        yield served

    library = MediaLibrary(tmp_path, draw_nothing)
    library.draw([*found.requests(case), *found.warm_requests(case)], lambda *_: None)
    one = asyncio.run(found.run(case, serve, library))
    assert served.num_begun == 1
    assert [len(each.bodies) for each in clients] == [3, 3]  # a warm one and two of four
    assert [each.bodies[0]["model"] for each in clients] == ["m0", "m1"]
    assert all(each["ignore_eos"] for client in clients for each in client.bodies)
    assert [each.ttft_s for each in one.outcomes] == pytest.approx([0.005] * 4)
    assert [each.tpot_s for each in one.outcomes] == pytest.approx([0.005] * 4)
    assert (one.late_share, one.counts, one.key) == (0.25, False, ("images", "2x1epd", 100.0, 0))


def test_a_file_repeats_a_comparison(tmp_path: Path) -> None:
    found = filled(two_rounds(), TOLD)
    path = tmp_path / "found.json"
    path.write_text(dump(found, {"cores": 2}, summary(found)), encoding="utf-8")
    again = load(path)
    assert (again.question, again.rounds, again.simulated) == (found.question, found.rounds, found.simulated)
    assert [each.key for each in again.cases(TOLD)] == [each.key for each in found.cases(TOLD)]
    for text in ("{", "[]", '{"format": "other"}', '{"format": "epd comparison, version 1"}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(RequestError, match="allowed"):
            load(path)


def test_turns_begin_anew_with_each_load() -> None:
    clients = [FakeClient(), FakeClient()]
    turns = Turns([("m", each) for each in clients])

    async def send(count: int) -> None:
        turns.restart()
        for _ in range(count):
            await turns.ask(Body((b"{}",)))

    asyncio.run(send(3))
    asyncio.run(send(1))
    assert [len(each.bodies) for each in clients] == [3, 1]
