"""Plays the videos of a folder, in loops, as backgrounds of drawn scenes.

A clip is scaled to cover the frame, cut to it around its centre, and muted as drawn backgrounds are, so that
the objects before it can be told from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from epd.errors import MediaError, RequestError
from epd.types import UInt8Array
from epd.video.containers.probe import probe
from epd.video.decoding.pixels import Size
from epd.video.decoding.stream import stream

_DARKEST, _SHARE_OF_CONTRAST = 40, 2


@dataclass(frozen=True, slots=True)
class _Clip:
    """One video. size: (height, width), pixels."""

    path: Path
    duration_s: float
    size: Size


class BackgroundClips:
    """The videos of a folder, ordered by name; holds no frames."""

    def __init__(self, folder: Path) -> None:
        """Raises RequestError for a folder without a video that can be read."""
        self.folder = folder
        paths = sorted(path for path in folder.glob("*") if path.is_file())
        self._clips = [clip for clip in map(_read, paths) if clip is not None]
        if not self._clips:
            raise RequestError(
                f"received the backgrounds {str(folder)!r}, with {len(paths)} files and no video among them; "
                "allowed: folders of videos; name another"
            )

    def play(self, seed: int, times_s: Iterable[float], height: int, width: int) -> Iterator[UInt8Array]:
        """Yields a background for each time, uint8 [H, W, 3]; the seed chooses the clip.

        times_s: increasing. Raises MediaError for a clip that cannot be decoded.
        """
        clip = self._clips[seed % len(self._clips)]
        size = _covering(clip.size, (height, width))
        for loop, times in groupby(times_s, lambda time_s: time_s // clip.duration_s):
            wanted = [max(0.0, time_s - loop * clip.duration_s) for time_s in times]
            with stream(clip.path, wanted, size, workers=1, groups_ahead=1) as groups:
                for group in groups:
                    for image in group.frames.data:
                        yield _muted(_centre(image, height, width))


def _read(path: Path) -> _Clip | None:
    try:
        info = probe(path)
    except MediaError:
        return None
    return _Clip(path, info.duration_s, (info.height, info.width)) if info.duration_s > 0 else None


def _covering(size: Size, frame: Size) -> Size:
    """Returns the least size with the clip's proportions that covers the frame."""
    scale = max(frame[0] / size[0], frame[1] / size[1])
    return max(frame[0], round(size[0] * scale)), max(frame[1], round(size[1] * scale))


def _centre(image: UInt8Array, height: int, width: int) -> UInt8Array:
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    return image[top : top + height, left : left + width]


def _muted(image: UInt8Array) -> UInt8Array:
    """Returns the image with half of its contrast, values 40 to 167."""
    return np.asarray(image // _SHARE_OF_CONTRAST + _DARKEST, np.uint8)
