"""What the comparison of split and colocated workers counts as goodput, and how long its passes last."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.epd_pays import rounds
from benchmarks.epd_pays.live import Layout, Round, Times, not_overlapped, run_live
from benchmarks.epd_pays.mixes import MIXES, Kind, sizes_of
from benchmarks.epd_pays.plan import predicted
from benchmarks.epd_pays.rounds import Case, cases, kept_rounds, layout_of, measure
from benchmarks.epd_pays.tables import (
    ATTAINED,
    attained,
    cells_of,
    goodput_rows,
    tail_rows,
    variant_rows,
    verdict_rows,
)
from epd.planning.space import Settings
from epd.serve_app.local.pacing import Pace
from epd.serve_app.worker.worker_core import WorkerCore
from epd.simulate.clock import seconds_of
from epd.simulate.language import PassTicks
from epd.stages.visual_inputs import VisualInputs
from epd.workload.comparison import goodput
from epd.workload.metrics import SLO

IMAGES, VIDEOS, _ = MIXES.values()
SETTINGS = Settings(4096, 16, 128, 2048, "groups")
PLAN = {
    kind: {"topology": topology, "settings": asdict(SETTINGS)}
    for kind, topology in (("merged", "8epd"), ("split", "6e1p1d"), ("ep+d", "7ep1d"))
}


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1.0, 1.0), (2.0, 0.95)], 2.0),  # all rates are met
        ([(1.0, 1.0), (2.0, 0.8)], 1.5),  # 0.9 lies halfway between 1.0 and 0.8
        ([(2.0, 0.8)], 1.0),  # no request at all meets every objective
        ([(1.0, 0.5), (2.0, 0.4)], 0.2),
    ],
)
def test_goodput_lies_on_a_line_between_rates(points: list[tuple[float, float]], expected: float) -> None:
    assert goodput(points, ATTAINED) == pytest.approx(expected)


class Clock:
    """A clock that only stands still and is slept on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("epd.serve_app.local.pacing.time", found)
    return found


def test_an_encoding_pass_lasts_as_long_as_its_patches_cost_before_anybody_gets_them(clock: Clock) -> None:
    pace = Pace(VIDEOS.live_profile, 2.0)
    runs: Any = [SimpleNamespace(grid=SimpleNamespace(num_patches=256))] * 2
    assert pace.encoder(lambda given: [len(given)])(runs) == [2]
    wanted_s = 2.0 * VIDEOS.profile.encode.cost.seconds(512 * VIDEOS.patches, 2)
    assert clock.now_s == pytest.approx(wanted_s)
    assert (pace.num_passes, pace.num_late) == (1, 0)


def output(scale: int) -> Any:
    """Returns what a scheduler puts into a pass of two prompts."""

    def chunk(start: int, stop: int) -> Any:
        request = SimpleNamespace(is_decoding=False)
        return SimpleNamespace(start=scale * start, stop=scale * stop, request=request)

    return SimpleNamespace(chunks=[chunk(0, 100), chunk(50, 80)], restores=(), preemptions=())


def test_a_pass_of_the_language_model_lasts_as_long_as_the_simulator_says(clock: Clock) -> None:
    """A token stands for several of the device's; a pass that takes longer than on the device is late."""

    device_s = seconds_of(PassTicks(VIDEOS.profile).mixed(output(VIDEOS.tokens)))
    ours_s = seconds_of(PassTicks(VIDEOS.live_profile).mixed(output(1)))
    assert ours_s == pytest.approx(device_s, rel=1e-3)  # a token and itself are one pair

    def paced(pace: Pace, work_s: float) -> float:
        """Runs one step that computes for so long. Returns how long it took."""
        engine: Any = SimpleNamespace(scheduler=SimpleNamespace(schedule=lambda: output(1)))
        engine.step = lambda: (engine.scheduler.schedule(), clock.sleep(work_s))
        start_s = clock.now_s
        pace.engine(engine)()
        return clock.now_s - start_s

    pace = Pace(VIDEOS.live_profile, 4.0)
    assert paced(pace, 3 * ours_s) == pytest.approx(4 * ours_s)
    assert pace.num_late == 0
    assert paced(pace, 5 * ours_s) == pytest.approx(5 * ours_s)
    assert (pace.num_passes, pace.num_late) == (2, 1)


