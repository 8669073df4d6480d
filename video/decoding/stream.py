"""Decodes the wanted frames of a video at target size, with all available CPUs: at once or as a stream."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np

from epd.colour import WHITE, Colour
from epd.errors import RequestError
from epd.types import FrameGroup, Frames
from epd.video.containers.animation import find_animation
from epd.video.containers.limits import DEFAULT_LIMITS, Limits
from epd.video.decoding.groups import cut_groups
from epd.video.decoding.picture_run import AnimatedPictures, ListedPictures, PictureRun
from epd.video.decoding.pixels import ResizeMode, Size
from epd.video.decoding.pool import DecodePool, shared_pool
from epd.video.decoding.run import AheadBound, DecodeRun, RunOptions
from epd.video.sources.frame_list import is_frame_list
from epd.video.sources.source import Media, Source, as_media

GROUP_SIZE = 16
FIRST_GROUP_SIZE = 4
GROUP_PERIOD_S = 0.5


def decode(
    source: Source | Media,
    times_s: Sequence[float],
    size: Size | None = None,
    workers: int | None = None,
    *,
    mode: ResizeMode = "exact",
    deadline_s: float | None = None,
    limits: Limits = DEFAULT_LIMITS,
    pool: DecodePool | None = None,
    background: Colour = WHITE,
) -> Frames:
    """Returns the frames on screen at `times_s`, in the order asked.

    size: (height, width); None keeps the video's own.
    workers: decoders at work at once, at most one for each CPU; None takes them all.
    mode: "exact" equals the models' processors bit for bit, "fast" lets swscale resize.
    deadline_s: on the monotonic clock; requests with earlier ones are decoded first.
    background: what shows through the transparency of animated pictures and listed frames.

    Raises the MediaError of what is wrong with the file, RequestError for times or sizes that make no sense.
    """
    times = _check_times(times_s)
    run = _start(
        source,
        times,
        (len(times),) if times else (),
        None,
        size,
        workers,
        mode,
        deadline_s,
        limits,
        pool,
        background,
    )
    try:
        group = run.next_group()
    finally:
        run.close()
    if group is None:
        return Frames(np.zeros((0, *run.frame_size, 3), np.uint8), np.zeros(0))
    return group.frames


class Run(Protocol):
    """Decodes the frames of one request: of a container, or of a list of images."""

    @property
    def frame_size(self) -> Size:
        """Returns (height, width) of the result."""
        ...

    def next_group(self) -> FrameGroup | None:
        """Returns the next group in order, waiting for it; None after the last. Raises what went wrong."""
        ...

    def close(self) -> None:
        """Stops decoding; calling it again does nothing."""
        ...


class GroupStream(Iterator[FrameGroup]):
    """Groups of frames in order, decoded ahead of the consumer; closing it stops the decoding."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __next__(self) -> FrameGroup:
        try:
            group = self._run.next_group()
        except BaseException:
            self.close()
            raise
        if group is None:
            self.close()
            raise StopIteration
        return group

    def __enter__(self) -> GroupStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop decoding and free what is held; calling it again does nothing."""
        self._run.close()


def stream(
    source: Source | Media,
    times_s: Sequence[float],
    size: Size | None = None,
    *,
    group_size: int = GROUP_SIZE,
    first_group_size: int | None = None,
    group_sizes: Sequence[int] | None = None,
    workers: int | None = None,
    mode: ResizeMode = "exact",
    groups_ahead: int | None = None,
    deadline_s: float | None = None,
    group_period_s: float = GROUP_PERIOD_S,
    limits: Limits = DEFAULT_LIMITS,
    pool: DecodePool | None = None,
    background: Colour = WHITE,
) -> GroupStream:
    """Yields groups of the frames on screen at `times_s`, in order, while later ones are still being decoded.

    group_sizes: every size; otherwise the first group has `first_group_size` frames (default: 4, so that it
        is ready early) and the others `group_size`.
    groups_ahead: if the times are in order, how many groups beyond those consumed may be in memory (default:
        128 MiB of them).
    deadline_s: when the first group is due, on the monotonic clock; the others follow every `group_period_s`.
        Of all requests, the group that is due first is decoded first.
    background: as in `decode`.

    Use it in a `with` block: leaving it stops the decoding. Raises as `decode` does, here or while iterating.
    """
    times = _check_times(times_s)
    sizes = _resolve_sizes(len(times), group_size, first_group_size, group_sizes)
    bound = AheadBound(groups_ahead) if times == sorted(times) else None
    run = _start(
        source,
        times,
        sizes,
        bound,
        size,
        workers,
        mode,
        deadline_s,
        limits,
        pool,
        background,
        group_period_s,
    )
    return GroupStream(run)


def _start(
    source: Source | Media,
    times: list[float],
    sizes: tuple[int, ...],
    bound: AheadBound | None,
    size: Size | None,
    workers: int | None,
    mode: ResizeMode,
    deadline_s: float | None,
    limits: Limits,
    pool: DecodePool | None,
    background: Colour,
    group_period_s: float = GROUP_PERIOD_S,
) -> Run:
    pool = pool or shared_pool()
    options = RunOptions(
        size=_check_size(size),
        mode=mode,
        workers=_check_workers(workers, pool),
        group_sizes=sizes,
        bound=bound,
        first_deadline_s=time.monotonic() if deadline_s is None else deadline_s,
        group_period_s=group_period_s,
        limits=limits,
    )
    media = as_media(source)
    if is_frame_list(media):
        return PictureRun(ListedPictures(media, background), times, options)
    animation = find_animation(media)
    if animation is not None:
        return PictureRun(AnimatedPictures(media, animation, options, background), times, options)
    return DecodeRun(media, times, options, pool)


def _check_times(times_s: Sequence[float]) -> list[float]:
    times = [float(time_s) for time_s in times_s]
    bad = next((time_s for time_s in times if not math.isfinite(time_s) or abs(time_s) > 1e9), None)
    if bad is not None:
        raise RequestError(f"received the time {bad} s; allowed finite seconds; change times_s")
    return times


def _check_size(size: Size | None) -> Size | None:
    if size is not None and (len(size) != 2 or min(size) < 1 or max(size) > 1 << 15):
        raise RequestError(f"received size={size}; allowed (height, width) from 1 to 32768; change size")
    return None if size is None else (int(size[0]), int(size[1]))


def _check_workers(workers: int | None, pool: DecodePool) -> int:
    if workers is not None and workers < 1:
        raise RequestError(f"received workers={workers}; allowed 1 or more; leave it out to use every CPU")
    return pool.num_threads if workers is None else workers


def _resolve_sizes(
    num_frames: int, group_size: int, first_group_size: int | None, group_sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """Returns the sizes of the groups, adding up to `num_frames`."""
    if group_sizes is not None:
        if sum(group_sizes) != num_frames or min(group_sizes, default=1) < 1:
            raise RequestError(
                f"received group sizes adding up to {sum(group_sizes)}; "
                f"allowed positive sizes adding up to {num_frames}; count the times again"
            )
        return tuple(group_sizes)
    first = min(FIRST_GROUP_SIZE, group_size) if first_group_size is None else first_group_size
    if group_size < 1 or first < 1:
        raise RequestError(
            f"received group_size={group_size}, first_group_size={first_group_size}; "
            "allowed 1 or more; change them"
        )
    return cut_groups(num_frames, group_size, first)
