"""Groups come early, in order and bounded; whoever stops listening stops the work.

Modules: `video/decoding/groups.py`, `video/decoding/run.py`,
`video/decoding/session.py`, `video/decoding/stream.py`, `video/decoding/run.py`.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from epd import video
from epd.errors import CancelledError, CorruptMediaError, MediaLimitError, RequestError
from epd.video.decoding.pixels import FrameConverter
from epd.video.decoding.pool import DecodePool
from epd.video.decoding.run import DecodeTask
from epd.video.decoding.session import DecodedFrame, DecoderSession
from tests.video.conftest import Clip
from tests.video.recipes import GOP15, Recipe

LONG = Recipe("long.mp4", options=GOP15, num_frames=600, width=64, height=48)
TIMES = list(np.arange(0.05, 20, 0.1))


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Grows by the time of each conversion of a frame."""
    calls: list[float] = []
    convert = FrameConverter.convert

    def counting(self: FrameConverter, frame: object) -> object:
        calls.append(time.monotonic())
        return convert(self, frame)  # type: ignore[arg-type]

    monkeypatch.setattr(FrameConverter, "convert", counting)
    return calls


@pytest.fixture
def pool() -> Iterator[DecodePool]:
    pool = DecodePool(2)
    yield pool
    pool.close()


def wait_until_still(calls: list[float]) -> int:
    """The length of a list that has stopped growing."""
    before = -1
    while len(calls) != before:
        before = len(calls)
        time.sleep(0.15)
    return before


def sessions() -> list[DecoderSession]:
    """The decoders that this process holds."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is DecoderSession]


def wait_until_freed(before: list[DecoderSession]) -> bool:
    """Whether no decoder is left but `before`: a thread of the pool drops its last one a moment later."""
    known = {id(one) for one in before}
    for _ in range(1200):
        if all(id(one) in known for one in sessions()):
            return True
        time.sleep(0.05)
    return False


def test_a_slow_consumer_bounds_what_is_decoded_ahead(clip: Clip, converted: list[float]) -> None:
    with video.stream(
        clip(LONG), TIMES, group_size=10, first_group_size=2, groups_ahead=3, workers=2
    ) as groups:
        next(groups)
        assert 2 <= wait_until_still(converted) <= 2 + 3 * 10 + 2  # and one frame waiting in each decoder
        for _ in range(4):
            next(groups)
        assert wait_until_still(converted) <= 2 + 7 * 10 + 2
        assert sum(len(group.frames) for group in groups) == len(TIMES) - 42


def test_closing_stops_the_work_and_frees_the_decoders(
    clip: Clip, converted: list[float], pool: DecodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever closes is quicker than the decoders, however busy the machine is."""
    is_closing, convert = threading.Event(), FrameConverter.convert

    def held(self: FrameConverter, frame: object) -> object:
        if len(converted) > 20:
            assert is_closing.wait(60)
        return convert(self, frame)  # type: ignore[arg-type]

    monkeypatch.setattr(FrameConverter, "convert", held)
    before = sessions()  # of tests that ran in this process
    groups = video.stream(clip(LONG), TIMES, group_size=2, groups_ahead=100, pool=pool)
    next(groups)
    groups.close()
    groups.close()
    is_closing.set()
    done = wait_until_still(converted)
    assert done < len(TIMES)
    with pytest.raises(CancelledError):
        next(groups)
    assert len(video.decode(clip(LONG), [1.0], pool=pool)) == 1
    assert wait_until_freed(before)


def test_a_consumer_that_waits_is_woken_by_close(clip: Clip) -> None:
    groups = video.stream(clip(LONG), TIMES, pool=DecodePool(0))
    threading.Timer(0.1, groups.close).start()
    with pytest.raises(CancelledError):
        next(groups)


def test_two_streams_taken_in_turn_share_one_thread(clip: Clip) -> None:
    pool = DecodePool(1)
    first = video.stream(clip(LONG), TIMES, group_size=5, groups_ahead=1, pool=pool)
    second = video.stream(clip("h264_one_key.mp4"), TIMES[:19], group_size=5, groups_ahead=1, pool=pool)
    with first, second:
        for _ in range(4):
            assert len(next(first).frames)
            assert len(next(second).frames)
    pool.close()


def test_frames_inside_a_decoder_come_out_though_the_ring_is_full(clip: Clip) -> None:
    """A long GOP is read in pieces; between two, the frame waited for may still be in the decoder."""
    times = [i / 30 + 0.01 for i in range(60)]
    limits = video.Limits(max_file_s=600.0)
    with video.stream(
        clip("h264_one_key.mp4"),
        times,
        group_size=1,
        first_group_size=1,
        groups_ahead=1,
        workers=1,
        limits=limits,
    ) as groups:
        assert sum(len(group.frames) for group in groups) == 60