def test_a_worker_answers_between_the_layers_of_a_pass_as_long_as_it_lasts(clock: Clock) -> None:
    """Else an encoder waits for the answer to the next request until the prefill before it is over."""
    pass_s = seconds_of(PassTicks(VIDEOS.live_profile).mixed(output(1)))
    engine: Any = SimpleNamespace(scheduler=SimpleNamespace(schedule=lambda: output(1)))
    engine._runner = SimpleNamespace(_decoder=SimpleNamespace(num_layers=4))
    engine.call_between_layers = lambda function: setattr(engine, "before_layer", function)
    engine.step = lambda: (engine.scheduler.schedule(), [engine.before_layer() for _ in range(4)])
    answered_s: list[float] = []
    step = Pace(VIDEOS.live_profile, 2.0).engine(engine, lambda: answered_s.append(clock.now_s))
    for number in range(2):
        step()
        wanted = [2 * pass_s * (number + layer / 4) for layer in range(4)]
        assert answered_s[4 * number :] == pytest.approx(wanted)
    assert clock.now_s == pytest.approx(4 * pass_s)


def test_requests_are_the_same_at_every_rate_and_for_the_simulator() -> None:
    slow, fast = VIDEOS.arrivals(1.0, 3), VIDEOS.arrivals(4.0, 3)
    assert [(each.kind, each.name) for each in slow] == [(each.kind, each.name) for each in fast]
    assert [each.at_s for each in slow] == pytest.approx([4 * each.at_s for each in fast])
    assert [each.kind for each in slow] != [each.kind for each in VIDEOS.arrivals(1.0, 4)]
    job = IMAGES.jobs(IMAGES.arrivals(1.0, 0))[0]
    assert [(group.media.num_patches, group.media.num_tokens) for group in job.groups] == [(10_240, 640)] * 4
    video = Kind(1.0, num_tokens=1, num_frames=64, side=64)
    groups = sizes_of(video, VIDEOS.group_tokens).groups
    assert [tokens * VIDEOS.tokens for _, tokens in groups] == [256] * 16


def test_a_small_round_answers_every_request_whole_and_leaves_nothing_paced(tmp_path: Path) -> None:
    """Without overlap, and so fast that every pass is late: only the counts and the order are asked for."""
    build, ready = WorkerCore._build, VisualInputs.num_ready
    kinds = (Kind(1.0, num_tokens=3, num_images=2),)
    mix = replace(IMAGES, kinds=kinds, num_requests=2)
    arrivals = mix.arrivals(1000.0, 0)
    layout = Layout("1e1p1d", SETTINGS, is_overlapped=False)
    live, simulated = run_live(mix, layout, arrivals, tmp_path, 1e-6), predicted(mix, layout, arrivals)
    for found in (live, simulated):
        assert all(0 < each.ttft_s < math.inf and each.tpot_s < math.inf for each in found.times)
        assert [each.has_media for each in found.times] == [True, True]
    # Tokens of a live answer may reach a process that had no core all at once.
    assert all(each.tpot_s >= 0 for each in live.times)
    assert all(each.tpot_s > 0 for each in simulated.times)
    assert (WorkerCore._build, VisualInputs.num_ready) == (build, ready)


def test_embeddings_that_are_not_overlapped_wait_for_the_last() -> None:
    class Half:
        _num_prompt_tokens, _num_arrived, indices = 9, 1, (2, 5)

    with not_overlapped():
        ready = VisualInputs.num_ready.fget  # type: ignore[attr-defined]
        half: Any = Half()
        assert ready(half) == 0
        half._num_arrived = 2
        assert ready(half) == 9
    assert VisualInputs.num_ready.fget(half) == 9  # type: ignore[attr-defined]
    half._num_arrived = 1
    assert VisualInputs.num_ready.fget(half) == 5  # type: ignore[attr-defined]


def times(ttft_s: float, tpot_s: float, count: int = 1, *, has_media: bool = True) -> tuple[Times, ...]:
    return (Times(has_media, ttft_s, tpot_s, 2 * tpot_s),) * count


def case(kind: str, rate: float, variant: str = "", round_index: int = 0) -> Case:
    return Case(IMAGES.name, kind, variant, rate, round_index, 4.0)


def test_rounds_are_kept_one_by_one_and_run_again_only_if_passes_were_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[float] = []

    def run(mix: object, layout: Layout, arrivals: Any, folder: Path, dilate: float) -> Round:
        ran.append(dilate)
        return Round(times(1.0, 0.02), 0.06 if len(ran) == 1 else 0.01, 1)

    monkeypatch.setattr(rounds, "run_live", run)
    monkeypatch.setattr(rounds, "planned", lambda _: {"slo": PLAN})
    path = tmp_path / "rounds.jsonl"
    todo = list(cases(IMAGES, 0, 4.0))
    measure(todo[:2], path)
    measure(todo[:3], path)
    assert len(ran) == 4  # the first had too many late passes and was run again
    assert kept_rounds(path) == dict.fromkeys(todo[:3], Round(times(1.0, 0.02), 0.01, 1))
    assert kept_rounds(tmp_path / "none") == {}


