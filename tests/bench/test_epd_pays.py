"""What the comparison of split and colocated workers counts as goodput, and how long its passes last."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.epd_pays import SCALE, Pace, earlier_rows, goodput, goodput_rows, merged
from epd.profiles.files import load_profile
from epd.simulate.clock import seconds_of
from epd.simulate.language import PassCost


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
    assert goodput(points) == pytest.approx(expected)


def test_an_encoding_pass_lasts_as_long_as_its_patches_cost() -> None:
    profile = load_profile("qwen2.5-vl-7b@a100-80gb")
    stage: Any = SimpleNamespace(counts=SimpleNamespace(num_patches=0))

    def step() -> int:
        stage.counts.num_patches += 4096
        return 2

    stage.step = step
    pace = Pace(profile, 2.0)
    start = time.perf_counter()
    assert pace.encoder(stage)() == 2
    assert time.perf_counter() - start >= 2.0 * profile.encode.cost.seconds(SCALE * 4096, 2)
    assert (pace.num_passes, pace.num_late) == (1, 0)
    stage.step = lambda: 0
    start = time.perf_counter()
    assert pace.encoder(stage)() == 0
    assert pace.num_passes == 1  # nothing was encoded: nothing to wait for


def test_a_pass_lasts_as_long_as_the_simulator_says() -> None:
    """Prompt tokens stand for `SCALE` of the device's; decodes ride with prefill, or pass alone."""
    profile = load_profile("qwen2.5-vl-7b@a100-80gb")

    def chunk(start: int, stop: int, *, is_decoding: bool = False) -> Any:
        return SimpleNamespace(start=start, stop=stop, request=SimpleNamespace(is_decoding=is_decoding))

    def device(start: int, stop: int, **kind: bool) -> Any:
        return chunk(SCALE * start, SCALE * stop, **kind)

    cost, pace = PassCost(profile), Pace(profile, 1.0)
    prefills, decode = ((0, 100), (50, 80)), (119, 120)
    ours = [chunk(*each) for each in prefills]
    theirs = [device(*each) for each in prefills]
    riding: Any = SimpleNamespace(
        chunks=[*theirs, device(*decode, is_decoding=True)], restores=(), preemptions=()
    )
    got = pace._pass_s([*ours, chunk(*decode, is_decoding=True)])
    assert got == pytest.approx(seconds_of(cost.mixed(riding)), rel=1e-3)  # a token and itself are one pair
    alone: Any = SimpleNamespace(chunks=riding.chunks[2:], restores=(), preemptions=())
    assert pace._pass_s([chunk(*decode, is_decoding=True)]) == pytest.approx(
        seconds_of(cost.mixed(alone)), rel=1e-6
    )


def test_a_case_is_as_it_was_measured_last_and_other_conditions_do_not_mix(tmp_path: Path) -> None:
    def row(topology: str, rate: float, attained: float) -> dict[str, Any]:
        return {"requests": "a small image", "topology": topology, "rate": rate, "attained": attained}

    path = tmp_path / "results.json"
    assert earlier_rows(path, {"slow": 4.0}) == []
    kept = [row("1e1p1d", 10.0, 0.5), row("3epd", 20.0, 0.6)]
    path.write_text(json.dumps({"setting": {"slow": 4.0, "cores": 2}, "live": kept}))
    assert earlier_rows(path, {"slow": 8.0}) == []
    found = merged(earlier_rows(path, {"slow": 4.0}), [row("3epd", 20.0, 0.9), row("3epd", 10.0, 1.0)])
    assert found == [row("3epd", 10.0, 1.0), row("3epd", 20.0, 0.9), row("1e1p1d", 10.0, 0.5)]


def test_topologies_are_compared_with_as_many_merged_workers() -> None:
    def row(topology: str, rate: float, attained: float, tpot_ms: float) -> dict[str, Any]:
        figures = {"rate": rate, "attained": attained, "tpot_p99_ms": tpot_ms}
        return {"requests": "a small image", "topology": topology, **figures}

    found = goodput_rows(
        [
            row("3epd", 4.0, 1.0, 30.0), row("3epd", 8.0, 0.4, 90.0),
            row("1e1p1d", 4.0, 1.0, 10.0), row("1e1p1d", 6.0, 1.0, 11.0),
            row("4epd", 8.0, 1.0, 45.0),
            row("2e1p1d", 8.0, 1.0, 15.0),
        ]
    )  # fmt: skip
    ratios = {each["topology"]: (each["over_merged"], each["merged_tpot_p99_over"]) for each in found}
    assert ratios == {"3epd": (1.0, 1.0), "1e1p1d": (1.29, 3.0), "4epd": (1.0, 1.0), "2e1p1d": (1.0, 3.0)}
