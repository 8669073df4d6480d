"""What is chosen for a budget: never too much, never less than could be, thin only where frames are few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.control.retention import LEVELS
from epd.control.visual_budget import (
    ENOUGH_FRAMES,
    LEAST_FRAMES,
    FrameChoice,
    allowed_levels,
    choose_frames,
    no_room,
    room_for_media,
    share_frames,
)
from epd.errors import RequestError
from epd.reduction import VisualBudget

wanted = st.integers(1, 5000)
per_frame = st.integers(1, 300)
budgets = st.integers(1, 400_000)
levels = st.sampled_from([LEVELS, LEVELS[1:], (0.25, 0.1), (1.0,), (0.5,)])


def cost(choice: FrameChoice, each: int) -> float:
    return choice.num_frames * each * choice.retention


def chosen(num_wanted: int, shares: tuple[float, ...], each: int, budget: int) -> FrameChoice | None:
    return choose_frames(num_wanted, shares, lambda num, share: num * each * share <= budget)


@given(wanted, levels, per_frame, budgets)
def test_a_choice_has_room_and_none_means_that_nothing_has(
    num_wanted: int, shares: tuple[float, ...], each: int, budget: int
) -> None:
    choice = chosen(num_wanted, shares, each, budget)
    least = min(LEAST_FRAMES, num_wanted)
    if choice is None:
        assert cost(FrameChoice(least, shares[-1]), each) > budget
        return
    assert cost(choice, each) <= budget
    assert least <= choice.num_frames <= num_wanted
    assert choice.retention in shares


@given(wanted, levels, per_frame, budgets)
def test_everything_is_kept_where_it_has_room(
    num_wanted: int, shares: tuple[float, ...], each: int, budget: int
) -> None:
    everything = FrameChoice(num_wanted, shares[0])
    assert (chosen(num_wanted, shares, each, budget) == everything) == (cost(everything, each) <= budget)


@given(wanted, levels, per_frame, budgets, budgets)
def test_a_larger_budget_keeps_more_of_a_frame_or_as_much_of_more_frames(
    num_wanted: int, shares: tuple[float, ...], each: int, budget: int, other: int
) -> None:
    small, large = (chosen(num_wanted, shares, each, most) for most in sorted((budget, other)))
    if small is None:
        return
    assert large is not None
    assert (small.retention, small.num_frames) <= (large.retention, large.num_frames)


@given(wanted, levels, per_frame, budgets)
def test_frames_stay_whole_where_there_are_enough_and_no_room_is_left_unused(
    num_wanted: int, shares: tuple[float, ...], each: int, budget: int
) -> None:
    choice = chosen(num_wanted, shares, each, budget)
    whole = int(budget / (each * shares[0]))
    if choice is not None and whole >= max(ENOUGH_FRAMES, num_wanted / 10):
        assert choice.retention == shares[0]
    if choice is not None and choice.num_frames < num_wanted:
        assert cost(FrameChoice(choice.num_frames + 1, choice.retention), each) > budget


# Measured on the shapes world, 7.5 visual tokens a frame: docs/reduction.md.
@pytest.mark.parametrize(
    ("num_wanted", "num_tokens", "expected"),
    [
        (128, 960, FrameChoice(128, 1.0)),
        (128, 240, FrameChoice(32, 1.0)),  # 97.3 % right, as 128 frames at a quarter
        (128, 96, FrameChoice(128, 0.1)),  # 94.8 % right, and 91.4 with 13 whole frames
        (512, 390, FrameChoice(52, 1.0)),  # 93.1 % right, and 92.6 with 512 at a tenth
        (768, 577, FrameChoice(768, 0.1)),  # 76 whole frames have room, less than a tenth of them
        (768, 578, FrameChoice(77, 1.0)),
        (10, 20, FrameChoice(10, 0.25)),
        (768, 60, FrameChoice(80, 0.1)),
        (768, 2, None),
    ],
)
def test_thresholds_are_those_that_were_measured(
    num_wanted: int, num_tokens: int, expected: FrameChoice | None
) -> None:
    found = choose_frames(num_wanted, LEVELS, lambda num, share: num * 7.5 * share <= num_tokens)
    assert found == expected


def test_a_retention_that_was_asked_for_is_kept() -> None:
    assert allowed_levels(VisualBudget(), 1.0) == LEVELS
    assert allowed_levels(VisualBudget(), 0.3) == (0.3, 0.25, 0.15, 0.1)
    assert allowed_levels(VisualBudget(retention_min=0.2), 1.0) == (1.0, 0.5, 0.25)
    assert allowed_levels(VisualBudget(keeps_retention=True), 0.3) == (0.3,)
    assert allowed_levels(VisualBudget(), 1.0, can_thin=False) == (1.0,)


def test_questions_of_like_length_leave_the_same_room() -> None:
    assert room_for_media(4096, 1) == room_for_media(4096, 512) == 3584
    assert room_for_media(4096, 513) == 3072
    assert room_for_media(4096, 5000) < 0


@given(st.integers(1, 5000), st.lists(st.integers(1, 5000), min_size=1, max_size=5))
def test_videos_share_frames_by_how_many_are_wanted(num_frames: int, each_wanted: list[int]) -> None:
    num_frames = min(num_frames, sum(each_wanted))
    shares = share_frames(num_frames, tuple(each_wanted))
    assert all(1 <= share <= most for share, most in zip(shares, each_wanted, strict=True))
    assert sum(shares) <= max(num_frames, len(shares)) + len(shares)


def test_errors_name_what_was_received_and_what_is_allowed() -> None:
    with pytest.raises(RequestError, match="received max_visual_tokens=0; allowed: at least 1"):
        VisualBudget(0)
    assert "received a budget of 5 visual tokens for media that have 9 at least" in str(no_room(9, 5, 100))
    assert "allowed: fewer than the 100 tokens" in str(no_room(90, None, 100))
    assert "allowed: fewer than the 100 tokens" in str(no_room(90, 200, 100))