def test_variants_are_of_the_planned_layout() -> None:
    found = {
        each: layout_of(PLAN, "split", each)
        for each in ("", "not sharded", "not overlapped", "unfit", "unfit, roles follow")
    }
    assert found[""] == Layout("6e1p1d", SETTINGS)
    assert found["not sharded"].settings == replace(SETTINGS, sharding="request")
    assert not found["not overlapped"].is_overlapped
    assert found["unfit"] == Layout(rounds.UNFIT, SETTINGS)
    assert layout_of(PLAN, "merged", "three workers").topology == "3epd"
    assert found["unfit, roles follow"] == replace(found["unfit"], is_elastic=True)


def test_rounds_with_many_late_passes_are_not_reported() -> None:
    good, late = Round(times(1.0, 0.02), 0.05), Round(times(1.0, 0.02), 0.051)
    rounds = {case("split", 1.0): good, case("split", 1.0, round_index=1): late, case("merged", 1.0): late}
    cells, refused = cells_of(rounds)
    assert [(cell.kind, cell.rounds) for cell in cells] == [("split", ((0, good),))]
    assert len(refused) == 2


def test_layouts_are_compared_with_merged_workers_at_the_rates_of_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.epd_pays.tables.planned", lambda _: {"slo": PLAN})
    monkeypatch.setattr("benchmarks.epd_pays.tables.predicted", lambda *_: Round(times(1.0, 0.01, 10)))
    met, missed = times(1.0, 0.02, 10), times(1.0, 0.06, 10)
    rounds = {
        case("merged", 2.0): Round(met), case("merged", 3.0): Round(missed),
        case("split", 2.0): Round(met), case("split", 3.0): Round(met), case("split", 4.0): Round(missed),
        case("split", 1.0): Round(met), case("merged", 1.0, round_index=1): Round(met),  # others
    }  # fmt: skip
    cells, _ = cells_of(rounds)
    strict = {row["layout"]: row for row in goodput_rows(cells) if row["objectives"].startswith("strict")}
    assert strict["6e1p1d"]["over merged"] == pytest.approx(3.1 / 2.1, abs=0.01)
    assert strict["6e1p1d"]["simulated over merged"] == round(4.0 / 3.0, 2)
    verdicts = {
        (row["objectives"][:6], row["rate"]): (row["measured"], row["planner says"], row["right"])
        for row in verdict_rows(cells)
    }
    assert verdicts["strict", 2.0] == ("equal", "equal", "yes")
    assert verdicts["strict", 3.0] == ("wins", "equal", "no")
    assert verdicts["loose:", 3.0] == ("equal", "equal", "yes")
    tails = {row["rate"]: row["times better"] for row in tail_rows(cells)}
    assert tails == {2.0: 1.0, 3.0: 3.0}


def test_variants_are_shown_beside_what_was_measured_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two rounds at least, the same ones, at one factor: single rounds hide under the machine's noise."""
    monkeypatch.setattr("benchmarks.epd_pays.tables.planned", lambda _: {"slo": PLAN})
    monkeypatch.setattr("benchmarks.epd_pays.tables.predicted", lambda *_: Round(times(1.0, 0.01, 10)))
    one = Round(times(1.0, 0.02, 10))

    def layouts(found: dict[Case, Round]) -> list[str]:
        return [row["layout"] for row in variant_rows(cells_of(found)[0])]

    plain = {case("split", 2.0, round_index=index): one for index in range(2)}
    varied = {case("split", 2.0, "not sharded", index): one for index in range(2)}
    assert layouts(plain | varied) == ["6e1p1d", "6e1p1d not sharded"]
    slower = {replace(each, dilate=8.0): one for each in varied}
    assert layouts(plain | slower) == layouts(plain) == []
    first = {each: one for each in (*plain, *varied) if not each.round_index}
    assert layouts(first) == []


def test_an_answer_that_never_came_meets_nothing() -> None:
    none = Times(True, *(math.inf,) * 3)
    assert attained((*times(1.0, 0.02), none), SLO(2.0, 0.03)) == 0.5
