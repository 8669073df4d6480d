"""M-RoPE positions (Qwen2-VL, section 2.1): text counts on; visual tokens have a time, a row and a column.

text  text | frame 0      frame 1      | text
t  0    1  |  2  2  2  2   4  4  4  4  |  4 ...      after a span, counting goes on from its start
h  0    1  |  2  2  3  3   2  2  3  3  |  4 ...      plus the larger of rows and columns
w  0    1  |  2  3  2  3   2  3  2  3  |  4 ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from encoders.adapter import Int64Array
from epd.types import PlaceholderRange


@dataclass(frozen=True, slots=True)
class VisualSpan:
    """A run of `frames` x `rows` x `columns` visual tokens, with `time_step` positions between frames."""

    range: PlaceholderRange
    frames: int
    rows: int
    columns: int
    time_step: float = 1.0

    def __post_init__(self) -> None:
        if self.range.length != self.frames * self.rows * self.columns:
            raise ValueError(f"{self.frames} x {self.rows} x {self.columns} tokens do not fill {self.range}")


def mrope_positions(num_tokens: int, spans: Sequence[VisualSpan]) -> tuple[Int64Array, int]:
    """Positions int64 [3, num_tokens] of a prompt with these spans, and the position that comes next."""
    pieces = list(_pieces(num_tokens, spans))
    positions = np.concatenate(pieces, axis=1) if pieces else np.zeros((3, 0), dtype=np.int64)
    return positions, int(positions.max(initial=-1)) + 1


def _pieces(num_tokens: int, spans: Sequence[VisualSpan]) -> Iterator[Int64Array]:
    offset, position = 0, 0
    for span in spans:
        yield _text(span.range.offset - offset, position)
        position += span.range.offset - offset
        yield _visual(span, position)
        position += max(span.rows, span.columns)
        offset = span.range.stop
    yield _text(num_tokens - offset, position)


def _text(length: int, start: int) -> Int64Array:
    return np.broadcast_to(np.arange(start, start + length, dtype=np.int64), (3, length))


def _visual(span: VisualSpan, start: int) -> Int64Array:
    # float32, then cut off: the reference computes times this way, and a last bit may decide an integer.
    times = (np.arange(span.frames, dtype=np.float32) * np.float32(span.time_step)).astype(np.int64)
    grid = np.meshgrid(times, np.arange(span.rows), np.arange(span.columns), indexing="ij")
    return np.stack(grid).reshape(3, -1).astype(np.int64) + start
