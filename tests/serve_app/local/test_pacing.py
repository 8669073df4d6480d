"""Paced passes last as long as the simulator says of their work, and answer messages meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epd.planning.replay import scaled
from epd.profiles.files import load_profile
from epd.serve_app.local.pacing import Pace
from epd.simulate.clock import seconds_of
from epd.simulate.language import PassTicks

SCALE = 32  # patches and tokens of the device, that one of the small model stands for
DEVICE = load_profile("qwen2.5-vl-7b@a100-80gb")
SMALL = scaled(DEVICE, SCALE, SCALE)


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
    pace = Pace(SMALL, 2.0)
    runs: Any = [SimpleNamespace(grid=SimpleNamespace(num_patches=256))] * 2
    assert pace.encoder(lambda given: [len(given)])(runs) == [2]
    wanted_s = 2.0 * DEVICE.encode.cost.seconds(512 * SCALE, 2)
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
    device_s = seconds_of(PassTicks(DEVICE).mixed(output(SCALE)))
    ours_s = seconds_of(PassTicks(SMALL).mixed(output(1)))
    assert ours_s == pytest.approx(device_s, rel=1e-3)  # a token and itself are one pair

    def paced(pace: Pace, work_s: float) -> float:
        """Runs one step that computes for so long. Returns how long it took."""
        engine: Any = SimpleNamespace(scheduler=SimpleNamespace(schedule=lambda: output(1)))
        engine.step = lambda: (engine.scheduler.schedule(), clock.sleep(work_s))
        start_s = clock.now_s
        pace.engine(engine)()
        return clock.now_s - start_s

    pace = Pace(SMALL, 4.0)
    assert paced(pace, 3 * ours_s) == pytest.approx(4 * ours_s)
    assert pace.num_late == 0
    assert paced(pace, 5 * ours_s) == pytest.approx(5 * ours_s)
    assert (pace.num_passes, pace.num_late) == (2, 1)
