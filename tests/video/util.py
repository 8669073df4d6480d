"""What the tests compare with, and the tolerances, each with its reason."""

from __future__ import annotations

import numpy as np

from epd.types import Frames, UInt8Array


def assert_same_frames(got: Frames, truth: Frames) -> None:
    """The same pixels and times, bit for bit: decoding and exact resizing leave nothing to tolerate."""
    wrong_times = np.flatnonzero(got.pts_s != truth.pts_s)
    assert not len(wrong_times), f"times differ at {wrong_times[:8]}: {got.pts_s} instead of {truth.pts_s}"
    wrong = [i for i in range(len(truth)) if not np.array_equal(got.data[i], truth.data[i])]
    assert not wrong, f"pixels differ at {wrong[:8]}"
    assert got.data.shape == truth.data.shape
    assert got.num_substituted == 0


def psnr_db(got: UInt8Array, truth: UInt8Array) -> float:
    """Peak signal to noise, infinite for equal pixels."""
    error = np.mean((got.astype(np.float64) - truth) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))
