"""Shares memory that a media child writes frames into and its parent copies them from.

One block serves group after group: fresh pages of shared memory cost forty times what copying them does. The
parent makes it and seals its size, so that a child cannot shrink what the parent has mapped.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Sequence

import numpy as np

from epd.types import UInt8Array

_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 2, 4


class SharedPixels:
    """The parent's end of a block. descriptor: is sent to the child."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = max(1, num_bytes)
        self.descriptor = os.memfd_create("epd-pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.num_bytes)
            fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
            self._pixels = mapped(self.descriptor)
        except BaseException:
            os.close(self.descriptor)
            raise

    def copy(self, shape: Sequence[int]) -> UInt8Array:
        """Returns the first pixels as an array of their own, uint8 of the given shape."""
        return self._pixels[: math.prod(shape)].reshape(shape).copy()

    def close(self) -> None:
        os.close(self.descriptor)


def mapped(descriptor: int) -> UInt8Array:
    """Returns all of a block, uint8 [bytes], to be read and written."""
    size = os.fstat(descriptor).st_size
    return np.frombuffer(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
