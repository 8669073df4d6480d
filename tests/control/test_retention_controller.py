"""The level of retention: what lowers it, what raises it again, and how often it can change at all.

Modules: `epd/control/retention.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from epd.control.retention import (
    PromptLoad,
    RetentionConfig,
    RetentionController,
    levels_down_to,
)
from epd.errors import RequestError
from epd.reduction import ReductionPolicy

CONFIG = RetentionConfig(slo_ttft_s=2.0, low=0.4, dwell_s=10.0, horizon_s=5.0)
LOADS = st.builds(
    PromptLoad,
    wait_s=st.floats(0, 10),
    fixed_s=st.floats(0, 2),
    visual_s=st.floats(0, 4),
    rate=st.floats(0, 20),
    num_waiting=st.integers(0, 40),
    kv_usage=st.floats(0, 1),
)
CONFIGS = st.builds(
    RetentionConfig,
    slo_ttft_s=st.floats(0.1, 5),
    levels=st.sampled_from([(1.0,), (1.0, 0.5), (1.0, 0.5, 0.25, 0.15, 0.1), (0.9, 0.3, 0.05)]),
    dwell_s=st.sampled_from([0.5, 2.0, 10.0]),
    down_gap_s=st.sampled_from([0.0, 0.5, 3.0]),
)


def settled(config: RetentionConfig, load: PromptLoad, first: PromptLoad | None = None) -> float:
    """The level after a long time of that load, and some of another one before."""
    controller = RetentionController(config)
    for now_s in range(100):
        controller.look(now_s, first or load)
    for now_s in range(100, 400):
        controller.look(now_s, load)
    return controller.level


def most_within(times: Sequence[float], seconds: float) -> int:
    return max((sum(start <= each <= start + seconds for each in times) for start in times), default=0)


@given(CONFIGS, st.lists(st.tuples(st.sampled_from([0, 1, 2, 8, 40]), LOADS), max_size=120))
@settings(max_examples=200, deadline=None)
def test_no_load_changes_the_level_more_often_than_the_bound(
    config: RetentionConfig, looks: list[tuple[int, PromptLoad]]
) -> None:
    """Times are multiples of a quarter of a second, so that they add up exactly."""
    controller, now_s, times = RetentionController(config), 0.0, []
    for quarters, load in looks:
        now_s += quarters / 4
        before = controller.level
        after = controller.look(now_s, load)
        assert after in config.levels
        if after != before:
            times.append(now_s)
            up = config.levels.index(before) - config.levels.index(after)
            assert up <= 1, "it rises by one level at a time"
            gaps = [now_s - each for each in times[-2:-1]]
            assert all(gap >= (config.dwell_s if up > 0 else config.down_gap_s) for gap in gaps)
    assert controller.num_changes == len(times)
    for seconds in (1.0, 10.0, 60.0):
        assert most_within(times, seconds) <= config.max_changes(seconds)


def test_the_worst_load_is_held_to_the_bound_of_a_minute() -> None:
    """All levels down at once, and up again as fast as it goes, for ten minutes."""
    controller, times = RetentionController(CONFIG), []
    calm, flood = PromptLoad(visual_s=0.1), PromptLoad(wait_s=9, visual_s=1)
    for tick in range(2400):
        before = controller.level
        load = flood if before == 1 or controller.num_changes % 2 == 0 else calm
        if controller.look(tick / 4, load) != before:
            times.append(tick / 4)
    assert CONFIG.max_changes(60) == 18
    assert 6 <= most_within(times, 60) <= 18


@given(LOADS, st.floats(0, 5), st.floats(0, 5), st.integers(0, 20), st.floats(0, 1))
@example(PromptLoad(fixed_s=1.3125, visual_s=0.5), 0.5, 0.0, 0, 0.0)  # the last levels save little
@settings(max_examples=200, deadline=None)
def test_more_load_never_keeps_more(
    load: PromptLoad, wait_s: float, rate: float, num_waiting: int, kv_usage: float
) -> None:
    heavier = PromptLoad(
        load.wait_s + wait_s,
        load.fixed_s,
        load.visual_s,
        load.rate + rate,
        load.num_waiting + num_waiting,
        min(1.0, load.kv_usage + kv_usage),
    )
    assert settled(CONFIG, heavier) <= settled(CONFIG, load)


@given(LOADS, LOADS)
@example(PromptLoad(fixed_s=1.5, visual_s=0.5), PromptLoad(visual_s=1.0, rate=1.0))  # little is saved
@settings(max_examples=100, deadline=None)
def test_where_it_settles_nothing_is_better(load: PromptLoad, first: PromptLoad) -> None:
    """Whatever came before: the level keeps the limit or cannot fall to help, and could not rise."""
    level = settled(CONFIG, load, first)
    controller, index = RetentionController(CONFIG), CONFIG.levels.index(level)
    lowest_s = load.service_s(CONFIG.levels[-1])
    if index < len(CONFIG.levels) - 1 and lowest_s < 0.9 * load.service_s(level):
        assert controller.ttft_s(load, level) <= CONFIG.high * CONFIG.slo_ttft_s
        assert load.num_waiting <= CONFIG.max_waiting
    if index and load.num_waiting == load.kv_usage == 0:
        above = controller.ttft_s(load, CONFIG.levels[index - 1])
        assert above > CONFIG.low * CONFIG.slo_ttft_s


def test_it_falls_as_far_as_it_must_at_once_and_rises_step_by_step() -> None:
    controller = RetentionController(CONFIG)
    busy = PromptLoad(wait_s=0.2, fixed_s=0.1, visual_s=1.0, rate=2.0)  # 0.25: 0.7 of the time busy
    assert controller.look(0, busy) == 0.25
    (change,) = controller.changes
    assert (change.before, change.after) == (1.0, 0.25)
    assert change.ttft_s == pytest.approx(0.55)
    assert "predicted" in change.reason
    calm = PromptLoad(fixed_s=0.1, visual_s=0.5, rate=0.1)
    levels = [controller.look(now_s, calm) for now_s in range(1, 32)]
    assert [level for level, _ in itertools.groupby(levels)] == [0.25, 0.5, 1.0]
    assert levels.index(0.5) == 10  # calm since second 1
    assert levels.index(1.0) == 21  # and since the second after


def test_between_the_marks_it_stays_where_it_is() -> None:
    """At half of the SLO the highest level is not left, and not gone back to."""
    load = PromptLoad(wait_s=0.8, visual_s=0.2)
    assert settled(CONFIG, load) == 1.0
    flood = PromptLoad(wait_s=5, visual_s=0.2)
    assert settled(CONFIG, load, first=flood) == CONFIG.levels[-1]


def test_a_short_calm_raises_nothing() -> None:
    controller = RetentionController(CONFIG)
    flood, calm = PromptLoad(wait_s=5, visual_s=1), PromptLoad(visual_s=0.1)
    for now_s in range(200):
        controller.look(now_s, flood if now_s % 10 == 0 else calm)
    assert controller.num_changes == 1


def test_a_queue_that_will_grow_lowers_the_level_before_it_has() -> None:
    load = PromptLoad(fixed_s=0.05, visual_s=0.5, rate=3.0)
    assert RetentionController(CONFIG).look(0, load) == 0.5
    assert RetentionController(CONFIG).look(0, PromptLoad(fixed_s=0.05, visual_s=0.5, rate=1.0)) == 1.0


@pytest.mark.parametrize(
    "load", [PromptLoad(num_waiting=9), PromptLoad(kv_usage=0.96), PromptLoad(num_waiting=9, visual_s=0.1)]
)
def test_a_queue_or_full_memory_lowers_it_level_by_level(load: PromptLoad) -> None:
    controller = RetentionController(CONFIG)
    levels = [controller.look(now_s, load) for now_s in range(60)]
    assert levels[0] == 0.5
    assert levels[9:11] == [0.5, 0.25]
    assert levels[-1] == 0.1


def test_nothing_is_dropped_where_that_saves_nothing() -> None:
    """Encoding takes all the time: prompts wait, and would wait as long without their visual tokens."""
    load = PromptLoad(wait_s=9, fixed_s=1.0, visual_s=0.02, rate=3, num_waiting=20)
    assert settled(CONFIG, load) == 1.0
    queue = PromptLoad(wait_s=9, visual_s=1)
    assert settled(CONFIG, replace(load, num_waiting=0), first=queue) == 1.0


def test_full_memory_does_not_rise_into_itself() -> None:
    """0.6 of the KV at a quarter of the tokens is more than there is at half of them."""
    first = PromptLoad(kv_usage=0.99)
    assert settled(CONFIG, PromptLoad(kv_usage=0.6), first=first) == 0.15
    assert settled(CONFIG, PromptLoad(kv_usage=0.05), first=first) == 1.0


def test_a_clock_that_goes_back_stands_still() -> None:
    controller = RetentionController(CONFIG)
    controller.look(100, PromptLoad(wait_s=5, visual_s=1))
    for now_s in range(100):
        controller.look(now_s, PromptLoad())
    assert controller.num_changes == 1


@pytest.mark.parametrize(
    ("level", "asked", "floor", "kept"),
    [
        (0.25, 1.0, 0.0, 0.25),
        (0.25, 1.0, 0.5, 0.5),
        (1.0, 0.5, 0.0, 0.5),
        (0.1, 0.4, 0.4, 0.4),
        (1, 0.2, 1, 1),
    ],
)
def test_a_request_has_the_last_word(level: float, asked: float, floor: float, kept: float) -> None:
    assert ReductionPolicy(retention=asked).clamped(level, floor).retention == kept


def test_levels_end_where_the_server_wants() -> None:
    assert levels_down_to(0.1) == (1.0, 0.5, 0.25, 0.15, 0.1)
    assert levels_down_to(0.2) == (1.0, 0.5, 0.25, 0.2)
    assert levels_down_to(1.0) == (1.0,)


@pytest.mark.parametrize(
    "options",
    [{"levels": ()}, {"levels": (0.5, 0.5)}, {"levels": (0.5, 1.0)}, {"levels": (1.0, 0.01)}, {"low": 0.8}],
)
def test_levels_that_are_none_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="allowed"):
        RetentionConfig(2.0, **options)  # type: ignore[arg-type]


def test_what_is_predicted_at_the_higher_level_counts() -> None:
    """At a quarter of 2 s all is calm; at half of them it would not be."""
    flood = PromptLoad(wait_s=5, visual_s=2)
    assert settled(CONFIG, PromptLoad(visual_s=2.0), first=flood) == 0.25