def test_the_earlier_deadline_is_decoded_first(clip: Clip, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the steps of the one thread: its consumers may be woken in any order."""
    pool = DecodePool(0)  # no thread yet: both requests queue up
    now = time.monotonic()
    steps: list[float] = []
    step = DecodeTask.step

    def noted(task: DecodeTask) -> object:
        steps.append(task._run.options.first_deadline_s)
        return step(task)

    monkeypatch.setattr(DecodeTask, "step", noted)

    def consume(deadline_s: float) -> None:
        assert len(video.decode(clip(LONG), TIMES, deadline_s=deadline_s, pool=pool)) == len(TIMES)

    later, sooner = now + 1000, now
    consumers = [threading.Thread(target=consume, args=(deadline_s,)) for deadline_s in (later, sooner)]
    for waiting, consumer in enumerate(consumers, start=1):
        consumer.start()
        while len(pool._queue) < waiting:
            time.sleep(0.001)
    pool.num_threads = 1
    with video.stream(clip(LONG), [0.0], deadline_s=now + 2000, pool=pool):
        for consumer in consumers:
            consumer.join()
    pool.close()
    both = [deadline_s for deadline_s in steps if deadline_s in (sooner, later)]
    assert set(both) == {sooner, later}
    assert both == sorted(both)


def test_the_first_group_is_small_and_comes_long_before_the_last(
    clip: Clip, converted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than a third of the frames are converted before it is there."""
    has_come, convert = threading.Event(), FrameConverter.convert

    def held(self: FrameConverter, frame: object) -> object:
        if len(converted) > 0.35 * len(TIMES):
            assert has_come.wait(60), "the first group waits for more frames"
        return convert(self, frame)  # type: ignore[arg-type]

    monkeypatch.setattr(FrameConverter, "convert", held)
    with video.stream(clip(LONG), TIMES, group_size=16, workers=2) as groups:
        assert len(next(groups).frames) == 4
        has_come.set()
        assert sum(len(group.frames) for group in groups) == len(TIMES) - 4


def test_group_sizes_may_be_given(clip: Clip) -> None:
    with video.stream(clip("h264_b.mp4"), TIMES[:10], group_sizes=[1, 7, 2]) as groups:
        assert [(group.index, group.start, group.stop) for group in groups] == [
            (0, 0, 1),
            (1, 1, 8),
            (2, 8, 10),
        ]


def test_no_times_give_no_frames(clip: Clip) -> None:
    assert video.decode(clip("h264_b.mp4"), []).data.shape == (0, 96, 128, 3)
    assert list(video.stream(clip("h264_b.mp4"), [])) == []


@pytest.mark.parametrize(
    "options",
    [
        {"group_sizes": [1, 1]},
        {"group_sizes": [11, -1]},
        {"group_size": 0},
        {"first_group_size": 0},
        {"workers": 0},
        {"size": (0, 10)},
        {"size": (10, 1 << 20)},
    ],
)
def test_options_that_make_no_sense(clip: Clip, options: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        video.stream(clip("h264_b.mp4"), TIMES[:10], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("times", [[float("nan")], [float("inf")], [1e12]])
def test_times_that_make_no_sense(clip: Clip, times: list[float]) -> None:
    with pytest.raises(RequestError):
        video.decode(clip("h264_b.mp4"), times)


def test_a_file_that_takes_too_long_is_given_up(clip: Clip) -> None:
    with pytest.raises(MediaLimitError, match="took more than 0"):
        video.decode(clip(LONG), TIMES, limits=video.Limits(max_file_s=0.01), pool=DecodePool(0))


def test_a_gop_that_takes_too_long_is_replaced(clip: Clip, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on in that GOP alone."""
    now_s, decode = 0.0, DecoderSession._decode

    def slow(self: DecoderSession, packet: object) -> object:
        nonlocal now_s
        if packet is not None and 2 * 15360 <= packet.pts < 2.5 * 15360:  # type: ignore[attr-defined]
            now_s += 0.15
        return decode(self, packet)  # type: ignore[arg-type]

    monkeypatch.setattr("epd.video.decoding.run.time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(DecoderSession, "_decode", slow)
    frames = video.decode(clip(LONG), TIMES, workers=1, limits=video.Limits(max_gop_s=1.0))
    assert 1 <= frames.num_substituted <= 20
    assert all(1.5 < time_s < 4.0 for time_s in frames.substituted_times_s)


def test_frames_that_wait_for_one_that_never_comes_are_an_error(
    clip: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All groups in memory miss all their frames, and what could stand in for them has no room."""

    def decode_late_ones(self: DecodeTask, decoded: DecodedFrame) -> None:
        if decoded.target is not None and decoded.target < 15 * 15360:
            decoded = DecodedFrame(decoded.target, None, decoded.pts, True)
        deliver(self, decoded)

    deliver = DecodeTask._deliver
    monkeypatch.setattr(DecodeTask, "_deliver", decode_late_ones)
    limits = video.Limits(max_substituted_fraction=1.0, max_file_s=600.0)
    with (
        video.stream(clip(LONG), TIMES, group_size=10, groups_ahead=3, limits=limits) as groups,
        pytest.raises(CorruptMediaError, match="no frame could be decoded near 4 wanted times"),
    ):
        next(groups)


def test_a_failure_in_a_worker_reaches_the_consumer(clip: Clip, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FrameConverter, frame: object) -> object:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(FrameConverter, "convert", fail)
    with pytest.raises(ZeroDivisionError):
        video.decode(clip(LONG), TIMES, limits=video.Limits(max_file_s=600.0))


def test_memory_for_the_result_is_bounded(clip: Clip) -> None:
    with pytest.raises(MediaLimitError, match="use stream"):
        video.decode(clip(LONG), TIMES, size=(4000, 4000), limits=video.Limits(max_output_bytes=1 << 30))
