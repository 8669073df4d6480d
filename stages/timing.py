"""Measures how long each stage was busy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

from epd.types import StageTimings

StageSeconds = Literal[
    "probe_s", "decode_video_s", "preprocess_s", "encode_s", "prefill_s", "decode_s", "total_s"
]


@contextmanager
def busy(timings: StageTimings, stage: StageSeconds) -> Iterator[None]:
    """Adds the seconds spent in the block to one field of `timings`."""
    start = perf_counter()
    try:
        yield
    finally:
        setattr(timings, stage, getattr(timings, stage) + perf_counter() - start)
