"""The planner against a toy decoder that knows every reference: exact, complete, and no more than needed."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.video.decoding.segment import Drain, Feed, Segmenter, Show, Stamp, StartRun


@dataclass(frozen=True)
class Coded:
    """A coded frame: its time and the times of the frames it refers to."""

    pts: int
    refs: tuple[int, ...]
    is_key: bool = False
    is_reference: bool = True


@dataclass
class Video:
    """Frames in decode order, and their decode timestamps."""

    frames: list[Coded] = field(default_factory=list)

    @property
    def times(self) -> list[int]:
        return sorted(frame.pts for frame in self.frames)

    def stamps(self) -> list[Stamp[Coded]]:
        delay = max(late - frame.pts for late, frame in zip(self.times, self.frames, strict=True))
        dts = [time - delay for time in self.times]
        rows = zip(self.frames, dts, strict=True)
        return [Stamp(frame.pts, d, frame.is_key, 100, True, frame) for frame, d in rows]


@st.composite
def videos(draw: st.DrawFn) -> Video:
    """Variable rate, any start, GOPs of any length, closed and open, with runs of B-frames."""
    made = Video()
    pts = draw(st.integers(-50, 500))
    anchor: int | None = None
    for _ in range(draw(st.integers(1, 5))):  # GOPs
        is_open = anchor is not None and draw(st.booleans())
        for index in range(draw(st.integers(1, 6))):  # anchors, each with the B-frames shown before it
            num_b = draw(st.integers(0, 3)) if index or is_open else 0
            b_times = [pts := pts + draw(st.integers(1, 40)) for _ in range(num_b)]
            pts += draw(st.integers(1, 40))
            refs = () if index == 0 else (anchor or 0,)
            made.frames.append(Coded(pts, refs, is_key=index == 0))
            made.frames += [Coded(time, (anchor or 0, pts), is_reference=False) for time in b_times]
            anchor = pts
    return made


@st.composite
def plans(draw: st.DrawFn) -> tuple[Video, list[int], int | None]:
    made = draw(videos())
    low, high = made.times[0] - 30, made.times[-1] + 30
    targets = draw(st.sets(st.integers(low, high), min_size=1, max_size=25))
    return made, sorted(targets), draw(st.sampled_from([None, 1, 4]))


def on_screen(times: list[int], target: int) -> int:
    return times[max(0, bisect_right(times, target) - 1)]


@given(plans())
@settings(max_examples=400, deadline=None)
def test_every_target_gets_its_frame_and_nothing_undecodable_is_shown(
    plan: tuple[Video, list[int], int | None],
) -> None:
    made, targets, fuse_packets = plan
    segmenter: Segmenter[Coded] = Segmenter(targets, fuse_packets=fuse_packets)
    for stamp in made.stamps():
        segmenter.push(stamp)
    segmenter.finish()

    shown: dict[int, int] = {}
    expected: dict[int, list[int]] = {}
    decoded: set[int] = set()
    start_pts = 0
    for op in segmenter.ops:
        if isinstance(op, StartRun):
            decoded, start_pts = set(), op.pts
        elif isinstance(op, Show):
            assert op.target not in shown
            shown[op.target] = op.pts if op.pts is not None else -1
            expected.setdefault(shown[op.target], []).append(op.target)
        elif isinstance(op, Feed):
            frame = op.stamp.packet
            if (frame.is_reference or op.full) and all(ref in decoded for ref in frame.refs):
                decoded.add(frame.pts)
            if frame.pts in expected:
                assert op.full
                assert frame.pts >= start_pts
        elif isinstance(op, Drain):
            assert expected.keys() <= decoded, "a frame was asked for and could not be decoded"
            expected = {}
    assert not expected
    assert shown == {target: on_screen(made.times, target) for target in targets}


@given(videos(), st.integers(-30, 900))
@settings(max_examples=200, deadline=None)
def test_one_target_costs_no_packet_before_its_keyframe_or_after_its_frame(made: Video, target: int) -> None:
    segmenter: Segmenter[Coded] = Segmenter([target])
    for stamp in made.stamps():
        segmenter.push(stamp)
    segmenter.finish()
    fed = [op.stamp.packet for op in segmenter.ops if isinstance(op, Feed)]
    wanted = on_screen(made.times, target)
    places = {frame.pts: place for place, frame in enumerate(made.frames)}
    keys = [frame.pts for frame in made.frames if frame.is_key and frame.pts <= wanted]
    first = places[keys[-1]] if keys else 0
    assert fed == made.frames[first : places[wanted] + 1]
    assert sum(isinstance(op, Feed) and op.full for op in segmenter.ops) == 1


def test_a_gop_is_handed_out_before_the_file_is_read_through() -> None:
    frames = [Coded(10 * i, () if i % 5 == 0 else (10 * i - 10,), is_key=i % 5 == 0) for i in range(40)]
    segmenter: Segmenter[Coded] = Segmenter([20, 120], fuse_packets=4)
    pushed = 0
    for stamp in Video(frames).stamps():
        segmenter.push(stamp)
        pushed += 1
        if any(isinstance(op, Drain) for op in segmenter.ops):
            break
    assert pushed <= 12


def test_a_long_gop_is_fed_before_too_much_is_held() -> None:
    frames = [Coded(10 * i, () if i == 0 else (10 * i - 10,), is_key=i == 0) for i in range(500)]
    segmenter: Segmenter[Coded] = Segmenter([4990], max_held_bytes=100 * 100)
    for stamp in Video(frames).stamps()[:400]:
        segmenter.push(stamp)
    assert sum(isinstance(op, Feed) for op in segmenter.ops) > 250


def test_short_gops_are_fused_and_long_runs_are_cut_for_others() -> None:
    frames = [Coded(10 * i, (), is_key=True) for i in range(100)]
    starts = {}
    for fuse_packets in (None, 32):
        segmenter: Segmenter[Coded] = Segmenter(range(0, 1000, 10), fuse_packets=fuse_packets)
        for stamp in Video(frames).stamps():
            segmenter.push(stamp)
        segmenter.finish()
        starts[fuse_packets] = sum(isinstance(op, StartRun) for op in segmenter.ops)
        assert sum(isinstance(op, Feed) for op in segmenter.ops) == 100
    assert starts == {None: 1, 32: 4}
