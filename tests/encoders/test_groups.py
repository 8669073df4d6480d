"""Groups: every unit once, common to overlapping clips, batched by shape; content by its bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from epd.encoders.groups import cut, plan_groups
from epd.encoders.plans import Grid, MediaPlan
from epd.types import content_hash


def clip(first: int, num_units: int, frames_per_unit: int, span_frames: int, offset: int) -> MediaPlan:
    """Units [first, first + num_units) of a video at 24 frames a second, each frame `span_frames` later.

    offset: of the first frame within its span, as processors take the first one or one in the middle.
    """
    frames = range(first * frames_per_unit, (first + num_units) * frames_per_unit)
    return MediaPlan(
        kind="video",
        size=(28, 28),
        grid=Grid(num_units, 2, 2),
        frames_per_unit=frames_per_unit,
        tokens_per_unit=1,
        times_s=tuple((frame * span_frames + offset + 0.5) / 24 for frame in frames),
        unit_span_s=frames_per_unit * span_frames / 24,
    )


UNITS = st.integers(1, 60)


@given(first=UNITS, num_units=UNITS, group_units=st.integers(1, 16), data=st.data())
def test_groups_cover_every_unit_once_and_are_short_enough(
    first: int, num_units: int, group_units: int, data: st.DataObject
) -> None:
    span, first_units = data.draw(st.integers(1, 48)), data.draw(st.integers(1, 20))
    plan = clip(first, num_units, 2, span, data.draw(st.integers(0, span // 2)))
    cuts = cut(plan, group_units, first_units)
    assert [unit for start, stop in cuts for unit in range(start, stop)] == list(range(num_units))
    assert all(1 <= stop - start <= group_units for start, stop in cuts)
    assert cuts[0][1] <= first_units


@given(first=UNITS, num_units=UNITS, group_units=st.integers(1, 16), first_units=st.integers(1, 20))
def test_a_small_first_group_is_cut_off_the_first_one_and_moves_no_other(
    first: int, num_units: int, group_units: int, first_units: int
) -> None:
    plan = clip(first, num_units, 2, 12, 0)
    usual, cuts = cut(plan, group_units), cut(plan, group_units, first_units)
    assert cuts[-len(usual) + 1 or len(cuts) :] == usual[1:]
    assert len(cuts) - len(usual) == (cuts[0] != usual[0])


def test_an_image_is_prefilled_whole_so_its_first_group_is_as_large_as_the_others() -> None:
    image = replace(clip(0, 20, 2, 12, 0), kind="image")
    assert cut(image, 8, 2) == [(0, 8), (8, 16), (16, 20)]
    large = replace(image, tokens_per_unit=100)
    groups = plan_groups([large], ["a"], model="m", group_tokens=1000)
    assert [group.plan.num_units for group in groups] == [10, 10]


def test_the_first_group_of_a_video_has_256_tokens_at_most() -> None:
    plan = replace(clip(0, 20, 2, 12, 0), tokens_per_unit=100)
    groups = plan_groups([plan], ["a"], model="m", group_tokens=1000)
    assert [group.plan.num_units for group in groups] == [2, 8, 10]
    small = plan_groups([plan], ["a"], model="m", group_tokens=100)
    assert {group.plan.num_units for group in small} == {1}


@given(starts=st.tuples(UNITS, UNITS), lengths=st.tuples(UNITS, UNITS), data=st.data())
def test_overlapping_clips_have_all_whole_groups_of_the_overlap_in_common(
    starts: tuple[int, int], lengths: tuple[int, int], data: st.DataObject
) -> None:
    group_units, span = data.draw(st.integers(1, 8)), data.draw(st.integers(4, 48))
    offset = data.draw(st.integers(0, span // 2))
    keys = [
        {
            group.spec.key
            for group in plan_groups(
                [clip(start, length, 2, span, offset)], ["video"], model="m", group_tokens=group_units
            )
        }
        for start, length in zip(starts, lengths, strict=True)
    ]
    first, stop = max(starts), min(start + length for start, length in zip(starts, lengths, strict=True))
    whole = max(0, stop // group_units - -(-first // group_units))
    assert len(keys[0] & keys[1]) >= whole


def test_equal_bytes_have_one_hash_wherever_they_are(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.mp4", "b.mp4", "c.mp4")]
    for file, content in zip(files, (b"same", b"same", b"other"), strict=True):
        file.write_bytes(content)
    first, second, third = map(content_hash, files)
    assert first == second != third
    assert len(first) == 32
