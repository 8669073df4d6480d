"""Turns pixels upright: of frames by their display matrix, of pictures by the orientation of EXIF."""

from __future__ import annotations

from typing import Any

import numpy as np
from av.sidedata.sidedata import SideData, Type
from av.video.frame import VideoFrame

from epd.types import UInt8Array

# Values of EXIF's orientation that exchange height and width.
TURNED = frozenset({5, 6, 7, 8})
DisplayMatrix = tuple[int, int, int, int]


def _unnamed(value: Any) -> Type:
    """Returns a kind of side data that PyAV has no name for, such as EXIF."""
    kind = object.__new__(Type)
    kind._name_, kind._value_ = f"KIND_{value}", value
    return kind


# Without this, PyAV refuses all side data of a frame for the sake of one kind that it does not know.
Type._missing_ = _unnamed  # type: ignore[method-assign]


def display_matrix(frame: VideoFrame) -> DisplayMatrix | None:
    """Returns (a, b, c, d) of the display matrix, x' = a x + c y and y' = b x + d y; None without one."""
    data = frame.side_data.get("DISPLAYMATRIX")
    if not isinstance(data, SideData):
        return None
    values = np.frombuffer(bytes(data), np.int32)
    return int(values[0]), int(values[1]), int(values[3]), int(values[4])


def upright(pixels: UInt8Array, matrix: DisplayMatrix | None) -> UInt8Array:
    """Turns and mirrors pixels to the nearest quarter turn that the display matrix asks for."""
    if matrix is None:
        return pixels
    a, b, c, d = matrix
    if is_transposed(matrix):
        pixels, x_sign, y_sign = pixels.transpose(1, 0, 2), c, b
    else:
        x_sign, y_sign = a, d
    return np.ascontiguousarray(pixels[:: -1 if y_sign < 0 else 1, :: -1 if x_sign < 0 else 1])


def is_transposed(matrix: DisplayMatrix | None) -> bool:
    """Returns whether the display matrix swaps width and height."""
    return matrix is not None and abs(matrix[1]) > abs(matrix[0])


def upright_by_exif(pixels: UInt8Array, orientation: int) -> UInt8Array:
    """Turns and mirrors pixels, [H, W, 3], as the orientation of EXIF says, 1 to 8; others change nothing."""
    if orientation in TURNED:
        pixels = pixels.transpose(1, 0, 2)
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return np.ascontiguousarray(pixels[::rows, ::columns])
