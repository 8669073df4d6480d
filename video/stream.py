"""`decode` and `stream`: wanted frames of a video, at target size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import TracebackType

import numpy as np

from epd.errors import RequestError
from epd.types import FrameGroup, Frames
from video.pixels import Size
from video.reference import reference_decode
from video.source import Media, Source


def decode(
    source: Source | Media, times_s: Sequence[float], size: Size | None = None, workers: int | None = None
) -> Frames:
    """Frames on screen at `times_s`, in the order asked, uint8 NHWC at `size` (height, width)."""
    del workers  # the sequential loop has one
    return reference_decode(source, times_s, size)


class GroupStream(Iterator[FrameGroup]):
    """Groups of frames in order; closing it, or leaving its `with` block, stops the decoding."""

    def __init__(self, groups: Iterator[FrameGroup]) -> None:
        self._groups = groups

    def __next__(self) -> FrameGroup:
        return next(self._groups)

    def __enter__(self) -> GroupStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop decoding and free what is held; calling it again does nothing."""
        self._groups = iter(())


def stream(
    source: Source | Media,
    times_s: Sequence[float],
    size: Size | None = None,
    *,
    group_size: int = 16,
    first_group_size: int | None = None,
    group_sizes: Sequence[int] | None = None,
    workers: int | None = None,
) -> GroupStream:
    """Groups of the frames on screen at `times_s`, in order, the first cut small so that it is ready early.

    `group_sizes` gives every size; otherwise the first group has `first_group_size` frames (default: at most
    4) and the others `group_size`.
    """
    sizes = cut_groups(len(times_s), group_size, first_group_size, group_sizes)
    return GroupStream(_groups(decode(source, times_s, size, workers), sizes))


def cut_groups(
    num_frames: int, group_size: int, first_group_size: int | None, group_sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """Sizes of the groups, adding up to `num_frames`."""
    if group_sizes is not None:
        if sum(group_sizes) != num_frames or min(group_sizes, default=1) < 1:
            raise RequestError(
                f"received group sizes adding up to {sum(group_sizes)}; "
                f"allowed positive sizes adding up to {num_frames}; count the times again"
            )
        return tuple(group_sizes)
    first = min(first_group_size or min(4, group_size), num_frames)
    if first < 1 and num_frames:
        raise RequestError(
            f"received first_group_size={first_group_size}, group_size={group_size}; allowed 1 or more"
        )
    rest, tail = divmod(num_frames - first, group_size)
    return tuple(size for size in (first, *[group_size] * rest, tail) if size)


def _groups(frames: Frames, sizes: tuple[int, ...]) -> Iterator[FrameGroup]:
    bounds = np.cumsum((0, *sizes)).tolist()
    for index, (start, stop) in enumerate(pairwise(bounds)):
        yield FrameGroup(index, start, Frames(frames.data[start:stop], frames.pts_s[start:stop]))
