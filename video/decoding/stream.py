"""Decodes the wanted frames of a video at target size, with all available CPUs: at once or as a stream.

Listed frames and animated pictures are decoded one after another, each when its group is wanted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from types import TracebackType

import numpy as np

from epd.colour import WHITE, Colour
from epd.errors import CancelledError, CorruptMediaError, RequestError
from epd.types import FrameGroup, Frames, UInt8Array
from epd.video.containers.animated_files import Animation
from epd.video.containers.animation import Drawing, check_animation, find_animation, frame_at
from epd.video.containers.images import exif_orientation, load_image, upright_size
from epd.video.containers.limits import DEFAULT_LIMITS, Limits
from epd.video.containers.orientation import TURNED, upright_by_exif
from epd.video.decoding.device import DeviceFailedError, VideoDevice
from epd.video.decoding.groups import cut_groups
from epd.video.decoding.pixels import ResizeMode, Size, exact_resize
from epd.video.decoding.pool import DecodePool, shared_pool
from epd.video.decoding.run import AheadBound, DecodeRun, RunOptions
from epd.video.sources.frame_list import LIST_FPS, FrameList, is_frame_list
from epd.video.sources.source import Media, Source, as_media

GROUP_SIZE = 16
FIRST_GROUP_SIZE = 4
GROUP_PERIOD_S = 0.5


class ListedPictures:
    """The frames that a client has listed.

    starts_s: when each is shown, seconds, and at last when the last one ends.
    """

    def __init__(self, media: Media, background: Colour) -> None:
        """Finds the frames. Raises MediaError."""
        self._frames = FrameList(media)
        self._background = background
        self.starts_s = [place / LIST_FPS for place in range(len(self._frames) + 1)]

    @property
    def size(self) -> Size:
        """Returns (height, width), upright."""
        return upright_size(self._frames.frame(0))

    def step_to(self, place: int) -> bool:  # noqa: ARG002 - any frame can be had at once
        """Works for a moment on a frame. Returns whether it can be had now. Raises MediaError."""
        return True

    def pixels(self, place: int) -> UInt8Array:
        """Returns that frame, uint8 [H, W, 3], upright. Raises MediaError."""
        return load_image(self._frames.frame(place), background=self._background)


class AnimatedPictures:
    """The frames of an animated picture. They are asked for in any order, and drawn in theirs."""

    def __init__(self, media: Media, animation: Animation, options: RunOptions, background: Colour) -> None:
        """Draws nothing yet. Raises MediaError."""
        check_animation(media.name, animation, options.limits)
        self._orientation = exif_orientation(media)
        self._animation = animation
        self._drawing = Drawing(media, animation, background)
        self.starts_s = animation.starts_s

    @property
    def size(self) -> Size:
        height, width = self._animation.height, self._animation.width
        return (width, height) if self._orientation in TURNED else (height, width)

    def step_to(self, place: int) -> bool:
        return self._drawing.draw_next(place)

    def pixels(self, place: int) -> UInt8Array:  # noqa: ARG002 - it is the one drawn last
        return upright_by_exif(self._drawing.pixels(), self._orientation)


class PictureRun:
    """Decodes the frames of one request, group by group; `close` stops it after the frame in work."""

    def __init__(
        self, pictures: ListedPictures | AnimatedPictures, times_s: Sequence[float], options: RunOptions
    ) -> None:
        """Decodes nothing yet."""
        self._pictures = pictures
        self._places = [frame_at(pictures.starts_s, time_s) for time_s in times_s]
        self._size = options.size
        self._bounds = list(pairwise((0, *accumulate(options.group_sizes))))
        self._index = 0  # of the next group
        self._last: tuple[int, UInt8Array] | None = None  # a frame may be wanted many times
        self._is_closed = False

    @property
    def frame_size(self) -> Size:
        """(height, width) of the result."""
        return self._size or self._pictures.size

    def next_group(self) -> FrameGroup | None:
        """Returns the next group; None after the last. Raises MediaError, CancelledError once closed."""
        if self._index >= len(self._bounds):
            return None
        start, stop = self._bounds[self._index]
        places = self._places[start:stop]
        data = np.stack([self._decoded(place) for place in places])
        pts_s = np.array([self._pictures.starts_s[place] for place in places], np.float64)
        group = FrameGroup(self._index, start, Frames(data, pts_s))
        self._index += 1
        return group

    def _decoded(self, place: int) -> UInt8Array:
        if self._last is None or self._last[0] != place:
            self._check_open()
            while not self._pictures.step_to(place):
                self._check_open()
            self._last = place, exact_resize(self._pictures.pixels(place), self._size)
        return self._last[1]

    def _check_open(self) -> None:
        if self._is_closed:
            raise CancelledError("decoding was stopped; ask again")

    def close(self) -> None:
        """Stops decoding; calling it again does nothing."""
        self._is_closed = True


class DeviceRun:
    """Decodes on a device; from the group on at which that fails or finds the file damaged, on the CPU."""

    def __init__(self, media: Media, times_s: Sequence[float], options: RunOptions, pool: DecodePool) -> None:
        self._media, self._times_s, self._options, self._pool = media, times_s, options, pool
        self._device = options.device
        self._run = DecodeRun(media, times_s, options, pool)
        self._first = self._num_taken = 0  # groups: before those of the run, and given
        self._is_closed = False

    @property
    def frame_size(self) -> Size:
        """(height, width) of the result."""
        return self._run.frame_size

    def next_group(self) -> FrameGroup | None:
        """Returns what `DecodeRun.next_group` does, and raises as that."""
        try:
            group = self._run.next_group()
        except (DeviceFailedError, CorruptMediaError) as error:
            if self._device is None or self._device.is_alone:
                raise
            self._leave(error)
            self._go_on()
            group = self._run.next_group()
        if group is None:
            self._leave(None)
            return None
        self._num_taken += 1
        start = sum(self._options.group_sizes[: self._first])
        return FrameGroup(self._first + group.index, start + group.start, group.frames)

    def _leave(self, failure: Exception | None) -> None:
        device, self._device = self._device, None
        if device is not None and not isinstance(failure, CorruptMediaError):
            device.note(failure)

    def _go_on(self) -> None:
        """Decodes the groups that are left on the CPU, which judges what is damaged."""
        self._first = self._num_taken
        sizes = self._options.group_sizes[self._first :]
        times_s = self._times_s[len(self._times_s) - sum(sizes) :]
        self._run = DecodeRun(
            self._media, times_s, replace(self._options, group_sizes=sizes, device=None), self._pool
        )
        if self._is_closed:
            self._run.close()

    def close(self) -> None:
        """Stops decoding; calling it again does nothing."""
        self._is_closed = True
        self._run.close()


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
    device: VideoDevice | None = None,
) -> Frames:
    """Returns the frames on screen at `times_s`, in the order asked.

    size: (height, width); None keeps the video's own.
    workers: decoders at work at once, at most one for each CPU; None takes them all.
    mode: "exact" equals the models' processors bit for bit, "fast" lets swscale resize.
    deadline_s: on the monotonic clock; requests with earlier ones are decoded first.
    background: what shows through the transparency of animated pictures and listed frames.
    device: that decodes in place of the CPU, where it can: see `video/decoding/device.py`.

    Raises the MediaError of what is wrong with the file, RequestError for times or sizes that make no sense.
    """
    times = _check_times(times_s)
    pool = pool or shared_pool()
    options = RunOptions(
        size=_check_size(size),
        mode=mode,
        workers=_check_workers(workers, pool),
        group_sizes=(len(times),) if times else (),
        bound=None,
        first_deadline_s=_or_now(deadline_s),
        group_period_s=GROUP_PERIOD_S,
        limits=limits,
        device=device,
    )
    run = _start(source, times, options, pool, background)
    try:
        group = run.next_group()
    finally:
        run.close()
    if group is None:
        return Frames(np.zeros((0, *run.frame_size, 3), np.uint8), np.zeros(0))
    return group.frames


class GroupStream(Iterator[FrameGroup]):
    """Groups of frames in order, decoded ahead of the consumer; closing it stops the decoding."""

    def __init__(self, run: DecodeRun | DeviceRun | PictureRun) -> None:
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
    device: VideoDevice | None = None,
) -> GroupStream:
    """Yields groups of the frames on screen at `times_s`, in order, while later ones are still being decoded.

    group_sizes: every size; otherwise the first group has `first_group_size` frames (default: 4, so that it
        is ready early) and the others `group_size`.
    groups_ahead: if the times are in order, how many groups beyond those consumed may be in memory (default:
        128 MiB of them).
    deadline_s: when the first group is due, on the monotonic clock; the others follow every `group_period_s`.
        Of all requests, the group that is due first is decoded first.
    background, device: as in `decode`.

    Use it in a `with` block: leaving it stops the decoding. Raises as `decode` does, here or while iterating.
    """
    times = _check_times(times_s)
    sizes = _resolve_sizes(len(times), group_size, first_group_size, group_sizes)
    bound = AheadBound(groups_ahead) if times == sorted(times) else None
    pool = pool or shared_pool()
    options = RunOptions(
        size=_check_size(size),
        mode=mode,
        workers=_check_workers(workers, pool),
        group_sizes=sizes,
        bound=bound,
        first_deadline_s=_or_now(deadline_s),
        group_period_s=group_period_s,
        limits=limits,
        device=device,
    )
    return GroupStream(_start(source, times, options, pool, background))


def _or_now(deadline_s: float | None) -> float:
    return time.monotonic() if deadline_s is None else deadline_s


def _start(
    source: Source | Media, times: list[float], options: RunOptions, pool: DecodePool, background: Colour
) -> DecodeRun | DeviceRun | PictureRun:
    media = as_media(source)
    if is_frame_list(media):
        return PictureRun(ListedPictures(media, background), times, options)
    animation = find_animation(media)
    if animation is not None:
        return PictureRun(AnimatedPictures(media, animation, options, background), times, options)
    kind = DecodeRun if options.device is None else DeviceRun
    return kind(media, times, options, pool)


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
